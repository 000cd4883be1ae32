// SPDX-License-Identifier: Apache-2.0
/// \file
/// The device's side of fetching by the copy engine: publishing what is missing, and waiting until it has
/// come.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_engine_types.hpp"
#include "nibble/moe/fetch_staged.cuh"

namespace nibble::moe {

namespace detail {

/// Words of a record are valid by themselves, so nothing has to be ordered.
__device__ __forceinline__ void write_record(std::uint64_t* word, std::uint32_t number, unsigned high,
                                             unsigned low) {
  const std::uint64_t v = std::uint64_t{number} << 32 | (high << 16 | low);
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}
__device__ __forceinline__ std::uint64_t* record_of(const engine_link& link, std::uint32_t number) {
  return link.records + static_cast<std::size_t>(number % engine_records) * link.record_words;
}
/// What a layer waits for, once its record, if it has one, is published. For one thread.
/// \param used whether any of the guesses for this layer came true
__device__ __forceinline__ void note_record(engine_state& s, std::uint32_t number, int demanded, int guesses,
                                            bool used) {
  const std::uint32_t guessed = s.guessed, older = s.guessed_older;
  s.needed = demanded > 0 ? 2 * number : 2 * (used ? guessed : older) + 1;
  s.guessed_older = guessed;
  if (guesses > 0) s.guessed = number;
  if (demanded + guesses > 0) s.published = number;
}

__device__ __forceinline__ uint2 read_done(const std::uint32_t* p) {
  uint2 v;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

}  // namespace detail

/// One warp; costs a chained launch when there is nothing to wait for.
template <int Threads>
__global__ __launch_bounds__(Threads) void await_engine(const __grid_constant__ engine_wait_params p) {
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (threadIdx.x != 0) return;
  engine_state& s = *p.state;
  const std::uint32_t needed = s.needed;
  bool lost = *static_cast<volatile std::uint32_t*>(&s.broken) != 0;
  uint2 seen = detail::read_done(&s.done);
  if (static_cast<std::int32_t>(seen.x - needed) < 0 && !lost) {
    const std::uint64_t begin = detail::nanoseconds();
    do {
      lost = detail::nanoseconds() - begin > fetch_patience_ns;
      seen = detail::read_done(&s.done);
    } while (static_cast<std::int32_t>(seen.x - needed) < 0 && !lost);
    if (lost) s.broken = 1;
  }
  if (lost || seen.y != 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.failures), 1ull);
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
  const std::uint32_t number = p.link.state->published + 1;
  std::uint64_t* const record = detail::record_of(p.link, number);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += Threads)
    detail::write_record(record + 1 + i, number, static_cast<unsigned>(p.list[4 + 2 * i]),
                         static_cast<unsigned>(p.list[5 + 2 * i]));
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (count > 0) detail::write_record(record, number, static_cast<unsigned>(count), 0);
  detail::note_record(*p.link.state, number, count, 0, false);
}

/// Waiting for the copy engine as a kernel family.
struct engine_wait_family {
  using params = engine_wait_params;
  static constexpr const char* name = "fetch by the copy engine";
  static constexpr int threads = 32;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    const status s = visit(await_engine<threads>, threads, std::size_t{0}, "await_engine");
    return s.ok() ? visit(ask_engine<threads>, threads, std::size_t{0}, "ask_engine") : s;
  }
  static status launch(const params& p, const launch_options& options) {
    if (p.state == nullptr || p.failures == nullptr)
      return status::invalid(where, "the state or the count of failures is missing");
    return nibble::launch(&await_engine<threads>, dim3(1), threads, 0, options, where, p);
  }
  static status ask(const engine_question_params& p, const launch_options& options) {
    if (p.list == nullptr || p.link.state == nullptr || p.link.records == nullptr || p.link.record_words < 16)
      return status::invalid(where, "the list or the records are missing");
    return nibble::launch(&ask_engine<threads>, dim3(1), threads, 0, options, where, p);
  }

 private:
  static constexpr const char* where = "nibble::moe::engine_wait";
};

}  // namespace nibble::moe
