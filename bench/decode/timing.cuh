// SPDX-License-Identifier: Apache-2.0
/// \file
/// What timing whole steps needs: a pair of events, medians, how fast this machine moves bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <utility>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/core/driver.cuh"
#include "nibble/core/driver_error.hpp"

namespace bench {

inline void good(cudaError_t e, const char* what) {
  nibble::require(nibble::runtime_status(e, "bench_steps", what));
}

/// An inline template, so that several files may hold it.
template <int Threads>
__global__ void read_kernel(const uint4* data, std::size_t count, unsigned* out) {
  unsigned sum = 0;
  for (std::size_t i = blockIdx.x * Threads + threadIdx.x; i < count; i += gridDim.x * Threads) {
    const uint4 v = __ldcs(data + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *out = sum;
}

class clock {
 public:
  explicit clock(cudaStream_t stream) : stream_(stream) {
    good(cudaEventCreate(&begin_), "event");
    good(cudaEventCreate(&end_), "event");
  }
  clock(const clock&) = delete;
  clock& operator=(const clock&) = delete;
  ~clock() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }
  template <class Body>
  double us(Body&& body) {
    good(cudaEventRecord(begin_, stream_), "event");
    std::forward<Body>(body)();
    good(cudaEventRecord(end_, stream_), "event");
    good(cudaEventSynchronize(end_), "the timed work failed");
    float ms = 0;
    good(cudaEventElapsedTime(&ms, begin_, end_), "event");
    return 1000.0 * static_cast<double>(ms);
  }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Bytes a microsecond of reading device memory.
inline double memory_bytes_per_us(clock& clock) {
  const std::size_t bytes = std::size_t{4} << 30;
  const nibble::device_memory data(bytes), out(256);
  good(cudaMemset(data.data(), 1, bytes), "memset");
  double best = 1e30;
  for (int blocks : {132 * 4, 132 * 8, 132 * 16})
    for (int i = 0; i < 4; ++i)
      best = std::min(best, clock.us([&] {
        read_kernel<512><<<static_cast<unsigned>(blocks), 512, 0, clock.stream()>>>(
            data.as<uint4>(), bytes / 16, out.as<unsigned>());
      }));
  std::fprintf(stderr, "read bandwidth %.2f TB/s\n", static_cast<double>(bytes) / best / 1e6);
  return static_cast<double>(bytes) / best;
}

/// Bytes a microsecond of one large copy from page-locked host memory.
inline double link_bytes_per_us(clock& clock) {
  const std::size_t bytes = std::size_t{256} << 20;
  const nibble::pinned_memory from(bytes);
  const nibble::device_memory to(bytes);
  double best = 1e30;
  for (int i = 0; i < 6; ++i)
    best = std::min(best, clock.us([&] {
      good(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyHostToDevice, clock.stream()), "copy");
    }));
  std::fprintf(stderr, "link %.1f GB/s\n", static_cast<double>(bytes) / best / 1e3);
  return static_cast<double>(bytes) / best;
}

}  // namespace bench
