// SPDX-License-Identifier: Apache-2.0
/// \file
/// A model_runner that answers by script: one fixed token after the other, chosen by the prompt.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "engine/model_runner.hpp"
#include "nibble/core/driver_error.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe::testing {

class script_runner : public model_runner {
 public:
  /// Token `index` of the answer to `prompt`.
  using script = std::function<std::int32_t(std::span<const std::int32_t> prompt, std::size_t index)>;

  script_runner(runner_limits limits, script answer)
      : limits_(limits), answer_(std::move(answer)), slots_(static_cast<std::size_t>(limits.slots)) {}

  const runner_limits& limits() const override { return limits_; }
  void clear_slot(int slot) override { slots_.at(static_cast<std::size_t>(slot)) = {}; }

  void step(std::span<const step_sequence> sequences, std::span<float> logits) override {
    if (const auto pause = step_pause_us.load())
      std::this_thread::sleep_for(std::chrono::microseconds(pause));
    std::fill(logits.begin(), logits.end(), 0.0f);
    std::size_t row = 0;
    for (const auto& sequence : sequences) {
      auto& slot = slots_.at(static_cast<std::size_t>(sequence.slot));
      slot.tokens.insert(slot.tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
      if (sequence.logits == wanted_logits::none) continue;
      if (slot.prompt == 0) slot.prompt = slot.tokens.size();
      const auto index = slot.tokens.size() - slot.prompt;
      if (static_cast<int>(index) == fail_at.load()) {
        if (lose_device) nibble::require(nibble::status::cuda(700, "script", "an illegal address"));
        throw nibble::error("the device is gone");
      }
      const auto token = answer_(std::span(slot.tokens).first(slot.prompt), index);
      logits[row++ * static_cast<std::size_t>(limits_.vocab_size) + static_cast<std::size_t>(token)] = 100.0f;
    }
  }

  std::atomic<int> step_pause_us{0};
  std::atomic<int> fail_at{-1};          ///< an answer's token at which the step throws
  std::atomic<bool> lose_device{false};  ///< it throws a context_lost_error

 private:
  struct slot_state {
    std::vector<std::int32_t> tokens;
    std::size_t prompt = 0;
  };
  runner_limits limits_;
  script answer_;
  std::vector<slot_state> slots_;
};

}  // namespace qwen3_moe::testing
