// SPDX-License-Identifier: Apache-2.0
/// \file
/// Linear maps of 32-bit words over GF(2) and their inverses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace nibble {

/// A linear map: the image of each single bit. It is applied by XOR over the set bits.
struct linear_map {
  std::uint32_t columns[32] = {};
  bool invertible = true;

  [[nodiscard]] constexpr std::uint32_t operator()(std::uint32_t word) const {
    std::uint32_t out = 0;
    for (int b = 0; b < 32; ++b) out ^= (word >> b & 1u) != 0 ? columns[b] : 0u;
    return out;
  }
};

/// The inverse of the linear function `forward`, by Gauss-Jordan elimination.
template <class Function>
[[nodiscard]] constexpr linear_map inverse_of(Function forward) {
  std::array<std::uint32_t, 32> in{}, out{};
  linear_map result;
  for (std::size_t i = 0; i < 32; ++i) {
    in[i] = 1u << i;
    out[i] = forward(1u << i);
  }
  for (std::size_t b = 0; b < 32; ++b) {
    std::size_t pivot = b;
    while (pivot < 32 && (out[pivot] >> b & 1u) == 0) ++pivot;
    if (pivot == 32) {
      result.invertible = false;
      return result;
    }
    const std::uint32_t in_pivot = in[pivot], out_pivot = out[pivot];
    in[pivot] = in[b];
    out[pivot] = out[b];
    in[b] = in_pivot;
    out[b] = out_pivot;
    for (std::size_t q = 0; q < 32; ++q)
      if (q != b && (out[q] >> b & 1u) != 0) {
        in[q] ^= in_pivot;
        out[q] ^= out_pivot;
      }
  }
  for (std::size_t b = 0; b < 32; ++b) result.columns[b] = in[b];
  return result;
}

/// Tables that apply a linear map byte by byte: map(word) = t[0][byte 0] ^ t[1][byte 1] ^ t[2][…] ^ t[3][…].
using byte_tables = std::array<std::array<std::uint32_t, 256>, 4>;

[[nodiscard]] constexpr byte_tables tables_of(const linear_map& map) {
  byte_tables tables{};
  for (std::size_t byte = 0; byte < 4; ++byte)
    for (std::uint32_t value = 0; value < 256; ++value)
      for (std::size_t b = 0; b < 8; ++b)
        if ((value >> b & 1u) != 0) tables[byte][value] ^= map.columns[8 * byte + b];
  return tables;
}

}  // namespace nibble
