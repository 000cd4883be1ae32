// SPDX-License-Identifier: Apache-2.0
/// \file
/// How resident E4M3 weights become bf16: the map and its inverse.
///
/// A bf16 number with an E4M3 magnitude in bits 10…4 and its sign in bit 15 is worth value · 2^-120,
/// subnormals included. Four weights decode in four instructions; they are stored through the inverse of that
/// linear map. The two NaN bytes would read as ±480: a loader refuses them.
#pragma once

#include <cstdint>
#include <nibble/core/config.hpp>
#include <nibble/core/linear_map.hpp>

namespace nibble::fp8 {

/// bf16 sign and the seven bits where an E4M3 magnitude is worth value · 2^-120, twice.
inline constexpr std::uint32_t weight_mask = 0x87F0'87F0u;
/// bf16 2^120, twice.
inline constexpr std::uint32_t weight_scale_bits = 0x7B80'7B80u;

/// Four stored weights to two bf16 pairs of value · 2^-120.
NIBBLE_HOST_DEVICE constexpr void decode_weights(std::uint32_t word, std::uint32_t (&pairs)[2]) {
  pairs[0] = word & weight_mask;
  pairs[1] = ((word << 4) ^ (word >> 4)) & weight_mask;
}

/// A stored word to four E4M3 bytes: byte 2 p + h is half h of pair p.
[[nodiscard]] constexpr std::uint32_t bytes_of_word(std::uint32_t word) {
  std::uint32_t pairs[2]{}, bytes = 0;
  decode_weights(word, pairs);
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t half = pairs[i / 2] >> (16 * (i & 1)) & 0xFFFFu;
    bytes |= ((half >> 4 & 127u) | (half >> 15 << 7)) << (8 * i);
  }
  return bytes;
}

inline constexpr linear_map word_map = inverse_of(bytes_of_word);
static_assert(word_map.invertible, "the decode map must be invertible, or weights would be lost");
inline constexpr byte_tables word_tables = tables_of(word_map);

/// Four E4M3 bytes to the stored word.
[[nodiscard]] constexpr std::uint32_t word_of_bytes(std::uint32_t bytes) {
  return word_tables[0][bytes & 255u] ^ word_tables[1][bytes >> 8 & 255u] ^
         word_tables[2][bytes >> 16 & 255u] ^ word_tables[3][bytes >> 24];
}

}  // namespace nibble::fp8
