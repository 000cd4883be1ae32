// SPDX-License-Identifier: Apache-2.0
/// \file
/// Greedy continuations from a file, and a sequence stepped by hand to hold against them.
#pragma once

#include <algorithm>
#include <boost/json.hpp>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "engine/model_runner.hpp"
#include "nibble/io/file.hpp"

namespace qwen3_moe::test {

struct reference_case {
  std::vector<std::int32_t> prompt, completion;
};

inline std::vector<reference_case> reference_cases(const std::filesystem::path& folder) {
  const auto text = nibble::io::file::read_text(folder / "reference.json", 64 << 20);
  std::vector<reference_case> cases;
  const auto ids = [](const boost::json::value& list) {
    return boost::json::value_to<std::vector<std::int32_t>>(list);
  };
  const auto document = boost::json::parse(text);
  for (const auto& item : document.as_array())
    cases.push_back({ids(item.at("prompt_ids")), ids(item.at("completion_ids"))});
  return cases;
}

/// One sequence with a slot and pages of its own.
class sequence {
 public:
  sequence(model_runner& runner, int slot) : runner_(&runner), slot_(slot) {
    const auto& limits = runner.limits();
    const int each = (limits.context_tokens + limits.page_tokens - 1) / limits.page_tokens;
    pages_.resize(static_cast<std::size_t>(each));
    std::iota(pages_.begin(), pages_.end(), slot * each);
    std::reverse(pages_.begin(), pages_.end());  // pages need not be in order
    runner.clear_slot(slot);
  }
  [[nodiscard]] step_sequence share(std::span<const std::int32_t> tokens, wanted_logits logits) const {
    return {tokens, position_, slot_, pages_, logits};
  }
  void advance(std::size_t tokens) { position_ += static_cast<int>(tokens); }
  /// Runs tokens in pieces; afterwards logits() are those of the last one.
  void append(std::span<const std::int32_t> tokens, std::size_t piece) {
    logits_.assign(static_cast<std::size_t>(runner_->limits().vocab_size), std::nanf(""));
    for (std::size_t done = 0; done < tokens.size();) {
      const std::size_t count = std::min(piece, tokens.size() - done);
      const bool last = done + count == tokens.size();
      const auto part = share(tokens.subspan(done, count), last ? wanted_logits::last : wanted_logits::none);
      runner_->step({&part, 1}, logits_);
      advance(count);
      done += count;
    }
  }
  [[nodiscard]] const std::vector<float>& logits() const { return logits_; }
  [[nodiscard]] std::int32_t best() const {
    return static_cast<std::int32_t>(std::max_element(logits_.begin(), logits_.end()) - logits_.begin());
  }
  /// Distance from the best logit to the second.
  [[nodiscard]] float gap() const {
    std::vector<float> sorted = logits_;
    std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
    return *std::max_element(sorted.begin(), sorted.end()) - sorted[1];
  }

 private:
  model_runner* runner_;
  int slot_, position_ = 0;
  std::vector<std::int32_t> pages_;
  std::vector<float> logits_;
};

}  // namespace qwen3_moe::test
