// SPDX-License-Identifier: Apache-2.0
/// \file
/// The two products for many tokens by warpgroup instructions, sm_90a. See experts_many.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/moe/experts_many.cuh"
#include "nibble/nvfp4/gemm_wide.cuh"

namespace nibble::moe {

namespace detail {

/// What both products know of a unit: the rows of one expert for one tile of its assignments.
struct wide_unit {
  const std::uint8_t* tiles;
  int last_tile, first_tile, slot, first, count;
};

template <int RowTiles, int KTiles, int TileBytes, std::size_t SlotBytes, int BlockTiles>
__device__ __forceinline__ wide_unit load_unit(const many_params& p, int u, std::size_t skip) {
  constexpr int row_units = (RowTiles + BlockTiles - 1) / BlockTiles;
  const int first_tile = u % row_units * BlockTiles;
  const int4 tile = *reinterpret_cast<const int4*>(p.tiles + u / row_units);
  const std::uint8_t* base = tile.x < 0 ? p.e.shared_expert : p.e.slots + tile.x * SlotBytes;
  return {base + skip + static_cast<std::size_t>(first_tile) * (KTiles * TileBytes),
          RowTiles - 1 - first_tile,
          first_tile,
          tile.x,
          tile.y,
          tile.z};
}

template <class Constants, int RowBlocks, int Tokens>
struct gate_up_work {
  using c = Constants;
  using plan = wide_plan<c::format, RowBlocks, Tokens>;
  using unit = wide_unit;
  struct context {
    float gate, up;
  };
  static constexpr int row_units = (c::up_row_tiles + plan::row_tiles - 1) / plan::row_tiles;
  const many_params& p;

  [[nodiscard]] __device__ __forceinline__ unit load(int u) const {
    return load_unit<c::up_row_tiles, c::up_k_tiles, c::tile, c::slot_bytes, plan::row_tiles>(p, u, 0);
  }
  [[nodiscard]] __device__ __forceinline__ int token(const unit& u, int i) const {
    return i < u.count ? token_at<c::top_k>(p, u.first + i) : -1;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* row(const unit&, int token) const {
    return token >= 0 ? p.e.x + static_cast<std::size_t>(token) * p.e.ldx : nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ context prepare(const unit& u) const {
    const float* scales = u.slot < 0 ? p.e.shared_scales : p.e.slot_scales + 3 * u.slot;
    return {scales[0] * device::fragment<c::format>::unscale,
            scales[1] * device::fragment<c::format>::unscale};
  }
  __device__ __forceinline__ void emit(const unit& u, const context& scale, const float (&acc)[Tokens / 2],
                                       int tile, int lane) const {
    const int g = lane >> 2, t = lane & 3, odd = g & 1;
    // Neighbouring rows meet in one lane, each lane takes one of the two tokens: stores of four bytes.
    __nv_bfloat16* to =
        p.e.h + static_cast<std::size_t>(u.first + odd) * c::inner + 8 * (u.first_tile + tile) + g - odd;
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
      const float v0 = swiglu_value(acc[4 * j] * scale.gate, acc[4 * j + 2] * scale.up);
      const float v1 = swiglu_value(acc[4 * j + 1] * scale.gate, acc[4 * j + 3] * scale.up);
      const float other = __shfl_xor_sync(0xFFFF'FFFFu, odd != 0 ? v0 : v1, 4);
      const int i = 8 * j + 2 * t;
      if (i + odd < u.count)
        device::store_pair<false>(to + static_cast<std::size_t>(i) * c::inner, odd != 0 ? other : v0,
                                  odd != 0 ? v1 : other);
    }
  }
};

template <class Constants, int RowBlocks, int Tokens>
struct down_work {
  using c = Constants;
  using plan = wide_plan<c::format, RowBlocks, Tokens>;
  using unit = wide_unit;
  struct context {
    float scale;
  };
  static constexpr int row_units = (c::down_row_tiles + plan::row_tiles - 1) / plan::row_tiles;
  const many_params& p;

  [[nodiscard]] __device__ __forceinline__ unit load(int u) const {
    return load_unit<c::down_row_tiles, c::down_k_tiles, c::tile, c::slot_bytes, plan::row_tiles>(
        p, u, c::up_bytes);
  }
  [[nodiscard]] __device__ __forceinline__ int token(const unit& u, int i) const {
    return i < u.count ? u.first + i : -1;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* row(const unit&, int position) const {
    return position >= 0 ? p.e.h + static_cast<std::size_t>(position) * c::inner : nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ context prepare(const unit& u) const {
    return {(u.slot < 0 ? p.e.shared_scales[2] : p.e.slot_scales[3 * u.slot + 2]) *
            device::fragment<c::format>::unscale};
  }
  __device__ __forceinline__ void emit(const unit& u, const context& v, const float (&acc)[Tokens / 2],
                                       int tile, int lane) const {
    const int g = lane >> 2, t = lane & 3;
    __nv_bfloat16* to =
        p.parts + static_cast<std::size_t>(u.first) * c::hidden + tile_rows * (u.first_tile + tile) + 2 * g;
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
      const int i = 8 * j + 2 * t;
      if (i < u.count)
        device::store_pair<false>(to + static_cast<std::size_t>(i) * c::hidden, acc[4 * j] * v.scale,
                                  acc[4 * j + 2] * v.scale);
      if (i + 1 < u.count)
        device::store_pair<false>(to + static_cast<std::size_t>(i + 1) * c::hidden, acc[4 * j + 1] * v.scale,
                                  acc[4 * j + 3] * v.scale);
    }
  }
};

}  // namespace detail

/// gate|up, persistent; empty but on sm_90a.
template <int RowBlocks, int Tokens, int... ShapeNumbers>
__global__ __launch_bounds__(384, 1) void experts_gate_up_wide(const __grid_constant__ many_params p) {
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using work = detail::gate_up_work<c, RowBlocks, Tokens>;
  device::run_wide<c::format, c::hidden, RowBlocks, Tokens>(work{p},
                                                            [&p] { return *p.tile_count * work::row_units; });
}

/// down, as gate|up.
template <int RowBlocks, int Tokens, int... ShapeNumbers>
__global__ __launch_bounds__(384, 1) void experts_down_wide(const __grid_constant__ many_params p) {
  using c = experts_constants<shape_from<ShapeNumbers...>>;
  using work = detail::down_work<c, RowBlocks, Tokens>;
  device::run_wide<c::format, c::inner, RowBlocks, Tokens>(work{p},
                                                           [&p] { return *p.tile_count * work::row_units; });
}

}  // namespace nibble::moe
