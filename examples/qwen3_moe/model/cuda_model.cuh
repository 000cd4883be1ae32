// SPDX-License-Identifier: Apache-2.0
/// \file
/// One compiled model on a GPU, from checkpoint to running. Included by one generated source file for each
/// model and class of devices.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "model/cuda_runner.cuh"
#include "model/memory_plan.hpp"
#include "model/once.hpp"
#include "model/registry.hpp"
#include "nibble/op/load.hpp"

namespace qwen3_moe {

/// The weights of a bound checkpoint. Both must live until the start is over. \param check_experts called
/// before the first expert is packed; what it throws ends the start
template <class Config>
[[nodiscard]] weight_source<Config> source_of(causal_lm<Config>& bound, int threads,
                                              std::function<void()> check_experts = {}) {
  weight_source<Config> source;
  const auto checked = std::make_shared<once>(std::move(check_experts));
  source.write_dense = [&bound, threads](device_uploader& uploader, std::byte* memory,
                                         causal_lm<Config>& lm) {
    lm = bound;
    dense_weights_writer<Config>(uploader, memory, threads).write(lm);
  };
  source.send_experts = [&bound, threads, checked](device_uploader& uploader, int first, int count,
                                                   std::byte* to) {
    (*checked)();
    send_experts(uploader, bound, first, count, to, threads);
  };
  source.pack_expert = [&bound, checked](int number, std::span<std::uint8_t> slot) {
    (*checked)();
    bound.model.layers.visit(number / Config::value.experts, [&](const auto& layer) {
      pack_expert(layer.mlp.experts[number % Config::value.experts], slot);
    });
  };
  source.threads = threads;
  for (int i = 0; i < Config::value.layers; ++i)
    bound.model.layers.visit(i, [&](const auto& layer) {
      for (int e = 0; e < Config::value.experts; ++e)
        source.scales.push_back(scales_of(layer.mlp.experts[e]));
    });
  return source;
}

template <class Config, nibble::kv_format Kv, nibble::device_class Device>
class cuda_model final : public loaded_model {
 public:
  cuda_model(const load_request& request, const load_options& options) : log_(options.log) {
    causal_lm<Config> bound;
    const int threads = options.threads;
    const nibble::parallel_runner in_parallel = [threads](std::size_t count, const auto& body) {
      run_in_parallel(count, threads, body);
    };
    // Matrices stay in the files' mapping until they are packed: no second copy in host memory. Experts are
    // looked at only when they are packed, which a start from their cache file does not do.
    const auto weights = nibble::load_weights(bound, request.source, request.binding, nibble::load_mode::map,
                                              in_parallel, [](const nibble::io::tensor_slice& slice) {
                                                return slice.name.find(".experts.") != std::string::npos;
                                              });
    nibble::start_options start;
    start.request = plan_request_of(options);
    start.log = [this](std::string_view line) { log(line); };
    auto source = source_of(bound, threads, [&] { weights.check_the_rest(in_parallel); });
    source.keeping = options.experts;
    source.keeping.checkpoint = request.source.folder();
    runner_ = std::make_unique<cuda_runner<Config, Kv, Device>>(
        nibble::startup::start<cuda_core<Config, Kv, Device>>(std::move(start), std::move(source),
                                                              request.max_positions));
  }
  ~cuda_model() override {
    if (runner_ != nullptr) try {
        runner_->remember_experts();
      } catch (const std::exception& problem) {
        log("which experts are in use was not saved: " + std::string(problem.what()));
      }
  }

  [[nodiscard]] model_runner& runner() override { return *runner_; }
  [[nodiscard]] std::uint64_t weight_bytes() const override {
    return nibble::weight_bytes<causal_lm<Config>>();
  }

 private:
  /// Lines of the start belong to the model's notes; later ones, of caches that changed, to the log.
  void log(std::string_view line) {
    if (runner_ == nullptr)
      notes.emplace_back(line);
    else if (log_)
      log_(line);
    else
      std::fprintf(stderr, "qwen3-moe: %.*s\n", static_cast<int>(line.size()), line.data());
  }
  /// Calls body(i) for every i; the first exception is thrown again here.
  template <class Body>
  static void run_in_parallel(std::size_t count, int threads, const Body& body) {
    nibble::host::thread_pool pool(threads);
    pool.parallel_for(static_cast<std::int64_t>(count), 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) body(static_cast<std::size_t>(i));
    });
  }

  std::function<void(std::string_view)> log_;
  std::unique_ptr<cuda_runner<Config, Kv, Device>> runner_;
};

/// The registry's loader of a configuration on a class of devices, or null where the device kernels do not
/// serve it.
template <class Config, nibble::device_class Device>
[[nodiscard]] cuda_loader cuda_loader_of() {
  if constexpr (device_refusal(Config::value).empty())
    return [](const load_request& request, const load_options& options) -> std::unique_ptr<loaded_model> {
      if (options.cuda.kv_fp8)
        return std::make_unique<cuda_model<Config, nibble::kv_format::fp8, Device>>(request, options);
      return std::make_unique<cuda_model<Config, nibble::kv_format::bf16, Device>>(request, options);
    };
  else
    return nullptr;
}

}  // namespace qwen3_moe
