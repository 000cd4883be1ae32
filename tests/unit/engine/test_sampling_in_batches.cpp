// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

}  // namespace

TEST_CASE("a seed gives the same tokens in every company") {
  const auto seeded = request_of(42, 9, 25);
  const auto expected = alone(seeded);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const auto other_seed = static_cast<std::uint64_t>(1000 + repeat);
    for (const int place : {0, 1, 3}) {
      fake_runner runner(small_limits());
      engine_counters counters;
      scheduler target(runner, {}, counters);
      std::vector<pending> items;
      for (int i = 0; i < 4; ++i)
        items.push_back(
            add(target, i == place ? seeded : request_of(other_seed + static_cast<std::uint64_t>(i), 5, 40)));
      const auto victim = static_cast<std::size_t>((place + 1) % 4);
      for (int i = 0; i < repeat; ++i) target.step();
      items[victim].handle->cancel();
      run_all(target);
      CHECK(items[static_cast<std::size_t>(place)].sink->tokens == expected);
    }
  }
}

TEST_CASE("two seeds give two answers") {
  auto a = request_of(1, 9, 25);
  auto b = a;
  b.sampling.seed = 2;
  CHECK(alone(a) != alone(b));
}

TEST_CASE("greedy, random and tiny temperatures share a batch") {
  const auto request = [](float temperature) {
    auto result = request_of(3, 9, 25);
    result.sampling.temperature = temperature;
    return result;
  };
  fake_runner runner(small_limits());
  // Masked tokens and large logits, as a real row may have them.
  runner.after_row = [](const step_sequence&, std::span<float> row) {
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = i % 3 == 0 ? -infinity : row[i] * 3750;
  };
  engine_counters counters;
  scheduler target(runner, {}, counters);
  std::vector<pending> items;
  for (const float temperature : {0.0f, 1.0f, 1e-5f, 1e-38f})
    items.push_back(add(target, request(temperature)));
  run_all(target);
  for (const auto& item : items) {
    CHECK(item.sink->tokens.size() == 25);
    for (const auto id : item.sink->tokens) CHECK(id % 3 != 0);
  }
  CHECK(items[2].sink->tokens == items[0].sink->tokens);
  CHECK(items[3].sink->tokens == items[0].sink->tokens);
}

TEST_CASE("C016, C098: a row without a distribution ends its request and no other") {
  for (const float bad : {nan_value, infinity, -infinity}) {
    fake_runner runner(small_limits());
    engine_counters counters;
    scheduler target(runner, {}, counters);
    const auto good = add(target, request_of(1, 9, 25));
    const auto ill = add(target, request_of(2, 5, 25));
    runner.after_row = [&](const step_sequence& sequence, std::span<float> row) {
      if (sequence.position + static_cast<int>(sequence.tokens.size()) == 12 && sequence.tokens.size() == 1 &&
          ill.sink->tokens.size() == 7 && good.sink->tokens.size() != 3)
        std::fill(row.begin(), row.end(), bad);
    };
    run_all(target);
    CHECK(good.sink->tokens == alone(request_of(1, 9, 25)));
    REQUIRE(ill.sink->end);
    CHECK(ill.sink->end->reason == finish_reason::error);
    CHECK_FALSE(ill.sink->end->message.empty());
    CHECK(ill.sink->tokens.size() == 7);
    CHECK(target.free_slots() == small_limits().slots);
  }
}

TEST_CASE("log-probabilities are of the model's own distribution") {
  auto request = request_of(1, 9, 10);
  request.sampling.logprobs = 5;
  request.sampling.temperature = 0;
  request.sampling.logit_bias = {{3, 100.0f}};
  struct keeping_sink : generation_sink {
    std::vector<sampled_token> tokens;
    void on_token(const sampled_token& token) override { tokens.push_back(token); }
    void on_finish(const generation_end&) override {}
  };
  fake_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto sink = std::make_shared<keeping_sink>();
  target.add(std::make_shared<generation>(request, sink));
  run_all(target);
  REQUIRE(sink->tokens.size() == 10);
  for (const auto& token : sink->tokens) {
    CHECK(token.id == 3);
    REQUIRE(token.logprob);
    CHECK(*token.logprob <= 0);
    REQUIRE(token.top.size() == 5);
    CHECK(std::is_sorted(token.top.begin(), token.top.end(),
                         [](const auto& a, const auto& b) { return a.logprob > b.logprob; }));
    CHECK(token.top.front().logprob >= *token.logprob);
    double sum = 0;
    for (const auto& item : token.top) sum += std::exp(static_cast<double>(item.logprob));
    CHECK(sum <= 1.0001);
  }
}
