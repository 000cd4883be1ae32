// SPDX-License-Identifier: Apache-2.0
/// \file
/// The fetch for experts that come beside a layer's work: few warps, and from sm_90 on no registers under
/// way, so that the multiprocessors are left to the kernels it runs beside.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_launch.cuh"

namespace nibble::moe {

/// One thread a block asks the bulk copy engine (sm_90 and later) for whole chunks, in and out. Chunks of all
/// entries are dealt out to the blocks in their order, as in fetch_experts. A block has Stages - 1 chunks
/// under way.
template <int Stages, int ChunkBytes>
__global__ __launch_bounds__(32) void fetch_experts_bulk(const __grid_constant__ fetch_params p) {
  using namespace device;
  static_assert(Stages >= 2 && ChunkBytes % 128 == 0, "a chunk is on its way in while one goes out");
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
/// \tparam Bulk the device has a bulk copy engine; without one it is the ordinary kernel of few warps, which
/// has 256 KiB under way
template <bool Bulk>
struct beside_fetch {
  using params = fetch_params;
  static constexpr const char* name = "fetch beside";
  static constexpr int blocks = Bulk ? 32 : 16, warps = Bulk ? 1 : 4;
  static constexpr int stages = 4, chunk_bytes = 4096;  ///< of the bulk kernel

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(kernel(), 32 * warps, std::size_t{0}, "fetch_experts_beside");
  }
  static status launch(const params& p, const launch_options& options) {
    static constexpr const char* where = "nibble::moe::fetch_experts_beside";
    if (const status s = check_fetch(p, where); !s.ok()) return s;
    return nibble::launch(kernel(), dim3(blocks), 32 * warps, 0, options, where, p);
  }

 private:
  static constexpr auto kernel() {
    if constexpr (Bulk)
      return &fetch_experts_bulk<stages, chunk_bytes>;
    else
      return fetch_kernel_of<fetch_policy{blocks, warps}>;
  }
};
using beside_fetch_family = beside_fetch<(default_device.architecture >= 90)>;

}  // namespace nibble::moe
