// SPDX-License-Identifier: Apache-2.0
/// \file
/// The steps over which a backend is compared with the host's at a model's full width. Host code.
#pragma once

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/module_walk.hpp"
#include "support/rounded_backend.hpp"

namespace full_width {

using qwen3_moe::step_sequence;
using qwen3_moe::wanted_logits;

inline constexpr int slots = 8, pages_each = 16, page_tokens = 16, context_tokens = pages_each * page_tokens,
                     step_tokens = 256;

/// Sequences that grow, over pages that are not in order.
class sequences {
 public:
  explicit sequences(int vocab_size)
      : tokens_(slots * context_tokens), pages_(slots * pages_each), lengths_(slots, 0) {
    std::mt19937 random(17);
    for (auto& t : tokens_) t = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab_size));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), random);
  }
  [[nodiscard]] step_sequence share(int slot, int tokens, wanted_logits logits) {
    int& length = lengths_[static_cast<std::size_t>(slot)];
    const step_sequence s{std::span(tokens_).subspan(static_cast<std::size_t>(slot * context_tokens + length),
                                                     static_cast<std::size_t>(tokens)),
                          length, slot,
                          std::span(pages_).subspan(static_cast<std::size_t>(slot * pages_each), pages_each),
                          logits};
    length += tokens;
    return s;
  }
  /// One token of each of the first `count` slots.
  [[nodiscard]] std::vector<step_sequence> decode(int count) {
    std::vector<step_sequence> step;
    for (int slot = 0; slot < count; ++slot) step.push_back(share(slot, 1, wanted_logits::last));
    return step;
  }

 private:
  std::vector<std::int32_t> tokens_, pages_;
  std::vector<int> lengths_;
};

[[nodiscard]] inline qwen3_moe::runner_limits limits_of(int vocab_size) {
  return {vocab_size, context_tokens, page_tokens, slots * pages_each, slots, step_tokens};
}

/// Module by module: prefill of one and of seven prompts, decode of one and of eight, and steps of both, with
/// few rows and with many.
template <class Walk>
void compare_modules(Walk& walk, int vocab_size) {
  sequences s(vocab_size);
  for (int slot = 0; slot < slots; ++slot) walk.clear_slot(slot);
  std::vector<step_sequence> step{s.share(0, 64, wanted_logits::all)};
  walk.step(step, "prefill");
  for (int i = 0; i < 4; ++i) walk.step(s.decode(1), "decode");
  step.clear();
  const int lengths[] = {17, 64, 3, 40, 21, 2, 50};
  for (int i = 0; i < 7; ++i) step.push_back(s.share(i + 1, lengths[i], wanted_logits::last));
  walk.step(step, "prefill");
  for (int i = 0; i < 4; ++i) walk.step(s.decode(slots), "decode");
  step = {s.share(3, 1, wanted_logits::last), s.share(5, 1, wanted_logits::last),
          s.share(6, 9, wanted_logits::none)};
  walk.step(step, "mixed");
  step = s.decode(3);
  step.push_back(s.share(4, 20, wanted_logits::none));
  step.push_back(s.share(7, 37, wanted_logits::last));
  walk.step(step, "mixed");
}

/// Whole passes, each backend on its own caches. \return |theirs - ours| / |ours| of every row of logits
template <class Walk>
std::vector<double> compare_whole(Walk& walk, int vocab_size) {
  sequences s(vocab_size);
  for (int slot = 0; slot < slots; ++slot) walk.clear_slot(slot);
  std::vector<double> errors;
  const auto run = [&](std::span<const step_sequence> step) {
    const std::vector<double> more = walk.whole(step);
    errors.insert(errors.end(), more.begin(), more.end());
  };
  std::vector<step_sequence> step;
  const int lengths[] = {33, 17, 48, 3, 40, 21, 2, 50};
  for (int slot = 0; slot < slots; ++slot) step.push_back(s.share(slot, lengths[slot], wanted_logits::last));
  run(step);
  for (int i = 0; i < 5; ++i) run(s.decode(slots));
  for (int i = 0; i < 4; ++i) run(s.decode(1));
  return errors;
}

[[nodiscard]] inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Compares the subject with the host backend, prints the rows. A whole pass may be 2.5 times as far off as
/// the host's own pass with its activations rounded: a device also rounds within modules, about as often as
/// between them, and where a row changes its experts the difference is large in both. \return what is out of
/// bounds
template <class Config, class Subject>
int compare(const qwen3_moe::causal_lm<Config>& lm, Subject& subject, nibble::host::thread_pool& pool,
            const std::string& facts) {
  using namespace qwen3_moe::test;
  constexpr int vocab_size = Config::value.vocab_size;
  const auto limits = limits_of(vocab_size);
  module_errors errors;
  std::vector<double> theirs, rounded;
  {
    module_walk<Config, Subject> walk(lm, limits, pool, subject, errors);
    compare_modules(walk, vocab_size);
    theirs = compare_whole(walk, vocab_size);
  }
  {
    module_errors unused;
    rounded_backend<Config> rounding(lm, limits, pool);
    module_walk<Config, rounded_backend<Config>> walk(lm, limits, pool, rounding, unused);
    rounded = compare_whole(walk, vocab_size);
  }
  int bad = errors.print(facts);
  const double middle = median(theirs), allowed = 2.5 * median(rounded);
  std::printf(
      "{\"bench\":\"module_error\",\"module\":\"whole "
      "model\",\"kind\":\"mixed\",\"rows\":%zu,\"rms_relative\":%.3e,\"max_relative\":%.3e,"
      "\"rounded_host\":%.3e,\"rms_bound\":%.3e%s}\n",
      theirs.size(), middle, *std::max_element(theirs.begin(), theirs.end()), median(rounded), allowed,
      facts.c_str());
  if (!(middle <= allowed)) {
    ++bad;
    std::printf("FAILED whole model: half of the rows are further off than %.3e, allowed %.3e\n", middle,
                allowed);
  }
  return bad;
}

}  // namespace full_width
