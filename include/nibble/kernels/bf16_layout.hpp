// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a bf16 matrix to the resident tiles and back: a lossless permutation.
///
/// A tile is 4096 bytes. Step s (0…7) of lane l is the 16 bytes at 512 s + 16 l: the columns
/// run_column(s / 2, t) + 4 (s % 2) … + 3 as pairs (row g, columns 0 1), (row g + 8, 0 1), (row g, 2 3), (row
/// g + 8, 2 3), just as the matrix instruction wants them. Tile parts beyond the matrix are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "nibble/core/error.hpp"
#include "nibble/core/parallel.hpp"
#include "nibble/geometry/tile.hpp"

namespace nibble::bf16_weights {
namespace detail {

template <class Visit>
void for_each_pair(const resident_layout& layout, int workers, Visit visit) {
  parallel_ranges(layout.row_tiles(), workers, [=](int begin, int end) {
    const int k_tiles = layout.k_tiles();
    for (int rt = begin; rt < end; ++rt)
      for (int kt = 0; kt < k_tiles; ++kt)
        for (int s = 0; s < 8; ++s)
          for (int lane = 0; lane < 32; ++lane)
            for (int p = 0; p < 4; ++p) {
              const int row = layout.row_at(rt, lane / 4 + 8 * (p % 2));
              const int column = kt * tile_columns + run_column(s / 2, lane % 4) + 4 * (s % 2) + 2 * (p / 2);
              visit(column < layout.shape.k ? row : -1, column,
                    (static_cast<std::size_t>(rt) * k_tiles + kt) * tile_bytes(weight_format::bf16) +
                        512 * s + 16 * lane + 4 * p);
            }
  });
}

inline void check_layout(const resident_layout& layout, std::size_t elements, std::size_t tiles_bytes) {
  if (layout.shape.format != weight_format::bf16 || !layout.valid())
    throw error("bf16 layout of " + layout.shape.name() +
                ": needs a bf16 matrix, K a multiple of 16, and two equal segments for the gate|up order");
  if (2 * elements != layout.shape.code_bytes() || tiles_bytes != layout.bytes())
    throw error("bf16 layout of " + layout.shape.name() + ": got " + std::to_string(2 * elements) +
                " weight and " + std::to_string(tiles_bytes) + " tile bytes; expected " +
                std::to_string(layout.shape.code_bytes()) + " and " + std::to_string(layout.bytes()));
}

}  // namespace detail

/// Packs a row-major bf16 matrix [n][k] into `tiles`, all of which is written.
/// \throws nibble::error when a span does not fit the layout
inline void pack(const resident_layout& layout, std::span<const std::uint16_t> weight,
                 std::span<std::uint8_t> tiles, int workers = 0) {
  detail::check_layout(layout, weight.size(), tiles.size());
  const auto k = static_cast<std::size_t>(layout.shape.k);
  detail::for_each_pair(layout, workers, [=](int row, int column, std::size_t at) {
    std::uint32_t pair = 0;
    if (row >= 0) std::memcpy(&pair, weight.data() + static_cast<std::size_t>(row) * k + column, 4);
    std::memcpy(tiles.data() + at, &pair, 4);
  });
}

/// The inverse of pack.
/// \throws nibble::error when a span does not fit the layout
inline void unpack(const resident_layout& layout, std::span<const std::uint8_t> tiles,
                   std::span<std::uint16_t> weight, int workers = 0) {
  detail::check_layout(layout, weight.size(), tiles.size());
  const auto k = static_cast<std::size_t>(layout.shape.k);
  detail::for_each_pair(layout, workers, [=](int row, int column, std::size_t at) {
    if (row >= 0)
      std::memcpy(weight.data() + static_cast<std::size_t>(row) * k + column, tiles.data() + at, 4);
  });
}

}  // namespace nibble::bf16_weights
