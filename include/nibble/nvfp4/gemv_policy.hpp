// SPDX-License-Identifier: Apache-2.0
/// \file
/// One constexpr selector: device class, layout, tokens → policy of the matrix-vector kernel.
///
/// The split of K over warps is a function of the layout alone (k_split). So a row is summed in the same
/// order for every number of tokens and on every device, and a token's result does not depend on its batch.
#pragma once

#include <algorithm>

#include "nibble/core/device_class.hpp"
#include "nibble/nvfp4/gemv_types.hpp"

namespace nibble {

/// Warps over which K is split: at most 8 for NVFP4 and for large N, else 16; each with an equal number of K
/// tiles where that is possible.
[[nodiscard]] constexpr int k_split(const resident_layout& layout) {
  const int tiles = layout.k_tiles();
  const bool large = layout.row_tiles() >= 2048;
  const int most = large || layout.shape.format == weight_format::nvfp4 ? 8 : 16;
  const int per_warp = (tiles + most - 1) / most;
  return (tiles + per_warp - 1) / per_warp;
}

namespace detail {

/// Blocks of one wave: the fewest that give no block more row tiles than `multiprocessors` blocks would.
[[nodiscard]] constexpr int equal_wave(int row_tiles, int multiprocessors) {
  const int blocks = std::min(row_tiles, multiprocessors);
  const int each = (row_tiles + blocks - 1) / blocks;
  const int fewest = (row_tiles + each - 1) / each;
  return row_tiles % fewest == 0 ? fewest : blocks;
}

}  // namespace detail

/// The policy of the kernel that serves `columns` token columns (token_columns(m)) of `layout`. `norm_bytes`:
/// of a weight of the RMSNorm in its input, which takes registers; 0 without one. `ends_block`: its output
/// ends a block of a model, so that a kernel of another kind follows.
[[nodiscard]] constexpr gemv_policy select_gemv(const resident_layout& layout, int columns,
                                                device_class device = default_device, int norm_bytes = 0,
                                                bool ends_block = false) {
  const int row_tiles = layout.row_tiles(), k_tiles = layout.k_tiles();
  gemv_policy p;
  p.columns = columns;
  p.warps = k_split(layout);
  const int per_warp = (k_tiles + p.warps - 1) / p.warps;
  const int row_bytes = k_tiles * static_cast<int>(tile_bytes(layout.shape.format));
  const bool exact = per_warp * p.warps == k_tiles;
  const bool copy_engine = device.has_bulk_copies();

  // Large N: persistent blocks, two per multiprocessor.
  if (copy_engine && exact && per_warp <= 2 && row_tiles >= 16 * device.multiprocessors) {
    p.variant = gemv_variant::ring;
    p.grid = 2 * device.multiprocessors;
    p.batch = 4;  // 64 rows: whole output lines
    p.min_blocks = 2;
    p.keep_output = true;
    const int parts = plan_of(layout, p).shared_bytes;  // stages are still zero
    const int half =
        (device.architecture == 120 ? 99 * 1024 - norm_bytes * layout.shape.k : 113 * 1024) - 2048;
    p.stages = std::clamp((half - parts) / row_bytes, 2, 5);
    if (compatible(layout, p) && plan_of(layout, p).shared_bytes <= half) return p;
    p = {};
    p.columns = columns;
    p.warps = k_split(layout);
  }
  p.grid = detail::equal_wave(row_tiles, device.multiprocessors);
  const int each = (row_tiles + p.grid - 1) / p.grid;
  const int budget = device.architecture == 120 ? 48 * 1024 : 112 * 1024;  // two grids' shares fit
  const bool nvfp4 = layout.shape.format == weight_format::nvfp4,
             fp8 = layout.shape.format == weight_format::fp8;
  // FP8 with 16 warps: two such blocks' 64 registers a thread are too few where FP8 is decoded by software,
  // and for what is compiled for Blackwell.
  const bool tight = p.warps > 8 && device.architecture != 89 && device.architecture != 90;
  // A few MB: everything at once through the copy engine, FP8 only where a block has a single row tile. For
  // sixteen tokens each warp waits for its own share alone, unless those pieces were too small.
  const bool pieces = each == 1 && columns == 16 && row_bytes / p.warps >= 4096;
  // One token of FP8 in a chain of its like is fastest that way; where the router follows, the step is faster
  // with its weights in registers, 64 a thread.
  const bool narrow = fp8 && norm_bytes == 0 && columns == 1 && each == 1 && (ends_block || !copy_engine);
  if (copy_engine && exact && !narrow && p.warps >= 8 && each * row_bytes <= budget &&
      (each > 1 ? nvfp4 : pieces || (row_bytes >= 16 * 1024 && (nvfp4 || columns <= 8)))) {
    p.variant = gemv_variant::one_shot;
    p.whole_rows = !pieces;
    p.decode_early = nvfp4 && (each > 1 ? columns <= 8 || (norm_bytes == 0 && per_warp <= 2)
                                        : columns <= 2 && norm_bytes <= 2);
    // Sixteen tokens: x takes as long as the products of a few row tiles, so half of it arrives behind those
    // of the other half; FP8 reads it late rather than keep the next kernel's block away.
    p.x_in_turns = columns == 16 && each > 1 && per_warp <= 2;
    p.x_at_use = columns == 16 && fp8 && per_warp <= 2 && !tight;
    const bool few = (columns <= 8 || p.x_at_use) && (p.warps <= 8 || norm_bytes == 0);
    p.min_blocks = (few && !tight) || (p.warps <= 8 && norm_bytes <= 2) ? 2 : 1;
    if (columns == 1 && each > 1) p.columns = 2;  // measured faster, with the same sums
    if (compatible(layout, p)) return p;
    p.columns = columns;
    p.x_in_turns = p.x_at_use = false;
  }
  // Registers. Few row tiles per block, so that the unrolled stream stays short.
  p.variant = gemv_variant::registers;
  // Sixteen columns of three row tiles fit everywhere; H200 has been seen to hold more without spills, FP8
  // six in a loop.
  const bool rolled = columns == 16 && fp8 && device.measured && per_warp == 1 && p.warps % 2 == 0 &&
                      each == 6 && row_tiles % p.grid == 0;
  const bool three =
      columns == 16 && !rolled && (fp8 ? each > 5 || !device.measured : !nvfp4 && !device.measured);
  const int most = per_warp > 2 ? 2 : three ? 3 : 6;
  if (each > most) p.grid = (row_tiles + most - 1) / most;
  // FP8, one or two tokens: two smaller blocks per multiprocessor.
  const int twice = detail::equal_wave(row_tiles, 2 * device.multiprocessors);
  const bool doubled = fp8 && norm_bytes == 0 && columns <= 2 && each > 1 && each <= most;
  if (doubled) p.grid = twice;
  // A short K leaves a warp one tile of a row tile: two of them a block share the wait for x.
  if (nvfp4 && norm_bytes == 0 && k_tiles <= 4 && each == 1 && columns <= 8 && row_tiles % 2 == 0 &&
      2 * row_tiles > device.multiprocessors)
    p.grid = row_tiles / 2;
  const int tiles = ((row_tiles + p.grid - 1) / p.grid) * per_warp;
  p.rolled = p.x_in_turns = rolled;
  p.depth = rolled ? 3
                   : std::min(tiles, columns == 16                ? (nvfp4 ? 2 : 1)
                                     : nvfp4 || (fp8 && !doubled) ? 4
                                                                  : 2);
  p.min_blocks = ((doubled || narrow) && !tight) || (nvfp4 && p.warps <= 8 && p.depth <= 2) ? 2 : 1;
  return p;
}

}  // namespace nibble
