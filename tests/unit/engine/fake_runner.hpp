// SPDX-License-Identifier: Apache-2.0
/// \file
/// A model_runner without a model. It stores each token in its page, folds it into its slot's state, and
/// compares the two at every step, so a wrong page table, position or slot ends the step with an error. Its
/// logits depend on the whole sequence and on nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/model_runner.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe::testing {

inline std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}

inline std::uint64_t fold(std::uint64_t state, std::int32_t token) {
  return mix(state * 31 + static_cast<std::uint64_t>(token) + 1);
}

class fake_runner : public model_runner {
 public:
  explicit fake_runner(runner_limits limits)
      : limits_(limits),
        page_tokens_(static_cast<std::size_t>(limits.pages) * static_cast<std::size_t>(limits.page_tokens),
                     -1),
        slots_(static_cast<std::size_t>(limits.slots)) {}

  const runner_limits& limits() const override { return limits_; }

  void clear_slot(int slot) override { slots_.at(static_cast<std::size_t>(slot)) = {}; }

  /// As if every step found three experts and missed one.
  expert_traffic experts() const override {
    const auto n = static_cast<std::uint64_t>(steps);
    return {3 * n, n};
  }

  void step(std::span<const step_sequence> sequences, std::span<float> logits) override {
    ++steps;
    if (before_step) before_step(sequences);
    int total = 0;
    std::set<int> slots;
    std::set<std::int32_t> pages;
    std::size_t row = 0;
    for (const auto& sequence : sequences) {
      const auto count = static_cast<int>(sequence.tokens.size());
      need(count > 0, "an empty share");
      total += count;
      need(slots.insert(sequence.slot).second, "two sequences in one slot");
      auto& state = slots_.at(static_cast<std::size_t>(sequence.slot));
      need(state.length == sequence.position, "a position that is not the slot's length");
      const auto end = sequence.position + count;
      need(end <= limits_.context_tokens, "more tokens than the context");
      need(static_cast<int>(sequence.pages.size()) * limits_.page_tokens >= end, "too few pages");
      for (const auto page : sequence.pages) {
        need(page >= 0 && page < limits_.pages, "a page outside the pool");
        need(pages.insert(page).second, "a page in two tables");
      }
      for (int i = 0; i < count; ++i) {
        const auto token = sequence.tokens[static_cast<std::size_t>(i)];
        need(token >= 0 && token < limits_.vocab_size, "a token outside the vocabulary");
        place(sequence, sequence.position + i) = token;
        state.value = fold(state.value, token);
      }
      state.length = end;
      std::uint64_t from_pages = 0;
      for (int i = 0; i < end; ++i) from_pages = fold(from_pages, place(sequence, i));
      need(from_pages == state.value, "pages and slot disagree");
      if (sequence.logits == wanted_logits::none) continue;
      need(sequence.logits == wanted_logits::last, "rows nobody asked for");
      const auto vocab = static_cast<std::size_t>(limits_.vocab_size);
      auto out = logits.subspan(row++ * vocab, vocab);
      fill(state.value, out);
      if (after_row) after_row(sequence, out);
    }
    need(row * static_cast<std::size_t>(limits_.vocab_size) == logits.size(),
         "a row count that does not fit");
    need(total <= limits_.step_tokens, "more tokens than a step may carry");
    largest_step = std::max(largest_step, total);
  }

  /// Called before a step does anything; may throw.
  std::function<void(std::span<const step_sequence>)> before_step;
  /// May change a row.
  std::function<void(const step_sequence&, std::span<float>)> after_row;
  int steps = 0;
  int largest_step = 0;

 private:
  struct slot_state {
    std::uint64_t value = 0;
    int length = 0;
  };

  static void need(bool ok, const char* what) {
    if (!ok) throw nibble::error(std::string("fake runner: ") + what);
  }
  std::int32_t& place(const step_sequence& sequence, int position) {
    const auto page = sequence.pages[static_cast<std::size_t>(position / limits_.page_tokens)];
    return page_tokens_.at(
        static_cast<std::size_t>(page * limits_.page_tokens + position % limits_.page_tokens));
  }
  static void fill(std::uint64_t state, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<float>(mix(state ^ mix(i + 1)) % 8192) / 1024.0f;
  }

  runner_limits limits_;
  std::vector<std::int32_t> page_tokens_;
  std::vector<slot_state> slots_;
};

inline runner_limits small_limits() {
  return {
      .vocab_size = 64, .context_tokens = 256, .page_tokens = 8, .pages = 96, .slots = 4, .step_tokens = 32};
}

}  // namespace qwen3_moe::testing
