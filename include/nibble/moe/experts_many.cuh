// SPDX-License-Identifier: Apache-2.0
/// \file
/// More than 16 tokens: tensor-core products over the assignments of each expert, then a sum for each token.
///
///     sort → h = SwiGLU(gate|up · x of the sorted assignments) → parts = down · h → y
///
/// h has a row for each assignment in sorted order, the shared expert's behind them; parts likewise, rounded
/// to bf16. A token's parts are added in fp32 in the order of j, so the result does not depend on timing.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/moe/experts_sort.cuh"
#include "nibble/nvfp4/gemm_tile.cuh"

namespace nibble::moe {

namespace detail {

/// Rows of x that a tile's assignments gather. `tokens` is in shared memory.
struct gathered_rows {
  const __nv_bfloat16* x;
  int ldx;
  const std::int32_t* tokens;  // -1: none
  __device__ __forceinline__ const __nv_bfloat16* operator()(int i) const {
    const int token = tokens[i];
    return token >= 0 ? x + static_cast<std::size_t>(token) * ldx : nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* any() const { return x; }
};

/// Neighbouring rows.
struct adjacent_rows {
  const __nv_bfloat16* x;
  int ldx, live;
  __device__ __forceinline__ const __nv_bfloat16* operator()(int i) const {
    return i < live ? x + static_cast<std::size_t>(i) * ldx : nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* any() const { return x; }
};

/// A token of a sorted position.
template <int TopK>
__device__ __forceinline__ int token_at(const many_params& p, int position) {
  const int assignments = p.e.m * TopK;
  return position >= assignments ? position - assignments : p.order[position] / TopK;
}

}  // namespace detail

/// gate|up of a tile: blockIdx.x counts (tile, rows), the rows first. The grid is an upper bound.
template <int RowWarps, int Tiles, int Tokens, int Stages, int MinBlocks, int... ShapeNumbers>
__global__ __launch_bounds__(32 * RowWarps,
                             MinBlocks) void experts_gate_up_many(const __grid_constant__ many_params p) {
  constexpr gemm_shape shape = gemm_shape_from<RowWarps, 1, Tiles, Tokens, Stages, MinBlocks>;
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using product = device::block_product<c::format, c::hidden, shape>;
  constexpr int row_blocks = (c::up_row_tiles + shape.row_tiles() - 1) / shape.row_tiles();
  extern __shared__ __align__(128) std::uint8_t staged[];
  __shared__ std::int32_t tokens[Tokens];
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int index = blockIdx.x / row_blocks, first_tile = blockIdx.x % row_blocks * shape.row_tiles();
  if (index >= *p.tile_count) return;
  const expert_tile work = p.tiles[index];
  const bool shared = work.slot < 0;
  const std::uint8_t* tiles = shared ? p.e.shared_expert : p.e.slots + work.slot * c::slot_bytes;
  const product b(staged, tiles + static_cast<std::size_t>(first_tile) * c::up_k_tiles * c::tile,
                  c::up_row_tiles - first_tile);
#pragma unroll
  for (int s = 0; s < Stages - 1; ++s) b.stage_weights(s);
  if (threadIdx.x < Tokens)
    tokens[threadIdx.x] = static_cast<int>(threadIdx.x) < work.count
                              ? detail::token_at<c::top_k>(p, work.first + static_cast<int>(threadIdx.x))
                              : -1;
  __syncthreads();
  typename product::sums acc;
  b.run(acc, detail::gathered_rows{p.e.x, p.e.ldx, tokens});
  constexpr float unscale = device::fragment<c::format>::unscale;
  const float gate_scale = (shared ? p.e.shared_scales[0] : p.e.slot_scales[3 * work.slot]) * unscale;
  const float up_scale = (shared ? p.e.shared_scales[1] : p.e.slot_scales[3 * work.slot + 1]) * unscale;
  const int g = b.lane >> 2, t = b.lane & 3;
#pragma unroll
  for (int r = 0; r < Tiles; ++r) {
    const int row = 8 * (first_tile + b.row_warp * Tiles + r) + g;
    if (row >= c::inner) break;
#pragma unroll
    for (int j = 0; j < product::token_tiles; ++j) {
      const float(&v)[4] = acc[r][j];
      __nv_bfloat16* to = p.e.h + static_cast<std::size_t>(work.first + 8 * j + 2 * t) * c::inner + row;
      if (8 * j + 2 * t < work.count)
        to[0] = __float2bfloat16_rn(swiglu_value(v[0] * gate_scale, v[2] * up_scale));
      if (8 * j + 2 * t + 1 < work.count)
        to[c::inner] = __float2bfloat16_rn(swiglu_value(v[1] * gate_scale, v[3] * up_scale));
    }
  }
}

/// down of a tile, as gate|up.
template <int RowWarps, int Tiles, int Tokens, int Stages, int MinBlocks, int... ShapeNumbers>
__global__ __launch_bounds__(32 * RowWarps,
                             MinBlocks) void experts_down_many(const __grid_constant__ many_params p) {
  constexpr gemm_shape shape = gemm_shape_from<RowWarps, 1, Tiles, Tokens, Stages, MinBlocks>;
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using product = device::block_product<c::format, c::inner, shape>;
  constexpr int row_blocks = (c::down_row_tiles + shape.row_tiles() - 1) / shape.row_tiles();
  extern __shared__ __align__(128) std::uint8_t staged[];
  // The tiles are older than the kernel before this one, which triggered after its own wait.
  const int index = blockIdx.x / row_blocks, first_tile = blockIdx.x % row_blocks * shape.row_tiles();
  const bool idle = index >= *p.tile_count;
  const expert_tile work = idle ? expert_tile{-1, 0, 0, 0} : p.tiles[index];
  const bool shared = work.slot < 0;
  const std::uint8_t* tiles =
      (shared ? p.e.shared_expert : p.e.slots + work.slot * c::slot_bytes) + c::up_bytes;
  const product b(staged, tiles + static_cast<std::size_t>(first_tile) * c::down_k_tiles * c::tile,
                  c::down_row_tiles - first_tile);
  if (!idle)
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s) b.stage_weights(s);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (idle) return;
  typename product::sums acc;
  b.run(acc,
        detail::adjacent_rows{p.e.h + static_cast<std::size_t>(work.first) * c::inner, c::inner, work.count});
  const float scale = (shared ? p.e.shared_scales[2] : p.e.slot_scales[3 * work.slot + 2]) *
                      device::fragment<c::format>::unscale;
  const int g = b.lane >> 2, t = b.lane & 3;
#pragma unroll
  for (int r = 0; r < Tiles; ++r) {
    const int row = tile_rows * (first_tile + b.row_warp * Tiles + r) + 2 * g;
    if (row >= c::hidden) break;
#pragma unroll
    for (int j = 0; j < product::token_tiles; ++j) {
      const float(&v)[4] = acc[r][j];
      __nv_bfloat16* to = p.parts + static_cast<std::size_t>(work.first + 8 * j + 2 * t) * c::hidden + row;
      if (8 * j + 2 * t < work.count) device::store_pair<false>(to, v[0] * scale, v[2] * scale);
      if (8 * j + 2 * t + 1 < work.count)
        device::store_pair<false>(to + c::hidden, v[1] * scale, v[3] * scale);
    }
  }
}

/// y = residual + Σ weight · part, a block a token.
template <int Hidden, int TopK, int Shared>
__global__ __launch_bounds__(256) void experts_combine(const __grid_constant__ many_params p) {
  constexpr int groups = TopK + Shared;
  const int token = blockIdx.x;
  // Routes and positions are older than the kernel before this one.
  const __nv_bfloat16* part[groups];
  float weight[groups];
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    int at = 0;
    if (Shared != 0 && g == 0) {
      at = p.e.m * TopK + token;
      weight[g] = p.e.shared_weights != nullptr ? p.e.shared_weights[token] : 1.0f;
    } else {
      const int a = token * TopK + g - Shared;
      at = p.position[a];
      weight[g] = p.e.weights[a];
    }
    part[g] = at >= 0 ? p.parts + static_cast<std::size_t>(at) * Hidden : nullptr;
  }
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  for (int column = 4 * threadIdx.x; column < Hidden; column += 4 * blockDim.x) {
    uint2 v[groups];
#pragma unroll
    for (int g = 0; g < groups; ++g)
      v[g] = part[g] != nullptr ? *reinterpret_cast<const uint2*>(part[g] + column) : make_uint2(0, 0);
    float sum[4] = {};
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const float w = part[g] != nullptr ? weight[g] : 0.0f;
      sum[0] += w * __uint_as_float(v[g].x << 16), sum[1] += w * __uint_as_float(v[g].x & 0xFFFF'0000u);
      sum[2] += w * __uint_as_float(v[g].y << 16), sum[3] += w * __uint_as_float(v[g].y & 0xFFFF'0000u);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      if (p.e.residual != nullptr) {
        const float2 r = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
            p.e.residual + static_cast<std::size_t>(token) * p.e.ldr + column + i));
        sum[i] += r.x, sum[i + 1] += r.y;
      }
      device::store_pair<false>(p.e.y + static_cast<std::size_t>(token) * p.e.ldy + column + i, sum[i],
                                sum[i + 1]);
    }
  }
}

}  // namespace nibble::moe
