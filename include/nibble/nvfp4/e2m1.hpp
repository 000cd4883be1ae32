// SPDX-License-Identifier: Apache-2.0
/// \file
/// E2M1, the 4-bit float of NVFP4: bit 3 is the sign, codes 0…7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6.
///
/// Two codes share a byte: the element with the even index lies in the LOW nibble.
#pragma once

#include <cstdint>
#include <nibble/core/bit_cast.hpp>
#include <nibble/core/config.hpp>

namespace nibble::e2m1 {

inline constexpr float max_finite = 6.0f;

/// The value of the low four bits of `code`. Code 8 is -0.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr float decode(unsigned code) noexcept {
  const std::uint32_t sign = (static_cast<std::uint32_t>(code) & 8u) << 28;
  const std::uint32_t exponent = (code >> 1) & 3u;
  const std::uint32_t mantissa = code & 1u;
  if (exponent == 0) return bit_cast<float>(sign | (mantissa != 0 ? 0x3F00'0000u : 0u));
  return bit_cast<float>(sign | ((exponent + 126u) << 23) | (mantissa << 22));
}

/// The nearest code, ties to the even code; beyond 6 it saturates. The sign of zero is kept, so a small
/// negative value becomes code 8. NaN becomes code 7, as in the hardware's saturating conversion.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t encode(float value) noexcept {
  const auto bits = bit_cast<std::uint32_t>(value);
  const auto magnitude = bit_cast<float>(bits & 0x7FFF'FFFFu);
  if (magnitude != magnitude) return 7;
  // One comparison for each midpoint between neighbours; ">=" where the upper code is the even one.
  const int code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                   (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
  return static_cast<std::uint8_t>(static_cast<unsigned>(code) | ((bits >> 28) & 8u));
}

/// Two codes in one byte; `even` is the element with the even index.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t pack(unsigned even, unsigned odd) noexcept {
  return static_cast<std::uint8_t>((even & 15u) | ((odd & 15u) << 4));
}

/// The code of the element with the even index.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t unpack_even(std::uint8_t byte) noexcept {
  return static_cast<std::uint8_t>(byte & 15u);
}

/// The code of the element with the odd index.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t unpack_odd(std::uint8_t byte) noexcept {
  return static_cast<std::uint8_t>(byte >> 4);
}

}  // namespace nibble::e2m1
