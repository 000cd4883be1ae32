// SPDX-License-Identifier: Apache-2.0
/// \file
/// How a block of the product for many tokens is cut: what fits the device, and what fills it.
#pragma once

#include <algorithm>

#include "nibble/nvfp4/gemv_policy.hpp"

namespace nibble {

/// Of one token's activations of a K tile in shared memory: 16 more than they are, so that the lanes of two
/// tokens, 32 bytes apart within each, read different banks.
inline constexpr int gemm_token_bytes = 2 * tile_columns + 16;

/// What a block takes, and how.
struct gemm_shape {
  int row_warps = 8;   ///< warps over row tiles
  int k_warps = 1;     ///< warps over K
  int tiles = 2;       ///< row tiles of a warp
  int tokens = 128;    ///< a multiple of 8
  int stages = 3;      ///< of the shared-memory ring
  int min_blocks = 1;  ///< per multiprocessor

  friend constexpr bool operator==(const gemm_shape&, const gemm_shape&) = default;
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int threads() const { return 32 * row_warps * k_warps; }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int row_tiles() const { return row_warps * tiles; }
  /// Bytes of one K tile of a stage: activations, then weights.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int x_bytes() const { return tokens * gemm_token_bytes; }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int slice_bytes(weight_format format) const {
    return x_bytes() + row_tiles() * static_cast<int>(tile_bytes(format));
  }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int stage_bytes(weight_format format) const {
    return k_warps * slice_bytes(format);
  }
  /// Bytes of the sums of the K warps, which take the place of the stages.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int sum_bytes() const {
    return k_warps > 1 ? k_warps * row_tiles() * tile_rows * tokens * 4 : 0;
  }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int shared_bytes(weight_format format) const {
    const int ring = stages * stage_bytes(format);
    return ring > sum_bytes() ? ring : sum_bytes();
  }
};

namespace detail {

/// Blocks per multiprocessor and stages of a cut; no stages: it does not fit.
[[nodiscard]] constexpr gemm_shape fitted(gemm_shape s, weight_format format, const device_class& device) {
  const int reserve = 3 * 1024, most = device.shared_bytes() - reserve;
  const int registers = s.tiles * s.tokens / 2;  // of the sums, per thread; 64 of 128 are too many
  for (const int blocks : {2, 1}) {
    if (blocks == 2 && (registers > 48 || s.threads() > 256)) continue;
    s.min_blocks = blocks;
    s.stages = std::min(5, most / blocks / s.stage_bytes(format));
    if (s.stages >= (blocks == 2 ? 3 : 2) && s.shared_bytes(format) <= most / blocks) return s;
  }
  s.stages = 0;
  return s;
}

}  // namespace detail

/// A block's cut of whole row tiles (16 or fewer) and at most `tokens` tokens that fits the device: fewer
/// tokens, then fewer row tiles, where shared memory is small.
[[nodiscard]] constexpr gemm_shape fit_gemm(weight_format format, int tokens,
                                            device_class device = default_device) {
  for (const int tiles : {2, 1})
    for (int t = tokens; t >= 16; t /= 2) {
      const gemm_shape s = detail::fitted({8, 1, tiles, t, 0, 1}, format, device);
      if (s.stages >= 2 && (t == tokens || t >= 64 || tiles == 1)) return s;
    }
  return detail::fitted({4, 1, 1, 16, 0, 1}, format, device);
}

/// Tokens of a block's cut for `m` tokens of a dense product.
[[nodiscard]] constexpr int gemm_token_class(int m) { return m <= 32 ? 32 : m <= 64 ? 64 : 128; }

/// The cut for a dense product of up to `tokens` tokens (a token class). Where a class is one block of
/// tokens, the cut is the one with the least to bring to a multiprocessor: waves × (activations + weights of
/// a block); blocks of few row tiles let their warps share K.
[[nodiscard]] constexpr gemm_shape select_gemm(const resident_layout& layout, int tokens,
                                               device_class device = default_device) {
  const weight_format format = layout.shape.format;
  gemm_shape best = fit_gemm(format, tokens, device);
  if (tokens > 64) return best;
  const auto cost = [&](const gemm_shape& s) {
    const int slots = s.min_blocks * device.multiprocessors;
    const int blocks =
        (layout.row_tiles() + s.row_tiles() - 1) / s.row_tiles() * ((tokens + s.tokens - 1) / s.tokens);
    const int waves = (blocks + slots - 1) / slots * s.min_blocks;
    return waves * (256 * s.tokens + s.row_tiles() * static_cast<int>(tile_bytes(format)));
  };
  for (const int tiles : {3, 2, 1})
    for (const int row_warps : {4, 2, 1})
      for (const int k_warps : {8, 4, 2}) {
        if (row_warps * k_warps > 8 || row_warps * k_warps < 4 || k_warps > layout.k_tiles()) continue;
        const gemm_shape s = detail::fitted({row_warps, k_warps, tiles, tokens, 0, 1}, format, device);
        if (s.stages >= 2 && cost(s) < cost(best)) best = s;
      }
  return best;
}

/// Units of the warpgroup kernel: 128 · row_blocks rows × at most 128 tokens.
[[nodiscard]] constexpr int wide_units(const resident_layout& layout, int row_blocks, int m) {
  return (layout.row_tiles() + 8 * row_blocks - 1) / (8 * row_blocks) * ((m + 127) / 128);
}
/// Row blocks of a unit for `m` tokens: 256 rows read activations less often, 128 fill the device with less.
/// A unit of 128 rows takes about three quarters of the time of one of 256, since both bring the same
/// activations.
[[nodiscard]] constexpr int wide_row_blocks(const resident_layout& layout, int m,
                                            device_class device = default_device) {
  const auto waves = [&](int row_blocks) {
    return (wide_units(layout, row_blocks, m) + device.multiprocessors - 1) / device.multiprocessors;
  };
  return 3 * waves(1) < 4 * waves(2) ? 1 : 2;
}

}  // namespace nibble
