// SPDX-License-Identifier: Apache-2.0
/// \file
/// The fetch kernel: listed experts from page-locked host memory into their slots.
///
/// Chunks of all entries are dealt out to the grid in their order, so entries arrive one after the other.
/// An entry whose numbers are out of range is skipped.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/moe/fetch_types.hpp"

namespace nibble::moe {

namespace detail {

template <bool Wide = false>
__device__ __forceinline__ uint4 load_host(const void* p) {
  uint4 v{};
#if __CUDA_ARCH__ >= 800
  if constexpr (Wide) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
  }
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

/// Bytes a warp has under way: eight loads of 16 bytes a lane before the first store.
inline constexpr unsigned fetch_chunk_bytes = 8 * 512;

/// One chunk of an entry, `bytes` long in all, by a warp.
template <class Load>
__device__ __forceinline__ void copy_chunk(const std::uint8_t* from, std::uint8_t* to, std::size_t bytes,
                                           unsigned chunk, Load load) {
  const std::size_t begin = static_cast<std::size_t>(chunk) * fetch_chunk_bytes + 16 * (threadIdx.x & 31u);
  uint4 v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (begin + 512 * i < bytes) v[i] = load(from + begin + 512 * i);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (begin + 512 * i < bytes) *reinterpret_cast<uint4*>(to + begin + 512 * i) = v[i];
}

}  // namespace detail

template <int Warps, bool Wide>
__global__ __launch_bounds__(32 * Warps) void fetch_experts(const __grid_constant__ fetch_params p) {
  const auto chunks =
      static_cast<unsigned>((p.bytes + detail::fetch_chunk_bytes - 1) / detail::fetch_chunk_bytes);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int entries = p.list[0];
  if (entries <= 0) return;
  const unsigned total = static_cast<unsigned>(entries) * chunks;
  for (unsigned u = blockIdx.x * Warps + (threadIdx.x >> 5); u < total; u += gridDim.x * Warps) {
    const std::uint8_t* from;
    std::uint8_t* to;
    if (!detail::fetch_entry(p, static_cast<int>(u / chunks), from, to)) continue;
    detail::copy_chunk(from, to, p.bytes, u % chunks,
                       [](const void* at) { return detail::load_host<Wide>(at); });
  }
}

}  // namespace nibble::moe
