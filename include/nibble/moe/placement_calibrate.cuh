// SPDX-License-Identifier: Apache-2.0
/// \file
/// Measures what fetching and computing missing experts take on this machine, alone and together.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/moe/fetch_engine_measure.cuh"
#include "nibble/moe/placement_host.cuh"
#include "nibble/moe/placement_server.cuh"
#include "nibble/moe/placement_split.hpp"

namespace nibble::moe {

/// Medians in microseconds for k = 0 … measured_misses. Nothing for the host where it failed or took seconds.
struct measured_latencies {
  static constexpr int measured_misses = 6, repeats = 9;
  std::vector<float> fetch, fetch_contended, host, host_contended;
  [[nodiscard]] miss_latencies view() const { return {fetch, fetch_contended, host, host_contended}; }
};

/// One token, one layer. Takes some tens of milliseconds and overwrites the slots 0 … measured_misses - 1, so
/// it comes before the pool is warmed. \param fetch store and slots, at least measured_misses of both, which
/// is then also the least top_k of the server  \param engine what fetches; null: a kernel. Throws
/// device_error.
[[nodiscard]] inline measured_latencies measure_misses(fetch_params fetch, const host_experts_server& server,
                                                       int hidden, int top_k, cudaStream_t stream,
                                                       const copy_engine* engine = nullptr) {
  constexpr int most = measured_latencies::measured_misses, times = measured_latencies::repeats;
  static constexpr const char* where = "nibble::moe::measure_misses";
  const int ways = std::min(most, std::min(top_k, std::min(fetch.slot_count, fetch.expert_count)));
  const auto call = [](cudaError_t e) { require(runtime_status(e, where, "a measurement failed")); };
  // Lists for every k, ids that name the experts, weights, a row of x and one of y.
  constexpr std::size_t list_words = 4 + 2 * 64;
  std::vector<std::int32_t> words(2 * list_words * (most + 1) + 64, 0);
  for (int k = 0; k <= ways; ++k) {
    std::int32_t* const fetched = words.data() + list_words * static_cast<std::size_t>(k);
    std::int32_t* const listed = fetched + list_words * (most + 1);
    fetched[0] = listed[0] = k;
    for (int i = 0; i < k; ++i) fetched[4 + 2 * i] = fetched[5 + 2 * i] = listed[4 + i] = i;
  }
  std::int32_t* const ids = words.data() + 2 * list_words * (most + 1);
  for (int i = 0; i < 64; ++i) ids[i] = i < top_k ? i : -1;
  const device_memory d_words(4 * words.size()), row(2 * 2 * static_cast<std::size_t>(hidden) + 1024),
      state(256);
  call(cudaMemcpyAsync(d_words.data(), words.data(), 4 * words.size(), cudaMemcpyHostToDevice, stream));
  call(cudaMemsetAsync(row.data(), 0, row.bytes(), stream));
  call(cudaMemsetAsync(state.data(), 0, state.bytes(), stream));
  const auto* const lists = d_words.as<std::int32_t>();
  host_experts_params p;
  server.set(p);
  p.rows = 1, p.ids = lists + 2 * list_words * (most + 1);
  p.x = row.data() + 1024, p.ldx = hidden;
  p.y = row.data() + 1024 + 2 * static_cast<std::size_t>(hidden), p.ldy = hidden;
  p.weights = row.as<float>();
  p.failures = state.as<std::uint64_t>();
  const launch_options options{stream, launch_chain::plain};
  cudaEvent_t events[3];
  for (auto& e : events) call(cudaEventCreate(&e));
  struct sample {
    float fetch, whole, compute;
  };
  // `fetched` experts while the CPU computes `listed`: until those are there, until both are.
  const auto run = [&](int fetched, int listed) {
    std::vector<sample> all;
    for (int i = 0; i < times; ++i) {
      fetch.list = lists + list_words * static_cast<std::size_t>(fetched);
      p.host_list = lists + list_words * static_cast<std::size_t>(most + 1 + listed);
      call(cudaEventRecord(events[0], stream));
      if (listed > 0) require(host_experts_family::ask(p, options));
      if (fetched > 0) require(fetch_listed(fetch, engine, p.failures, options));
      call(cudaEventRecord(events[1], stream));
      if (listed > 0) require(host_experts_family::launch(p, options));
      call(cudaEventRecord(events[2], stream));
      call(cudaStreamSynchronize(stream));
      sample s{};
      call(cudaEventElapsedTime(&s.fetch, events[0], events[1]));
      call(cudaEventElapsedTime(&s.whole, events[0], events[2]));
      all.push_back({1e3f * s.fetch, 1e3f * s.whole, server.last_compute_us()});
    }
    const auto median = [&](float sample::*what) {
      std::nth_element(all.begin(), all.begin() + times / 2, all.end(),
                       [what](const sample& a, const sample& b) { return a.*what < b.*what; });
      return all[times / 2].*what;
    };
    return sample{median(&sample::fetch), median(&sample::whole), median(&sample::compute)};
  };
  measured_latencies out;
  for (auto* v : {&out.fetch, &out.fetch_contended, &out.host, &out.host_contended}) v->push_back(0);
  static_cast<void>(run(1, 1));  // wakes the thread
  for (int k = 1; k <= ways; ++k) {
    const sample fetched = run(k, 0), computed = run(0, k);
    out.fetch.push_back(fetched.whole);
    out.host.push_back(computed.whole);
    // The other side has as much to do, so that both are busy throughout.
    const sample beside = run(k, k);
    out.fetch_contended.push_back(beside.fetch);
    out.host_contended.push_back(beside.compute + std::max(0.0f, computed.whole - computed.compute));
  }
  for (auto& e : events) static_cast<void>(cudaEventDestroy(e));
  // Nobody waits for an answer that failed, so a host that cannot compute would look fast.
  std::uint64_t failures = 0;
  call(cudaMemcpyAsync(&failures, state.data(), sizeof failures, cudaMemcpyDeviceToHost, stream));
  call(cudaStreamSynchronize(stream));
  if (failures != 0) out.host.clear(), out.host_contended.clear();
  return out;
}

}  // namespace nibble::moe
