// SPDX-License-Identifier: Apache-2.0
/// \file
/// Steps of a loaded model on a GPU: arrays over, forward pass, logits back; decode through captured graphs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/model_runner.hpp"
#include "model/cuda_core.cuh"
#include "model/step_check.hpp"
#include "nibble/core/device_memory.cuh"

namespace qwen3_moe {

template <class Config, nibble::kv_format Kv>
class cuda_runner final : public model_runner {
  static constexpr model_config c = Config::value;

 public:
  using core_type = cuda_core<Config, Kv>;
  using backend_type = typename core_type::backend_type;
  using engine_type = nibble::startup::engine<core_type>;

  explicit cuda_runner(engine_type engine)
      : engine_(std::move(engine)),
        limits_(limits_of(engine_.context().plan())),
        sizes_(core().sizes()),
        words_(4u * static_cast<std::uint64_t>(backend().step_layout().words())),
        logits_(4u * static_cast<std::uint64_t>(sizes_.logit_rows) *
                static_cast<std::uint64_t>(c.vocab_size)),
        step_(backend().step_layout(), words_.template as<std::int32_t>()),
        pages_(sizes_.sequences, sizes_.page_stride) {}

  [[nodiscard]] const runner_limits& limits() const override { return limits_; }

  void clear_slot(int slot) override {
    check_slot(limits_, slot);
    if constexpr (backend_type::slot_state_bytes > 0)
      nibble::require(nibble::runtime_status(
          cudaMemsetAsync(backend().states + static_cast<std::size_t>(slot) * backend_type::slot_state_bytes,
                          0, backend_type::slot_state_bytes, stream()),
          where, "a slot's state could not be cleared"));
  }

  void step(std::span<const step_sequence> sequences, std::span<float> logits) override {
    check_step(limits_, sequences, logits.size());
    const bool all_decode =
        std::all_of(sequences.begin(), sequences.end(), [](const auto& s) { return s.tokens.size() == 1; });
    const int padded = all_decode ? engine_.padded(static_cast<int>(sequences.size())) : 0;
    step_.compose(sequences, padded);
    send(sequences);
    if (padded > 0) {
      nibble::require(engine_.decode(padded));
      read_decoded(logits);
      return;
    }
    backend().begin_step(step_.rows(), step_.decodes(), step_.sequences());
    const int first = std::min(step_.wanted(), sizes_.logit_rows);
    backend().want_rows(0, first);
    forward(backend(), lm());
    nibble::require(backend().result());
    read_logits(logits.data(), first);
    for (int done = first; done < step_.wanted();) {
      const int count = std::min(step_.wanted() - done, sizes_.logit_rows);
      backend().want_rows(done, count);
      backend().project(lm().lm_head, backend().normed(lm().model.norm, backend().selected),
                        backend().logits);
      nibble::require(backend().result());
      read_logits(logits.data() + static_cast<std::size_t>(done) * static_cast<std::size_t>(c.vocab_size),
                  count);
      done += count;
    }
  }

  [[nodiscard]] engine_type& engine() { return engine_; }

 private:
  static constexpr const char* where = "qwen3_moe::cuda_runner";

  [[nodiscard]] core_type& core() { return engine_.model(); }
  [[nodiscard]] backend_type& backend() { return core().backend(); }
  [[nodiscard]] const causal_lm<Config>& lm() { return core().model(); }
  [[nodiscard]] cudaStream_t stream() { return backend().stream(); }
  [[nodiscard]] static runner_limits limits_of(const nibble::memory_plan& plan) {
    // The plan's dummies stay unused: padding rows have a negative position and touch no cache.
    return {c.vocab_size,        plan.limits.context_tokens,
            device_page_tokens,  static_cast<int>(plan.kv_pages),
            plan.limits.running, std::max(plan.limits.step_tokens, plan.limits.running)};
  }

  void copy_to_device(std::int32_t* to, const std::int32_t* from, std::size_t count) {
    nibble::require(
        nibble::runtime_status(cudaMemcpyAsync(to, from, 4 * count, cudaMemcpyHostToDevice, stream()), where,
                               "the step's arrays could not be sent"));
  }
  void send_words() {
    copy_to_device(backend().step_words(), words_.template as<std::int32_t>(),
                   static_cast<std::size_t>(backend().step_layout().words()));
  }
  void send(std::span<const step_sequence> sequences) {
    send_words();
    const auto order = step_.order();
    for (std::size_t i = 0; i < order.size(); ++i) {
      const step_sequence& s = sequences[static_cast<std::size_t>(order[i])];
      const auto tokens = static_cast<std::size_t>(s.position) + s.tokens.size();
      const auto page_tokens = static_cast<std::size_t>(limits_.page_tokens);
      pages_.update(static_cast<int>(i), s.pages.first((tokens + page_tokens - 1) / page_tokens),
                    [&](std::size_t at, std::span<const std::int32_t> changed) {
                      copy_to_device(backend().page_table() + at, changed.data(), changed.size());
                    });
    }
  }

  void wait() {
    nibble::require(nibble::runtime_status(cudaStreamSynchronize(stream()), where, "the step failed"));
  }
  /// Rows 0 … rows - 1 of the logits buffer to host memory, and the end of the step.
  void read_logits(float* to, int rows) {
    const std::size_t bytes = 4 * static_cast<std::size_t>(rows) * static_cast<std::size_t>(c.vocab_size);
    if (rows > 0)
      nibble::require(nibble::runtime_status(
          cudaMemcpyAsync(logits_.data(), backend().logits_buffer(), bytes, cudaMemcpyDeviceToHost, stream()),
          where, "the logits could not be read"));
    wait();
    std::memcpy(to, logits_.data(), bytes);
  }
  /// The wanted rows of a decode step that computed the logits of all.
  void read_decoded(std::span<float> to) {
    const auto width = static_cast<std::size_t>(c.vocab_size);
    const auto wanted = step_.wanted_rows();
    for (std::size_t i = 0; i < wanted.size(); ++i)
      nibble::require(nibble::runtime_status(
          cudaMemcpyAsync(logits_.template as<float>() + i * width,
                          backend().logits_buffer() + static_cast<std::size_t>(wanted[i]) * width, 4 * width,
                          cudaMemcpyDeviceToHost, stream()),
          where, "the logits could not be read"));
    wait();
    std::memcpy(to.data(), logits_.data(), 4 * width * wanted.size());
  }

  engine_type engine_;
  runner_limits limits_;
  device_sizes sizes_;
  nibble::pinned_memory words_, logits_;
  device_step step_;
  page_table_shadow pages_;
};

}  // namespace qwen3_moe
