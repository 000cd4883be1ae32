// SPDX-License-Identifier: Apache-2.0
/// \file
/// The fetch kernel for experts that come beside a layer's work: few warps, no registers under way, so that
/// the multiprocessors are left to the kernels it runs beside.
#pragma once

#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_launch.cuh"

namespace nibble::moe {

namespace detail {

/// A warp's copies through a ring in shared memory that fills without registers, so that the multiprocessor
/// is left to the kernels beside. A lane reads back only what it asked for itself.
template <int Stages>
struct chunk_pipe {
  static constexpr unsigned chunk_bytes = 2048, copies = chunk_bytes / 512;
  struct storage {
    alignas(16) std::uint8_t ring[Stages * chunk_bytes];
    std::uint8_t* to[Stages];  ///< where a chunk goes; null: nowhere
    unsigned bytes[Stages];
  };

  /// Asks for `bytes` (at most a chunk) and writes out the chunk asked for Stages - 1 calls before.
  __device__ __forceinline__ void push(const std::uint8_t* from, std::uint8_t* to, unsigned bytes) {
    const unsigned lane = threadIdx.x & 31u, stage = count % Stages, oldest = (count + 1) % Stages;
    if (to != nullptr)
#pragma unroll
      for (unsigned i = 0; i < copies; ++i)
        if (512 * i + 16 * lane < bytes)
          device::copy_async(ring + stage * chunk_bytes + 512 * i + 16 * lane, from + 512 * i + 16 * lane,
                             true);
    device::commit_copies();
    if (lane == 0) room->to[stage] = to, room->bytes[stage] = bytes;
    device::wait_for_copies<Stages - 1>();
    __syncwarp();
    if (std::uint8_t* const out = room->to[oldest]; out != nullptr)
#pragma unroll
      for (unsigned i = 0; i < copies; ++i)
        if (512 * i + 16 * lane < room->bytes[oldest])
          *reinterpret_cast<uint4*>(out + 512 * i + 16 * lane) =
              device::load_shared(ring + oldest * chunk_bytes + 512 * i + 16 * lane);
    __syncwarp();
    ++count;
  }
  /// Writes out all that was asked for.
  __device__ __forceinline__ void drain() {
#pragma unroll 1
    for (int i = 0; i < Stages - 1; ++i) push(nullptr, nullptr, 0);
  }

  storage* room;
  std::uint32_t ring;
  unsigned count;
};

}  // namespace detail

/// One warp a block: chunks of all entries are dealt out to the blocks in their order, as in fetch_experts.
template <int Stages>
__global__ __launch_bounds__(32) void fetch_experts_beside(const __grid_constant__ fetch_params p) {
  using pipe_type = detail::chunk_pipe<Stages>;
  constexpr unsigned chunk = pipe_type::chunk_bytes;
  __shared__ typename pipe_type::storage room;
  if (threadIdx.x < Stages) room.to[threadIdx.x] = nullptr;
  __syncwarp();
  pipe_type pipe{&room, device::shared_address(room.ring), 0};
  const auto chunks = static_cast<unsigned>((p.bytes + chunk - 1) / chunk);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int entries = p.list[0];
  if (entries <= 0) return;
  const unsigned total = static_cast<unsigned>(entries) * chunks;
#pragma unroll 1
  for (unsigned u = blockIdx.x; u < total; u += gridDim.x) {
    const std::uint8_t* from;
    std::uint8_t* to;
    if (!detail::fetch_entry(p, static_cast<int>(u / chunks), from, to)) continue;
    const std::size_t begin = static_cast<std::size_t>(u % chunks) * chunk, left = p.bytes - begin;
    pipe.push(from + begin, to + begin, static_cast<unsigned>(left < chunk ? left : chunk));
  }
  pipe.drain();
}

/// The same by the bulk copy engine (sm_90 and later): one thread a block asks for whole chunks, in and out.
template <int Stages, int ChunkBytes>
__global__ __launch_bounds__(32) void fetch_experts_bulk(const __grid_constant__ fetch_params p) {
  using namespace device;
  __shared__ __align__(128) std::uint8_t ring[Stages][ChunkBytes];
  __shared__ std::uint64_t arrived[Stages];
  __shared__ std::uint8_t* goes_to[Stages];
  __shared__ unsigned bytes[Stages];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < Stages; ++i) barrier_init(shared_address(&arrived[i]), 1);
  barrier_init_fence();
  const auto chunks = static_cast<unsigned>((p.bytes + ChunkBytes - 1) / ChunkBytes);
  const std::uint64_t policy = evict_first_policy();
  wait_for_previous_grid();
  let_next_grid_start();
  const int entries = p.list[0];
  const unsigned total = entries > 0 ? static_cast<unsigned>(entries) * chunks : 0;
  unsigned asked = 0, written = 0;
  const auto write_oldest = [&] {
    const unsigned s = written % Stages;
    barrier_wait(shared_address(&arrived[s]), written / Stages & 1);
    bulk_store(goes_to[s], shared_address(ring[s]), bytes[s]);
    commit_bulk_stores();
    ++written;
  };
#pragma unroll 1
  for (unsigned u = blockIdx.x; u < total; u += gridDim.x) {
    const std::uint8_t* from;
    std::uint8_t* to;
    if (!detail::fetch_entry(p, static_cast<int>(u / chunks), from, to)) continue;
    if (asked - written == Stages - 1) write_oldest();
    wait_for_bulk_reads<1>();  // the place's last chunk went out before the one just written
    const std::size_t begin = static_cast<std::size_t>(u % chunks) * ChunkBytes, left = p.bytes - begin;
    const unsigned s = asked++ % Stages;
    goes_to[s] = to + begin;
    bytes[s] = static_cast<unsigned>(left < ChunkBytes ? left : ChunkBytes);
    barrier_expect(shared_address(&arrived[s]), bytes[s]);
    bulk_copy(shared_address(ring[s]), from + begin, bytes[s], shared_address(&arrived[s]), policy);
  }
  while (written < asked) write_oldest();
  wait_for_bulk_stores();
}

/// Fetching beside other kernels as a kernel family; takes what fetch_family takes.
struct beside_fetch_family {
  using params = fetch_params;
  static constexpr const char* name = "fetch beside";
  static constexpr bool bulk = default_device.architecture >= 90;
  static constexpr int blocks = bulk ? 32 : 16, stages = bulk ? 4 : 8, chunk_bytes = 4096;
  static constexpr void (*kernel)(fetch_params) = [] {
    if constexpr (bulk)
      return &fetch_experts_bulk<stages, chunk_bytes>;
    else
      return &fetch_experts_beside<stages>;
  }();

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(kernel, 32, std::size_t{0}, "fetch_experts_beside");
  }
  static status launch(const params& p, const launch_options& options) {
    static constexpr const char* where = "nibble::moe::fetch_experts_beside";
    if (const status s = check_fetch(p, where); !s.ok()) return s;
    return nibble::launch(kernel, dim3(blocks), 32, 0, options, where, p);
  }
};

}  // namespace nibble::moe
