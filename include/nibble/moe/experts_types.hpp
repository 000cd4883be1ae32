// SPDX-License-Identifier: Apache-2.0
/// \file
/// Routed experts for a few tokens: shapes, the slot layout, and the tuning numbers.
///
///     h[m][j]  = silu(gate_j · x[m]) ⊙ (up_j · x[m])              j: the shared expert, then the top k
///     y[m]     = residual[m] + Σ_j weight[m][j] · down_j · h[m][j]    in the order of j
///
/// Two kernels. An expert rests in a slot: its gate|up tiles (gate_up row order), then its down tiles. Slots
/// are found on the device: expert id → slot_of[id] → slots + slot · slot_bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "nibble/core/device_class.hpp"
#include "nibble/geometry/tile.hpp"
#include "nibble/nvfp4/gemv_types.hpp"

namespace nibble::moe {

/// Tokens one launch takes.
inline constexpr int max_tokens = 16;

/// What the expert kernels are specialised on.
struct experts_shape {
  int hidden = 0;   ///< width of x and y, a multiple of 16
  int inner = 0;    ///< width of h, a multiple of 16
  int experts = 0;  ///< ids are 0 … experts - 1
  int top_k = 0;    ///< experts a token chooses
  bool shared = false;
  weight_format format = weight_format::nvfp4;

  friend constexpr bool operator==(const experts_shape&, const experts_shape&) = default;

  [[nodiscard]] constexpr resident_layout gate_up() const {
    return {fused(hidden, format, inner, inner), row_order::gate_up};
  }
  [[nodiscard]] constexpr resident_layout down() const { return {matrix(hidden, inner, format)}; }
  /// Experts a token passes through.
  [[nodiscard]] constexpr int groups() const { return top_k + (shared ? 1 : 0); }
  [[nodiscard]] constexpr std::size_t slot_bytes() const { return gate_up().bytes() + down().bytes(); }
  [[nodiscard]] constexpr bool valid() const {
    return hidden > 0 && inner > 0 && hidden % 16 == 0 && inner % 16 == 0 && experts > 0 && experts <= 4096 &&
           top_k > 0 && groups() <= 16 && format != weight_format::bf16;
  }
};

/// Words of the report that the gate|up kernel fills: word 0 counts ids outside [0, experts), then one bit
/// per missing expert.
[[nodiscard]] constexpr int report_words(const experts_shape& shape) { return 1 + (shape.experts + 31) / 32; }

/// Tuning numbers of the pair. The K splits are part of the summation order and do not depend on the tokens.
struct experts_policy {
  int up_warps = 8;         ///< over which gate|up splits its K
  int up_depth = 2;         ///< K tiles asked for ahead
  int up_min_blocks = 4;    ///< per multiprocessor
  int down_warps = 1;       ///< per expert
  int down_depth = 2;       ///< K tiles asked for ahead
  int down_min_blocks = 3;  ///< per multiprocessor
  int multiprocessors = 132;

  friend constexpr bool operator==(const experts_policy&, const experts_policy&) = default;
};

namespace detail {
/// The largest divisor of `count` that is at most `most`: register buffers go round without a remainder.
[[nodiscard]] constexpr int divisor_of(int count, int most) {
  int d = std::min(count, most);
  while (count % d != 0) --d;
  return d;
}
}  // namespace detail

/// Splits of K: a function of the shape alone.
[[nodiscard]] constexpr int up_split(const experts_shape& s) {
  const int tiles = s.gate_up().k_tiles(), per_warp = (tiles + 7) / 8;
  return (tiles + per_warp - 1) / per_warp;
}
[[nodiscard]] constexpr int down_split(const experts_shape& s) {
  const int tiles = s.down().k_tiles(), most = 32 / s.groups();
  const int warps = std::clamp((tiles + 5) / 6, 1, std::max(1, most));
  const int per_warp = (tiles + warps - 1) / warps;
  return (tiles + per_warp - 1) / per_warp;
}

/// Tokens up to which down has a kernel of its own: one, few, more.
inline constexpr int one_token = 1, few_tokens = 4;

/// The policy for `m` tokens. Many warps with few tiles ahead each hide more latency than few with many; but
/// the down product of one token does best with all its weights asked for while gate|up still runs, and that
/// of a few with registers to spare: two blocks a multiprocessor.
[[nodiscard]] constexpr experts_policy select_experts(const experts_shape& s, int m,
                                                      device_class device = default_device) {
  experts_policy p;
  const bool nvfp4 = s.format == weight_format::nvfp4;
  p.multiprocessors = device.multiprocessors;
  p.up_warps = up_split(s);
  const int up_tiles = (s.gate_up().k_tiles() + p.up_warps - 1) / p.up_warps;
  p.up_depth = detail::divisor_of(up_tiles, 2);
  // Five leave room for the next kernel's blocks; with the shared expert the registers suffice for it.
  p.up_min_blocks = !nvfp4 ? 3 : m == one_token && s.shared ? 5 : 4;
  p.down_warps = down_split(s);
  const int down_tiles = (s.down().k_tiles() + p.down_warps - 1) / p.down_warps;
  const int warps = p.down_warps * s.groups();
  const bool crowded = m > few_tokens && nvfp4 && warps <= 9 && device.measured;
  p.down_depth = detail::divisor_of(down_tiles, m == one_token && nvfp4 ? 4 : 2);
  p.down_min_blocks = crowded                             ? 4
                      : warps <= 9 && m > few_tokens      ? 3
                      : warps <= (m > one_token ? 13 : 9) ? 2
                                                          : 1;
  // Before sm_90, six tiles a warp need more registers than three blocks leave.
  if (device.architecture < 90 && down_tiles > 4) p.down_min_blocks = std::min(p.down_min_blocks, 2);
  return p;
}

}  // namespace nibble::moe
