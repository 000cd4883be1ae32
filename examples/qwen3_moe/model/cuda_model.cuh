// SPDX-License-Identifier: Apache-2.0
/// \file
/// One compiled model on a GPU, from checkpoint to running. Included by one generated source file for each
/// model.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "model/cuda_runner.cuh"
#include "model/registry.hpp"
#include "nibble/op/load.hpp"

namespace qwen3_moe {

[[nodiscard]] inline nibble::start_options start_options_of(const load_options& options,
                                                            std::vector<std::string>& log) {
  nibble::start_options start;
  auto& request = start.request;
  if (options.cuda.vram_limit_bytes != 0) request.vram_limit_bytes = options.cuda.vram_limit_bytes;
  if (options.cuda.kv_bytes != 0) request.kv_bytes = options.cuda.kv_bytes;
  if (options.cuda.expert_slots != 0)
    request.expert_slots = static_cast<std::uint64_t>(options.cuda.expert_slots);
  if (options.context_tokens != 0) request.context_tokens = options.context_tokens;
  if (options.max_running != 0) request.max_running = options.max_running;
  if (options.step_tokens != 0) request.step_tokens = options.step_tokens;
  request.graphs = options.cuda.largest_graph > 0;
  if (request.graphs)
    for (int rows = 1; rows <= std::min(options.cuda.largest_graph, options.max_running); rows *= 2)
      request.captured_sizes.push_back(rows);
  start.log = [&log](std::string_view line) { log.emplace_back(line); };
  return start;
}

/// The weights of a bound checkpoint. Both must live until the start is over.
template <class Config>
[[nodiscard]] weight_source<Config> source_of(causal_lm<Config>& bound, int threads) {
  weight_source<Config> source;
  source.write_dense = [&bound, threads](device_uploader& uploader, std::byte* memory,
                                         causal_lm<Config>& lm) {
    lm = bound;
    dense_weights_writer<Config>(uploader, memory, threads).write(lm);
  };
  source.send_experts = [&bound, threads](device_uploader& uploader, int first, int count, std::byte* to) {
    send_experts(uploader, bound, first, count, to, threads);
  };
  for (int i = 0; i < Config::value.layers; ++i)
    bound.model.layers.visit(i, [&](const auto& layer) {
      for (int e = 0; e < Config::value.experts; ++e)
        source.scales.push_back(scales_of(layer.mlp.experts[e]));
    });
  return source;
}

template <class Config, nibble::kv_format Kv>
class cuda_model final : public loaded_model {
 public:
  cuda_model(const load_request& request, const load_options& options) {
    causal_lm<Config> bound;
    const int threads = options.threads;
    // Matrices stay in the files' mapping until they are packed: no second copy in host memory.
    const auto weights = nibble::load_weights(
        bound, request.source, request.binding, nibble::load_mode::map,
        [threads](std::size_t count, const auto& body) { run_in_parallel(count, threads, body); });
    runner_ = std::make_unique<cuda_runner<Config, Kv>>(nibble::startup::start<cuda_core<Config, Kv>>(
        start_options_of(options, notes), source_of(bound, threads), request.max_positions));
  }

  [[nodiscard]] model_runner& runner() override { return *runner_; }
  [[nodiscard]] std::uint64_t weight_bytes() const override {
    return nibble::weight_bytes<causal_lm<Config>>();
  }

 private:
  /// Calls body(i) for every i; the first exception is thrown again here.
  template <class Body>
  static void run_in_parallel(std::size_t count, int threads, const Body& body) {
    nibble::host::thread_pool pool(threads);
    pool.parallel_for(static_cast<std::int64_t>(count), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) body(static_cast<std::size_t>(i));
    });
  }

  std::unique_ptr<cuda_runner<Config, Kv>> runner_;
};

/// The registry's loader of a configuration, or null where the device kernels do not serve it.
template <class Config>
[[nodiscard]] cuda_loader cuda_loader_of() {
  if constexpr (device_refusal(Config::value).empty())
    return [](const load_request& request, const load_options& options) -> std::unique_ptr<loaded_model> {
      if (options.cuda.kv_fp8)
        return std::make_unique<cuda_model<Config, nibble::kv_format::fp8>>(request, options);
      return std::make_unique<cuda_model<Config, nibble::kv_format::bf16>>(request, options);
    };
  else
    return nullptr;
}

}  // namespace qwen3_moe
