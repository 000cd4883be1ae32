// SPDX-License-Identifier: Apache-2.0
/// \file
/// A step's fetching as one kernel that runs beside all others.
///
/// It begins with the step on a stream of its own and walks the layers. What is placed for a layer is brought
/// at once; while the layer computes, it brings what was guessed for the next one, a chunk after the other,
/// and leaves that where it is when the next placement arrives. So the link is busy while multiprocessors
/// compute, and a wrong guess costs no more than the chunks under way. Guesses that came true are completed
/// first.
///
///     stream:  clear_fetch_stream ── fork ─ … router, place, wait_for_fetch, gate|up, down … ── join
///     side:                           └──── fetch_stream ─────────────────────────────────────┘
///
/// Placements use `posted` and, with guesses, drop_guesses and recent. wait_for_fetch stands where an
/// ordinary fetch would: between place and gate|up.
#pragma once

#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_beside.cuh"
#include "nibble/moe/fetch_kernel.cuh"
#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

struct fetch_stream_params {
  fetch_params fetch;  ///< `list` is not read; first_byte 0, bytes slot_bytes
  residency_view state;
  residency_shape shape;
  int layer = 0;         ///< wait_for_fetch: whose experts are waited for
  bool guesses = false;  ///< there are lists ahead
};

namespace detail {

/// How long either side waits for the other before it gives the step up, so that nothing ever hangs.
inline constexpr std::uint64_t stream_patience_ns = 10'000'000'000ull;

__device__ __forceinline__ std::uint32_t read_shared_word(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::uint64_t global_nanoseconds() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
/// Lists change while the kernel runs: never from L1.
__device__ __forceinline__ int list_word(const std::int32_t* p) { return __ldcg(p); }

/// Until *p ≥ wanted. \return false when patience ran out
__device__ inline bool wait_for_word(const std::uint32_t* p, std::uint32_t wanted) {
  if (read_shared_word(p) >= wanted) return true;
  const std::uint64_t begin = global_nanoseconds();
  while (read_shared_word(p) < wanted) {
    __nanosleep(64);
    if (global_nanoseconds() - begin > stream_patience_ns) return false;
  }
  return true;
}

}  // namespace detail

/// Clears the words through which the two sides speak. The stream is forked after it.
template <int Threads>
__global__ __launch_bounds__(Threads) void clear_fetch_stream(residency_view state, int layers) {
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (threadIdx.x == 0) *state.posted = 0;
  for (int i = static_cast<int>(threadIdx.x); i < layers; i += Threads) state.done[i] = 0;
}

/// One warp a block.
template <int Stages>
__global__ __launch_bounds__(32) void fetch_stream(const __grid_constant__ fetch_stream_params p) {
  using pipe_type = detail::chunk_pipe<Stages>;
  constexpr unsigned chunk = pipe_type::chunk_bytes;
  __shared__ typename pipe_type::storage room;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (lane < Stages) room.to[lane] = nullptr;
  __syncwarp();
  pipe_type pipe{&room, device::shared_address(room.ring), 0};
  const unsigned mine = blockIdx.x, stride = gridDim.x;
  const auto chunks = static_cast<unsigned>((p.fetch.bytes + chunk - 1) / chunk);
  const std::uint8_t* from = nullptr;
  std::uint8_t* to = nullptr;
  const std::int32_t* at_list = nullptr;
  unsigned at_entry = 0;
  const auto copy = [&](const std::int32_t* list, unsigned unit) {
    const unsigned entry = unit / chunks;
    if (list != at_list || entry != at_entry) {
      at_list = list, at_entry = entry;
      const int number = detail::list_word(list + 4 + 2 * entry),
                slot = detail::list_word(list + 5 + 2 * entry);
      const bool good =
          number >= 0 && number < p.fetch.expert_count && slot >= 0 && slot < p.fetch.slot_count;
      from = p.fetch.store + static_cast<std::size_t>(good ? number : 0) * p.fetch.slot_bytes;
      to = good ? p.fetch.slots + static_cast<std::size_t>(slot) * p.fetch.slot_bytes : nullptr;
    }
    const std::size_t begin = static_cast<std::size_t>(unit % chunks) * chunk, left = p.fetch.bytes - begin;
    pipe.push(from + begin, to != nullptr ? to + begin : nullptr,
              static_cast<unsigned>(left < chunk ? left : chunk));
  };
  device::wait_for_previous_grid();
#pragma unroll 1
  for (int layer = 0; layer < p.shape.layers; ++layer) {
    const auto wanted = static_cast<std::uint32_t>(layer) + 1;
    // Guesses, until the layer's placement arrives. Their list was written before the last one arrived.
    unsigned unit = mine;
    const std::int32_t* const guesses = p.state.ahead_list(p.shape, layer);
    const unsigned guessed =
        p.guesses && layer > 0 ? static_cast<unsigned>(detail::list_word(guesses)) * chunks : 0;
    at_list = nullptr;
#pragma unroll 1
    for (; unit < guessed; unit += stride) {
      const unsigned posted = lane == 0 ? *static_cast<volatile std::uint32_t*>(p.state.posted) : 0;
      if (__shfl_sync(0xFFFF'FFFFu, posted, 0) >= wanted) break;
      copy(guesses, unit);
    }
    if (unit >= guessed) pipe.drain();
    int arrived = 1;
    if (lane == 0) arrived = detail::wait_for_word(p.state.posted, wanted) ? 1 : 0;
    if (__shfl_sync(0xFFFF'FFFFu, arrived, 0) == 0) return;
    // What of them came true and is not there yet, then the rest.
    const unsigned came_true = guessed > 0 ? static_cast<unsigned>(detail::list_word(guesses + 1)) : 0u;
#pragma unroll 1
    for (; unit < guessed; unit += stride)
      if ((came_true >> (unit / chunks) & 1u) != 0) copy(guesses, unit);
    const std::int32_t* const list = p.state.demand_list(p.shape, layer);
    const unsigned demanded = static_cast<unsigned>(detail::list_word(list)) * chunks;
#pragma unroll 1
    for (unit = mine; unit < demanded; unit += stride) copy(list, unit);
    pipe.drain();
    __syncwarp();
    if (lane == 0) {
      __threadfence();
      atomicAdd(p.state.done + layer, 1u);
    }
  }
}

/// Ends when the layer's experts are there; where nothing had to be brought, when those of the layer before
/// are.
template <int Blocks>
__global__ __launch_bounds__(32) void wait_for_fetch(const __grid_constant__ fetch_stream_params p) {
  device::wait_for_previous_grid();
  // Once every block of the stream has begun, the next kernel may take its place on the multiprocessors and
  // wait there. Before, it could keep the stream out for ever.
  const bool begun = p.layer > 0;
  if (begun) device::let_next_grid_start();
  if (threadIdx.x == 0) {
    const bool brings = !begun || detail::list_word(p.state.demand_list(p.shape, p.layer)) > 0 ||
                        (p.guesses && detail::list_word(p.state.ahead_list(p.shape, p.layer)) > 0 &&
                         detail::list_word(p.state.ahead_list(p.shape, p.layer) + 1) != 0);
    // A step that has failed before is not waited for: its end is near, its results are not used.
    const bool failed = *static_cast<volatile std::uint64_t*>(&p.state.counts->failed) != 0;
    if (!failed && !detail::wait_for_word(p.state.done + (brings ? p.layer : p.layer - 1), Blocks))
      atomicAdd(reinterpret_cast<unsigned long long*>(&p.state.counts->failed), 1ull);
  }
  __syncwarp();
  if (!begun) device::let_next_grid_start();
}

/// The three kernels as a family. begin() goes to the step's stream, before the fork; run() to the side
/// stream; wait() takes the place of a fetch.
template <residency_shape Shape>
struct fetch_stream_family {
  using params = fetch_stream_params;
  static constexpr const char* name = "fetch stream";
  static constexpr int stages = 8, blocks = 16;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    const auto none = std::size_t{0};
    status s = visit(clear_fetch_stream<128>, 128, none, "clear_fetch_stream");
    if (s.ok()) s = visit(fetch_stream<stages>, 32, none, "fetch_stream");
    if (s.ok()) s = visit(wait_for_fetch<blocks>, 32, none, "wait_for_fetch");
    return s;
  }
  static status begin(const params& p, const launch_options& options) {
    if (const status s = check(p); !s.ok()) return s;
    return nibble::launch(&clear_fetch_stream<128>, dim3(1), 128, 0, options, where, p.state, Shape.layers);
  }
  static status run(const params& p, const launch_options& options) {
    if (const status s = check(p); !s.ok()) return s;
    return nibble::launch(&fetch_stream<stages>, dim3(blocks), 32, 0, options, where, p);
  }
  static status launch(const params& p, const launch_options& options) {
    if (const status s = check(p); !s.ok()) return s;
    return nibble::launch(&wait_for_fetch<blocks>, dim3(1), 32, 0, options, where, p);
  }

 private:
  static constexpr const char* where = "nibble::moe::fetch_stream";
  static status check(const params& p) {
    if (p.state.posted == nullptr || p.state.lists == nullptr || p.shape != Shape || p.layer < 0 ||
        p.layer >= Shape.layers)
      return status::invalid(where, "the tables are missing, or of another shape or layer");
    if (p.fetch.store == nullptr || reinterpret_cast<std::uintptr_t>(p.fetch.store) % 16 != 0 ||
        p.fetch.slots == nullptr || reinterpret_cast<std::uintptr_t>(p.fetch.slots) % 128 != 0)
      return status::invalid(where, "the store (16-byte) or the slots (128-byte) are missing or unaligned");
    if (p.fetch.slot_bytes == 0 || p.fetch.slot_bytes % 128 != 0 || p.fetch.first_byte != 0 ||
        p.fetch.bytes != p.fetch.slot_bytes)
      return status::invalid(where, "whole slots of a multiple of 128 bytes are brought");
    return status::success();
  }
};

}  // namespace nibble::moe
