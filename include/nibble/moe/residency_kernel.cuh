// SPDX-License-Identifier: Apache-2.0
/// \file
/// The placement kernel: one block finds the missing experts of a layer, the slots of least worth, and
/// rewrites the tables. host_residency (residency.hpp) takes the same decisions.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

namespace detail {

/// Plain loads that stay where they are written: the compiler must not move them below the wait.
__device__ __forceinline__ std::uint32_t load_word(const void* p) {
  std::uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void add_count(std::uint64_t& count, unsigned by) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&count), static_cast<unsigned long long>(by));
}

/// Sum over a block; every thread gets it. `room` is [2][32], `turn` alternates from call to call.
template <int Threads>
__device__ __forceinline__ unsigned block_sum(unsigned value, unsigned (*room)[32], int turn) {
  constexpr int warps = Threads / 32;
  const int lane = threadIdx.x & 31;
  value = __reduce_add_sync(0xFFFF'FFFFu, value);
  if (lane == 0) room[turn][threadIdx.x >> 5] = value;
  __syncthreads();
  return __reduce_add_sync(0xFFFF'FFFFu, lane < warps ? room[turn][lane] : 0u);
}

}  // namespace detail

/// \tparam Threads at least as many as a layer has experts  \tparam Rounds slots a thread looks after
template <int Threads, int Rounds>
__global__ __launch_bounds__(Threads, 1) void place_experts(const __grid_constant__ place_params p,
                                                            int experts, int total) {
  constexpr int warps = Threads / 32;
  constexpr std::uint32_t taken = worth_protected;
  static_assert(Threads % 32 == 0 && Threads <= 1024 && Rounds * warps <= 1024);
  __shared__ std::uint32_t chosen[32], kept[1024];
  __shared__ unsigned sums[2][32];
  __shared__ std::uint32_t lows[32], highs[32];
  __shared__ unsigned below[Rounds * warps], equal[Rounds * warps];
  __shared__ int order[Threads], victims[Threads];
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  const residency_view& s = p.state;
  const int number = p.layer * experts + thread;
  const bool an_expert = thread < experts;

  std::uint32_t key[Rounds], worth = worth_never, now = 0;
  int slot = -1, guess = -1;
  const auto read_tables = [&] {
    if (an_expert) {
      slot = static_cast<int>(detail::load_word(s.slot_of + number));
      worth = detail::load_word(s.worth + number);
    }
    now = detail::load_word(s.clock);
    if (p.guesses != nullptr && an_expert)
      guess = static_cast<int>(detail::load_word(p.guesses + 4 + 2 * thread));
    if (p.guesses != nullptr && thread >= static_cast<int>(detail::load_word(p.guesses))) guess = -1;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
      const int at = r * Threads + thread;
      key[r] = at < s.slot_count ? detail::load_word(s.slot_key + at) : taken;
    }
  };
  if (p.tables_settled) read_tables();
  if (thread < 32) chosen[thread] = 0;
  for (int i = thread; i < 1024; i += Threads) kept[i] = 0;
  order[thread] = INT32_MAX;
  __syncthreads();
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (!p.tables_settled) read_tables();

  // Which experts are asked for.
  const bool ahead = p.mode == place_mode::ahead;
  if (p.ids == nullptr) {
    if (an_expert) atomicOr(&chosen[warp], 1u << lane);
  } else {
    unsigned bad = 0;
    for (int i = thread; i < p.assignments; i += Threads) {
      const int id = p.ids[i];
      if (id >= 0 && id < experts) {
        atomicOr(&chosen[id >> 5], 1u << (id & 31));
        if (ahead) atomicMin(&order[id], i);
      } else if (id != -1) {
        ++bad;
      }
    }
    if (bad != 0 && !ahead) detail::add_count(s.counts->bad_ids, bad);
  }
  // What another layer is computing with.
  if (p.keep_layer >= 0) {
    const std::int32_t* row = s.slot_of + p.keep_layer * experts;
    const int count = p.keep_ids == nullptr ? experts : p.keep_assignments;
    for (int i = thread; i < count; i += Threads) {
      const int id = p.keep_ids == nullptr ? i : p.keep_ids[i];
      const int at = id >= 0 && id < experts ? row[id] : -1;
      if (at >= 0 && at < s.slot_count) atomicOr(&kept[at >> 5], 1u << (at & 31));
    }
  }
  if (slot >= s.slot_count) slot = -1;  // the pool shrank below it
  __syncthreads();

  if (p.new_step) {
    now += p.ticks;
    if (now >= clock_limit) {  // once in weeks: every worth moves down
      const std::uint32_t by = now - clock_start;
      now = clock_start;
      for (int i = thread; i < total; i += Threads) s.worth[i] = worth_rebased(s.worth[i], by);
#pragma unroll
      for (int r = 0; r < Rounds; ++r) {
        const int at = r * Threads + thread;
        if (at < s.slot_count) s.slot_key[at] = key[r] = worth_rebased(key[r], by);
      }
      worth = worth_rebased(worth, by);
      __syncthreads();
    }
    if (thread == 0) *s.clock = now;
  }

  const bool mine = an_expert && (chosen[warp] >> lane & 1u) != 0;
  bool missing = mine && slot < 0;
  if (mine && slot >= 0) {
    atomicOr(&kept[slot >> 5], 1u << (slot & 31));
    if (p.mode == place_mode::decode) {
      worth = worth_used(worth, now);
      s.worth[number] = worth;
      s.slot_key[slot] = worth;
    }
  }
  if (guess >= 0 && !ahead) {
    const int id = guess - p.layer * experts;
    if (id >= 0 && id < experts && (chosen[id >> 5] >> (id & 31) & 1u) != 0)
      detail::add_count(s.counts->ahead_used, 1);
  }
  const unsigned missing_lanes = __ballot_sync(0xFFFF'FFFFu, missing);
  const unsigned both = detail::block_sum<Threads>(
      lane == 0 ? __popc(missing_lanes) << 16 | __popc(an_expert || warp * 32 < experts ? chosen[warp] : 0u)
                : 0u,
      sums, 0);
  const int misses = static_cast<int>(both >> 16), asked = static_cast<int>(both & 0xFFFFu);
  if (p.split_views && an_expert) {
    s.hit_slots[thread] = mine ? slot : -1;
    if (!missing) s.missed_slots[thread] = -1;
  }
  if (thread == 0 && !ahead) {
    detail::add_count(s.counts->hits, static_cast<unsigned>(asked - misses));
    if (misses > 0) detail::add_count(s.counts->misses, static_cast<unsigned>(misses));
  }
  int wanted = ahead && misses > p.limit ? p.limit : misses;
  if (wanted <= 0) {
    if (thread == 0) p.list[0] = 0;
    return;
  }

  // The rank of a missing expert: by id; ahead, by how likely it is.
  int rank = __popc(missing_lanes & ((1u << lane) - 1));
  for (int w = 0; w < warp; ++w) rank += static_cast<int>(sums[0][w] >> 16);
  if (ahead && p.ids != nullptr) {
    if (!missing) order[thread] = INT32_MAX;
    __syncthreads();
    rank = 0;
    if (missing)
      for (int e = 0; e < experts; ++e) rank += order[e] < order[thread] ? 1 : 0;
  }

  // The `wanted` slots of least key: T is the smallest key with so many slots at or below it.
  std::uint32_t low = taken, high = 0;
  unsigned open = 0;
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    if ((kept[r * warps + warp] >> lane & 1u) != 0) key[r] = taken;
    if (key[r] != taken) {
      low = min(low, key[r]), high = max(high, key[r]);
      ++open;
    }
  }
  low = __reduce_min_sync(0xFFFF'FFFFu, low), high = __reduce_max_sync(0xFFFF'FFFFu, high);
  if (lane == 0) lows[warp] = low, highs[warp] = high;
  const int room = static_cast<int>(detail::block_sum<Threads>(open, sums, 1));
  low = __reduce_min_sync(0xFFFF'FFFFu, lane < warps ? lows[lane] : taken);
  high = __reduce_max_sync(0xFFFF'FFFFu, lane < warps ? highs[lane] : 0u);
  if (room < wanted) {
    if (thread == 0 && !ahead) detail::add_count(s.counts->unplaced, static_cast<unsigned>(wanted - room));
    wanted = room;
  }
  for (int turn = 0; low < high; turn ^= 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    unsigned count = 0;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) count += key[r] <= middle ? 1 : 0;
    if (static_cast<int>(detail::block_sum<Threads>(count, sums, turn)) >= wanted)
      high = middle;
    else
      low = middle + 1;
  }

  // Those below T, and of those at T the first by number.
  unsigned below_lanes[Rounds], equal_lanes[Rounds];
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    below_lanes[r] = __ballot_sync(0xFFFF'FFFFu, key[r] < low);
    equal_lanes[r] = __ballot_sync(0xFFFF'FFFFu, key[r] == low && low != taken);
    if (lane == 0) {
      below[r * warps + warp] = __popc(below_lanes[r]);
      equal[r * warps + warp] = __popc(equal_lanes[r]);
    }
  }
  __syncthreads();
  {
    // Running sums over (round, warp), which is the order of slots; packed, 16 bits each.
    unsigned packed = 0;
    if (thread < Rounds * warps) packed = below[thread] | equal[thread] << 16;
    unsigned sum = packed;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned other = __shfl_up_sync(0xFFFF'FFFFu, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) sums[0][warp] = sum;
    __syncthreads();
    unsigned before = lane < warp ? sums[0][lane] : 0u;
    before = __reduce_add_sync(0xFFFF'FFFFu, before);
    sum += before - packed;
    if (thread < Rounds * warps) below[thread] = sum & 0xFFFFu, equal[thread] = sum >> 16;
    if (thread == Threads - 1) lows[0] = (sum + packed) & 0xFFFFu;  // all that are below
  }
  __syncthreads();
  const int from_equal = wanted - static_cast<int>(lows[0]);
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const unsigned before = (1u << lane) - 1;
    const int lesser = static_cast<int>(below[r * warps + warp]) + __popc(below_lanes[r] & before);
    const int same = static_cast<int>(equal[r * warps + warp]) + __popc(equal_lanes[r] & before);
    const bool is_below = (below_lanes[r] >> lane & 1u) != 0, is_equal = (equal_lanes[r] >> lane & 1u) != 0;
    if (wanted > 0 && (is_below || (is_equal && same < from_equal)))
      victims[lesser + min(same, from_equal)] = r * Threads + thread;
  }
  __syncthreads();

  if (missing && rank < wanted) {
    const int to = victims[rank], gone = s.expert_of[to];
    if (gone >= 0 && gone < total && s.slot_of[gone] == to) s.slot_of[gone] = -1;
    s.slot_of[number] = to;
    s.expert_of[to] = number;
#pragma unroll
    for (int i = 0; i < 3; ++i) s.slot_scales[3 * to + i] = s.expert_scales[3 * number + i];
    if (p.mode == place_mode::decode) {
      worth = worth_used(worth, now);
      s.worth[number] = worth;
      s.slot_key[to] = worth;
    } else {
      s.slot_key[to] = worth == worth_protected          ? worth
                       : p.mode == place_mode::streaming ? worth_streamed
                                                         : max(worth, worth_least);
    }
    p.list[4 + 2 * rank] = number;
    p.list[5 + 2 * rank] = to;
    if (p.split_views && !ahead) s.missed_slots[thread] = to;
  } else if (missing && p.split_views && !ahead) {
    s.missed_slots[thread] = -1;
  }
  if (thread == 0) {
    p.list[0] = wanted;
    detail::add_count(s.counts->placed, static_cast<unsigned>(wanted));
    if (ahead) detail::add_count(s.counts->ahead, static_cast<unsigned>(wanted));
  }
}

}  // namespace nibble::moe
