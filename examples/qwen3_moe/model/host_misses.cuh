// SPDX-License-Identifier: Apache-2.0
/// \file
/// Missing experts that the CPU computes instead of having them fetched: the host's side, and how many.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "model/expert_keeping.hpp"
#include "nibble/host/resident_experts.hpp"
#include "nibble/host/thread_pool.hpp"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/placement_calibrate.cuh"
#include "nibble/moe/placement_server.cuh"
#include "nibble/moe/placement_split.hpp"
#include "nibble/moe/residency_device.cuh"

namespace qwen3_moe {

/// What came of measuring. Without a server the CPU is left alone.
struct host_misses {
  std::unique_ptr<nibble::moe::host_experts_server> server;
  std::array<std::int32_t, nibble::moe::most_split_misses + 1> fetch_of{};
  double bytes_per_us = 0;  ///< of experts that the CPU computes alone, as measured
  std::string text;         ///< one line for the start
};

namespace detail {

/// Threads and experts of the host's side; the server's function owns it.
struct host_experts_state {
  /// \param others threads that are busy meanwhile
  host_experts_state(const nibble::moe::expert_store& from, int wanted_threads, int others)
      : store(from),
        pool(wanted_threads > 0 ? wanted_threads : std::max(1, nibble::host::available_cores() - others)) {}
  const nibble::moe::expert_store& store;
  nibble::host::thread_pool pool;
  /// While measuring, each call takes another layer: experts that lie in a cache would be too fast.
  std::atomic<bool> measuring = false;
  int next_layer = 0;
};

}  // namespace detail

/// Measures and decides, in some tens of milliseconds. NVFP4 experts, all of them page-locked. The slots are
/// overwritten. \param slots at least as many as a token chooses \param threads 0: those that the cores leave
/// over \param engine what fetches; null: a kernel. Throws device_error.
[[nodiscard]] inline host_misses measure_host_misses(const nibble::moe::expert_store& store, cpu_share wish,
                                                     int hidden, int inner, int layers, int top_k,
                                                     std::byte* slots, int slot_count, int threads,
                                                     cudaStream_t stream,
                                                     const nibble::moe::copy_engine* engine) {
  using namespace nibble::moe;
  host_misses out;
  const auto state = std::make_shared<detail::host_experts_state>(store, threads, engine != nullptr ? 2 : 1);
  const int layer_experts = store.count() / layers;
  auto server = std::make_unique<host_experts_server>(
      hidden, top_k,
      [=](int layer, int rows, const std::int32_t* ids, const float* weights, const float* x, float* y) {
        if (state->measuring) layer = state->next_layer++ % layers;
        if (layer < 0 || layer >= layers) throw nibble::error("experts on the CPU: there is no such layer");
        for (int i = 0; i < rows * top_k; ++i)
          if (ids[i] >= layer_experts) throw nibble::error("experts on the CPU: there is no such expert");
        const auto first = static_cast<std::size_t>(layer) * static_cast<std::size_t>(layer_experts);
        const auto& from = state->store;
        nibble::host::routed_experts(state->pool,
                                     {hidden, inner, top_k, from.data() + first * from.slot_bytes(),
                                      from.slot_bytes(), from.scales().data() + first},
                                     ids, weights, x, rows, y);
      });
  if (wish == cpu_share::always) {
    for (int k = 0; k <= most_split_misses; ++k) out.fetch_of[static_cast<std::size_t>(k)] = k / 2;
    out.server = std::move(server);
    out.text = "experts: the CPU computes half of the missing ones, as asked";
    return out;
  }
  state->measuring = true;
  const measured_latencies measured =
      measure_misses(whole_experts(store, slots, slot_count), *server, hidden, top_k, stream, engine);
  state->measuring = false;
  if (measured.host.empty()) {
    const std::string why = server->take_failure();
    out.text = "experts: the CPU is left alone, it did not answer in time" + (why.empty() ? "" : ": " + why);
    return out;
  }
  out.fetch_of = split_misses(measured.view());
  int computed = 0;
  std::string shares;
  for (int k = 1; k <= most_split_misses; ++k) {
    const int left = k - out.fetch_of[static_cast<std::size_t>(k)];
    computed += left;
    if (k <= top_k) shares += (shares.empty() ? "" : ", ") + std::to_string(left);
  }
  const auto us = [](float value) { return std::to_string(static_cast<int>(value)) + " us"; };
  out.text =
      "experts: one is fetched in " + us(measured.fetch[1]) + " and computed by " +
      std::to_string(state->pool.threads()) + " threads in " + us(measured.host[1]) +
      (computed == 0 ? "; the CPU is left alone" : "; of 1, 2, … missing ones the CPU computes " + shares);
  const double miss_rate = 1.0 - static_cast<double>(slot_count) / store.count();
  if (computed > 0 && wish == cpu_share::measured &&
      !split_pays(measured.view(), out.fetch_of, top_k, miss_rate))
    out.text += ", which would not pay at every kind of routing; the CPU is left alone";
  else if (computed > 0)
    out.server = std::move(server);
  const auto most = measured.host.size() - 1;
  out.bytes_per_us = static_cast<double>(most * store.slot_bytes()) / measured.host[most];
  return out;
}

}  // namespace qwen3_moe
