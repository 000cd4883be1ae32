// SPDX-License-Identifier: Apache-2.0
/// \file
/// E4M3, the 8-bit float of block scales and FP8 weights: sign, 4 exponent bits (bias 7), 3 mantissa bits.
///
/// There is no infinity. Exponent 0 holds subnormals (step 2^-9), 0x7F and 0xFF are NaN, and the largest
/// finite value is 448. The block scales of NVFP4 are the same bytes; a set sign bit there is an honest
/// negative factor, never a larger positive one.
#pragma once

#include <cstdint>
#include <limits>
#include <nibble/core/bit_cast.hpp>
#include <nibble/core/config.hpp>

namespace nibble::e4m3 {

inline constexpr float max_finite = 448.0f;
inline constexpr float min_subnormal = 0x1p-9f;
inline constexpr std::uint8_t nan_byte = 0x7F;

/// Whether the byte is one of the two NaNs.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr bool is_nan(std::uint8_t byte) noexcept {
  return (byte & 0x7F) == 0x7F;
}

/// The value of `byte`, exactly: (-1)^s 2^(e-7) (1 + m/8), or (-1)^s 2^-6 m/8 when e is 0.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr float decode(std::uint8_t byte) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(byte & 0x80) << 24;
  const std::uint32_t exponent = (byte >> 3) & 0x0F;
  const std::uint32_t mantissa = byte & 0x07;
  if (is_nan(byte)) return bit_cast<float>(sign | 0x7FC0'0000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * min_subnormal;
    return sign != 0 ? -magnitude : magnitude;
  }
  return bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

/// The nearest E4M3 byte, ties to the even mantissa. Magnitudes beyond 448, infinity too, saturate to ±448;
/// NaN becomes 0x7F; the sign of zero is kept.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t encode(float value) noexcept {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7FFF'FFFFu;
  if (magnitude > 0x7F80'0000u) return nan_byte;
  if (magnitude >= 0x43E0'0000u) return static_cast<std::uint8_t>(sign | 0x7Eu);  // 448 and more
  if (magnitude >= 0x3C80'0000u) {                                                // 2^-6: normal numbers
    const std::uint32_t rounded = magnitude + 0x7'FFFFu + ((magnitude >> 20) & 1u);
    return static_cast<std::uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
  }
  // Subnormal: the integer nearest to |value|·2^9. The full significand is shifted right by `shift` bits.
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 117) return static_cast<std::uint8_t>(sign);  // below 2^-10: nearer to zero
  const std::uint32_t significand = (magnitude & 0x7F'FFFFu) | 0x80'0000u;
  const std::uint32_t shift = 141u - exponent;
  const std::uint32_t floor = significand >> shift;
  const std::uint32_t rest = significand & ((1u << shift) - 1u);
  const std::uint32_t half = 1u << (shift - 1u);
  const bool up = rest > half || (rest == half && (floor & 1u) != 0);
  return static_cast<std::uint8_t>(sign | (floor + (up ? 1u : 0u)));
}

}  // namespace nibble::e4m3
