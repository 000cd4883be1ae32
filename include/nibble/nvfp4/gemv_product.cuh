// SPDX-License-Identifier: Apache-2.0
/// \file
/// What every matrix-vector kernel is made of: a warp's product, the order of its sums, and their way out.
///
/// A block takes a contiguous share of the row tiles; its warps split K. A warp multiplies its K tiles of a
/// row tile into two accumulator chains, which are added; the warps' sums are added in the order of the warps
/// through shared memory. That order is the same for every variant, column count and device.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "nibble/kernels/fragment.cuh"
#include "nibble/kernels/ring_release.hpp"
#include "nibble/nvfp4/gemv_epilogue.cuh"
#include "nibble/nvfp4/gemv_input.cuh"
#include "nibble/nvfp4/gemv_types.hpp"

namespace nibble {

template <class Epilogue, class Input = plain_input>
struct gemv_params {
  const std::uint8_t* tiles = nullptr;  ///< layout.bytes(), 128-byte aligned
  const __nv_bfloat16* x = nullptr;     ///< [m][k], rows `ldx` apart, 16-byte aligned
  int ldx = 0;                          ///< elements, a multiple of 8
  int m = 0;                            ///< tokens, at most the policy's columns
  float scale[max_segments] = {};       ///< per row segment
  typename Epilogue::params out{};
  typename Input::params in{};
};

namespace device {

/// Arithmetic of one warp for a fixed number of token columns.
template <weight_format Format, int Columns, int K>
struct warp_product {
  static constexpr int token_tiles = Columns == 16 ? 2 : 1;
  static constexpr int pairs = Columns == 1 ? 1 : Columns / 2;
  static constexpr int units = 8 * pairs;
  using vec = std::conditional_t<Columns == 1, float2, float4>;
  using acc_t = accumulators<token_tiles>;
  using x_t = activations<token_tiles>;
  using x_rows = const __nv_bfloat16* [token_tiles];

  /// The token whose column lane group g feeds.
  static __device__ __forceinline__ int token_of(int j, int m) {
    const int g = (threadIdx.x >> 2) & 7;
    const int token = (g & (Columns < 8 ? Columns - 1 : 7)) + 8 * j;
    return token < m ? token : m - 1;
  }
  static __device__ __forceinline__ void point(x_rows& rows, const __nv_bfloat16* x, int ldx, int m) {
#pragma unroll
    for (int j = 0; j < token_tiles; ++j)
      rows[j] = x + static_cast<std::size_t>(token_of(j, m)) * ldx + run_column(0, threadIdx.x & 3);
  }
  static __device__ __forceinline__ void load_x(x_t& x, const x_rows& rows, int kt) {
#pragma unroll
    for (int j = 0; j < token_tiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = kt * tile_columns + run_column(i, 0);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (K % tile_columns == 0 || column + run_column(0, threadIdx.x & 3) < K)
          v = *reinterpret_cast<const uint4*>(rows[j] + column);
        x[j][4 * i] = v.x, x[j][4 * i + 1] = v.y, x[j][4 * i + 2] = v.z, x[j][4 * i + 3] = v.w;
      }
  }
  static __device__ __forceinline__ void zero(acc_t& acc) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int j = 0; j < token_tiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[c][j][i] = 0.0f;
  }
  static __device__ __forceinline__ void leave(vec* to, const acc_t& acc, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < token_tiles; ++j) {
      const float c0 = acc[0][j][0] + acc[1][j][0], c1 = acc[0][j][1] + acc[1][j][1];
      const float c2 = acc[0][j][2] + acc[1][j][2], c3 = acc[0][j][3] + acc[1][j][3];
      if (t + 4 * j < pairs) {
        if constexpr (Columns == 1)
          to[g] = make_float2(c0, c2);
        else
          to[8 * (t + 4 * j) + g] = make_float4(c0, c1, c2, c3);
      }
    }
  }
  /// The sum over warps of a unit, `stride` vectors apart.
  template <int Warps>
  static __device__ __forceinline__ vec sum(const vec* p, int stride) {
    vec v = p[0];
#pragma unroll
    for (int w = 1; w < Warps; ++w) {
      const vec q = p[w * stride];
      v.x += q.x, v.y += q.y;
      if constexpr (Columns > 1) v.z += q.z, v.w += q.w;
    }
    return v;
  }
  /// Item `j` of four row tiles at a time → (row tile, unit): a warp writes 64 rows of one token pair.
  static __device__ __forceinline__ int2 wide_item(int j) {
    const int block = j / (4 * units), in = j % (4 * units);
    return make_int2(4 * block + in % 32 / 8, 8 * (in / 32) + in % 8);
  }
};

/// Scale of a row, the format's own factor included.
template <resident_layout Layout>
__device__ __forceinline__ float scale_of_row(const float (&scale)[max_segments], int row) {
  using layout = layout_constants<Layout>;
  float s = scale[0];
  if (layout::segments > 1 && row >= layout::first_row_1) s = scale[1];
  if (layout::segments > 2 && row >= layout::first_row_2) s = scale[2];
  if (layout::segments > 3 && row >= layout::first_row_3) s = scale[3];
  return s * fragment<layout::format>::unscale;
}

/// Hands one unit's sums to the epilogue. `tile` is a row tile of the matrix. State is the input's.
template <resident_layout Layout, class Epilogue, class State, int Columns, bool Keep, class Input, class Vec>
__device__ __forceinline__ void emit(const gemv_params<Epilogue, Input>& p, typename Epilogue::shared& shared,
                                     const typename State::shared& input, int tile, int unit, Vec v) {
  constexpr int rows = layout_constants<Layout>::rows;
  constexpr bool paired = layout_constants<Layout>::paired;
  const int row = paired ? 8 * tile + unit % 8 : tile_rows * tile + 2 * (unit % 8);
  const float s0 = scale_of_row<Layout>(p.scale, paired ? 0 : row);
  const float s1 = scale_of_row<Layout>(p.scale, paired ? rows : row + 1);
  if constexpr (Columns == 1) {
    if constexpr (Input::normed) {
      const float f = State::factor(p.in, input, 0);
      v.x *= f, v.y *= f;
    }
    Epilogue::template pair<rows, Keep>(p.out, shared, 0, row, v.x * s0, v.y * s1);
  } else {
    const int token = 2 * (unit / 8);
    if constexpr (Input::normed) {
      const float f = State::factor(p.in, input, token), f1 = State::factor(p.in, input, token + 1);
      v.x *= f, v.z *= f, v.y *= f1, v.w *= f1;
    }
    if (token < p.m) Epilogue::template pair<rows, Keep>(p.out, shared, token, row, v.x * s0, v.z * s1);
    if (token + 1 < p.m)
      Epilogue::template pair<rows, Keep>(p.out, shared, token + 1, row, v.y * s0, v.w * s1);
  }
}

/// Whether the weights of a norm may wait in shared memory beside the rest of a block: two blocks of the
/// matrix's copies must still fit a multiprocessor.
template <class Input, int K, int SharedBytes>
inline constexpr bool norm_is_staged =
    Input::norm_bytes <= 2 || SharedBytes + K* Input::norm_bytes <= 112 * 1024;

/// load() by every warp of a block. In turns, the second half of the warps waits until the first half has
/// asked: what is asked for first arrives first, and is multiplied while the rest is on its way.
template <int Warps, bool InTurns, class Load>
__device__ __forceinline__ void load_in_turns(int warp, Load load) {
  if constexpr (InTurns)
    if (warp >= Warps / 2) partial_block_barrier<32 * Warps>();
  load();
  if constexpr (InTurns)
    if (warp < Warps / 2)
      arriving_warps_wait ? partial_block_barrier<32 * Warps>() : partial_block_arrive<32 * Warps>();
}

/// First row tile of block `b`: equal contiguous shares.
template <int RowTiles, int Grid>
__device__ __forceinline__ int share(int b) {
  if constexpr (RowTiles % Grid == 0) return b * (RowTiles / Grid);
  return static_cast<int>(static_cast<std::int64_t>(b) * RowTiles / Grid);
}

}  // namespace device
}  // namespace nibble
