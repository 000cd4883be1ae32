// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a checkpoint's FP8 (E4M3) matrix to the resident tiles and back: a lossless permutation.
///
/// A tile is 2048 bytes. Lane l's words 2 s and 2 s + 1 of step s (0…7) lie at 512 (w / 4) + 16 l + 4 (w %
/// 4); they hold rows g and g + 8 of columns run_column(s / 2, t) + 4 (s % 2) + 2 j and the next, j = 0, 1,
/// through fp8::word_of_bytes. Tile parts beyond the matrix are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "nibble/core/error.hpp"
#include "nibble/core/parallel.hpp"
#include "nibble/fp8/decode.hpp"
#include "nibble/geometry/tile.hpp"

namespace nibble::fp8 {
namespace detail {

/// Calls visit(row g or -1, row g + 8 or -1, column, offset of the word) for each word.
template <class Visit>
void for_each_pair(const resident_layout& layout, int begin, int end, Visit visit) {
  const int k_tiles = layout.k_tiles();
  for (int rt = begin; rt < end; ++rt)
    for (int kt = 0; kt < k_tiles; ++kt) {
      const std::size_t tile = (static_cast<std::size_t>(rt) * k_tiles + kt) * tile_bytes(weight_format::fp8);
      for (int w = 0; w < 16; ++w)
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = lane % 4, s = w / 2;
          const int column = kt * tile_columns + run_column(s / 2, t) + 4 * (s % 2) + 2 * (w % 2);
          const std::size_t at = tile + 512 * (w / 4) + 16 * lane + 4 * (w % 4);
          visit(column < layout.shape.k ? layout.row_at(rt, g) : -1,
                column < layout.shape.k ? layout.row_at(rt, g + 8) : -1, column, at);
        }
    }
}

inline void check_layout(const resident_layout& layout, std::size_t weight_bytes, std::size_t tiles_bytes) {
  if (layout.shape.format != weight_format::fp8 || !layout.valid())
    throw error("FP8 layout of " + layout.shape.name() +
                ": needs an fp8 matrix, K a multiple of 16, and two equal segments for the gate|up order");
  if (weight_bytes != layout.shape.code_bytes() || tiles_bytes != layout.bytes())
    throw error("FP8 layout of " + layout.shape.name() + ": got " + std::to_string(weight_bytes) +
                " weight and " + std::to_string(tiles_bytes) + " tile bytes; expected " +
                std::to_string(layout.shape.code_bytes()) + " and " + std::to_string(layout.bytes()));
}

}  // namespace detail

/// Packs a row-major FP8 matrix [n][k] into `tiles`, all of which is written. NaN bytes are the loader's to
/// refuse.
/// \throws nibble::error when a span does not fit the layout
inline void pack(const resident_layout& layout, std::span<const std::uint8_t> weight,
                 std::span<std::uint8_t> tiles, int workers = 0) {
  detail::check_layout(layout, weight.size(), tiles.size());
  const auto k = static_cast<std::size_t>(layout.shape.k);
  parallel_ranges(layout.row_tiles(), workers, [=](int begin, int end) {
    detail::for_each_pair(layout, begin, end, [=](int a, int b, int column, std::size_t at) {
      std::uint8_t bytes[4] = {};
      if (a >= 0) std::memcpy(bytes, weight.data() + static_cast<std::size_t>(a) * k + column, 2);
      if (b >= 0) std::memcpy(bytes + 2, weight.data() + static_cast<std::size_t>(b) * k + column, 2);
      std::uint32_t word;
      std::memcpy(&word, bytes, 4);
      word = word_of_bytes(word);
      std::memcpy(tiles.data() + at, &word, 4);
    });
  });
}

/// The inverse of pack.
/// \throws nibble::error when a span does not fit the layout
inline void unpack(const resident_layout& layout, std::span<const std::uint8_t> tiles,
                   std::span<std::uint8_t> weight, int workers = 0) {
  detail::check_layout(layout, weight.size(), tiles.size());
  const auto k = static_cast<std::size_t>(layout.shape.k);
  parallel_ranges(layout.row_tiles(), workers, [=](int begin, int end) {
    detail::for_each_pair(layout, begin, end, [=](int a, int b, int column, std::size_t at) {
      std::uint32_t word;
      std::memcpy(&word, tiles.data() + at, 4);
      word = bytes_of_word(word);
      std::uint8_t bytes[4];
      std::memcpy(bytes, &word, 4);
      if (a >= 0) std::memcpy(weight.data() + static_cast<std::size_t>(a) * k + column, bytes, 2);
      if (b >= 0) std::memcpy(weight.data() + static_cast<std::size_t>(b) * k + column, bytes + 2, 2);
    });
  });
}

}  // namespace nibble::fp8
