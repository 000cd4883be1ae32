// SPDX-License-Identifier: Apache-2.0
/// \file
/// std::bit_cast that device code may call too.
#pragma once

#include <nibble/core/config.hpp>
#include <type_traits>

namespace nibble {

/// The object representation of `value` read as a `To`. Sizes must be equal.
template <class To, class From>
requires(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>)
    [[nodiscard]] NIBBLE_HOST_DEVICE constexpr To bit_cast(const From& value) noexcept {
  return __builtin_bit_cast(To, value);
}

}  // namespace nibble
