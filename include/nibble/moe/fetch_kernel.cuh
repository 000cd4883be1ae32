// SPDX-License-Identifier: Apache-2.0
/// \file
/// The fetch kernels: listed experts from page-locked host memory into their slots.
///
/// Chunks of all entries are dealt out to the grid in their order, so entries arrive one after the other.
/// An entry whose numbers are out of range is skipped.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/moe/fetch_types.hpp"

namespace nibble::moe {

namespace detail {

__device__ __forceinline__ uint4 load_host(const void* p) {
  uint4 v{};
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
#endif
  return v;
}

/// From and to of one entry; false: nothing to copy.
__device__ __forceinline__ bool fetch_entry(const fetch_params& p, int entry, const std::uint8_t*& from,
                                            std::uint8_t*& to) {
  const int number = p.list[4 + 2 * entry], slot = p.list[5 + 2 * entry];
  if (number < 0 || number >= p.expert_count || slot < 0 || slot >= p.slot_count) return false;
  from = p.store + static_cast<std::size_t>(number) * p.slot_bytes + p.first_byte;
  to = p.slots + static_cast<std::size_t>(slot) * p.slot_bytes + p.first_byte;
  return true;
}

/// Bulk copy from shared to global memory; groups are counted, and the waits below are for all but the last
/// `Pending` of this thread's groups: until their source may be overwritten, or until they are done.
__device__ __forceinline__ void bulk_store(void* to, std::uint32_t from_shared, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from_shared),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_bulk_group() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wait_for_bulk_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wait_for_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

}  // namespace detail

/// A warp takes a chunk of 4 KiB: eight loads of 16 bytes a lane are in flight before the first store.
template <int Warps>
__global__ __launch_bounds__(32 * Warps) void fetch_by_loads(const __grid_constant__ fetch_params p) {
  constexpr int each = 8, chunk = each * 512;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto chunks = static_cast<unsigned>((p.bytes + chunk - 1) / chunk);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int entries = p.list[0];
  if (entries <= 0) return;
  const unsigned total = static_cast<unsigned>(entries) * chunks;
  for (unsigned u = blockIdx.x * Warps + (threadIdx.x >> 5); u < total; u += gridDim.x * Warps) {
    const std::uint8_t* from;
    std::uint8_t* to;
    if (!detail::fetch_entry(p, static_cast<int>(u / chunks), from, to)) continue;
    const std::size_t begin = static_cast<std::size_t>(u % chunks) * chunk + 16 * lane;
    uint4 v[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (begin + 512 * i < p.bytes) v[i] = detail::load_host(from + begin + 512 * i);
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (begin + 512 * i < p.bytes) *reinterpret_cast<uint4*>(to + begin + 512 * i) = v[i];
  }
}

/// One thread a block keeps `Stages` chunks in flight through shared memory.
template <int Stages, int ChunkBytes>
__global__ __launch_bounds__(32) void fetch_by_bulk(const __grid_constant__ fetch_params p) {
  static_assert(ChunkBytes % 128 == 0 && Stages >= 2);
  extern __shared__ __align__(128) std::uint8_t fetch_ring[];
  __shared__ __align__(8) std::uint64_t full[Stages];
  if (threadIdx.x != 0) {
    device::wait_for_previous_grid();
    device::let_next_grid_start();
    return;
  }
  const std::uint32_t ring = device::shared_address(fetch_ring), barriers = device::shared_address(full);
  for (int i = 0; i < Stages; ++i) device::barrier_init(barriers + 8 * i, 1);
  device::barrier_init_fence();
  const std::uint64_t policy = device::evict_first_policy();
  const auto chunks = static_cast<unsigned>((p.bytes + ChunkBytes - 1) / ChunkBytes);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int entries = p.list[0];
  if (entries <= 0) return;
  const unsigned total = static_cast<unsigned>(entries) * chunks;
  const unsigned mine = blockIdx.x < total ? (total - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const auto place = [&](unsigned i, const std::uint8_t*& from, std::uint8_t*& to, std::uint32_t& bytes) {
    const unsigned u = blockIdx.x + i * gridDim.x;
    if (!detail::fetch_entry(p, static_cast<int>(u / chunks), from, to)) return false;
    const std::size_t begin = static_cast<std::size_t>(u % chunks) * ChunkBytes;
    const std::size_t left = p.bytes - begin;
    bytes = static_cast<std::uint32_t>(left < ChunkBytes ? left : ChunkBytes);
    from += begin, to += begin;
    return true;
  };
  const auto ask = [&](unsigned i) {
    const std::uint8_t* from;
    std::uint8_t* to;
    std::uint32_t bytes;
    const std::uint32_t stage = i % Stages;
    if (!place(i, from, to, bytes)) {
      device::barrier_arrive(barriers + 8 * stage);
      return;
    }
    device::barrier_expect(barriers + 8 * stage, bytes);
    device::bulk_copy(ring + stage * ChunkBytes, from, bytes, barriers + 8 * stage, policy);
  };
  // One stage is always being emptied, so that waiting for its reads is not waiting for its stores.
  constexpr unsigned lead = Stages - 1;
  for (unsigned i = 0; i < lead && i < mine; ++i) ask(i);
  for (unsigned i = 0; i < mine; ++i) {
    const std::uint8_t* from;
    std::uint8_t* to;
    std::uint32_t bytes;
    device::barrier_wait(barriers + 8 * (i % Stages), i / Stages & 1u);
    if (place(i, from, to, bytes)) detail::bulk_store(to, ring + i % Stages * ChunkBytes, bytes);
    detail::commit_bulk_group();  // an empty group where there was nothing to store
    if (i + lead < mine) {
      // The stage that chunk i + lead takes was read out by the store of chunk i - 1.
      detail::wait_for_bulk_reads<1>();
      ask(i + lead);
    }
  }
  detail::wait_for_bulk_stores<0>();
}

}  // namespace nibble::moe
