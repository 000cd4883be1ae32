// SPDX-License-Identifier: Apache-2.0
/// \file
/// The matrix-vector family, all weight formats: what a kernel is specialised on, and the contract.
///
///     y[m][n] = scale(n) · Σ_k W[n][k] · x[m][k]          m = 1…16 tokens, x bf16, sums fp32
///
/// Cost: the resident bytes of W once, from memory; x from L2 by every block. Architectures: sm_80 and later.
#pragma once

#include <array>
#include <compare>
#include <cstdint>

#include "nibble/geometry/tile.hpp"

namespace nibble {

/// Tokens one launch takes; more are done in turns.
inline constexpr int max_gemv_tokens = 16;

/// Token columns of the kernel that serves `m` tokens. Spare columns repeat a live token and are not stored.
[[nodiscard]] constexpr int token_columns(int m) {
  return m <= 1 ? 1 : m <= 2 ? 2 : m <= 4 ? 4 : m <= 8 ? 8 : 16;
}

/// How weights travel to the multiplying warps.
enum class gemv_variant : unsigned char {
  registers,  ///< memory to registers, `depth` tiles ahead: small shapes, and any device
  one_shot,   ///< the copy engine brings the block's whole share at once: sm_90, a few MB to a few tens
  ring,       ///< a producer warp keeps `stages` row tiles in flight, persistent blocks: sm_90, large N
};

/// The tuning numbers of one kernel. Printable, comparable, a structural template argument.
struct gemv_policy {
  gemv_variant variant = gemv_variant::registers;
  int columns = 1;            ///< token columns: 1, 2, 4, 8 or 16
  int warps = 1;              ///< K is split over this many: part of the summation order
  int grid = 1;               ///< blocks; each takes an equal contiguous share of the row tiles
  int depth = 1;              ///< registers: tiles asked for ahead
  int stages = 0;             ///< ring: row tiles in flight
  int batch = 0;              ///< ring: row tiles summed at a time
  int min_blocks = 1;         ///< blocks per multiprocessor the register budget allows
  bool whole_rows = true;     ///< one_shot: one thread copies row tiles, or each warp its own K share
  bool decode_early = false;  ///< one_shot: the first tile is decoded before the wait, in registers
  bool keep_output = false;   ///< store with L2 evict-last: megabytes of output beside streamed weights
  bool x_in_turns = false;    ///< half the warps ask for x when the others have: those multiply meanwhile
  bool x_at_use = false;      ///< x of one K tile at a time: fewer registers than all of the warp's
  bool rolled = false;        ///< registers: a loop over `depth` row tiles at a time, which takes fewer

  friend constexpr bool operator==(const gemv_policy&, const gemv_policy&) = default;
};

/// Buffers of partial sums in the ring: with 16 columns two would not fit beside its stages.
[[nodiscard]] constexpr int ring_buffers(int columns) { return columns == 16 ? 1 : 2; }

/// Everything a kernel and its launch must agree on, from one place.
struct gemv_plan {
  int row_tiles = 0;      ///< of the matrix
  int k_tiles = 0;        ///< of the matrix
  int k_tiles_warp = 0;   ///< per warp, at most
  int row_tiles_cta = 0;  ///< per block, at most
  int tile_bytes = 0;
  int row_bytes = 0;   ///< of one row tile
  int units = 0;       ///< vectors of partial sums per row tile and warp
  int unit_bytes = 0;  ///< 8 for one token, else 16
  int threads = 0;
  int shared_bytes = 0;  ///< dynamic
  bool ragged_k = false;
  int part_bytes = 0;   ///< partial sums of one row tile and warp
  bool holds_x = true;  ///< a warp keeps x of all its K tiles in registers
};

[[nodiscard]] constexpr gemv_plan plan_of(const resident_layout& layout, const gemv_policy& policy) {
  gemv_plan p;
  p.row_tiles = layout.row_tiles();
  p.k_tiles = layout.k_tiles();
  p.k_tiles_warp = (p.k_tiles + policy.warps - 1) / policy.warps;
  p.row_tiles_cta = (p.row_tiles + policy.grid - 1) / policy.grid;
  p.tile_bytes = static_cast<int>(tile_bytes(layout.shape.format));
  p.units = 8 * (policy.columns == 1 ? 1 : policy.columns / 2);
  p.row_bytes = p.k_tiles * p.tile_bytes;
  p.unit_bytes = policy.columns == 1 ? 8 : 16;
  p.part_bytes = p.units * p.unit_bytes;
  p.holds_x = p.k_tiles_warp <= 2 && !policy.x_at_use;
  p.threads = 32 * policy.warps + (policy.variant == gemv_variant::ring ? 32 : 0);
  p.ragged_k = p.k_tiles_warp * policy.warps != p.k_tiles || layout.shape.k % tile_columns != 0;
  switch (policy.variant) {
    case gemv_variant::registers:
      p.shared_bytes = p.row_tiles_cta * policy.warps * p.part_bytes;
      break;
    case gemv_variant::one_shot:
      p.shared_bytes = p.row_tiles_cta * p.row_bytes;
      break;
    case gemv_variant::ring:
      p.shared_bytes = policy.stages * p.row_bytes +
                       ring_buffers(policy.columns) * policy.batch * policy.warps * p.part_bytes +
                       (policy.columns == 16 ? p.k_tiles * 2048 : 0);
      break;
  }
  return p;
}

/// Whether the policy can serve the layout at all, whatever its speed.
[[nodiscard]] constexpr bool compatible(const resident_layout& layout, const gemv_policy& policy) {
  if (!layout.valid() || policy.warps < 1 || policy.grid < 1) return false;
  const gemv_plan p = plan_of(layout, policy);
  const bool columns_known = policy.columns == 1 || policy.columns == 2 || policy.columns == 4 ||
                             policy.columns == 8 || policy.columns == 16;
  if (!columns_known || policy.grid > p.row_tiles || p.threads > 1024) return false;
  if (p.k_tiles_warp * (policy.warps - 1) >= p.k_tiles) return false;  // a warp without work
  if (policy.x_in_turns && (policy.warps % 2 != 0 || policy.variant == gemv_variant::ring)) return false;
  switch (policy.variant) {
    case gemv_variant::registers:
      return policy.depth >= 1 && (!policy.rolled || (p.k_tiles_warp == 1 && p.row_tiles % policy.grid == 0 &&
                                                      p.row_tiles_cta % policy.depth == 0));
    case gemv_variant::one_shot:  // partial sums take the place of the tiles they came from
      return p.k_tiles_warp * policy.warps == p.k_tiles && !policy.rolled &&
             p.part_bytes <= p.k_tiles_warp * p.tile_bytes && p.shared_bytes <= 232448 - 1024;
    case gemv_variant::ring:
      return p.k_tiles_warp * policy.warps == p.k_tiles && p.k_tiles_warp <= 2 && !policy.rolled &&
             !policy.x_at_use && policy.stages >= 2 && policy.batch >= 1 && p.shared_bytes <= 232448 - 1024;
  }
  return false;
}

/// plan_of as a constant that device code may use.
template <resident_layout Layout, gemv_policy Policy>
inline constexpr gemv_plan plan_for = plan_of(Layout, Policy);

/// What device code needs of a layout, as constants.
template <resident_layout Layout>
struct layout_constants {
  static constexpr weight_format format = Layout.shape.format;
  static constexpr int k = Layout.shape.k;
  static constexpr int k_tiles = Layout.k_tiles();
  static constexpr int row_tiles = Layout.row_tiles();
  static constexpr int rows = Layout.output_rows();
  static constexpr bool paired = Layout.order == row_order::gate_up;
  static constexpr int segments = Layout.shape.segments();
  static constexpr int first_row_1 = segments > 1 ? Layout.shape.first_row_of(1) : Layout.shape.n;
  static constexpr int first_row_2 = segments > 2 ? Layout.shape.first_row_of(2) : Layout.shape.n;
  static constexpr int first_row_3 = segments > 3 ? Layout.shape.first_row_of(3) : Layout.shape.n;
};

// nvcc cannot spell class-type template arguments in the host stub of a __global__ template, so kernels take
// a layout and a policy as integers.

/// The policy in 62 bits.
[[nodiscard]] constexpr std::uint64_t encode(const gemv_policy& p) {
  std::uint64_t bits = 0;
  const auto put = [&bits](std::uint64_t value, int width) { bits = bits << width | value; };
  put(static_cast<std::uint64_t>(p.variant), 2);
  put(static_cast<std::uint64_t>(p.columns), 5);
  put(static_cast<std::uint64_t>(p.warps), 6);
  put(static_cast<std::uint64_t>(p.grid), 24);
  put(static_cast<std::uint64_t>(p.depth), 6);
  put(static_cast<std::uint64_t>(p.stages), 4);
  put(static_cast<std::uint64_t>(p.batch), 5);
  put(static_cast<std::uint64_t>(p.min_blocks), 4);
  put(p.whole_rows ? 1 : 0, 1);
  put(p.decode_early ? 1 : 0, 1);
  put(p.keep_output ? 1 : 0, 1);
  put(p.x_in_turns ? 1 : 0, 1);
  put(p.x_at_use ? 1 : 0, 1);
  put(p.rolled ? 1 : 0, 1);
  return bits;
}
[[nodiscard]] constexpr gemv_policy decode_policy(std::uint64_t bits) {
  const auto take = [&bits](int width) {
    const auto value = static_cast<int>(bits & ((std::uint64_t{1} << width) - 1));
    bits >>= width;
    return value;
  };
  gemv_policy p;
  p.rolled = take(1) != 0;
  p.x_at_use = take(1) != 0;
  p.x_in_turns = take(1) != 0;
  p.keep_output = take(1) != 0;
  p.decode_early = take(1) != 0;
  p.whole_rows = take(1) != 0;
  p.min_blocks = take(4);
  p.batch = take(5);
  p.stages = take(4);
  p.depth = take(6);
  p.grid = take(24);
  p.warps = take(6);
  p.columns = take(5);
  p.variant = static_cast<gemv_variant>(take(2));
  return p;
}

template <int N, int K, int Format, int Order, int S0, int S1, int S2, int S3>
inline constexpr resident_layout layout_from = {{N, K, static_cast<weight_format>(Format), {S0, S1, S2, S3}},
                                                static_cast<row_order>(Order)};
template <std::uint64_t Bits>
inline constexpr gemv_policy policy_from = decode_policy(Bits);

}  // namespace nibble
