// SPDX-License-Identifier: Apache-2.0
/// \file
/// The device's side of fetching by the copy engine: publishing what is missing, and waiting until it has
/// come.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_engine_types.hpp"
#include "nibble/moe/fetch_kernel.cuh"
#include "nibble/moe/fetch_launch.cuh"
#include "nibble/moe/fetch_staged.cuh"

namespace nibble::moe {

namespace detail {

/// Words of a record are valid by themselves, so nothing has to be ordered.
__device__ __forceinline__ void write_record(std::uint64_t* word, std::uint64_t number, unsigned high,
                                             unsigned low) {
  const std::uint64_t v = number << 32 | (high << 16 | low);
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}
__device__ __forceinline__ std::uint64_t* record_of(const engine_link& link, std::uint64_t number) {
  return link.records + number % engine_records * static_cast<unsigned>(link.record_words);
}
__device__ __forceinline__ std::uint64_t load_long(const void* p) {
  std::uint64_t v;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
/// Whether a kernel may bring the head of a record's first demanded expert: nothing under way goes to a slot
/// that the placement may give away. \param spares_guesses it leaves the slots of the last guesses alone
__device__ __forceinline__ bool takes_head(const engine_link& link, bool spares_guesses) {
  const engine_state& s = *link.state;
  const std::uint64_t last = load_long(spares_guesses ? &s.guessed_older : &s.guessed);
  return link.head_bytes > 0 && load_long(&s.done) >= engine_guesses_done(last);
}
/// What a layer waits for, once its record, if it has one, is published. For one thread.
/// \param used whether any of the guesses for this layer came true, or that is not known  \param head of
/// takes_head
__device__ __forceinline__ void note_record(engine_state& s, std::uint64_t number, int demanded, int guesses,
                                            bool used, bool head) {
  const std::uint64_t guessed = s.guessed;
  s.needed = demanded > 0 ? 2 * number : engine_guesses_done(used ? guessed : s.guessed_older);
  s.head = demanded > 0 && head ? 1 : 0;
  s.guessed_older = guessed;
  if (guesses > 0) s.guessed = number;
  if (demanded + guesses > 0) s.published = number;
}

}  // namespace detail

/// Brings the head, then waits for the rest. Costs a chained launch when there is nothing to wait for.
template <int Warps>
__global__ __launch_bounds__(32 * Warps) void await_engine(const __grid_constant__ engine_wait_params p) {
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  engine_state& s = *p.state;
  const std::uint8_t* from;
  std::uint8_t* to;
  if (s.head != 0 && detail::fetch_entry(p.fetch, 0, from, to)) {
    const auto chunks =
        static_cast<unsigned>((p.head_bytes + detail::fetch_chunk_bytes - 1) / detail::fetch_chunk_bytes);
    // Warp by warp over the grid, so that a few chunks are spread over many multiprocessors.
    for (unsigned u = blockIdx.x + gridDim.x * (threadIdx.x >> 5); u < chunks; u += gridDim.x * Warps)
      detail::copy_chunk(from, to, p.head_bytes, u, [](const void* at) { return detail::load_host(at); });
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const std::uint64_t needed = s.needed;
  bool lost = *static_cast<volatile std::uint32_t*>(&s.broken) != 0;
  if (!lost && detail::load_long(&s.done) < needed) {
    const std::uint64_t begin = detail::nanoseconds();
    do lost = detail::nanoseconds() - begin > fetch_patience_ns;
    while (!lost && detail::load_long(&s.done) < needed);
    if (lost) s.broken = 1;
  }
  if (lost || detail::load_long(&s.failed) != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(p.failures), 1ull);
  __threadfence_system();
}

/// Publishes a fetch list as a placement would: for measurements.
struct engine_question_params {
  const std::int32_t* list = nullptr;  ///< see fetch_list_words
  engine_link link;
};
template <int Threads>
__global__ __launch_bounds__(Threads) void ask_engine(const __grid_constant__ engine_question_params p) {
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int count = p.list[0];
  const std::uint64_t number = p.link.state->published + 1;
  std::uint64_t* const record = detail::record_of(p.link, number);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += Threads)
    detail::write_record(record + 1 + i, number, static_cast<unsigned>(p.list[4 + 2 * i]),
                         static_cast<unsigned>(p.list[5 + 2 * i]));
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool head = detail::takes_head(p.link, false);
  if (count > 0)
    detail::write_record(record, number, static_cast<unsigned>(count), head ? engine_head_flag : 0);
  detail::note_record(*p.link.state, number, count, 0, false, head);
}

/// Waiting for the copy engine as a kernel family.
struct engine_wait_family {
  using params = engine_wait_params;
  static constexpr const char* name = "fetch by the copy engine";
  static constexpr int blocks = 32, warps = 8, ask_threads = 32;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    const status s = visit(await_engine<warps>, 32 * warps, std::size_t{0}, "await_engine");
    return s.ok() ? visit(ask_engine<ask_threads>, ask_threads, std::size_t{0}, "ask_engine") : s;
  }
  static status launch(const params& p, const launch_options& options) {
    if (p.state == nullptr || p.failures == nullptr)
      return status::invalid(where, "the state or the count of failures is missing");
    if (p.head_bytes > 0)
      if (const status s = check_fetch(p.fetch, where); !s.ok()) return s;
    if (p.head_bytes % 128 != 0 || p.head_bytes > p.fetch.bytes)
      return status::invalid(where, "the head is a multiple of 128 bytes of an expert");
    return nibble::launch(&await_engine<warps>, dim3(blocks), 32 * warps, 0, options, where, p);
  }
  static status ask(const engine_question_params& p, const launch_options& options) {
    if (p.list == nullptr || p.link.state == nullptr || p.link.records == nullptr || p.link.record_words < 16)
      return status::invalid(where, "the list or the records are missing");
    return nibble::launch(&ask_engine<ask_threads>, dim3(1), ask_threads, 0, options, where, p);
  }

 private:
  static constexpr const char* where = "nibble::moe::engine_wait";
};

}  // namespace nibble::moe
