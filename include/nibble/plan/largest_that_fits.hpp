// SPDX-License-Identifier: Apache-2.0
/// \file
/// The largest level that fits.
#pragma once

#include <cstdint>

namespace nibble::detail {

/// The largest level in [low, high] that `fits`, given that `low` does and that fits is monotone.
template <class Fits>
[[nodiscard]] std::uint64_t largest_that_fits(std::uint64_t low, std::uint64_t high, const Fits& fits) {
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2 + 1;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace nibble::detail
