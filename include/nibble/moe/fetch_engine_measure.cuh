// SPDX-License-Identifier: Apache-2.0
/// \file
/// Measures whether the copy engine or a kernel brings missing experts faster on this machine.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/moe/fetch_engine.cuh"
#include "nibble/moe/fetch_engine_server.cuh"
#include "nibble/moe/fetch_launch.cuh"
#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

/// Medians in microseconds for one fetch of `experts`, hand-over included.
struct fetch_times {
  int experts = 0;
  float kernel_us = 0;
  float engine_us = 0;  ///< infinite where it did not answer
  [[nodiscard]] bool engine_answers() const { return engine_us < std::numeric_limits<float>::infinity(); }
  /// The engine leaves the multiprocessors alone and needs no second stream for guesses, so it may take a
  /// little longer: 5 %.
  [[nodiscard]] bool engine_pays() const { return engine_us <= 1.05f * kernel_us; }
};

/// Fetches what fetch.list names as a step would, for measurements. \param engine null: by a kernel
/// \param failures counts what did not come
[[nodiscard]] inline status fetch_listed(const fetch_params& fetch, const copy_engine* engine,
                                         std::uint64_t* failures, const launch_options& options) {
  if (engine == nullptr) return fetch_family::launch(fetch, options);
  if (const status s = engine_wait_family::ask({fetch.list, engine->link()}, options); !s.ok()) return s;
  return engine_wait_family::launch(engine->wait_params(fetch, failures), options);
}

/// Takes a few milliseconds and overwrites the first slots, so it comes before the pool is warmed.
/// \param fetch store and slots, at least one of both. Throws device_error.
[[nodiscard]] inline fetch_times measure_fetch(fetch_params fetch, const copy_engine& engine,
                                               cudaStream_t stream) {
  static constexpr const char* where = "nibble::moe::measure_fetch";
  constexpr int most = 4, repeats = 9, warm = 2, list_words = 4 + 2 * most;
  fetch_times out;
  out.experts = std::min({most, fetch.slot_count, fetch.expert_count});
  const auto call = [](cudaError_t e) { require(runtime_status(e, where, "a measurement failed")); };
  // Every repetition names other experts, so that no cache of the host helps.
  std::vector<std::int32_t> words(static_cast<std::size_t>(list_words * (repeats + warm)), 0);
  for (int r = 0, next = 0; r < repeats + warm; ++r) {
    std::int32_t* const list = words.data() + list_words * r;
    list[0] = out.experts;
    for (int i = 0; i < out.experts; ++i, next = (next + 1) % fetch.expert_count)
      list[4 + 2 * i] = next, list[5 + 2 * i] = i;
  }
  const device_memory lists(4 * words.size()), failures(256);
  copy_to_device(lists.data(), words.data(), 4 * words.size());
  call(cudaMemsetAsync(failures.data(), 0, failures.bytes(), stream));
  cudaEvent_t begin, end;
  call(cudaEventCreate(&begin));
  call(cudaEventCreate(&end));
  const launch_options options{stream, launch_chain::plain};
  const auto median = [&](const copy_engine* by) {
    std::vector<float> all;
    for (int r = 0; r < repeats + warm; ++r) {
      fetch.list = lists.as<std::int32_t>() + list_words * r;
      call(cudaEventRecord(begin, stream));
      require(fetch_listed(fetch, by, failures.as<std::uint64_t>(), options));
      call(cudaEventRecord(end, stream));
      call(cudaStreamSynchronize(stream));
      float ms = 0;
      call(cudaEventElapsedTime(&ms, begin, end));
      if (r >= warm) all.push_back(1e3f * ms);
    }
    std::nth_element(all.begin(), all.begin() + repeats / 2, all.end());
    return all[repeats / 2];
  };
  out.kernel_us = median(nullptr);
  out.engine_us = median(&engine);
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
  std::uint64_t failed = 0;
  call(cudaMemcpyAsync(&failed, failures.data(), sizeof failed, cudaMemcpyDeviceToHost, stream));
  call(cudaStreamSynchronize(stream));
  if (failed != 0) out.engine_us = std::numeric_limits<float>::infinity();
  return out;
}

}  // namespace nibble::moe
