// SPDX-License-Identifier: Apache-2.0
/// \file
/// A block's product for many tokens on sm_90a: 128 or 256 rows × up to 128 tokens by warpgroup instructions.
///
/// Persistent blocks of three warpgroups. One brings packed weights and activations through a shared-memory
/// ring; activations change their order on the way: a word is copied by itself, so that columns lie in the
/// order in which a lane's decoded weights meet them. Two warpgroups decode weights in registers, where the
/// instruction takes them from, while the instructions of the run before are at work; 64 rows each, once or
/// twice. Sums are fp32 in K order: a row's result does not depend on the other tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/ring_release.hpp"
#include "nibble/nvfp4/gemm_tile.cuh"
#include "nibble/nvfp4/wgmma.cuh"

namespace nibble {

/// What host and device agree on. RowBlocks: of 64 rows, per warpgroup. Tokens: of a unit, 64, 96 or 128.
template <weight_format Format, int RowBlocks, int Tokens>
struct wide_plan {
  static constexpr int tokens = Tokens;
  static constexpr int threads = 384;
  static constexpr int row_tiles = 8 * RowBlocks;
  static constexpr int half_bytes = tokens * 128;  ///< 64 columns of every token
  static constexpr int x_bytes = 2 * half_bytes;
  static constexpr int weight_bytes = row_tiles * static_cast<int>(tile_bytes(Format));
  /// Swizzled rows start at multiples of 1024.
  static constexpr int stage_bytes = (x_bytes + weight_bytes + 1023) / 1024 * 1024;
  static constexpr int most_bytes = 220 * 1024;  ///< the barriers and pointers of a block take the rest
  static constexpr int stages = most_bytes / stage_bytes < 6 ? most_bytes / stage_bytes : 6;
  static constexpr std::size_t shared_bytes = static_cast<std::size_t>(stages) * stage_bytes + 1024;
};

namespace device {

/// A Work describes units: `unit load(int u)`, in whose fields are `tiles` (of the unit's first row tile),
/// `last_tile` (of those that exist) and `count` (tokens); `int token(unit, i)`, a number that
/// `row(unit, number)` turns into the token's activations, null for none; `context prepare(unit)` and
/// `emit(unit, context, acc, tile, lane)` for the sums of a warp's row tile.
template <weight_format Format, int K, int RowBlocks, int Tokens, class Work>
struct wide_product {
  using plan = wide_plan<Format, RowBlocks, Tokens>;
  static_assert(K % tile_columns == 0);
  static constexpr int k_tiles = K / tile_columns;
  static constexpr int bytes = static_cast<int>(tile_bytes(Format));
  using unit = typename Work::unit;

  const Work& work;
  std::uint32_t ring, full, empty;
  int units;
  int stage = 0, phase = 0;

  __device__ __forceinline__ void next_stage() {
    if (++stage == plan::stages) stage = 0, phase ^= 1;
  }

  /// One of the four warps that bring data; `rows` is the shared address of twice 128 pointers.
  __device__ __forceinline__ void bring(std::uint32_t rows) {
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    // A load takes 128 bytes of four tokens: one run of lane quarter t, four words. Word q goes to chunk q of
    // the run, place t: 32 lanes write 32 banks.
    const int t = lane & 3, group = lane >> 2 & 1, of_four = lane >> 3;
    constexpr int tiles = plan::row_tiles / 4, pieces = tiles * bytes / 16, turns = (pieces + 31) / 32;
    constexpr int per_warp = Tokens / 4, batches = per_warp / 8;
    int u = blockIdx.x;
    if (u >= units) return;
    uint4 x[batches][4];
    std::uint32_t buffer = rows + 8 * 32 * warp;
    const auto load = [&](int b, std::uint32_t from, int live, int kt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * b + 4 * (e / 2) + of_four;
        const int column = kt * tile_columns + run_column(2 * (e % 2), 0) + run_column(group, t);
        x[b][e] = make_uint4(0, 0, 0, 0);
        if (i < live)
          x[b][e] = load_weights(reinterpret_cast<const __nv_bfloat16*>(load_shared_pointer(from + 8 * i)) +
                                 column);
      }
    };
    const auto point = [&](const unit& at, std::uint32_t to, int token) {
      __syncwarp();
      store_shared_pointer(to + 8 * lane, work.row(at, token));
      __syncwarp();
    };
    unit now = work.load(u);
    int token = work.token(now, per_warp * warp + lane), live = now.count - per_warp * warp;
    point(now, buffer, token);
#pragma unroll
    for (int b = 0; b < batches; ++b) load(b, buffer, live, 0);
    for (; u < units; u += gridDim.x) {
      const bool more = u + static_cast<int>(gridDim.x) < units;
      const unit next = more ? work.load(u + gridDim.x) : now;
#pragma unroll 1
      for (int kt = 0; kt < k_tiles; ++kt) {
        barrier_wait(empty + 8 * stage, phase ^ 1);
        const std::uint32_t to = ring + stage * plan::stage_bytes;
        const std::uint32_t weights = to + plan::x_bytes + warp * tiles * bytes;
        const std::uint8_t* from = now.tiles + static_cast<std::size_t>(kt) * bytes;
#pragma unroll 4  // addresses take registers
        for (int i = 0; i < turns; ++i) {
          const int piece = 32 * i + lane;
          if (pieces % 32 != 0 && piece >= pieces) break;
          const int tile = min(warp * tiles + piece / (bytes / 16), now.last_tile);
          copy_async(weights + piece * 16,
                     from + static_cast<std::size_t>(tile) * (k_tiles * bytes) + piece % (bytes / 16) * 16,
                     true);
        }
        barrier_arrive_after_copies(full + 8 * stage);
        if (k_tiles == 1 && more) token = work.token(next, per_warp * warp + lane);
        const bool last = kt == k_tiles - 1;
        if (last) {
          buffer ^= 1024;
          live = more ? next.count - per_warp * warp : 0;
          point(next, buffer, token);
        }
        const int then = last ? 0 : kt + 1;
        const std::uint32_t row = to + (per_warp * warp + of_four) * 128 + 4 * t;
#pragma unroll
        for (int b = 0; b < batches; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const std::uint32_t at = row + (8 * b + 4 * (e / 2)) * 128 + e % 2 * plan::half_bytes;
            const std::uint32_t words[4] = {x[b][e].x, x[b][e].y, x[b][e].z, x[b][e].w};
#pragma unroll
            for (int q = 0; q < 4; ++q)
              store_shared_4(at + ((4 * group + q) ^ (4 * (e / 2) + of_four)) * 16, words[q]);
          }
          load(b, buffer, live, then);
        }
        fence_matrix_reads();
        barrier_arrive(full + 8 * stage);
        if (k_tiles > 1 && kt == 0 && more) token = work.token(next, per_warp * warp + lane);
        next_stage();
      }
      now = next;
    }
  }

  /// One of the two warpgroups that multiply.
  __device__ __forceinline__ void multiply() {
    int u = blockIdx.x;
    if (u >= units) return;
    unit now = work.load(u);
    for (; u < units; u += gridDim.x) {
      const unit next = u + static_cast<int>(gridDim.x) < units ? work.load(u + gridDim.x) : now;
      const auto context = work.prepare(now);
      one_unit(now, context);
      now = next;
    }
  }

 private:
  template <class Context>
  __device__ __forceinline__ void one_unit(const unit& now, const Context& context) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_tile = warp * RowBlocks;  // neighbours in a warp
    float acc[RowBlocks][Tokens / 2];
    std::uint32_t a[2][RowBlocks][2][4];
    int before = -1;
#pragma unroll
    for (int r = 0; r < RowBlocks; ++r)
#pragma unroll
      for (int q = 0; q < Tokens / 2; ++q) acc[r][q] = 0.0f;
#pragma unroll 1
    for (int kt = 0; kt < k_tiles; ++kt) {
      barrier_wait(full + 8 * stage, phase);
      const std::uint32_t from = ring + stage * plan::stage_bytes;
      const std::uint32_t weights = from + plan::x_bytes + first_tile * bytes;
      const std::uint64_t x = swizzled_rows(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_wait<1>();  // the run before the last has read its registers
        if (i == 1 && before >= 0 && lane < ring_arrivals) barrier_arrive(empty + 8 * before);
#pragma unroll
        for (int r = 0; r < RowBlocks; ++r) decode_run<Format>(a[i % 2][r], weights + r * bytes, i, lane);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int r = 0; r < RowBlocks; ++r)
            wgmma<Tokens>(acc[r], a[i % 2][r][j], x + (i / 2 * (plan::half_bytes >> 4) + (i % 2 * 2 + j) * 2),
                          1);
        wgmma_commit();
      }
      before = stage;
      next_stage();
    }
    wgmma_wait<0>();
    if (lane < ring_arrivals) barrier_arrive(empty + 8 * before);
#pragma unroll
    for (int r = 0; r < RowBlocks; ++r)
      if (first_tile + r <= now.last_tile) work.emit(now, context, acc[r], first_tile + r, lane);
  }
};

/// The body of a kernel of plan::threads threads.
template <weight_format Format, int K, int RowBlocks, int Tokens, class Work, class Prologue>
__device__ __forceinline__ void run_wide(const Work& work, const Prologue& units_after_wait) {
#if NIBBLE_WGMMA_CODE
  using plan = wide_plan<Format, RowBlocks, Tokens>;
  extern __shared__ std::uint8_t wide_shared[];
  __shared__ std::uint64_t full[plan::stages], empty[plan::stages];
  __shared__ __align__(2048) const void* rows[256];
  if (threadIdx.x == 0) {
    for (int s = 0; s < plan::stages; ++s) {
      barrier_init(shared_address(&full[s]), 256);  // copies of weights, stores of activations
      barrier_init(shared_address(&empty[s]), 8 * ring_arrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_grid();
  let_next_grid_start();
  wide_product<Format, K, RowBlocks, Tokens, Work> product{
      work, (shared_address(wide_shared) + 1023) / 1024 * 1024, shared_address(full), shared_address(empty),
      units_after_wait()};
  if (threadIdx.x >= 256) {
    fewer_registers<120>();
    product.bring(shared_address(rows));
  } else {
    more_registers<192>();
    product.multiply();
  }
#endif
}

}  // namespace device
}  // namespace nibble
