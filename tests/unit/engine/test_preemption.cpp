// SPDX-License-Identifier: Apache-2.0
#include <random>

#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

namespace {

runner_limits tight() {
  auto limits = small_limits();
  limits.pages = 10;  // 80 tokens for four sequences of up to 70
  limits.step_tokens = 12;
  return limits;
}

}  // namespace

TEST_CASE("answers that outgrow the pages are computed again and come out the same") {
  fake_runner runner(tight());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  std::vector<pending> items;
  for (std::uint64_t i = 0; i < 6; ++i) items.push_back(add(target, request_of(i, 10, 50)));
  run_all(target);
  CHECK(counters.preempted > 0);
  for (std::uint64_t i = 0; i < 6; ++i) {
    CHECK(items[i].sink->tokens == alone(request_of(i, 10, 50)));
    CHECK(items[i].sink->end->reason == finish_reason::length);
  }
  CHECK(target.free_pages() == 10);
  CHECK(counters.queued == 0);
}

TEST_CASE("penalties and stop tokens survive being computed again") {
  auto request = request_of(4, 10, 55);
  request.sampling.repetition_penalty = 1.3f;
  request.sampling.frequency_penalty = 0.5f;
  const auto expected = alone(request);
  fake_runner runner(tight());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  add(target, request_of(1, 10, 60));
  const auto item = add(target, request);
  run_all(target);
  CHECK(counters.preempted > 0);
  CHECK(item.sink->tokens == expected);
}

TEST_CASE("the pool bounds the context where it is the smaller one") {
  auto limits = small_limits();
  limits.pages = 3;
  fake_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  CHECK(target.context_tokens() == 24);
  CHECK_FALSE(target.refusal(request_of(1, 24, 1)).empty());
  const auto item = add(target, request_of(1, 20, 100));
  run_all(target);
  CHECK(item.sink->tokens.size() == 4);
  CHECK(item.sink->end->reason == finish_reason::length);
}

TEST_CASE("the oldest is never preempted and first come is first admitted") {
  fake_runner runner(tight());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  std::vector<int> order;
  std::vector<pending> items;
  for (std::uint64_t i = 0; i < 5; ++i) {
    items.push_back(add(target, request_of(i, 30, 40)));
    items.back().sink->on_each = [&order, i](recording_sink& sink) {
      if (sink.tokens.size() == 40) order.push_back(static_cast<int>(i));
    };
  }
  run_all(target);
  CHECK(order == std::vector<int>{0, 1, 2, 3, 4});
}

TEST_CASE("tight pools, random work and cancels: nothing is lost, nothing hangs") {
  std::mt19937 random(5);
  for (int run = 0; run < 40; ++run) {
    auto limits = small_limits();
    limits.pages = 4 + static_cast<int>(random() % 12);
    limits.page_tokens = 1 + static_cast<int>(random() % 9);
    limits.slots = 1 + static_cast<int>(random() % 5);
    limits.step_tokens = 1 + static_cast<int>(random() % 20);
    fake_runner runner(limits);
    engine_counters counters;
    scheduler target(runner, {.prefill_chunk_tokens = static_cast<int>(random() % 6)}, counters);
    std::vector<pending> items;
    std::vector<generation_request> requests;
    for (int i = 0; i < 30; ++i) {
      auto request = request_of(random(), 1 + random() % 20, 1 + static_cast<int>(random() % 30));
      if (!target.refusal(request).empty()) continue;
      requests.push_back(request);
      items.push_back(add(target, request));
      for (auto n = random() % 5; n > 0; --n) target.step();
      if (random() % 4 == 0) items[random() % items.size()].handle->cancel();
    }
    run_all(target);
    for (std::size_t i = 0; i < items.size(); ++i) {
      REQUIRE(items[i].sink->ends == 1);
      if (items[i].sink->end->reason != finish_reason::cancelled)
        CHECK(items[i].sink->tokens == alone(requests[i], limits));
    }
    CHECK(target.free_pages() == limits.pages);
    CHECK(target.free_slots() == limits.slots);
    CHECK(counters.queued == 0);
    CHECK(counters.running == 0);
  }
}
