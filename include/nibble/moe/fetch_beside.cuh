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
  extern __shared__ __align__(128) std::uint8_t ring[];  // [Stages][ChunkBytes]
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
    bulk_store(goes_to[s], shared_address(ring + s * ChunkBytes), bytes[s]);
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
    bulk_copy(shared_address(ring + s * ChunkBytes), from + begin, bytes[s], shared_address(&arrived[s]),
              policy);
  }
  while (written < asked) write_oldest();
  wait_for_bulk_stores();
}

/// Fetching beside other kernels as a kernel family; takes what fetch_family takes.
///
/// 256 KiB or more are under way. Where a multiprocessor has the shared memory, four blocks have all of it:
/// four multiprocessors then have no place for a block that wants much, and the others are as good as empty.
/// A grid of one block a multiprocessor should leave out `multiprocessors`
/// (launch_options::left_multiprocessors).
template <device_class Device>
struct beside_fetch {
  using params = fetch_params;
  static constexpr const char* name = "fetch beside";
  static constexpr bool bulk = Device.has_bulk_copies(), few = bulk && Device.shared_bytes() > 200 * 1024;
  static constexpr int blocks = few ? 4 : bulk ? 32 : 16, warps = bulk ? 1 : 4;
  static constexpr int stages = few ? 16 : 4, chunk_bytes = few ? 8192 : 4096;  ///< of the bulk kernel
  static constexpr int shared_bytes = bulk ? stages * chunk_bytes : 0;
  static constexpr int multiprocessors = few ? blocks : 0;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(kernel(), 32 * warps, std::size_t{shared_bytes}, "fetch_experts_beside");
  }
  static status launch(const params& p, const launch_options& options) {
    static constexpr const char* where = "nibble::moe::fetch_experts_beside";
    if (const status s = check_fetch(p, where); !s.ok()) return s;
    return nibble::launch(kernel(), dim3(blocks), 32 * warps, shared_bytes, options, where, p);
  }

 private:
  static constexpr auto kernel() {
    if constexpr (bulk)
      return &fetch_experts_bulk<stages, chunk_bytes>;
    else
      return fetch_kernel_of<fetch_policy{blocks, warps}>;
  }
};
using beside_fetch_family = beside_fetch<default_device>;

}  // namespace nibble::moe
