// SPDX-License-Identifier: Apache-2.0
/// \file
/// The router's kernels: one for up to 16 rows, and the product with the choice behind it for many.
#pragma once

#include <cstdint>

#include "nibble/kernels/norm_math.cuh"
#include "nibble/kernels/router_choice.cuh"
#include "nibble/kernels/router_params.cuh"
#include "nibble/kernels/rows_product.cuh"

namespace nibble {

namespace device {

/// Words that signal their own arrival: zero means nothing yet, so +0 travels as -0.
__device__ __forceinline__ void store_signal(float* to, float v) {
  const std::uint32_t bits = __float_as_uint(v);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits == 0 ? 0x8000'0000u : bits)
               : "memory");
}
__device__ __forceinline__ uint4 load_signals(const float* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
/// Waits for the words that this lane wants of a row's `Words`, at from + 4 lane + 128 i, puts them there in
/// shared memory, and leaves zeros.
template <int Words>
__device__ __forceinline__ void take_signals(float* to, float* from) {
  constexpr int vectors = (Words + 127) / 128;
  const int lane = threadIdx.x & 31;
  const auto wanted = [&](int i) { return Words % 128 == 0 || 128 * i + 4 * lane < Words; };
  uint4 v[vectors];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      if (wanted(i)) v[i] = load_signals(from + 128 * i + 4 * lane);
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      all = all && (!wanted(i) || (v[i].x != 0 && v[i].y != 0 && v[i].z != 0 && v[i].w != 0));
  } while (!all);
#pragma unroll
  for (int i = 0; i < vectors; ++i)
    if (wanted(i)) {
      *reinterpret_cast<uint4*>(to + 128 * i + 4 * lane) = v[i];
      *reinterpret_cast<uint4*>(from + 128 * i + 4 * lane) = make_uint4(0, 0, 0, 0);
    }
  __syncwarp();
}

}  // namespace device

/// Sizes of the kernel for few rows: a block per 16 experts, its warps split K.
/// \tparam Staged weights wait in shared memory: in registers they would keep a block from starting beside
/// the kernel before
template <int Hidden, int Rows, int Tiles, bool Staged>
struct router_plan {
  static constexpr int k_tiles = Hidden / 128;
  static constexpr int warps = [] {
    int w = k_tiles < 16 ? k_tiles : 16;
    while (k_tiles % w != 0) --w;
    return w;
  }();
  static constexpr int threads = 32 * warps;
  static constexpr int tiles_warp = k_tiles / warps;
  static constexpr int token_tiles = Rows > 8 ? 2 : 1;
  static constexpr int parts = Hidden / device::norm_columns;
  static constexpr int tasks = (Rows * parts + warps - 1) / warps;  ///< (row, 256 columns) of a warp
  static constexpr int row_bytes = 2 * Hidden + 64;  ///< 64: eight tokens' lanes meet no bank twice
  static constexpr int sums_bytes = 2 * k_tiles * token_tiles * 512;
  static constexpr int logits_bytes = (warps < Rows ? warps : Rows) * Tiles * 64;  ///< in the sums' place
  static constexpr int sums_and_logits_bytes = sums_bytes > logits_bytes ? sums_bytes : logits_bytes;
  static constexpr int weights_bytes = Staged ? 32 * Hidden : 0;
  static constexpr int shared_bytes = Rows * row_bytes + sums_and_logits_bytes + weights_bytes;
};

template <int Rows, bool Staged, int Hidden, int Experts, int TopK, bool Shared, bool Normalise>
__global__ __launch_bounds__(
    router_plan<Hidden, Rows, (Experts + 15) / 16 + (Shared ? 1 : 0), Staged>::threads,
    Staged ? 2 : 1) void router_decode_kernel(const __grid_constant__ router_params p) {
  using namespace device;
  constexpr int expert_tiles = (Experts + 15) / 16, tiles = expert_tiles + (Shared ? 1 : 0), ldl = 16 * tiles;
  using plan = router_plan<Hidden, Rows, tiles, Staged>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ float squares[Rows][plan::parts];
  auto* const sums = reinterpret_cast<float*>(shared + Rows * plan::row_bytes);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile = static_cast<int>(blockIdx.x), base = Rows * static_cast<int>(blockIdx.y);
  const int count = min(Rows, p.rows - base);
  const router_operands& router = blockIdx.z == 0 ? static_cast<const router_operands&>(p) : p.beside;
  const bool is_gate = Shared && tile == expert_tiles;

  // Before the wait: this warp's weights, each lane's where it will look for them, and the norm's.
  weight_run w[Staged ? 1 : plan::tiles_warp][4];
  const std::uint32_t own_weights =
      shared_address(shared + Rows * plan::row_bytes + plan::sums_and_logits_bytes) +
      warp * plan::tiles_warp * 4096 + 16 * lane;
  {
    const auto row_of = [&](int r) {
      return is_gate ? router.gate
                     : router.weight +
                           static_cast<std::size_t>(Experts % 16 == 0 || r < Experts ? r : 0) * Hidden;
    };
    const __nv_bfloat16* const upper = row_of(16 * tile + g) + 8 * t;
    const __nv_bfloat16* const lower = row_of(16 * tile + g + 8) + 8 * t;
#pragma unroll
    for (int i = 0; i < plan::tiles_warp; ++i)
#pragma unroll
      for (int run = 0; run < 4; ++run) {
        const int k = 128 * (warp * plan::tiles_warp + i) + 32 * run;
        if constexpr (Staged) {
          copy_async(own_weights + (i * 4 + run) * 1024, upper + k, true);
          copy_async(own_weights + (i * 4 + run) * 1024 + 512, lower + k, true);
        } else {
          w[i][run] = {load_weights(upper + k), load_weights(lower + k)};
        }
      }
    if constexpr (Staged) commit_copies();
  }
  norm_weights weights;
  constexpr bool same_part = plan::warps % plan::parts == 0 || plan::tasks == 1;
  if constexpr (same_part) weights.load(router.norm + 256 * (warp % plan::parts) + 8 * lane, p.zero_centred);
  // The experts of several rows take long to begin (tables, groups), and find places already now.
  if constexpr (Rows > 1) let_next_grid_start();
  wait_for_previous_grid();
  if constexpr (Rows == 1) let_next_grid_start();

  // The norm of the group's rows, by every block: a row is 4 KB in L2. Task j of a warp: row and 256 columns.
  uint4 x[plan::tasks];
#pragma unroll
  for (int j = 0; j < plan::tasks; ++j) {
    const int task = warp + plan::warps * j, row = task / plan::parts, part = task % plan::parts;
    if (row < count)
      x[j] = load_16(p.hidden + static_cast<std::size_t>(base + row) * p.ldh + 256 * part + 8 * lane);
  }
#pragma unroll
  for (int j = 0; j < plan::tasks; ++j) {
    const int task = warp + plan::warps * j, row = task / plan::parts, part = task % plan::parts;
    if (row >= count) continue;
    const float own = norm_squares(x[j]);
    if (lane == 0) squares[row][part] = own;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < plan::tasks; ++j) {
    const int task = warp + plan::warps * j, row = task / plan::parts, part = task % plan::parts;
    if (row >= count) continue;
    if constexpr (!same_part) weights.load(router.norm + 256 * part + 8 * lane, p.zero_centred);
    const uint4 y = weights.apply(x[j], norm_factor<plan::parts>(squares[row], p.eps));
    *reinterpret_cast<uint4*>(shared + row * plan::row_bytes + 2 * (256 * part + 8 * lane)) = y;
    if (row % tiles == tile)
      *reinterpret_cast<uint4*>(router.normed + static_cast<std::size_t>(base + row) * p.ldn + 256 * part +
                                8 * lane) = y;
  }
  __syncthreads();

  // Runs of 64 columns; sums lie by run, then as the instruction leaves them. A tile's two runs go in turns.
  {
    if constexpr (Staged) wait_for_copies<0>();
    const auto weights_of = [&](int i, int run) {
      if constexpr (!Staged) return w[i][run];
      const std::uint32_t at = own_weights + (i * 4 + run) * 1024;
      return weight_run{load_shared(at), load_shared(at + 512)};
    };
    std::uint32_t row[plan::token_tiles];
#pragma unroll
    for (int n = 0; n < plan::token_tiles; ++n)
      row[n] = shared_address(shared) + min(8 * n + g, count - 1) * plan::row_bytes + 16 * t;
#pragma unroll
    for (int i = 0; i < plan::tiles_warp; ++i) {
      const int k_tile = warp * plan::tiles_warp + i;
      uint4 y[4][plan::token_tiles];
#pragma unroll
      for (int run = 0; run < 4; ++run)
#pragma unroll
        for (int n = 0; n < plan::token_tiles; ++n) y[run][n] = load_shared(row[n] + 256 * k_tile + 64 * run);
      float c[2][plan::token_tiles][4] = {};
#pragma unroll
      for (int run = 0; run < 2; ++run)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          multiply_run(c[half], weights_of(i, 2 * half + run), y[2 * half + run]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < plan::token_tiles; ++n)
          *reinterpret_cast<float4*>(sums + (((2 * k_tile + half) * plan::token_tiles + n) * 32 + lane) * 4) =
              make_float4(c[half][n][0], c[half][n][1], c[half][n][2], c[half][n][3]);
    }
  }
  __syncthreads();
  // Logits go to memory as words that are not zero, and block 0 takes each when it is there, leaving zero for
  // the next launch: no fence and no counter, since every word is its own signal. Only the first block of a
  // row group waits: 7 at most, 14 of two routers. Where there are more multiprocessors the blocks they wait
  // for find places; where there are fewer, blocks begin in the order of their numbers, so all groups but the
  // last to begin are complete. The next grid may start only when all blocks have begun.
  auto* const logits = reinterpret_cast<float*>(router.workspace) + base * ldl;
  for (int v = static_cast<int>(threadIdx.x); v < 16 * count; v += plan::threads) {
    const int row = v % 16, token = v / 16;
    const float* from = sums + (token / 8 * 32 + row % 8 * 4 + token % 8 / 2) * 4 + row / 8 * 2 + token % 2;
    float sum = 0.0f;
#pragma unroll
    for (int run = 0; run < Hidden / 64; ++run) sum = __fadd_rn(sum, from[run * plan::token_tiles * 128]);
    store_signal(logits + token * ldl + 16 * tile + row, sum);
  }
  if (tile != 0) return;
  __syncthreads();  // the sums have been read: their place takes the rows' logits
  for (int row = warp; row < count; row += plan::warps) {
    float* const own = sums + warp * ldl;
    take_signals<ldl>(own, logits + row * ldl);
    choose_experts<Experts, TopK, Normalise>(own, router.ids + (base + row) * TopK,
                                             router.weights + (base + row) * TopK);
    if (Shared && lane == 0) router.shared_weights[base + row] = sigmoid(own[16 * expert_tiles]);
    __syncwarp();
  }
}

/// Logits and choice of 64 normalised rows a block.
template <int SharedBytes, int Hidden, int Experts, int TopK, bool Shared, bool Normalise>
__global__ __launch_bounds__(256, 1) void router_prefill_kernel(const __grid_constant__ router_params p) {
  using namespace device;
  using plan = rows_product_plan<Experts, Shared, Hidden, SharedBytes>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  wait_for_previous_grid();
  let_next_grid_start();
  const int first = plan::tile_rows * static_cast<int>(blockIdx.x);
  const float* results = rows_product<Experts, Shared, Hidden, SharedBytes>(
      {p.normed, p.ldn, p.weight, p.gate}, first, p.rows - 1, shared);
  for (int i = static_cast<int>(threadIdx.x) >> 5; i < plan::tile_rows; i += plan::threads / 32) {
    const int row = first + i;
    if (row >= p.rows) break;
    choose_experts<Experts, TopK, Normalise>(results + i * plan::ldr,
                                             p.ids + static_cast<std::size_t>(row) * TopK,
                                             p.weights + static_cast<std::size_t>(row) * TopK);
    if (Shared && (threadIdx.x & 31) == 0)
      p.shared_weights[row] = sigmoid(results[i * plan::ldr + plan::extra_row]);
  }
}

}  // namespace nibble
