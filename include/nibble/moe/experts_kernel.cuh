// SPDX-License-Identifier: Apache-2.0
/// \file
/// The two expert kernels.
///
/// gate|up: a block is a few row tiles of one expert and of up to 8 tokens that chose it. Equal experts are
/// found by the blocks themselves: an assignment (token, j) whose expert an earlier assignment also chose
/// leaves the work to that one. down: a block is a few row tiles of one token, one or two warps an expert,
/// summed in order.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/moe/experts_types.hpp"
#include "nibble/nvfp4/gemv_product.cuh"

namespace nibble::moe {

struct experts_params {
  const std::uint8_t* slots = nullptr;  ///< slot s at slots + s · slot_bytes, 128-byte aligned
  const float* slot_scales = nullptr;   ///< [slots][3]: gate, up, down
  int slot_count = 0;
  const std::int32_t* slot_of = nullptr;  ///< [experts], -1: not resident. Not written by a kernel that may
                                          ///< still run: see router_family
  const std::uint8_t* shared_expert = nullptr;  ///< laid out as a slot; only with shape.shared
  float shared_scales[3] = {};
  const std::int32_t* ids = nullptr;      ///< [m][top_k]; -1 adds nothing
  const float* weights = nullptr;         ///< [m][top_k]
  const float* shared_weights = nullptr;  ///< [m], null: 1
  const __nv_bfloat16* x = nullptr;       ///< [m][hidden], rows ldx apart
  int ldx = 0;
  __nv_bfloat16* h = nullptr;  ///< m · groups · inner elements, written by gate|up, read by down
  __nv_bfloat16* y = nullptr;  ///< [m][hidden], rows ldy apart
  int ldy = 0;
  const __nv_bfloat16* residual = nullptr;  ///< [m][hidden], rows ldr apart; may be null, may be y
  int ldr = 0;
  unsigned* report = nullptr;  ///< [report_words], only ever added to; may be null
  int m = 0;
  std::byte* workspace = nullptr;  ///< only for more than 16 tokens: experts_family::workspace_bytes
  std::size_t workspace_bytes = 0;
};

// Kernels take the shape and policy as integers; see gemv_types.hpp.
template <int Hidden, int Inner, int Experts, int TopK, int Shared, int Format>
inline constexpr experts_shape shape_from = {Hidden, Inner,       Experts,
                                             TopK,   Shared != 0, static_cast<weight_format>(Format)};

template <experts_shape Shape>
struct experts_constants {
  static constexpr int groups = Shape.groups();
  static constexpr int top_k = Shape.top_k;
  static constexpr int inner = Shape.inner;
  static constexpr int hidden = Shape.hidden;
  static constexpr int experts = Shape.experts;
  static constexpr bool shared = Shape.shared;
  static constexpr weight_format format = Shape.format;
  static constexpr int up_row_tiles = Shape.gate_up().row_tiles();
  static constexpr int up_k_tiles = Shape.gate_up().k_tiles();
  static constexpr int down_row_tiles = Shape.down().row_tiles();
  static constexpr int down_k_tiles = Shape.down().k_tiles();
  static constexpr std::size_t up_bytes = Shape.gate_up().bytes();
  static constexpr std::size_t slot_bytes = Shape.slot_bytes();
  static constexpr int tile = static_cast<int>(tile_bytes(Shape.format));
};

namespace detail {

/// The slot of an id; -1 for -1, for an id out of range, for an expert that is not resident.
template <int Experts>
__device__ __forceinline__ int slot_of_id(const experts_params& p, int id, const std::int32_t* table) {
  if (id < 0 || id >= Experts) return -1;
  const int slot = table[id];
  return slot < p.slot_count ? slot : -1;
}

template <int Experts>
__device__ __forceinline__ void report_missing(const experts_params& p, int id) {
  if (p.report == nullptr || id == -1) return;
  if (id < 0 || id >= Experts)
    atomicAdd(p.report, 1u);
  else
    atomicOr(p.report + 1 + id / 32, 1u << (id % 32));
}

/// One expert's work for up to 8 tokens.
struct group {
  const std::uint8_t* tiles;
  float gate_scale, up_scale;
  int count;
  std::int16_t members[8];  ///< assignments token · top_k + j; for the shared expert tokens
};

/// Stages `bytes` of activations of a warp in shared memory, whole lines at a time; bytes from `have` on are
/// zero.
template <int Bytes>
__device__ __forceinline__ void stage(uint4* to, const __nv_bfloat16* from, int have_bytes) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < (Bytes + 511) / 512; ++i) {
    const int at = 512 * i + 16 * lane;
    if (at < Bytes)
      to[at / 16] = at < have_bytes
                        ? *reinterpret_cast<const uint4*>(reinterpret_cast<const std::uint8_t*>(from) + at)
                        : make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

/// acc += tile · x, eight columns of x at a time: x of run i of the tile is run(i). Few registers are live.
template <class Accumulators, class Fragment, class Run>
__device__ __forceinline__ void multiply_runs(Accumulators& acc, const Fragment& f, Run run) {
  uint4 x;
  f.for_each_step([&](int s, const std::uint32_t(&a)[4]) {
    if (s % 2 == 0) x = run(s / 2);
    device::mma(acc[s / 4][0], a, s % 2 == 0 ? x.x : x.z, s % 2 == 0 ? x.y : x.w);
  });
}

}  // namespace detail

/// gate|up for one token: a block is one row tile of one expert.
template <int Warps, int Depth, int MinBlocks, int... ShapeNumbers>
__global__ __launch_bounds__(32 * Warps, MinBlocks) void experts_gate_up_single(
    const __grid_constant__ experts_params p) {
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using product = device::warp_product<c::format, 1, c::hidden>;
  constexpr int per_warp = (c::up_k_tiles + Warps - 1) / Warps, units = product::units;
  __shared__ __align__(16) float2 part[Warps * units];
  __shared__ __align__(16) uint4 staged[Warps][per_warp * 16];
  __shared__ std::int32_t table[c::experts];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = blockIdx.x / c::up_row_tiles, tile = blockIdx.x % c::up_row_tiles, k0 = warp * per_warp;
  const int k_tiles = c::up_k_tiles - k0;
  const std::size_t skip = (static_cast<std::size_t>(tile) * c::up_k_tiles + k0) * c::tile;
  const bool shared = c::shared && group == 0;
  device::fragment<c::format> f[Depth];
  float gate_scale = p.shared_scales[0], up_scale = p.shared_scales[1];
  const std::uint8_t* base = p.shared_expert + skip;
  const auto ask = [&] {
#pragma unroll
    for (int d = 0; d < Depth; ++d)
      if (d < k_tiles) f[d].load(base + d * c::tile, lane);
  };
  if (shared)
    ask();  // its address is known before the router has spoken
  else
    for (int i = threadIdx.x; i < c::experts; i += 32 * Warps) table[i] = p.slot_of[i];
  __syncthreads();
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (!shared) {
    const int id = p.ids[group - (c::shared ? 1 : 0)];
    const int slot = detail::slot_of_id<c::experts>(p, id, table);
    if (slot < 0) {
      if (tile == 0 && threadIdx.x == 0) detail::report_missing<c::experts>(p, id);
      return;
    }
    base = p.slots + slot * c::slot_bytes + skip;
    ask();
    gate_scale = p.slot_scales[3 * slot], up_scale = p.slot_scales[3 * slot + 1];
  }
  detail::stage<per_warp * 256>(staged[warp], p.x + k0 * tile_columns, 2 * (c::hidden - k0 * tile_columns));
  const std::uint32_t row = device::shared_address(staged[warp]) + 2 * run_column(0, lane & 3);
  typename product::acc_t acc;
  product::zero(acc);
#pragma unroll
  for (int k = 0; k < per_warp; ++k) {
    if (k >= k_tiles) break;
    detail::multiply_runs(acc, f[k % Depth],
                          [&](int i) { return device::load_shared(row + 256 * k + 2 * run_column(i, 0)); });
    if (k + Depth < per_warp && k + Depth < k_tiles) f[k % Depth].load(base + (k + Depth) * c::tile, lane);
  }
  product::leave(part + warp * units, acc, lane);
  __syncthreads();
  if (threadIdx.x < units && 8 * tile + static_cast<int>(threadIdx.x) < c::inner) {
    const float2 v = product::template sum<Warps>(part + threadIdx.x, units);
    constexpr float unscale = device::fragment<c::format>::unscale;
    p.h[static_cast<std::size_t>(group) * c::inner + 8 * tile + threadIdx.x] =
        __float2bfloat16_rn(swiglu_value(v.x * (gate_scale * unscale), v.y * (up_scale * unscale)));
  }
}

/// gate|up for 2 to 16 tokens: persistent blocks walk (expert, row tile) units; an expert that several tokens
/// chose is read once for up to `Columns` of them.
template <int Columns, int Warps, int Depth, int MinBlocks, int... ShapeNumbers>
__global__ __launch_bounds__(32 * Warps, MinBlocks) void experts_gate_up_grouped(
    const __grid_constant__ experts_params p) {
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using product = device::warp_product<c::format, Columns, c::hidden>;
  using vec = typename product::vec;
  constexpr int per_warp = (c::up_k_tiles + Warps - 1) / Warps, units = product::units, threads = 32 * Warps;
  constexpr int most_assignments = (max_tokens * c::top_k + 3) / 4 * 4;
  __shared__ __align__(16) vec part[2][Warps * units];
  __shared__ detail::group groups[max_tokens * (c::top_k + 1)];
  __shared__ std::int32_t table[c::experts];
  __shared__ __align__(16) std::int32_t ids[most_assignments];
  __shared__ std::int16_t group_of[most_assignments];
  constexpr int rounds = (most_assignments + threads - 1) / threads;
  __shared__ int led[rounds * Warps];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, k0 = warp * per_warp,
            k_tiles = c::up_k_tiles - k0;
  const int assignments = p.m * c::top_k, shared_groups = c::shared ? (p.m + Columns - 1) / Columns : 0;
  for (int i = threadIdx.x; i < c::experts; i += threads) table[i] = p.slot_of[i];
  if (static_cast<int>(threadIdx.x) < shared_groups) {
    detail::group& g = groups[threadIdx.x];
    g.tiles = p.shared_expert, g.gate_scale = p.shared_scales[0], g.up_scale = p.shared_scales[1];
    g.count = min(Columns, p.m - static_cast<int>(threadIdx.x) * Columns);
    for (int i = 0; i < g.count; ++i) g.members[i] = static_cast<std::int16_t>(threadIdx.x * Columns + i);
  }
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  for (int i = threadIdx.x; i < most_assignments; i += threads) ids[i] = i < assignments ? p.ids[i] : -1;
  __syncthreads();
  // The first token's experts lead the first groups unless one of them is missing: a block asks for its first
  // unit before the groups are known, and again if it guessed wrong.
  device::fragment<c::format> f[Depth];
  const int first = blockIdx.x;
  const auto offset_of = [&](int unit) {
    return (static_cast<std::size_t>(unit % c::up_row_tiles) * c::up_k_tiles + k0) * c::tile;
  };
  const auto ask = [&](const std::uint8_t* base) {
#pragma unroll
    for (int d = 0; d < Depth; ++d)
      if (d < k_tiles) f[d].load(base + d * c::tile, lane);
  };
  const std::uint8_t* base = nullptr;
  const int guess = first / c::up_row_tiles - shared_groups;
  if (guess < 0) {
    base = p.shared_expert + offset_of(first);
  } else if (guess < c::top_k) {
    const int slot = detail::slot_of_id<c::experts>(p, ids[guess], table);
    if (slot >= 0) base = p.slots + slot * c::slot_bytes + offset_of(first);
  }
  if (base != nullptr) ask(base);
  // A thread an assignment: its rank among equal ids, in order, says whether it leads a group, and whose it
  // is.
  int leader[rounds], rank[rounds], slots[rounds];
  unsigned leaders[rounds];
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int a = r * threads + threadIdx.x, id = a < assignments ? ids[a] : -1;
    rank[r] = 0, leader[r] = a;
#pragma unroll 4
    for (int b = 0; b < assignments; b += 4) {
      const int4 four = *reinterpret_cast<const int4*>(ids + b);
      const int other[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (b + i < a && other[i] == id) {
          if (rank[r] % Columns == 0) leader[r] = b + i;
          ++rank[r];
        }
    }
    if (rank[r] % Columns == 0) leader[r] = a;
    slots[r] = detail::slot_of_id<c::experts>(p, id, table);
    if (slots[r] < 0) {
      if (a < assignments && blockIdx.x == 0) detail::report_missing<c::experts>(p, id);
      leader[r] = -1;
    }
    leaders[r] = __ballot_sync(0xFFFF'FFFFu, leader[r] == a);
    if (lane == 0) led[r * Warps + warp] = __popc(leaders[r]);
  }
  __syncthreads();
  // Groups in the order of their leaders, the same in every block.
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int a = r * threads + threadIdx.x;
    if (leader[r] != a) continue;
    int at = shared_groups + __popc(leaders[r] & ((1u << lane) - 1));
    for (int w = 0; w < r * Warps + warp; ++w) at += led[w];
    group_of[a] = static_cast<std::int16_t>(at);
    detail::group& g = groups[at];
    g.tiles = p.slots + slots[r] * c::slot_bytes;
    g.gate_scale = p.slot_scales[3 * slots[r]], g.up_scale = p.slot_scales[3 * slots[r] + 1];
    g.count = 0;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < rounds; ++r)
    if (leader[r] >= 0) {
      detail::group& g = groups[group_of[leader[r]]];
      g.members[rank[r] % Columns] = static_cast<std::int16_t>(r * threads + threadIdx.x);
      atomicAdd(&g.count, 1);
    }
  __syncthreads();
  int group_count = shared_groups;
#pragma unroll
  for (int w = 0; w < rounds * Warps; ++w) group_count += led[w];
  const int total = group_count * c::up_row_tiles, stride = gridDim.x;
  const auto tiles_of = [&](int unit) { return groups[unit / c::up_row_tiles].tiles + offset_of(unit); };
  int unit = first;
  if (unit >= total) return;
  if (base != tiles_of(unit)) {
    base = tiles_of(unit);
    ask(base);
  }
  int buffer = 0;
#pragma unroll 1
  for (; unit < total; unit += stride, buffer ^= 1) {
    const int index = unit / c::up_row_tiles, tile = unit % c::up_row_tiles;
    const detail::group& g = groups[index];
    const bool shared = c::shared && index < shared_groups;
    const int member = g.members[product::token_of(0, g.count)];
    const __nv_bfloat16* x_row =
        p.x + static_cast<std::size_t>(shared ? member : member / c::top_k) * p.ldx + run_column(0, lane & 3);
    const bool more = unit + stride < total;
    const std::uint8_t* next = more ? tiles_of(unit + stride) : base;
    typename product::acc_t acc;
    product::zero(acc);
#pragma unroll
    for (int k = 0; k < per_warp; ++k) {
      if (k < k_tiles)
        detail::multiply_runs(acc, f[k % Depth], [&](int i) {
          const int column = (k0 + k) * tile_columns + run_column(i, 0);
          if (c::hidden % tile_columns != 0 && column + run_column(0, lane & 3) >= c::hidden)
            return make_uint4(0, 0, 0, 0);
          return *reinterpret_cast<const uint4*>(x_row + column);
        });
      // The buffers go round: behind this unit's last tiles come the next unit's first.
      if (k + Depth < per_warp) {
        if (k + Depth < k_tiles) f[k % Depth].load(base + (k + Depth) * c::tile, lane);
      } else if (more && k + Depth - per_warp < k_tiles) {
        f[k % Depth].load(next + (k + Depth - per_warp) * c::tile, lane);
      }
    }
    base = next;
    product::leave(part[buffer] + warp * units, acc, lane);
    __syncthreads();
    for (int u = threadIdx.x; u < units; u += threads) {
      const vec v = product::template sum<Warps>(part[buffer] + u, units);
      constexpr float unscale = device::fragment<c::format>::unscale;
      const float gate_scale = g.gate_scale * unscale, up_scale = g.up_scale * unscale;
      const int out = 8 * tile + u % 8;
      const auto put = [&](int column, float gate, float up) {
        if (column >= g.count || out >= c::inner) return;
        const int a = g.members[column];
        const int to = shared ? a * c::groups : a / c::top_k * c::groups + a % c::top_k + (c::shared ? 1 : 0);
        p.h[static_cast<std::size_t>(to) * c::inner + out] =
            __float2bfloat16_rn(swiglu_value(gate * gate_scale, up * up_scale));
      };
      put(2 * (u / 8), v.x, v.z);
      put(2 * (u / 8) + 1, v.y, v.w);
    }
  }
}

/// down: persistent blocks walk (token, row tile) units, `PerExpert` warps an expert, sums in the order of
/// the experts.
template <int PerExpert, int Depth, int MinBlocks, int... ShapeNumbers>
__global__ __launch_bounds__(32 * PerExpert * experts_constants<shape_from<ShapeNumbers...>>::groups,
                             MinBlocks) void experts_down(const __grid_constant__ experts_params p) {
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using product = device::warp_product<c::format, 1, c::inner>;
  constexpr int per_warp = (c::down_k_tiles + PerExpert - 1) / PerExpert, warps = PerExpert * c::groups,
                units = product::units;
  __shared__ __align__(16) float2 part[2][warps * units];
  __shared__ __align__(16) uint4 staged[2][warps][per_warp * 16];  // h of the first and of the last token
  __shared__ float weight[2][c::groups];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = warp / PerExpert, k0 = warp % PerExpert * per_warp, k_tiles = c::down_k_tiles - k0;
  const bool shared = c::shared && group == 0;
  // A block's share is at most one token's row tiles long, so it touches two tokens at most.
  const int total = p.m * c::down_row_tiles;
  const int begin = static_cast<int>(blockIdx.x * static_cast<unsigned>(total) / gridDim.x);
  const int end = static_cast<int>((blockIdx.x + 1) * static_cast<unsigned>(total) / gridDim.x);
  const int first_token = begin / c::down_row_tiles, last_token = (end - 1) / c::down_row_tiles;
  // The ids are older than the kernel before this one, which triggered after its own wait: reading them, and
  // every weight, before the wait is safe.
  // What a warp looks up again for every unit rather than keep in registers.
  __shared__ const std::uint8_t* places[2][warps];  // of the two tokens' tiles; null: nothing to add
  __shared__ int bounds[2][warps];                  // the first unit of the last token; the last unit + 1
  const std::uint8_t* from = nullptr;
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    const int token = i == 0 ? first_token : last_token;
    from = p.shared_expert + c::up_bytes;
    float scale = p.shared_scales[2];
    if (shared) {
      if (p.shared_weights != nullptr) scale *= p.shared_weights[token];
    } else {
      const int a = token * c::top_k + group - (c::shared ? 1 : 0), id = p.ids[a];
      const int slot = id < 0 || id >= c::experts ? -1 : p.slot_of[id];
      const bool live = slot >= 0 && slot < p.slot_count;
      from = live ? p.slots + slot * c::slot_bytes + c::up_bytes : nullptr;
      scale = live ? p.weights[a] * p.slot_scales[3 * slot + 2] : 0.0f;
    }
    if (lane == 0) {
      places[i][warp] = from;
      if (warp % PerExpert == 0) weight[i][group] = scale * device::fragment<c::format>::unscale;
    }
  }
  if (lane == 0) bounds[0][warp] = (first_token + 1) * c::down_row_tiles, bounds[1][warp] = end;
  __syncwarp();
  const auto offset_of = [&](int unit) {
    return (static_cast<std::size_t>(unit % c::down_row_tiles) * c::down_k_tiles + k0) * c::tile;
  };
  device::fragment<c::format> f[Depth];
#pragma unroll
  for (int d = 0; d < Depth; ++d)
    if (from != nullptr && d < k_tiles) f[d].load(from + offset_of(begin) + d * c::tile, lane);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  for (int i = 0; i < 2; ++i)
    if (places[i][warp] != nullptr && (i == 0 || last_token != first_token))
      detail::stage<per_warp * 256>(
          staged[i][warp],
          p.h + static_cast<std::size_t>((i == 0 ? first_token : last_token) * c::groups + group) * c::inner +
              k0 * tile_columns,
          2 * (c::inner - k0 * tile_columns));
#pragma unroll 1
  for (int unit = begin; unit < bounds[1][warp]; ++unit) {
    const int which = unit < bounds[0][warp] ? 0 : 1;
    const std::uint8_t* const next =
        unit + 1 == bounds[1][warp] ? nullptr : places[unit + 1 < bounds[0][warp] ? 0 : 1][warp];
    const std::uint32_t row = device::shared_address(staged[which][warp]) + 2 * run_column(0, lane & 3);
    typename product::acc_t acc;
    product::zero(acc);
#pragma unroll
    for (int k = 0; k < per_warp; ++k) {
      if (from != nullptr && k < k_tiles)
        detail::multiply_runs(acc, f[k % Depth], [&](int i) {
          return device::load_shared(row + 256 * k + 2 * run_column(i, 0));
        });
      if (k + Depth < per_warp) {
        if (from != nullptr && k + Depth < k_tiles)
          f[k % Depth].load(from + offset_of(unit) + (k + Depth) * c::tile, lane);
      } else if (next != nullptr && k + Depth - per_warp < k_tiles) {
        f[k % Depth].load(next + offset_of(unit + 1) + (k + Depth - per_warp) * c::tile, lane);
      }
    }
    from = next;
    product::leave(part[unit % 2] + warp * units, acc, lane);
    __syncthreads();
    if (threadIdx.x < units) {
      const int u = threadIdx.x, token = unit / c::down_row_tiles,
                out = tile_rows * (unit % c::down_row_tiles) + 2 * u, which = unit < bounds[0][warp] ? 0 : 1;
      float a = 0.0f, b = 0.0f;
#pragma unroll
      for (int g = 0; g < c::groups; ++g) {
        const float2 e = product::template sum<PerExpert>(part[unit % 2] + g * PerExpert * units + u, units);
        a += weight[which][g] * e.x, b += weight[which][g] * e.y;
      }
      if (p.residual != nullptr) {
        const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
            p.residual + static_cast<std::size_t>(token) * p.ldr + out));
        a += v.x, b += v.y;
      }
      device::store_pair<false>(p.y + static_cast<std::size_t>(token) * p.ldy + out, a, b);
    }
  }
}

}  // namespace nibble::moe
