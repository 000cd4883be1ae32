// SPDX-License-Identifier: Apache-2.0
/// \file
/// The tiles in which a weight matrix rests on the device, for every weight format.
///
/// A tile is 16 rows × 128 columns, the share one warp multiplies at a time. Tiles lie row tile by row tile,
/// along K within a row tile. A warp's 32 lanes are (g = lane / 4, t = lane % 4): a lane owns fragment rows g
/// and g + 8, and of the tile's columns 16 t … 16 t + 15 and 64 + 16 t … 64 + 16 t + 15: of each half a block
/// of NVFP4, and 32 bytes of an activation row, so that the four lanes of a row ask for whole cache lines of
/// it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"
#include "nibble/geometry/geometry.hpp"

namespace nibble {

inline constexpr int tile_rows = 16;
inline constexpr int tile_columns = 128;
/// Every tile starts at a multiple of this.
inline constexpr std::size_t tile_alignment_bytes = 128;

/// Which logical rows a row tile holds.
enum class row_order : std::uint8_t {
  adjacent,  ///< fragment rows g, g + 8 are the neighbours 2 g, 2 g + 1: a lane stores two at once
  gate_up,   ///< two equal segments: fragment row g is gate row 8 tile + g, row g + 8 the same row of up
};

[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t tile_bytes(weight_format format) {
  switch (format) {
    case weight_format::bf16:
      return 4096;
    case weight_format::fp8:
      return 2048;
    case weight_format::nvfp4:
      return 1024 + 128;  // codes, block scales
  }
  return 0;
}

/// Geometry and row order together: what a resident matrix is. Usable as a template argument.
struct resident_layout {
  geometry shape{};
  row_order order = row_order::adjacent;

  friend constexpr bool operator==(const resident_layout&, const resident_layout&) = default;

  /// Whether such a layout exists: a valid geometry, K a multiple of 16, two equal segments for gate_up.
  [[nodiscard]] constexpr bool valid() const {
    if (!shape.valid() || shape.k % 16 != 0) return false;
    return order == row_order::adjacent || (shape.segments() == 2 && shape.rows_of(0) == shape.rows_of(1));
  }
  /// Rows of the product: N, or N/2 where gate and up become one.
  [[nodiscard]] constexpr int output_rows() const {
    return order == row_order::adjacent ? shape.n : shape.n / 2;
  }
  [[nodiscard]] constexpr int row_tiles() const {
    const int rows = order == row_order::adjacent ? tile_rows : tile_rows / 2;
    return (output_rows() + rows - 1) / rows;
  }
  [[nodiscard]] constexpr int k_tiles() const { return (shape.k + tile_columns - 1) / tile_columns; }
  [[nodiscard]] constexpr std::size_t bytes() const {
    return static_cast<std::size_t>(row_tiles()) * static_cast<std::size_t>(k_tiles()) *
           tile_bytes(shape.format);
  }
  /// The matrix row at fragment row `r` of row tile `tile`; -1 where the tile sticks out.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int row_at(int tile, int r) const {
    if (order == row_order::adjacent) {
      const int row = tile * tile_rows + (r < 8 ? 2 * r : 2 * (r - 8) + 1);
      return row < shape.n ? row : -1;
    }
    const int row = tile * 8 + r % 8;
    return row < shape.n / 2 ? row + (r < 8 ? 0 : shape.n / 2) : -1;
  }
};

/// First column of run `i` (0…3, eight columns, one 16-byte load of x) of lane quarter `t`, within its tile.
/// It is run_column(i, 0) + run_column(0, t).
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr int run_column(int i, int t) {
  return 64 * (i / 2) + 16 * t + 8 * (i % 2);
}

}  // namespace nibble
