// SPDX-License-Identifier: Apache-2.0
/// \file
/// The fetch kernel that asks host threads for what it cannot read itself.
#pragma once

#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_kernel.cuh"
#include "nibble/moe/fetch_staged_types.hpp"

namespace nibble::moe {

namespace detail {

__device__ __forceinline__ std::uint64_t read_answer(const std::uint64_t* p) {
  std::uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void write_mail(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void write_mail(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
/// Places of the ring are written again and again, so nothing of them may come out of a cache.
__device__ __forceinline__ uint4 load_ring(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

/// Waits until the host has answered for `tag`, or gives up. \return whether the expert is in its place
__device__ inline bool wait_for_ring(const staged_fetch_params& p, std::uint32_t tag) {
  const std::uint64_t* const answer = &p.mail->answers[tag % fetch_ring_places];
  volatile std::uint32_t* const broken = &p.state->broken;
  const std::uint64_t begin = nanoseconds();
  for (;;) {
    const std::uint64_t said = read_answer(answer);
    if (said >> 32 == tag && (said & 3) != 0) return (said & 3) == fetch_answer_good;
    if (*broken != 0) return false;
    if (nanoseconds() - begin > fetch_patience_ns) {
      *broken = 1;
      // Block 0 counts what it misses itself; it may have seen the answer in the last moment.
      if (blockIdx.x != 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.failures), 1ull);
      return false;
    }
    __nanosleep(200);
  }
}

}  // namespace detail

/// As fetch_experts; entries from `locked` on come through the ring, in the order of the list.
template <int Warps>
__global__ __launch_bounds__(32 * Warps) void fetch_staged(const __grid_constant__ staged_fetch_params p) {
  __shared__ bool there;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const std::size_t bytes = p.fetch.bytes;
  const auto chunks =
      static_cast<unsigned>((bytes + detail::fetch_chunk_bytes - 1) / detail::fetch_chunk_bytes);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int entries = p.fetch.list[0];
  if (entries <= 0) return;
  const std::uint32_t first_tag = p.state->last_tag + 1;
  const bool broken = *static_cast<volatile std::uint32_t*>(&p.state->broken) != 0;
  const auto staged_number = [&](int entry) {
    const int number = p.fetch.list[4 + 2 * entry], slot = p.fetch.list[5 + 2 * entry];
    return number >= p.locked && number < p.fetch.expert_count && slot >= 0 && slot < p.fetch.slot_count;
  };
  if (blockIdx.x == 0 && threadIdx.x == 0 && !broken) {
    std::uint32_t tag = first_tag;
    for (int i = 0; i < entries; ++i)
      if (staged_number(i)) {
        const auto number = static_cast<std::uint32_t>(p.fetch.list[4 + 2 * i]);
        detail::write_mail(&p.mail->asked[tag % 1024u], std::uint64_t{tag} << 32 | number);
        ++tag;
      }
  }
  std::uint32_t tag = first_tag;
  for (int entry = 0; entry < entries; ++entry) {
    const std::uint8_t* from;
    std::uint8_t* to;
    if (!detail::fetch_entry(p.fetch, entry, from, to)) continue;
    const bool staged = staged_number(entry);
    if (staged) {
      if (threadIdx.x == 0) there = !broken && detail::wait_for_ring(p, tag);
      __syncthreads();
      if (!there && blockIdx.x == 0 && threadIdx.x == 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(p.failures), 1ull);
      from = p.ring + static_cast<std::size_t>(tag % fetch_ring_places) * p.fetch.slot_bytes;
    }
    if (!staged || there)
      for (unsigned u = blockIdx.x * Warps + static_cast<unsigned>(warp); u < chunks;
           u += gridDim.x * Warps) {
        detail::copy_chunk(from, to, bytes, u, [&](const void* at) {
          return staged ? detail::load_ring(at) : detail::load_host(at);
        });
      }
    if (staged) {
      __syncthreads();  // everybody has read; `there` may change
      if (threadIdx.x == 0) {
        __threadfence_system();
        const std::uint32_t place = tag % fetch_ring_places;
        if (atomicAdd(&p.state->consumed[place], 1u) == gridDim.x - 1) {
          p.state->consumed[place] = 0;
          __threadfence_system();
          detail::write_mail(&p.mail->taken[place], tag);
        }
      }
      ++tag;
    }
  }
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&p.state->blocks_done, 1u) == gridDim.x - 1) {
      p.state->blocks_done = 0;
      p.state->last_tag = tag - 1;
    }
  }
}

/// Fetching with a ring as a kernel family; see fetch_server.
struct staged_fetch_family {
  using params = staged_fetch_params;
  static constexpr const char* name = "fetch through the host";
  static constexpr int warps = 8, blocks = 16;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(fetch_staged<warps>, 32 * warps, std::size_t{0}, "fetch_staged");
  }
  static status launch(const params& p, const launch_options& options) {
    static constexpr const char* where = "nibble::moe::fetch_staged";
    const auto aligned = [](const void* a, std::uintptr_t to) {
      return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % to == 0;
    };
    if (!aligned(p.fetch.list, 4) || !aligned(p.fetch.slots, 128) || !aligned(p.ring, 16) ||
        p.mail == nullptr || p.state == nullptr || p.failures == nullptr)
      return status::invalid(where,
                             "the list, the slots (128-byte), the ring (16-byte) or its mail are missing");
    if (p.locked > 0 && !aligned(p.fetch.store, 16))
      return status::invalid(where, "locked experts need a store with a 16-byte address");
    if (p.fetch.slot_bytes == 0 || p.fetch.slot_bytes % 128 != 0 || p.fetch.first_byte != 0 ||
        p.fetch.bytes != p.fetch.slot_bytes)
      return status::invalid(where, "only whole slots go through the ring");
    return nibble::launch(fetch_staged<warps>, dim3(blocks), 32 * warps, 0, options, where, p);
  }
};

}  // namespace nibble::moe
