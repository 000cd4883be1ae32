// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which slots a placement refills: those of least key, chosen by one block.
#pragma once

#include <cstdint>

#include "nibble/moe/residency_types.hpp"

namespace nibble::moe::detail {

/// Plain loads that stay where they are written: the compiler must not move them below the wait.
__device__ __forceinline__ std::uint32_t load_word(const void* p) {
  std::uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_count(std::uint64_t& count, unsigned by) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&count), static_cast<unsigned long long>(by));
}
__device__ __forceinline__ unsigned lanes_below() { return (1u << (threadIdx.x & 31u)) - 1u; }

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

/// Slots of a warp that are listed beforehand, and the most that are chosen from the lists.
inline constexpr int listed_depth = 4, listed_most = 12;

/// What the choice of slots works in.
template <int Threads, int Rounds>
struct victim_room {
  static constexpr int warps = Threads / 32;
  std::uint32_t keys[2][32];
  int slots[2][32];
  unsigned sums[2][32];
  unsigned below[Rounds * warps], equal[Rounds * warps];
  int victims[2 * Threads];
  /// For pick_listed: of each warp's slots the least, in order, and the experts in them.
  std::uint32_t listed_keys[listed_depth][warps];
  int listed_slots[listed_depth][warps], listed_experts[listed_depth][warps];
  int listed_victims[warps][listed_most];  ///< each warp's own copy, ascending
};

/// Lists the least slots of every warp while there is time: before it is known which must stay. All threads.
/// \param key as for pick_few, unchanged  \param expert_of [slots]
template <int Threads, int Rounds>
__device__ __forceinline__ void list_least(const std::uint32_t (&key)[Rounds], const std::int32_t* expert_of,
                                           victim_room<Threads, Rounds>& room) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  unsigned listed = 0;  // rounds of this thread
#pragma unroll
  for (int depth = 0; depth < listed_depth; ++depth) {
    std::uint32_t mine = worth_protected;
    int round = 0;
#pragma unroll
    for (int r = 0; r < Rounds; ++r)
      if ((listed >> r & 1u) == 0 && key[r] < mine) mine = key[r], round = r;
    const int my_slot = mine == worth_protected ? INT32_MAX : round * Threads + thread;
    const std::uint32_t least = __reduce_min_sync(0xFFFF'FFFFu, mine);
    const int slot = __reduce_min_sync(0xFFFF'FFFFu, mine == least ? my_slot : INT32_MAX);
    if (slot == my_slot && mine != worth_protected) listed |= 1u << round;
    if (lane == depth) {
      room.listed_keys[depth][warp] = least, room.listed_slots[depth][warp] = slot;
      room.listed_experts[depth][warp] =
          least == worth_protected ? -1 : static_cast<int>(load_word(expert_of + slot));
    }
  }
}

/// What pick_few finds, by every warp for itself, without waiting for the others. \param kept bit n: slot n
/// stays \param taken called by warp 0, by one lane for each, with the expert that goes out \return how many
/// there were, in listed_victims[warp]; -1: the lists are too short to tell
template <int Threads, int Rounds, class Taken>
__device__ __forceinline__ int pick_listed(const std::uint32_t* kept, int wanted,
                                           victim_room<Threads, Rounds>& room, Taken taken) {
  constexpr int warps = Threads / 32, each = (listed_depth * warps + 31) / 32;
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t key[each];
  int slot[each];
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int at = j * 32 + lane;
    key[j] = worth_protected, slot[j] = INT32_MAX;
    if (at < listed_depth * warps) key[j] = room.listed_keys[0][at], slot[j] = room.listed_slots[0][at];
    if (key[j] != worth_protected && (kept[slot[j] >> 5] >> (slot[j] & 31) & 1u) != 0)
      key[j] = worth_protected;
  }
  // A slot that no list names comes behind the last one of some list.
  const std::uint32_t last_key = lane < warps ? room.listed_keys[listed_depth - 1][lane] : worth_protected;
  const int last_slot = lane < warps ? room.listed_slots[listed_depth - 1][lane] : INT32_MAX;
  const std::uint32_t end_key = __reduce_min_sync(0xFFFF'FFFFu, last_key);
  const int end_slot = __reduce_min_sync(0xFFFF'FFFFu, last_key == end_key ? last_slot : INT32_MAX);
  int count = 0, taken_slot = -1, rank = 0;
  bool told = true;
  for (; count < wanted; ++count) {
    std::uint32_t mine = worth_protected;
    int my_slot = INT32_MAX, my_j = 0;
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (key[j] < mine || (key[j] == mine && key[j] != worth_protected && slot[j] < my_slot))
        mine = key[j], my_slot = slot[j], my_j = j;
    const std::uint32_t least = __reduce_min_sync(0xFFFF'FFFFu, mine);
    if (least == worth_protected) {
      told = end_key == worth_protected;
      break;
    }
    const int found = __reduce_min_sync(0xFFFF'FFFFu, mine == least ? my_slot : INT32_MAX);
    if (least > end_key || (least == end_key && found > end_slot)) {
      told = false;
      break;
    }
    if (lane < count && found < taken_slot) ++rank;
    const unsigned smaller = __ballot_sync(0xFFFF'FFFFu, lane < count && taken_slot < found);
    if (lane == count) taken_slot = found, rank = __popc(smaller);
    if (mine == least && my_slot == found) {
#pragma unroll
      for (int j = 0; j < each; ++j)
        if (j == my_j) key[j] = worth_protected;
    }
  }
  if (!told) return -1;
  if (lane < count) room.listed_victims[warp][rank] = taken_slot;
  __syncwarp();
  if (warp == 0)
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int at = j * 32 + lane;
      if (at >= listed_depth * warps) continue;
      bool out = false;
      for (int i = 0; i < count; ++i) out |= room.listed_victims[0][i] == slot[j];
      if (out) taken(room.listed_experts[0][at]);
    }
  return count;
}

/// The few slots of least key, one after the other. Slot r · Threads + thread has key[r]; ties go to the
/// lower slot. victims[0 … count - 1] ascend. \param taken called by the thread whose slot it is
/// \return how many there were
template <int Threads, int Rounds, class Taken>
__device__ __forceinline__ int pick_few(std::uint32_t (&key)[Rounds], int wanted,
                                        victim_room<Threads, Rounds>& room, Taken taken) {
  constexpr int warps = Threads / 32;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  std::uint32_t mine = worth_protected;
  int my_slot = INT32_MAX;
  const auto look = [&] {
    mine = worth_protected, my_slot = INT32_MAX;
#pragma unroll
    for (int r = 0; r < Rounds; ++r)
      if (key[r] < mine) mine = key[r], my_slot = r * Threads + thread;
  };
  const auto show = [&](int turn) {
    const std::uint32_t least = __reduce_min_sync(0xFFFF'FFFFu, mine);
    const int slot = __reduce_min_sync(0xFFFF'FFFFu, mine == least ? my_slot : INT32_MAX);
    if (lane == 0) room.keys[turn][warp] = least, room.slots[turn][warp] = slot;
  };
  look();
  show(0);
  int count = 0, taken_slot = -1, rank = 0;
  for (int turn = 0; count < wanted; ++count, turn ^= 1) {
    __syncthreads();
    const std::uint32_t key_of = lane < warps ? room.keys[turn][lane] : worth_protected;
    const std::uint32_t least = __reduce_min_sync(0xFFFF'FFFFu, key_of);
    if (least == worth_protected) break;
    const int slot =
        __reduce_min_sync(0xFFFF'FFFFu, lane < warps && key_of == least ? room.slots[turn][lane] : INT32_MAX);
    // The order of the slots: lane c of every warp keeps slot number c and counts the smaller ones.
    if (lane < count && slot < taken_slot) ++rank;
    const unsigned smaller = __ballot_sync(0xFFFF'FFFFu, lane < count && taken_slot < slot);
    if (lane == count) taken_slot = slot, rank = __popc(smaller);
    const bool here = (slot % Threads) >> 5 == warp;
    if (here) {
      if (slot % Threads == thread) {
        taken(slot);
#pragma unroll
        for (int r = 0; r < Rounds; ++r)
          if (r * Threads + thread == slot) key[r] = worth_protected;
        look();
      }
      show(turn ^ 1);
    } else if (lane == 0) {
      room.keys[turn ^ 1][warp] = room.keys[turn][warp], room.slots[turn ^ 1][warp] = room.slots[turn][warp];
    }
  }
  if (warp == 0 && lane < count) room.victims[rank] = taken_slot;
  __syncthreads();
  return count;
}

/// The same for any number: finds the key that so many are at or below, then takes those below and the first
/// of those at it.
template <int Threads, int Rounds>
__device__ __forceinline__ int pick_many(const std::uint32_t (&key)[Rounds], int wanted,
                                         victim_room<Threads, Rounds>& room) {
  constexpr int warps = Threads / 32;
  constexpr std::uint32_t taken = worth_protected;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  std::uint32_t low = taken, high = 0;
  unsigned open = 0;
#pragma unroll
  for (int r = 0; r < Rounds; ++r)
    if (key[r] != taken) {
      low = min(low, key[r]), high = max(high, key[r]);
      ++open;
    }
  low = __reduce_min_sync(0xFFFF'FFFFu, low), high = __reduce_max_sync(0xFFFF'FFFFu, high);
  if (lane == 0) room.keys[0][warp] = low, room.keys[1][warp] = high;
  wanted = min(wanted, static_cast<int>(block_sum<Threads>(open, room.sums, 1)));
  if (wanted == 0) return 0;
  low = __reduce_min_sync(0xFFFF'FFFFu, lane < warps ? room.keys[0][lane] : taken);
  high = __reduce_max_sync(0xFFFF'FFFFu, lane < warps ? room.keys[1][lane] : 0u);
  for (int turn = 0; low < high; turn ^= 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    unsigned count = 0;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) count += key[r] <= middle ? 1 : 0;
    if (static_cast<int>(block_sum<Threads>(count, room.sums, turn)) >= wanted)
      high = middle;
    else
      low = middle + 1;
  }
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const unsigned below = __ballot_sync(0xFFFF'FFFFu, key[r] < low);
    const unsigned equal = __ballot_sync(0xFFFF'FFFFu, key[r] == low);
    if (lane == 0) room.below[r * warps + warp] = __popc(below), room.equal[r * warps + warp] = __popc(equal);
  }
  __syncthreads();
  // Running sums over (round, warp), which is the order of slots; packed, 16 bits each.
  const bool counts = thread < Rounds * warps;
  const unsigned packed = counts ? room.below[thread] | room.equal[thread] << 16 : 0;
  unsigned sum = packed;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned other = __shfl_up_sync(0xFFFF'FFFFu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) room.sums[0][warp] = sum;
  __syncthreads();
  sum += __reduce_add_sync(0xFFFF'FFFFu, lane < warp ? room.sums[0][lane] : 0u) - packed;
  if (counts) room.below[thread] = sum & 0xFFFFu, room.equal[thread] = sum >> 16;
  if (thread == Threads - 1) room.sums[1][0] = (sum + packed) & 0xFFFFu;  // all that are below
  __syncthreads();
  const int from_equal = wanted - static_cast<int>(room.sums[1][0]);
#pragma unroll
  for (int r = 0; r < Rounds; ++r) {
    const unsigned below = __ballot_sync(0xFFFF'FFFFu, key[r] < low);
    const unsigned equal = __ballot_sync(0xFFFF'FFFFu, key[r] == low);
    const int lesser = static_cast<int>(room.below[r * warps + warp]) + __popc(below & lanes_below());
    const int same = static_cast<int>(room.equal[r * warps + warp]) + __popc(equal & lanes_below());
    if (key[r] < low || (key[r] == low && same < from_equal))
      room.victims[lesser + min(same, from_equal)] = r * Threads + thread;
  }
  __syncthreads();
  return wanted;
}

}  // namespace nibble::moe::detail
