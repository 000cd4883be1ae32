// SPDX-License-Identifier: Apache-2.0
/// \file
/// The placement kernel: one block finds the missing experts of a layer, the slots of least worth, and
/// rewrites the tables. host_residency (residency.hpp) takes the same decisions.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/moe/fetch_engine.cuh"
#include "nibble/moe/residency_pick.cuh"
#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

/// \tparam Threads at least as many as a layer has experts  \tparam Rounds slots a thread looks after
template <int Threads, int Rounds>
__global__ __launch_bounds__(Threads, 1) void place_experts(const __grid_constant__ place_params p,
                                                            int experts, int total) {
  constexpr int warps = Threads / 32;
  static_assert(Threads % 32 == 0 && Threads <= 1024 && Rounds * warps <= Threads);
  __shared__ std::uint32_t chosen[32], likely[32], kept[Rounds * warps];
  __shared__ int next_slots[Threads];
  __shared__ unsigned missing_in[32], likely_in[32];
  __shared__ std::uint32_t missing_worth[most_split_misses];
  __shared__ bool guess_used;
  __shared__ detail::victim_room<Threads, Rounds> room;
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
  const residency_view& s = p.state;
  const int number = p.layer * experts + thread;
  const bool an_expert = thread < experts, ahead = p.ahead_list != nullptr;
  const bool few_guesses = p.ahead_ids != nullptr && p.ahead_limit <= most_guess_candidates;

  std::uint32_t key[Rounds], worth = worth_never, now = 0;
  float scales[3] = {};
  int slot = -1, next_slot = -1, guess = -1, recent_slot = -1;
  bool listed = false;  // the least slots are
  std::uint64_t record_number = 0;
  bool head = false;                          // of thread 0: a kernel brings the head of what is demanded
  constexpr bool reads_early = Rounds <= 24;  // beyond, registers are short
  const auto read_scales = [&] {
#pragma unroll
    for (int i = 0; i < 3; ++i)
      scales[i] = __uint_as_float(detail::load_word(s.expert_scales + 3 * number + i));
  };
  const auto read_tables = [&] {
    if (an_expert) {
      slot = static_cast<int>(detail::load_word(s.slot_of + number));
      worth = detail::load_word(s.worth + number);
      if constexpr (reads_early) read_scales();
      if (ahead) next_slot = static_cast<int>(detail::load_word(s.slot_of + number + experts));
    }
    now = detail::load_word(s.clock);
    if (p.guesses != nullptr && an_expert && thread < static_cast<int>(detail::load_word(p.guesses)))
      guess = static_cast<int>(detail::load_word(p.guesses + 4 + 2 * thread)) - p.layer * experts;
    if (p.recent != nullptr && an_expert && thread < static_cast<int>(detail::load_word(p.recent)))
      recent_slot = static_cast<int>(detail::load_word(p.recent + 5 + 2 * thread));
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
      const int at = r * Threads + thread;
      key[r] = at < s.slot_count ? detail::load_word(s.slot_key + at) : worth_protected;
    }
    if (p.engine.state != nullptr) record_number = detail::load_long(&p.engine.state->published) + 1;
    if constexpr (reads_early) detail::list_least<Threads, Rounds>(key, s.expert_of, room), listed = true;
  };
  if (p.tables_settled) read_tables();
  if (thread < 32) chosen[thread] = 0, likely[thread] = 0;
  if (thread == 0) guess_used = false;
  for (int i = thread; i < Rounds * warps; i += Threads) kept[i] = 0;
  __syncthreads();
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (!p.tables_settled) read_tables();
  if (p.engine.state != nullptr && thread == 0) head = detail::takes_head(p.engine, p.recent != nullptr);

  // Which experts are asked for, and which may be next.
  const auto keep = [&](int at) {
    if (at >= 0 && at < s.slot_count) atomicOr(&kept[at >> 5], 1u << (at & 31));
  };
  if (slot >= s.slot_count) slot = -1;
  if (next_slot >= s.slot_count) next_slot = -1;
  next_slots[thread] = next_slot;
  if (p.ids == nullptr) {
    if (an_expert) atomicOr(&chosen[warp], 1u << lane);
  } else {
    unsigned bad = 0;
    for (int i = thread; i < p.assignments; i += Threads) {
      const int id = p.ids[i];
      if (id >= 0 && id < experts)
        atomicOr(&chosen[id >> 5], 1u << (id & 31));
      else if (id != -1)
        ++bad;
    }
    if (bad != 0) detail::add_count(s.counts->bad_ids, bad);
  }
  int candidate = -1;
  // Of the likely expert that this thread may give a slot to, asked for early.
  std::uint32_t likely_worth = 0;
  float likely_scales[3] = {};
  const auto read_likely = [&](int id) {
    const int expert = (p.layer + 1) * experts + id;
    likely_worth = detail::load_word(s.worth + expert);
#pragma unroll
    for (int i = 0; i < 3; ++i)
      likely_scales[i] = __uint_as_float(detail::load_word(s.expert_scales + 3 * expert + i));
  };
  if (ahead) {
    if (p.ahead_ids == nullptr) {
      if (an_expert) atomicOr(&likely[warp], 1u << lane);
    } else {
      // Lane i of every warp has candidate i: the likeliest of every row, then every second likeliest …
      const int rows = p.ahead_assignments / p.ahead_row;
      if (lane < p.ahead_assignments) candidate = p.ahead_ids[lane % rows * p.ahead_row + lane / rows];
      if (reads_early && few_guesses && warp == 0 && candidate >= 0 && candidate < experts)
        read_likely(candidate);
      for (int i = thread; i < p.ahead_assignments; i += Threads)
        if (const int id = p.ahead_ids[i]; id >= 0 && id < experts)
          atomicOr(&likely[id >> 5], 1u << (id & 31));
    }
  }
  keep(recent_slot);
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
      worth = worth_rebased(worth, by), likely_worth = worth_rebased(likely_worth, by);
      listed = false;
      __syncthreads();
    }
    if (thread == 0) *s.clock = now;
  }

  const auto bit = [&](const std::uint32_t* set) { return an_expert && (set[warp] >> lane & 1u) != 0; };
  const bool mine = bit(chosen), missing = mine && slot < 0;
  if (mine && slot >= 0) keep(slot);
  if (guess >= 0 && guess < experts && (chosen[guess >> 5] >> (guess & 31) & 1u) != 0) {
    detail::add_count(s.counts->ahead_used, 1);
    guess_used = true;
  }
  const bool next_missing = ahead && bit(likely) && next_slot < 0;
  if (ahead && bit(likely)) keep(next_slot);
  const unsigned missing_lanes = __ballot_sync(0xFFFF'FFFFu, missing);
  const unsigned next_lanes = __ballot_sync(0xFFFF'FFFFu, next_missing);
  if (lane == 0) {
    missing_in[warp] = static_cast<unsigned>(__popc(missing_lanes)) << 16 |
                       (warp * 32 < experts ? static_cast<unsigned>(__popc(chosen[warp])) : 0u);
    likely_in[warp] = static_cast<unsigned>(__popc(next_lanes));
  }
  __syncthreads();
  const unsigned both = __reduce_add_sync(0xFFFF'FFFFu, lane < warps ? missing_in[lane] : 0u);
  const int misses = static_cast<int>(both >> 16), asked = static_cast<int>(both & 0xFFFFu);
  if (thread == 0) {
    detail::add_count(s.counts->hits, static_cast<unsigned>(asked - misses));
    if (misses > 0) detail::add_count(s.counts->misses, static_cast<unsigned>(misses));
  }

  // The rank of a missing expert, and how many are to be fetched.
  int rank = static_cast<int>(__reduce_add_sync(0xFFFF'FFFFu, lane < warp ? missing_in[lane] >> 16 : 0u)) +
             __popc(missing_lanes & detail::lanes_below());
  int fetched = misses;
  if (p.fetch_of != nullptr && misses > 0 && misses <= most_split_misses) {
    fetched = min(misses, max(0, p.fetch_of[misses]));
    if (missing) missing_worth[rank] = worth;
    __syncthreads();
    if (missing) {
      const int by_id = rank;
      rank = 0;
      for (int i = 0; i < misses; ++i)
        rank += missing_worth[i] > worth || (missing_worth[i] == worth && i < by_id) ? 1 : 0;
      if (rank >= fetched) {
        p.host_list[4 + rank - fetched] = thread;
        if (p.mode == place_mode::decode) s.worth[number] = worth_used(worth, now);
      }
    }
  }
  if (p.fetch_of != nullptr && thread == 0) {
    p.host_list[0] = misses - fetched;
    if (misses > fetched) detail::add_count(s.counts->on_host, static_cast<unsigned>(misses - fetched));
  }

  // The guesses, in order: rank and expert of mine, and how many there are.
  int guesses = 0, guess_rank = -1, guess_id = thread;
  if (ahead) {
    if (!few_guesses) {
      guesses = static_cast<int>(__reduce_add_sync(0xFFFF'FFFFu, lane < warps ? likely_in[lane] : 0u));
      if (next_missing) {
        guess_rank = __popc(next_lanes & detail::lanes_below());
        for (int w = 0; w < warp; ++w) guess_rank += static_cast<int>(likely_in[w]);
      }
    } else {
      int id = candidate;
      if (id < 0 || id >= experts || next_slots[id] >= 0) id = -1;
      const unsigned same = __match_any_sync(0xFFFF'FFFFu, id);
      const bool first = id >= 0 && (same & detail::lanes_below()) == 0;
      const unsigned firsts = __ballot_sync(0xFFFF'FFFFu, first);
      guesses = __popc(firsts);
      if (warp == 0 && first) guess_rank = __popc(firsts & detail::lanes_below()), guess_id = id;
    }
    guesses = min(guesses, p.ahead_limit);
  }

  int places = 0;
  const bool few = fetched + guesses <= detail::listed_most;
  const int* victims = room.victims;
  if (fetched + guesses > 0) {
    const auto out = [&](int expert) {
      if (expert >= 0 && expert < total) s.slot_of[expert] = -1;
    };
    places = few && listed ? detail::pick_listed<Threads, Rounds>(kept, fetched + guesses, room, out) : -1;
    if (places >= 0) {
      victims = room.listed_victims[warp];
    } else {
#pragma unroll
      for (int r = 0; r < Rounds; ++r)
        if ((kept[r * warps + warp] >> lane & 1u) != 0) key[r] = worth_protected;
      places = few ? detail::pick_few<Threads, Rounds>(key, fetched + guesses, room,
                                                       [&](int at) { out(s.expert_of[at]); })
                   : detail::pick_many<Threads, Rounds>(key, fetched + guesses, room);
    }
  }
  const int demand = min(fetched, places), ahead_count = max(0, places - fetched);
  const bool goes = missing && rank < demand, guessed = guess_rank >= 0 && guess_rank < ahead_count;
  if (p.engine.state != nullptr && places > 0) {
    // The bytes are on their way while the tables are still being written.
    std::uint64_t* const record = detail::record_of(p.engine, record_number);
    if (thread == 0)
      detail::write_record(record, record_number, static_cast<unsigned>(demand),
                           static_cast<unsigned>(ahead_count) | (head ? engine_head_flag : 0u));
    if (goes)
      detail::write_record(record + 1 + rank, record_number, static_cast<unsigned>(number),
                           static_cast<unsigned>(victims[rank]));
    if (guessed)
      detail::write_record(record + 1 + demand + guess_rank, record_number,
                           static_cast<unsigned>((p.layer + 1) * experts + guess_id),
                           static_cast<unsigned>(victims[fetched + guess_rank]));
  }

  if (mine && slot >= 0 && p.mode == place_mode::decode) {
    worth = worth_used(worth, now);
    s.worth[number] = worth;
    s.slot_key[slot] = worth;
  }
  const auto fill = [&](std::int32_t* list, int at, int expert, int to, std::uint32_t new_key) {
    list[4 + 2 * at] = expert;
    list[5 + 2 * at] = to;
    s.slot_of[expert] = to;
    s.slot_key[to] = new_key;
  };
  if (places > 0) {
    if (!few) {  // who goes out
      for (int i = thread; i < places; i += Threads) {
        const int gone = s.expert_of[victims[i]];
        if (gone >= 0 && gone < total) s.slot_of[gone] = -1;
      }
      __syncthreads();
    }
    if (goes) {
      const int to = victims[rank];
      if (p.mode == place_mode::decode) {
        worth = worth_used(worth, now);
        s.worth[number] = worth;
      }
      const bool stays = p.mode == place_mode::decode || worth == worth_protected;
      fill(p.list, rank, number, to, stays ? worth : worth_streamed);
      s.expert_of[to] = number;
      if constexpr (!reads_early) read_scales();
#pragma unroll
      for (int i = 0; i < 3; ++i) s.slot_scales[3 * to + i] = scales[i];
    }
    if (guessed) {
      const int expert = (p.layer + 1) * experts + guess_id, to = victims[fetched + guess_rank];
      if (!reads_early || !few_guesses) read_likely(guess_id);
      const bool stays = p.mode == place_mode::decode || likely_worth == worth_protected;
      fill(p.ahead_list, guess_rank, expert, to, stays ? max(likely_worth, worth_least) : worth_streamed);
      s.expert_of[to] = expert;
#pragma unroll
      for (int i = 0; i < 3; ++i) s.slot_scales[3 * to + i] = likely_scales[i];
    }
  }
  if (thread == 0) {
    p.list[0] = demand;
    if (ahead) p.ahead_list[0] = ahead_count;
    if (fetched > places) detail::add_count(s.counts->unplaced, static_cast<unsigned>(fetched - places));
    if (places > 0) detail::add_count(s.counts->placed, static_cast<unsigned>(places));
    if (ahead_count > 0) detail::add_count(s.counts->ahead, static_cast<unsigned>(ahead_count));
    if (p.engine.state != nullptr)
      detail::note_record(*p.engine.state, record_number, demand, ahead_count,
                          guess_used || p.guesses == nullptr, head);
  }
}

}  // namespace nibble::moe
