// SPDX-License-Identifier: Apache-2.0
/// \file
/// The pieces of an offload measurement at the sizes of Qwen3.6-35B-A3B: 10,240 experts in locked host
/// memory, a pool of slots, the bytes of everything else that a step reads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/host/experts.hpp"
#include "nibble/moe/experts_family.cuh"
#include "nibble/moe/fetch_launch.cuh"
#include "nibble/moe/placement_calibrate.cuh"
#include "nibble/moe/residency_device.cuh"
#include "nibble/moe/residency_launch.cuh"
#include "unit/moe/traces.hpp"

namespace bench {

#define BENCH_CHECK(call)                                                                           \
  do {                                                                                              \
    if (const cudaError_t error = (call); error != cudaSuccess) {                                   \
      std::fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (0)

inline void good(nibble::status s) {
  if (s.ok()) return;
  std::fprintf(stderr, "%s: %s (%d)\n", s.where, s.text, s.cuda_error);
  std::exit(1);
}

inline constexpr nibble::moe::experts_shape experts_shape{2048, 512,  256,
                                                          8,    true, nibble::weight_format::nvfp4};
inline constexpr nibble::moe::residency_shape shape{40, 256, 8};
inline constexpr std::size_t slot_bytes = experts_shape.slot_bytes();
/// Everything but routed experts that a decode step reads: attention, delta nets and routers of 40 layers,
/// and the output matrix.
inline constexpr std::size_t layer_bytes = std::size_t{32} << 20, head_bytes = std::size_t{286} << 20;

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Reads `bytes` as a matrix-vector product does: before it waits.
__global__ __launch_bounds__(256) void read_bytes(const uint4* from, std::size_t count, unsigned* out) {
  unsigned sum = 0;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * 256;
  std::size_t i = static_cast<std::size_t>(blockIdx.x) * 256 + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
    sum += a.x ^ b.y ^ c.z ^ d.w;
  }
  for (; i < count; i += stride) sum += from[i].x;
  nibble::device::wait_for_previous_grid();
  nibble::device::let_next_grid_start();
  if (sum == 0x1234'5678u) *out = sum;
}
inline void read(const std::byte* from, std::size_t bytes, unsigned* out, nibble::launch_options o) {
  good(nibble::launch(&read_bytes, dim3(132 * 8), 256, 0, o, "read", reinterpret_cast<const uint4*>(from),
                      bytes / 16, out));
}

/// A stream, an event pair and graphs of what a body launches.
class timer {
 public:
  timer() {
    BENCH_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    BENCH_CHECK(cudaEventCreate(&begin_));
    BENCH_CHECK(cudaEventCreate(&end_));
  }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  template <class Body>
  cudaGraphExec_t capture(Body&& body) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    BENCH_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    body();
    BENCH_CHECK(cudaStreamEndCapture(stream_, &graph));
    BENCH_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    BENCH_CHECK(cudaGraphDestroy(graph));
    BENCH_CHECK(cudaGraphUpload(exec, stream_));
    return exec;
  }
  template <class Body>
  double microseconds(Body&& body) {
    BENCH_CHECK(cudaEventRecord(begin_, stream_));
    body();
    BENCH_CHECK(cudaEventRecord(end_, stream_));
    BENCH_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    BENCH_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return 1e3 * ms;
  }
  /// Median over `times` replays of a graph of `count` calls, per call.
  template <class Body>
  double per_call(int count, int times, Body&& body) {
    cudaGraphExec_t exec = capture([&] {
      for (int i = 0; i < count; ++i) body(i);
    });
    std::vector<double> all;
    for (int i = 0; i < times + 1; ++i) {
      const double us = microseconds([&] { BENCH_CHECK(cudaGraphLaunch(exec, stream_)); });
      if (i > 0) all.push_back(us / count);
    }
    BENCH_CHECK(cudaGraphExecDestroy(exec));
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// All experts in locked host memory: one random slot, and the expert's number in its first words.
inline std::unique_ptr<nibble::moe::expert_store> make_store(int count) {
  static nibble::moe::cuda_page_locker locker(0);
  std::vector<std::uint64_t> pattern(slot_bytes / 8);
  std::mt19937_64 random(5);
  for (auto& v : pattern) v = random() & 0xB7B7'B7B7'B7B7'B7B7ull;
  nibble::moe::expert_store_options o;
  o.count = count, o.slot_bytes = slot_bytes, o.locker = &locker;
  o.note = [](std::string_view text) {
    std::printf("note: %.*s\n", static_cast<int>(text.size()), text.data());
  };
  auto store = std::make_unique<nibble::moe::expert_store>(o);
  store->fill([&](int number, std::span<std::byte> slot, nibble::moe::expert_scales& scales) {
    std::memcpy(slot.data(), pattern.data(), slot.size());
    std::memcpy(slot.data(), &number, 1);
    scales = {0.01f, 0.01f, 0.01f};
  });
  return store;
}

}  // namespace bench
