// SPDX-License-Identifier: Apache-2.0
/// \file
/// bfloat16 as its 16 bits: sign, 8 exponent bits, 7 mantissa bits; the upper half of a binary32.
#pragma once

#include <cstdint>
#include <nibble/core/bit_cast.hpp>
#include <nibble/core/config.hpp>

namespace nibble::bf16 {

/// The value of `bits`, exactly. NaN payloads survive.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr float decode(std::uint16_t bits) noexcept {
  return bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// The nearest bfloat16, ties to the even mantissa; beyond the largest finite value it is infinity.
/// A NaN stays a NaN of the same sign and becomes quiet.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint16_t encode(float value) noexcept {
  const auto bits = bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFF'FFFFu) > 0x7F80'0000u) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace nibble::bf16
