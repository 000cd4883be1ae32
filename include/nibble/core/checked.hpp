// SPDX-License-Identifier: Apache-2.0
/// \file
/// Arithmetic on sizes from outside that cannot wrap.
#pragma once

#include <cstdint>
#include <optional>

namespace nibble {

/// a · b, or nothing when it does not fit 64 bits.
[[nodiscard]] constexpr std::optional<std::uint64_t> checked_multiply(std::uint64_t a, std::uint64_t b) {
  if (b != 0 && a > UINT64_MAX / b) return std::nullopt;
  return a * b;
}

/// a + b, or nothing when it does not fit 64 bits.
[[nodiscard]] constexpr std::optional<std::uint64_t> checked_add(std::uint64_t a, std::uint64_t b) {
  if (a > UINT64_MAX - b) return std::nullopt;
  return a + b;
}

/// ceil(a / b) for b > 0.
[[nodiscard]] constexpr std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) {
  return a / b + (a % b != 0);
}

/// The smallest multiple of `alignment` that is not below `a`; `alignment` > 0, the result must fit.
[[nodiscard]] constexpr std::uint64_t align_up(std::uint64_t a, std::uint64_t alignment) {
  return divide_up(a, alignment) * alignment;
}

/// `bytes` rounded up to whole granules, or the largest number.
[[nodiscard]] constexpr std::uint64_t saturating_align(std::uint64_t bytes, std::uint64_t granule) {
  const auto up = checked_add(bytes, granule - 1);
  return up ? *up / granule * granule : UINT64_MAX;
}

}  // namespace nibble
