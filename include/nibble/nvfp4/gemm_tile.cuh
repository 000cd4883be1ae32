// SPDX-License-Identifier: Apache-2.0
/// \file
/// A block's product for more than 16 tokens with mma.sync: row tiles × tokens, weights decoded in registers.
///
/// Packed weights and activations come through a shared-memory ring (cp.async). Warps share the row tiles
/// and, where there are few of them, K: a stage holds one K tile for each K warp, whose sums are added in
/// their order at the end. Sums are fp32 in K order: the same bits for a row whatever its neighbours are.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "nibble/nvfp4/gemm_policy.hpp"
#include "nibble/nvfp4/gemv_product.cuh"

namespace nibble {

// Kernels take a cut as integers; see gemv_types.hpp.
template <int RowWarps, int KWarps, int Tiles, int Tokens, int Stages, int MinBlocks>
inline constexpr gemm_shape gemm_shape_from = {RowWarps, KWarps, Tiles, Tokens, Stages, MinBlocks};

namespace device {

/// One run of a warp's tile, two steps of the matrix instruction, from shared memory.
template <weight_format Format>
__device__ __forceinline__ void decode_run(std::uint32_t (&a)[2][4], std::uint32_t tile, int i, int lane) {
  if constexpr (Format == weight_format::nvfp4) {
    const uint2 q = load_shared_8(tile + 512 * (i / 2) + lane * 16 + 8 * (i % 2));
    const std::uint32_t packed = load_shared_4(tile + 1024 + lane * 4);
    const std::uint32_t both = ((i / 2 ? packed >> 4 : packed << 4) & 0x0FF0'0FF0u) | nvfp4::scale_bits;
    const std::uint32_t low = both_halves<0>(both), high = both_halves<1>(both);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      nvfp4::decode_codes(j ? q.y : q.x, a[j]);
      a[j][0] = multiply_pairs(a[j][0], low);
      a[j][1] = multiply_pairs(a[j][1], high);
      a[j][2] = multiply_pairs(a[j][2], low);
      a[j][3] = multiply_pairs(a[j][3], high);
    }
  } else if constexpr (Format == weight_format::fp8) {
    const uint4 q = load_shared(tile + 512 * i + lane * 16);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      std::uint32_t p[2], r[2];
      fp8::decode_weights(j ? q.z : q.x, p);
      fp8::decode_weights(j ? q.w : q.y, r);
      a[j][0] = multiply_pairs(p[0], fp8::weight_scale_bits);
      a[j][1] = multiply_pairs(p[1], fp8::weight_scale_bits);
      a[j][2] = multiply_pairs(r[0], fp8::weight_scale_bits);
      a[j][3] = multiply_pairs(r[1], fp8::weight_scale_bits);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 q = load_shared(tile + 512 * (2 * i + j) + lane * 16);
      a[j][0] = q.x, a[j][1] = q.y, a[j][2] = q.z, a[j][3] = q.w;
    }
  }
}

/// The product of one block.
template <weight_format Format, int K, gemm_shape Shape>
struct block_product {
  static constexpr int k_tiles = (K + tile_columns - 1) / tile_columns;
  static constexpr int rounds = (k_tiles + Shape.k_warps - 1) / Shape.k_warps;
  static constexpr int bytes = static_cast<int>(tile_bytes(Format));
  static constexpr int token_bytes = gemm_token_bytes;
  static constexpr int token_tiles = Shape.tokens / 8;
  static constexpr int row_tiles = Shape.row_tiles();
  using sums = float[Shape.tiles][token_tiles][4];

  std::uint32_t ring;        // shared address
  const std::uint8_t* base;  // of the block's first row tile
  int last_tile;             // of the row tiles that exist, counted from the first
  int warp, lane, row_warp, k_warp;

  __device__ __forceinline__ block_product(const void* shared, const std::uint8_t* first_row_tile,
                                           int live_row_tiles)
      : ring(shared_address(shared)),
        base(first_row_tile),
        last_tile(live_row_tiles - 1),
        warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31),
        row_warp(warp % Shape.row_warps),
        k_warp(warp / Shape.row_warps) {}

  __device__ __forceinline__ void stage_weights(int round) const {
    if (round >= rounds) return;
    constexpr int pieces = row_tiles * bytes / 16, turns = (pieces + Shape.threads() - 1) / Shape.threads();
    constexpr int unroll = turns > 9 ? 4 : turns;  // addresses take registers
#pragma unroll
    for (int w = 0; w < Shape.k_warps; ++w) {
      const int k_tile = round * Shape.k_warps + w;
      if (k_tiles % Shape.k_warps != 0 && k_tile >= k_tiles) return;
      const std::uint32_t to = ring + round % Shape.stages * Shape.stage_bytes(Format) +
                               w * Shape.slice_bytes(Format) + Shape.x_bytes();
      const std::uint8_t* from = base + static_cast<std::size_t>(k_tile) * bytes;
#pragma unroll unroll
      for (int i = 0; i < turns; ++i) {
        const int piece = i * Shape.threads() + threadIdx.x;
        if (pieces % Shape.threads() != 0 && piece >= pieces) break;
        const int tile = piece / (bytes / 16), at = piece % (bytes / 16) * 16;
        copy_async(to + piece * 16,
                   from + static_cast<std::size_t>(min(tile, last_tile)) * (k_tiles * bytes) + at, true);
      }
    }
  }
  /// row(token) is the token's activations or null.
  template <class Row>
  __device__ __forceinline__ void stage_x(int round, const Row& row) const {
    if (round < rounds) {
      constexpr int pieces = Shape.tokens * 16;
#pragma unroll
      for (int w = 0; w < Shape.k_warps; ++w) {
        const int k_tile = round * Shape.k_warps + w;
        if (k_tiles % Shape.k_warps != 0 && k_tile >= k_tiles) break;
        const std::uint32_t to =
            ring + round % Shape.stages * Shape.stage_bytes(Format) + w * Shape.slice_bytes(Format);
#pragma unroll 4
        for (int i = 0; i < (pieces + Shape.threads() - 1) / Shape.threads(); ++i) {
          const int piece = i * Shape.threads() + threadIdx.x, token = piece / 16, at = piece % 16;
          if (pieces % Shape.threads() != 0 && piece >= pieces) break;
          const int column = k_tile * tile_columns + 8 * at;
          const __nv_bfloat16* from = row(token);
          const bool live = from != nullptr && (K % tile_columns == 0 || column < K);
          copy_async(to + token * token_bytes + 16 * at, live ? from + column : row.any(), live);
        }
      }
    }
    commit_copies();
  }

  /// Everything up to the sums of this warp's tiles over its part of K.
  template <class Row>
  __device__ __forceinline__ void run(sums& acc, const Row& row) const {
#pragma unroll
    for (int s = 0; s < Shape.stages - 1; ++s) stage_x(s, row);
#pragma unroll
    for (int r = 0; r < Shape.tiles; ++r)
#pragma unroll
      for (int j = 0; j < token_tiles; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) acc[r][j][q] = 0.0f;
    // A loop of one round would dissolve, and its registers spill: the compiler is not told how many there
    // are.
    int end = rounds;
    asm("" : "+r"(end));
#pragma unroll 1
    for (int round = 0; round < end; ++round) {
      wait_for_copies<Shape.stages - 2>();
      __syncthreads();  // this stage has arrived for all; the one filled next has been read by all
      stage_weights(round + Shape.stages - 1);
      stage_x(round + Shape.stages - 1, row);
      if (k_tiles % Shape.k_warps != 0 && round * Shape.k_warps + k_warp >= k_tiles) continue;
      const std::uint32_t slice =
          ring + round % Shape.stages * Shape.stage_bytes(Format) + k_warp * Shape.slice_bytes(Format);
      const std::uint32_t x = slice + (lane >> 2) * token_bytes + 2 * run_column(0, lane & 3);
      const std::uint32_t weights = slice + Shape.x_bytes() + row_warp * Shape.tiles * bytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t a[Shape.tiles][2][4];
#pragma unroll
        for (int r = 0; r < Shape.tiles; ++r) decode_run<Format>(a[r], weights + r * bytes, i, lane);
#pragma unroll
        for (int j = 0; j < token_tiles; ++j) {
          const uint4 b = load_shared(x + 8 * j * token_bytes + 2 * run_column(i, 0));
#pragma unroll
          for (int r = 0; r < Shape.tiles; ++r) {
            mma(acc[r][j], a[r][0], b.x, b.y);
            mma(acc[r][j], a[r][1], b.z, b.w);
          }
        }
      }
    }
    if constexpr (Shape.k_warps > 1) add_k_warps(acc);
  }
  /// Whether this warp has sums to emit after run().
  [[nodiscard]] __device__ __forceinline__ bool emits() const { return k_warp == 0; }

 private:
  /// Adds the sums of the K warps in their order into those of the first.
  __device__ __forceinline__ void add_k_warps(sums& acc) const {
    constexpr int vectors = Shape.tiles * token_tiles;  // of a warp, each 16 bytes a lane
    wait_for_copies<0>();
    __syncthreads();
    const auto at = [&](int w, int v) {
      return ring +
             static_cast<std::uint32_t>(((w * Shape.row_warps + row_warp) * vectors + v) * 512 + lane * 16);
    };
    if (k_warp > 0)
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const float(&c)[4] = acc[v / token_tiles][v % token_tiles];
        store_shared(at(k_warp, v), make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]),
                                               __float_as_uint(c[2]), __float_as_uint(c[3])));
      }
    __syncthreads();
    if (k_warp == 0)
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        float(&c)[4] = acc[v / token_tiles][v % token_tiles];
#pragma unroll
        for (int w = 1; w < Shape.k_warps; ++w) {
          const uint4 other = load_shared(at(w, v));
          c[0] += __uint_as_float(other.x), c[1] += __uint_as_float(other.y);
          c[2] += __uint_as_float(other.z), c[3] += __uint_as_float(other.w);
        }
      }
  }
};

}  // namespace device
}  // namespace nibble
