// SPDX-License-Identifier: Apache-2.0
/// \file
/// Many tokens: which assignments each expert has, found on the device without a read-back.
///
/// One block sorts the assignments (token · top_k + j) of a step by expert, stably, and cuts each expert's
/// into tiles. Assignments of no resident expert are left out and reported. Nothing depends on timing: the
/// same routes give the same order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/moe/experts_kernel.cuh"
#include "nibble/moe/experts_workspace.hpp"

namespace nibble::moe {

/// What the kernels for many tokens read beside the parameters.
struct many_params {
  experts_params e;
  std::int32_t* tile_count = nullptr;
  std::int32_t* order = nullptr;
  std::int32_t* position = nullptr;
  expert_tile* tiles = nullptr;
  __nv_bfloat16* parts = nullptr;
};

/// Warps of the sorting block: as many as have room for a counter of every expert.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr int sort_warps(int experts) {
  return experts <= 512 ? 32 : experts <= 1024 ? 16 : experts <= 2048 ? 8 : 4;
}
[[nodiscard]] constexpr std::size_t sort_shared_bytes(int experts) {
  return (static_cast<std::size_t>(sort_warps(experts)) + 2) * static_cast<std::size_t>(experts) *
         sizeof(std::int32_t);
}

/// `width`: assignments of a tile at most, a multiple of eight.
template <int Experts, int TopK, int Shared>
__global__ __launch_bounds__(32 * sort_warps(Experts),
                             1) void experts_sort(const __grid_constant__ many_params p, int width) {
  constexpr int warps = sort_warps(Experts), threads = 32 * warps, ahead = 4;
  constexpr unsigned all = 0xFFFF'FFFFu;
  extern __shared__ std::int32_t counters[];  // [warps][experts], then offsets and tile offsets
  std::int32_t *offset = counters + warps * Experts, *tile_offset = offset + Experts;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int assignments = p.e.m * TopK;
  const int per_warp = (assignments + 32 * warps - 1) / (32 * warps) * 32;
  const int begin = min(warp * per_warp, assignments), end = min(begin + per_warp, assignments);
  for (int i = threadIdx.x; i < warps * Experts; i += threads) counters[i] = 0;
  __syncthreads();
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  // visit(assignment, id, slot) for this warp's assignments, 32 at a time, all lanes; -1: none.
  const auto walk = [&](const auto& visit) {
#pragma unroll 1
    for (int base = begin; base < end; base += 32 * ahead) {
      int id[ahead], slot[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int a = base + 32 * i + lane;
        id[i] = a < end ? p.e.ids[a] : -1;
      }
#pragma unroll
      for (int i = 0; i < ahead; ++i) slot[i] = detail::slot_of_id<Experts>(p.e, id[i], p.e.slot_of);
#pragma unroll
      for (int i = 0; i < ahead; ++i)
        if (base + 32 * i < end) visit(base + 32 * i + lane, id[i], slot[i]);
    }
  };
  std::int32_t* mine = counters + warp * Experts;
  walk([&](int a, int id, int slot) {
    if (a < end && slot < 0) detail::report_missing<Experts>(p.e, id);
    const int key = slot >= 0 ? id : -1;
    const unsigned same = __match_any_sync(all, key);
    if (key >= 0 && lane == __ffs(static_cast<int>(same)) - 1) mine[key] += __popc(same);
    __syncwarp();
  });
  __syncthreads();
  // Counters become places within an expert.
  for (int e = threadIdx.x; e < Experts; e += threads) {
    int total = 0;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const int count = counters[w * Experts + e];
      counters[w * Experts + e] = total;
      total += count;
    }
    offset[e] = total;
  }
  __syncthreads();
  const int shared_tiles = Shared != 0 ? (p.e.m + width - 1) / width : 0;
  if (warp == 0) {
    int at = 0, tile_at = shared_tiles;
#pragma unroll 1
    for (int base = 0; base < Experts; base += 32) {
      const int e = base + lane, count = e < Experts ? offset[e] : 0, tiles = (count + width - 1) / width;
      int sum = count, tile_sum = tiles;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(all, sum, d), other_tiles = __shfl_up_sync(all, tile_sum, d);
        if (lane >= d) sum += other, tile_sum += other_tiles;
      }
      if (e < Experts) {
        offset[e] = at + sum - count;
        tile_offset[e] = tile_at + tile_sum - tiles;
        const int slot = p.e.slot_of[e];
        const int even = tiles > 0 ? ((count + tiles - 1) / tiles + 7) / 8 * 8 : 0;
        for (int i = 0; i < tiles; ++i)
          p.tiles[tile_offset[e] + i] = {slot, offset[e] + i * even, min(even, count - i * even), even};
      }
      at += __shfl_sync(all, sum, 31);
      tile_at += __shfl_sync(all, tile_sum, 31);
    }
    if (lane == 0) *p.tile_count = tile_at;
  }
  // The shared expert's rows of h lie behind the sorted ones, in the order of the tokens.
  for (int i = threadIdx.x; i < shared_tiles; i += threads) {
    const int count = min(width, p.e.m - i * width);
    p.tiles[i] = {-1, assignments + i * width, count, (count + 7) / 8 * 8};
  }
  __syncthreads();
  walk([&](int a, int id, int slot) {
    const int key = slot >= 0 ? id : -1;
    const unsigned same = __match_any_sync(all, key);
    const int place = key >= 0 ? mine[key] : 0;
    __syncwarp();
    if (key >= 0 && lane == __ffs(static_cast<int>(same)) - 1) mine[key] = place + __popc(same);
    __syncwarp();
    const int at = key >= 0 ? offset[key] + place + __popc(same & ((1u << lane) - 1)) : -1;
    if (a < end) p.position[a] = at;
    if (at >= 0) p.order[at] = a;
  });
}

}  // namespace nibble::moe
