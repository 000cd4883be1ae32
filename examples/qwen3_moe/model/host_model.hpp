// SPDX-License-Identifier: Apache-2.0
/// \file
/// One compiled model on the host backend. Included by one generated source file for each model.
#pragma once

#include <memory>
#include <utility>

#include "model/forward.hpp"
#include "model/host_backend.hpp"
#include "model/registry.hpp"
#include "model/step_check.hpp"
#include "nibble/op/load.hpp"
#include "nibble/op/type_visitors.hpp"

namespace qwen3_moe {

template <class Config>
class host_model final : public loaded_model, private model_runner {
 public:
  host_model(nibble::io::checkpoint& source, const nibble::bind_options& options, const runner_limits& limits,
             nibble::load_mode mode, int threads)
      : pool_(threads), limits_(limits) {
    weights_ = nibble::load_weights(lm_, source, options, mode, [this](std::size_t count, const auto& body) {
      pool_.parallel_for(static_cast<std::int64_t>(count), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = begin; i < end; ++i) body(static_cast<std::size_t>(i));
      });
    });
    backend_ = std::make_unique<host_backend>(Config::value, limits_, pool_);
    backend_->prepare(lm_);
  }

  [[nodiscard]] model_runner& runner() override { return *this; }
  [[nodiscard]] std::uint64_t weight_bytes() const override {
    return nibble::weight_bytes<causal_lm<Config>>();
  }

 private:
  [[nodiscard]] const runner_limits& limits() const override { return limits_; }
  void clear_slot(int slot) override {
    check_slot(limits_, slot);
    backend_->clear_slot(slot);
  }
  void step(std::span<const step_sequence> sequences, std::span<float> logits) override {
    check_step(limits_, sequences, logits.size());
    backend_->begin_step(sequences, logits.data());
    forward(*backend_, lm_);
  }

  nibble::host::thread_pool pool_;
  runner_limits limits_;
  causal_lm<Config> lm_;
  nibble::loaded_weights weights_;
  std::unique_ptr<host_backend> backend_;
};

/// The registry's row for a configuration type that has `name`, `value` and `max_positions`.
template <class Config>
[[nodiscard]] compiled_model compiled_model_of() {
  static constexpr auto geometries = nibble::distinct_geometries<causal_lm<Config>>();
  return {Config::name,
          &Config::value,
          Config::max_positions,
          {geometries.begin(), geometries.size()},
          nibble::weight_bytes<causal_lm<Config>>(),
          [](nibble::io::checkpoint& source, const nibble::bind_options& options, const runner_limits& limits,
             nibble::load_mode mode, int threads) -> std::unique_ptr<loaded_model> {
            return std::make_unique<host_model<Config>>(source, options, limits, mode, threads);
          },
          {}};
}

}  // namespace qwen3_moe
