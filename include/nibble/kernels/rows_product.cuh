// SPDX-License-Identifier: Apache-2.0
/// \file
/// Products of many bf16 rows with a small bf16 matrix, row-major, whose results an epilogue consumes in the
/// block: router logits, the delta rule's b and a.
///
/// A block has 64 rows of x and all rows of W. K goes in runs of 64, each a chain of four matrix
/// instructions, and the runs are added in order. product_run is that chain; whoever uses it gets the same
/// bits.
#pragma once

#include <cstdint>

#include "nibble/kernels/rows_math.cuh"

namespace nibble {
namespace device {

/// 32 columns of 16 rows of W as a lane has them: row g, and row g + 8, columns 8 t … 8 t + 7.
struct weight_run {
  uint4 upper, lower;
};
/// The matrix instruction, kept in the order of the source: left to itself ptxas 13.0 puts each chain's
/// instructions one behind the other, and every one waits for the one before.
__device__ __forceinline__ void mma_in_order(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// Four registers that only the matrix instruction uses, so that they are put side by side once and not
/// before every instruction.
__device__ __forceinline__ void set_operand(std::uint32_t (&to)[4], std::uint32_t a0, std::uint32_t a1,
                                            std::uint32_t a2, std::uint32_t a3) {
  asm volatile("mov.b32 %0, %4; mov.b32 %1, %5; mov.b32 %2, %6; mov.b32 %3, %7;"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3));
}

/// c[n] += 32 columns of 16 rows × 8 tokens, for Tiles tokens' tiles. \param x the columns 8 t … 8 t + 7 of
/// the tile's token g. One tile's two instructions depend on each other, so the tiles go in turns.
template <int Tiles>
__device__ __forceinline__ void multiply_run(float (&c)[Tiles][4], const weight_run& w,
                                             const uint4 (&x)[Tiles]) {
  std::uint32_t first[4], second[4];
  set_operand(first, w.upper.x, w.lower.x, w.upper.y, w.lower.y);
  set_operand(second, w.upper.z, w.lower.z, w.upper.w, w.lower.w);
#pragma unroll
  for (int n = 0; n < Tiles; ++n) mma_in_order(c[n], first, x[n].x, x[n].y);
#pragma unroll
  for (int n = 0; n < Tiles; ++n) mma_in_order(c[n], second, x[n].z, x[n].w);
}

__device__ __forceinline__ void copy_async_16(std::uint32_t to_shared, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
#endif
}
__device__ __forceinline__ void copy_async_8(std::uint32_t to_shared, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to_shared), "l"(from) : "memory");
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

}  // namespace device

/// Sizes of a product kernel. \tparam N rows of W  \tparam Extra one more row of weights, in a tile of its
/// own  \tparam SharedBytes dynamic shared memory a block may have
template <int N, bool Extra, int K, int SharedBytes>
struct rows_product_plan {
  static_assert(K % 64 == 0);
  static constexpr int threads = 256, tile_rows = 64, runs = K / 64;
  static constexpr int tiles = (N + 15) / 16 + (Extra ? 1 : 0), tiles_warp = (tiles + 3) / 4;
  static constexpr int extra_row = 16 * ((N + 15) / 16);  ///< its number among the results
  static constexpr int weight_rows = 16 * tiles;
  static constexpr int stage_bytes = 128 * (weight_rows + tile_rows);
  static constexpr int stages = 4 * stage_bytes <= SharedBytes ? 4 : 3 * stage_bytes <= SharedBytes ? 3 : 2;
  static constexpr int ldr = weight_rows + 4;  ///< floats from one token's results to the next's
  static constexpr int result_bytes = 4 * ldr * tile_rows;
  static constexpr int shared_bytes =
      stages * stage_bytes > result_bytes ? stages* stage_bytes : result_bytes;
  static constexpr bool fits = shared_bytes <= SharedBytes;
};

struct rows_product_operands {
  const __nv_bfloat16* x = nullptr;
  int ldx = 0;
  const __nv_bfloat16* weight = nullptr;  ///< [N][K]
  const __nv_bfloat16* extra = nullptr;   ///< [K]
};

namespace device {

/// results[token · ldr + n] for the 64 rows that begin at `first`; rows past `last` repeat it. Returns after
/// a block barrier.
template <int N, bool Extra, int K, int SharedBytes>
__device__ __forceinline__ const float* rows_product(const rows_product_operands& p, int first, int last,
                                                     std::uint8_t* shared) {
  using plan = rows_product_plan<N, Extra, K, SharedBytes>;
  static_assert(plan::fits,
                "a block of this architecture has too little shared memory for so many rows of weights");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wm = warp >> 1, wn = warp & 1;
  // Thread i copies 16 bytes of rows i / 8, i / 8 + 32, … .
  const int row0 = static_cast<int>(threadIdx.x) / 8, piece = threadIdx.x % 8;
  const std::uint32_t to0 = row0 * 64 + piece % 4 * 16;
  const __nv_bfloat16* const weight = p.weight + static_cast<std::size_t>(row0) * K + 8 * piece;
  const __nv_bfloat16* const x0 = p.x + static_cast<std::size_t>(min(first + row0, last)) * p.ldx + 8 * piece;
  const __nv_bfloat16* const x1 =
      p.x + static_cast<std::size_t>(min(first + row0 + 32, last)) * p.ldx + 8 * piece;
  const auto fetch = [&](int run) {
    const std::uint32_t stage = shared_address(shared + run % plan::stages * plan::stage_bytes) + to0;
    const std::uint32_t ws = stage + piece / 4 * (plan::weight_rows * 64);
    const std::uint32_t xs = stage + plan::weight_rows * 128 + piece / 4 * (plan::tile_rows * 64);
#pragma unroll
    for (int i = 0; i < (plan::weight_rows + 31) / 32; ++i) {
      if (32 * i + 32 <= N) {
        copy_async_16(ws + 2048 * i, weight + 64 * run + static_cast<std::size_t>(32 * i) * K);
      } else {
        const int row = row0 + 32 * i;
        const __nv_bfloat16* from = p.weight + static_cast<std::size_t>(row < N ? row : 0) * K;
        if (Extra && row >= plan::extra_row) from = p.extra;
        if (row < plan::weight_rows) copy_async_16(ws + 2048 * i, from + 8 * piece + 64 * run);
      }
    }
    copy_async_16(xs, x0 + 64 * run);
    copy_async_16(xs + 2048, x1 + 64 * run);
  };
  float total[plan::tiles_warp][4][4];
#pragma unroll
  for (int i = 0; i < plan::tiles_warp; ++i)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) total[i][n][c] = 0.0f;
#pragma unroll
  for (int s = 0; s < plan::stages - 1; ++s) {
    if (s < plan::runs) fetch(s);
    copy_async_commit();
  }
#pragma unroll 1
  for (int run = 0; run < plan::runs; ++run) {
    copy_async_wait<plan::stages - 2>();
    __syncthreads();
    const std::uint32_t stage = shared_address(shared + run % plan::stages * plan::stage_bytes) + 16 * lane;
    const std::uint32_t xs = stage + plan::weight_rows * 128 + 32 * 64 * wn;
    // Here tokens are the instruction's rows and weights its columns: a weight's registers then lie as they
    // come from shared memory, and only x's are put in order. A product is the same bits either way.
    std::uint32_t x[2][2][2][4];  // half, step, 16 tokens
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 upper = load_shared(xs + half * plan::tile_rows * 64 + 16 * 64 * m);
        const uint4 lower = load_shared(xs + half * plan::tile_rows * 64 + 16 * 64 * m + 8 * 64);
        set_operand(x[half][0][m], upper.x, lower.x, upper.y, lower.y);
        set_operand(x[half][1][m], upper.z, lower.z, upper.w, lower.w);
      }
    // The next tile's weights are asked for while this one's are multiplied.
    weight_run w[2][2];  // by turns, by half
    const auto load = [&](weight_run(&to)[2], int tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t ws = stage + half * plan::weight_rows * 64 + 16 * 64 * tile;
        to[half] = {load_shared(ws), load_shared(ws + 8 * 64)};
      }
    };
    constexpr int ahead = plan::tiles_warp <= 6 ? 1 : 0;  // as many as registers allow
    load(w[0], plan::tiles % 4 == 0 || wm < plan::tiles ? wm : 0);
    // Behind this run's first loads from shared memory, which would wait for the copies to be asked for.
    if (run + plan::stages - 1 < plan::runs) fetch(run + plan::stages - 1);
    copy_async_commit();
#pragma unroll
    for (int i = 0; i < plan::tiles_warp; ++i) {
      const int wanted = wm + 4 * (i + ahead);
      if (i + ahead > 0 && i + ahead < plan::tiles_warp && (plan::tiles % 4 == 0 || wanted < plan::tiles))
        load(w[(i + ahead) * ahead & 1], wanted);
      if (plan::tiles % 4 != 0 && wm + 4 * i >= plan::tiles) continue;
      float c[4][4] = {};  // 16 tokens × 8 weights: 2 m + the half of the tile
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const weight_run& v = w[i * ahead & 1][half];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_in_order(c[2 * m], x[half][0][m], v.upper.x, v.upper.y);
          mma_in_order(c[2 * m + 1], x[half][0][m], v.lower.x, v.lower.y);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_in_order(c[2 * m], x[half][1][m], v.upper.z, v.upper.w);
          mma_in_order(c[2 * m + 1], x[half][1][m], v.lower.z, v.lower.w);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][n][j] = __fadd_rn(total[i][n][j], c[n][j]);
    }
  }
  copy_async_wait<0>();
  __syncthreads();
  auto* results = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < plan::tiles_warp; ++i) {
    const int tile = wm + 4 * i;
    if (plan::tiles % 4 != 0 && tile >= plan::tiles) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float* to = results + (32 * wn + 16 * (n / 2) + (lane >> 2)) * plan::ldr + 16 * tile + 8 * (n % 2) +
                  2 * (lane & 3);
      *reinterpret_cast<float2*>(to) = make_float2(total[i][n][0], total[i][n][1]);
      *reinterpret_cast<float2*>(to + 8 * plan::ldr) = make_float2(total[i][n][2], total[i][n][3]);
    }
  }
  __syncthreads();
  return results;
}

}  // namespace device
}  // namespace nibble
