// SPDX-License-Identifier: Apache-2.0
// Field cases of the engine over a real model on the host: requests that begin again, long ones between
// short.
#include <memory>
#include <vector>

#include "engine/scheduler.hpp"
#include "model/registry.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;

namespace {

struct keeping_sink final : generation_sink {
  std::vector<std::int32_t> tokens;
  finish_reason reason = finish_reason::error;
  void on_token(const sampled_token& token) override { tokens.push_back(token.id); }
  void on_finish(const generation_end& end) override { reason = end.reason; }
};

std::unique_ptr<loaded_model> load(int kv_tokens) {
  load_options options;
  options.device = device_choice::host;
  options.max_running = 2;
  options.context_tokens = 192;
  options.step_tokens = 48;
  options.kv_tokens = kv_tokens;
  return load_model(NIBBLE_SOURCE_DIR "/examples/qwen3_moe/models/tiny", options);
}

generation_request request_of(unsigned seed, int prompt_tokens, int max_tokens) {
  generation_request r;
  for (int i = 0; i < prompt_tokens; ++i)
    r.prompt.push_back(
        static_cast<std::int32_t>((seed * 7919u + static_cast<unsigned>(i * i) * 31u) % 1900u));
  r.max_tokens = max_tokens;
  r.sampling.temperature = 0;
  return r;
}

/// Answers of requests that run together.
std::vector<std::vector<std::int32_t>> answers(model_runner& runner,
                                               const std::vector<generation_request>& requests,
                                               engine_counters& counters) {
  scheduler target(runner, {}, counters);
  std::vector<std::shared_ptr<keeping_sink>> sinks;
  for (const auto& r : requests) {
    sinks.push_back(std::make_shared<keeping_sink>());
    target.add(std::make_shared<generation>(r, sinks.back()));
  }
  for (int steps = 0; target.step(); ++steps) REQUIRE(steps < 5000);
  std::vector<std::vector<std::int32_t>> all;
  for (const auto& sink : sinks) {
    CHECK(sink->reason == finish_reason::length);
    all.push_back(sink->tokens);
  }
  CHECK(target.free_slots() == runner.limits().slots);
  CHECK(target.free_pages() == runner.limits().pages);
  return all;
}

}  // namespace

TEST_CASE("C091: a request that gave its pages back begins again with an empty state") {
  const std::vector<generation_request> requests{request_of(1, 64, 64), request_of(2, 64, 64)};
  const auto roomy = load(2 * 192);
  std::vector<std::vector<std::int32_t>> alone;
  for (const auto& r : requests) {
    engine_counters counters;
    alone.push_back(answers(roomy->runner(), {r}, counters)[0]);
  }
  const auto tight = load(192);  // one and a half of the two
  engine_counters counters;
  CHECK(answers(tight->runner(), requests, counters) == alone);
  CHECK(counters.preempted > 0);
}

TEST_CASE("C098: after the longest request that is allowed a short one is answered as before") {
  const auto model = load(2 * 192);
  engine_counters counters;
  const auto first = answers(model->runner(), {request_of(3, 12, 10)}, counters);
  static_cast<void>(answers(model->runner(), {request_of(4, 190, 2)}, counters));
  CHECK(answers(model->runner(), {request_of(3, 12, 10)}, counters) == first);
}

TEST_CASE(
    "C096: prompts that begin alike are answered as by a fresh model: no state is reused with another's "
    "keys") {
  const auto model = load(2 * 192);
  const generation_request first = request_of(5, 150, 8);
  auto longer = first, other = first;
  longer.prompt.push_back(77);
  other.prompt.resize(140);
  for (std::int32_t i = 0; i < 10; ++i) other.prompt.push_back(1000 + i);
  engine_counters counters;
  std::vector<std::vector<std::int32_t>> fresh;
  for (const auto& r : {first, longer, other})
    fresh.push_back(answers(load(2 * 192)->runner(), {r}, counters)[0]);
  for (int round = 0; round < 2; ++round) {
    CHECK(answers(model->runner(), {first}, counters)[0] == fresh[0]);
    CHECK(answers(model->runner(), {longer}, counters)[0] == fresh[1]);
    CHECK(answers(model->runner(), {other}, counters)[0] == fresh[2]);
    CHECK(answers(model->runner(), {first, other}, counters) == std::vector{fresh[0], fresh[2]});
  }
}
