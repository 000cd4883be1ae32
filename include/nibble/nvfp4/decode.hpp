// SPDX-License-Identifier: Apache-2.0
/// \file
/// How resident E2M1 codes and block scales become bf16: the maps, their inverses, and what they are worth.
///
/// A bf16 number with an E2M1 magnitude in bits 8…6 and its sign in bit 15 is the code's value · 2^-126,
/// subnormals included. Three magnitude bits and a sign cannot be cut out of a word at four places by shifts
/// and masks alone, but one of the four cuts may mix two shifts; the four together are an invertible linear
/// map over GF(2), and codes are stored through its inverse. Eight codes decode in eight instructions.
#pragma once

#include <array>
#include <cstdint>
#include <nibble/core/config.hpp>
#include <nibble/core/linear_map.hpp>

namespace nibble::nvfp4 {

/// bf16 sign and the three bits where an E2M1 magnitude is worth value · 2^-126, twice.
inline constexpr std::uint32_t code_mask = 0x81C0'81C0u;

/// Eight stored codes to four bf16 pairs of value · 2^-126.
NIBBLE_HOST_DEVICE constexpr void decode_codes(std::uint32_t word, std::uint32_t (&pairs)[4]) {
  pairs[0] = word & code_mask;
  pairs[1] = (word << 6) & code_mask;
  pairs[2] = (word << 12 | word >> 20) & code_mask;
  pairs[3] = ((word << 2) ^ (word >> 6)) & code_mask;
}

/// A stored word to eight codes, four bits each: code 2 p + h is half h of pair p.
[[nodiscard]] constexpr std::uint32_t codes_of_word(std::uint32_t word) {
  std::uint32_t pairs[4]{}, codes = 0;
  decode_codes(word, pairs);
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t half = pairs[i / 2] >> (16 * (i & 1)) & 0xFFFFu;
    codes |= ((half >> 6 & 7u) | (half >> 15 << 3)) << (4 * i);
  }
  return codes;
}

inline constexpr linear_map word_map = inverse_of(codes_of_word);
static_assert(word_map.invertible, "the decode map must be invertible, or codes would be lost");
inline constexpr byte_tables word_tables = tables_of(word_map);

/// Eight codes, four bits each, to the stored word.
[[nodiscard]] constexpr std::uint32_t word_of_codes(std::uint32_t codes) {
  return word_tables[0][codes & 255u] ^ word_tables[1][codes >> 8 & 255u] ^
         word_tables[2][codes >> 16 & 255u] ^ word_tables[3][codes >> 24];
}

/// A block scale without its sign as the low five exponent bits and three mantissa bits of the bf16 number
/// scale · 2^119. All 126 non-zero magnitudes, the seven subnormal ones too, are bytes 0x68…0xF6; a zero
/// scale is byte 0, worth 2^-22, and its codes are stored as zero.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t stored_scale(std::uint8_t magnitude) {
  int exponent = magnitude >> 3, mantissa = magnitude & 7;
  if (magnitude == 0) return 0;
  if (exponent != 0) return static_cast<std::uint8_t>((exponent + 15) << 3 | mantissa);
  exponent = 16;
  while ((mantissa & 8) == 0) {
    mantissa <<= 1;
    --exponent;
  }
  return static_cast<std::uint8_t>(exponent << 3 | (mantissa & 7));
}

/// The E4M3 magnitude of a stored scale: the inverse of stored_scale.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t scale_magnitude(std::uint8_t stored) {
  const int exponent = stored >> 3, mantissa = stored & 7;
  if (stored == 0) return 0;
  if (exponent >= 16) return static_cast<std::uint8_t>((exponent - 15) << 3 | mantissa);
  return static_cast<std::uint8_t>((8 | mantissa) >> (16 - exponent));
}

/// bf16 bits of stored scale · 2^119 = the low half of this.
inline constexpr std::uint32_t scale_bits = 0x7000'7000u;
/// Decoded weights are value · 2^(119 - 126): the product is multiplied by this, exactly.
inline constexpr float unscale = 128.0f;

}  // namespace nibble::nvfp4
