// SPDX-License-Identifier: Apache-2.0
/// \file
/// A sink that remembers, and runs of a scheduler on the calling thread.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/scheduler.hpp"
#include "fake_runner.hpp"

namespace qwen3_moe::testing {

struct recording_sink : generation_sink {
  std::vector<std::int32_t> tokens;
  std::optional<generation_end> end;
  int ends = 0;
  int tokens_after_end = 0;
  std::function<void(recording_sink&)> on_each;

  void on_token(const sampled_token& token) override {
    if (end) ++tokens_after_end;
    tokens.push_back(token.id);
    if (on_each) on_each(*this);
  }
  void on_finish(const generation_end& result) override {
    end = result;
    ++ends;
  }
};

struct pending {
  std::shared_ptr<generation> handle;
  std::shared_ptr<recording_sink> sink;
};

inline pending add(scheduler& target, generation_request request) {
  auto sink = std::make_shared<recording_sink>();
  auto handle = std::make_shared<generation>(std::move(request), sink);
  target.add(handle);
  return {std::move(handle), std::move(sink)};
}

inline void run_all(scheduler& target) {
  for (int i = 0; i < 1'000'000; ++i)
    if (!target.step()) return;
  throw nibble::error("the scheduler did not come to an end");
}

inline std::vector<std::int32_t> prompt_of(std::uint64_t seed, std::size_t length, int vocab = 64) {
  std::vector<std::int32_t> prompt(length);
  for (std::size_t i = 0; i < length; ++i)
    prompt[i] = static_cast<std::int32_t>(mix(seed * 1000 + i) % static_cast<std::uint64_t>(vocab));
  return prompt;
}

inline generation_request request_of(std::uint64_t seed, std::size_t prompt_tokens, int max_tokens) {
  generation_request request;
  request.prompt = prompt_of(seed, prompt_tokens);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 1;
  request.sampling.seed = seed;
  return request;
}

/// What a request answers when nobody shares its batch.
inline std::vector<std::int32_t> alone(const generation_request& request,
                                       runner_limits limits = small_limits()) {
  fake_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto item = add(target, request);
  run_all(target);
  if (item.sink->end->reason == finish_reason::error) throw nibble::error(item.sink->end->message);
  return item.sink->tokens;
}

}  // namespace qwen3_moe::testing
