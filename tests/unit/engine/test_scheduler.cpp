// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <random>
#include <set>

#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

TEST_CASE("prefill in chunks of any size gives the same answer") {
  const auto request = request_of(7, 61, 20);
  const auto expected = alone(request);
  REQUIRE(expected.size() == 20);
  for (const int chunk : {1, 2, 3, 7, 8, 31, 32, 61, 500})
    for (const int step : {1, 2, 5, 32, 64}) {
      auto limits = small_limits();
      limits.step_tokens = step;
      fake_runner runner(limits);
      engine_counters counters;
      scheduler target(runner, {.prefill_chunk_tokens = chunk}, counters);
      const auto item = add(target, request);
      run_all(target);
      CHECK(item.sink->tokens == expected);
      CHECK(counters.prompt_tokens == 61);
      CHECK(runner.largest_step <= step);
    }
}

TEST_CASE("a request answers the same alone and in any company") {
  std::vector<generation_request> requests;
  for (std::uint64_t i = 0; i < 12; ++i)
    requests.push_back(request_of(i, 3 + 11 * (i % 5), 5 + static_cast<int>(i)));
  for (const int step : {1, 3, 16, 40}) {
    auto limits = small_limits();
    limits.step_tokens = step;
    fake_runner runner(limits);
    engine_counters counters;
    scheduler target(runner, {}, counters);
    std::vector<pending> items;
    for (const auto& request : requests) items.push_back(add(target, request));
    run_all(target);
    for (std::size_t i = 0; i < items.size(); ++i) CHECK(items[i].sink->tokens == alone(requests[i]));
    CHECK(target.free_pages() == limits.pages);
    CHECK(target.free_slots() == limits.slots);
    CHECK(counters.running == 0);
    CHECK(counters.queued == 0);
    CHECK(counters.finished_length == 12);
  }
}

TEST_CASE("decode goes on while a long prompt is read, and the prompt too") {
  auto limits = small_limits();
  limits.step_tokens = 4;
  fake_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  std::vector<pending> decoding;
  for (std::uint64_t i = 0; i < 3; ++i) decoding.push_back(add(target, request_of(i, 1, 200)));
  for (int i = 0; i < 3; ++i) target.step();
  const auto before = decoding[0].sink->tokens.size();
  const auto reading = add(target, request_of(9, 40, 5));
  for (int i = 0; i < 60; ++i) target.step();
  for (const auto& item : decoding) CHECK(item.sink->tokens.size() >= before + 40);
  CHECK(reading.sink->tokens.size() == 5);
}

TEST_CASE("with fewer tokens in a step than sequences each gets its turn") {
  for (const int step : {1, 2, 3}) {
    auto limits = small_limits();
    limits.step_tokens = step;
    fake_runner runner(limits);
    engine_counters counters;
    scheduler target(runner, {}, counters);
    std::vector<pending> items;
    for (std::uint64_t i = 0; i < 4; ++i) items.push_back(add(target, request_of(i, 1, 100)));
    for (int i = 0; i < 120; ++i) target.step();
    std::size_t least = 1000, most = 0;
    for (const auto& item : items) {
      least = std::min(least, item.sink->tokens.size());
      most = std::max(most, item.sink->tokens.size());
    }
    CHECK(most - least <= 1);
  }
}

TEST_CASE("a prompt is cut where that changes no bits, whoever shares its steps") {
  auto limits = small_limits();
  limits.step_tokens = 40, limits.piece_tokens = 16;
  fake_runner runner(limits);
  std::vector<int> ends;
  runner.before_step = [&](std::span<const step_sequence> sequences) {
    for (const auto& s : sequences)
      if (s.tokens.size() > 1) ends.push_back(s.position + static_cast<int>(s.tokens.size()));
  };
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto stranger = add(target, request_of(1, 1, 30));
  target.step();
  const auto prompt = add(target, request_of(2, 150, 5));
  run_all(target);
  CHECK(ends == std::vector<int>{32, 64, 96, 128, 150});  // 39 tokens are left beside the stranger
  CHECK(prompt.sink->tokens == alone(request_of(2, 150, 5)));
  // A piece shorter than that is still served.
  limits.step_tokens = 7;
  fake_runner small(limits);
  scheduler narrow(small, {}, counters);
  const auto slow = add(narrow, request_of(2, 150, 5));
  run_all(narrow);
  CHECK(slow.sink->tokens == prompt.sink->tokens);
}

TEST_CASE("a short prompt does not wait for a long one to end") {
  auto limits = small_limits();
  limits.step_tokens = 8;
  fake_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto long_one = add(target, request_of(1, 200, 5));
  target.step();
  const auto short_one = add(target, request_of(2, 8, 1));
  int steps = 0;
  while (!short_one.sink->end && steps < 100) target.step(), ++steps;
  CHECK(steps <= 3);
  CHECK(long_one.sink->tokens.empty());
  run_all(target);
  CHECK(long_one.sink->tokens == alone(request_of(1, 200, 5)));
}

TEST_CASE("stop tokens end the answer and are not delivered") {
  auto request = request_of(3, 5, 50);
  const auto full = alone(request);
  request.stop_tokens = {full[10], full[17]};
  const auto cut =
      std::find_first_of(full.begin(), full.end(), request.stop_tokens.begin(), request.stop_tokens.end()) -
      full.begin();
  fake_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto item = add(target, request);
  run_all(target);
  CHECK(item.sink->tokens == std::vector<std::int32_t>(full.begin(), full.begin() + cut));
  CHECK(item.sink->end->reason == finish_reason::stop);
  CHECK(item.sink->end->completion_tokens == static_cast<int>(cut) + 1);
  CHECK(item.sink->end->prompt_tokens == 5);
  CHECK(counters.finished_stop == 1);
}

TEST_CASE("max_tokens is cut to the context and the answer ends with length") {
  const auto limits = small_limits();
  fake_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto long_prompt = add(target, request_of(4, 255, 1000));
  const auto huge = add(target, request_of(5, 250, std::numeric_limits<int>::max()));
  const auto one = add(target, request_of(6, 10, 1));
  run_all(target);
  CHECK(long_prompt.sink->tokens.size() == 1);
  CHECK(huge.sink->tokens.size() == 6);
  CHECK(one.sink->tokens.size() == 1);
  for (const auto& item : {long_prompt, huge, one}) {
    CHECK(item.sink->end->reason == finish_reason::length);
    CHECK(item.sink->ends == 1);
  }
}

TEST_CASE("requests that can never run are named") {
  fake_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto why = [&](generation_request request) { return target.refusal(request); };
  CHECK(why(request_of(1, 0, 5)).find("no token") != std::string::npos);
  CHECK(why(request_of(1, 5, 0)).find("max_tokens") != std::string::npos);
  CHECK(why(request_of(1, 256, 5)).find("256") != std::string::npos);
  CHECK(why(request_of(1, 255, 5)).empty());
  auto request = request_of(1, 5, 5);
  request.prompt[2] = 64;
  CHECK(why(request).find("64") != std::string::npos);
  request.prompt[2] = -1;
  CHECK(why(request).find("-1") != std::string::npos);
  request = request_of(1, 5, 5);
  request.sampling.logit_bias = {{64, 1.0f}};
  CHECK(why(request).find("logit_bias") != std::string::npos);
  request = request_of(1, 5, 5);
  request.sampling.temperature = std::numeric_limits<float>::quiet_NaN();
  CHECK_FALSE(why(request).empty());
  request.sampling.temperature = 1;
  request.sampling.top_p = 1.1f;
  CHECK_FALSE(why(request).empty());
}

TEST_CASE("a step that throws ends its own requests only") {
  fake_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {.max_running = 2}, counters);
  const auto a = add(target, request_of(1, 4, 30));
  const auto b = add(target, request_of(2, 4, 30));
  const auto waiting = add(target, request_of(3, 4, 30));
  for (int i = 0; i < 3; ++i) target.step();
  runner.before_step = [](auto) { throw nibble::error("the device is gone"); };
  target.step();
  runner.before_step = nullptr;
  for (const auto& item : {a, b}) {
    REQUIRE(item.sink->end);
    CHECK(item.sink->end->reason == finish_reason::error);
    CHECK(item.sink->end->message == "the device is gone");
  }
  CHECK_FALSE(waiting.sink->end);
  run_all(target);
  CHECK(waiting.sink->tokens == alone(request_of(3, 4, 30)));
  CHECK(counters.finished_error == 2);
  CHECK(target.free_pages() == small_limits().pages);
}

TEST_CASE("a sink that throws ends its own request only") {
  fake_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto bad = add(target, request_of(1, 4, 30));
  const auto good = add(target, request_of(2, 4, 30));
  bad.sink->on_each = [](recording_sink& sink) {
    if (sink.tokens.size() == 5) throw nibble::error("no more");
  };
  run_all(target);
  CHECK(bad.sink->tokens.size() == 5);
  CHECK(bad.sink->end->reason == finish_reason::error);
  CHECK(good.sink->tokens == alone(request_of(2, 4, 30)));
}

TEST_CASE("cancelling one changes no other, in the queue, in prefill and in decode") {
  const auto x = request_of(1, 6, 40);
  const auto y = request_of(2, 40, 40);
  for (const int slots : {1, 2})
    for (int when = 0; when < 45; ++when) {
      auto limits = small_limits();
      limits.slots = slots;
      limits.step_tokens = 8;
      fake_runner runner(limits);
      engine_counters counters;
      scheduler target(runner, {}, counters);
      const auto first = add(target, x);
      const auto second = add(target, y);
      for (int i = 0; i < when; ++i) target.step();
      second.handle->cancel();
      second.handle->cancel();
      const bool over = second.sink->end.has_value();
      target.step();
      REQUIRE(second.sink->end);
      CHECK(second.sink->end->reason == (over ? finish_reason::length : finish_reason::cancelled));
      run_all(target);
      CHECK(first.sink->tokens == alone(x));
      CHECK(second.sink->ends == 1);
      CHECK(counters.aborted == (over ? 0 : 1));
      CHECK(target.free_pages() == limits.pages);
      CHECK(target.free_slots() == limits.slots);
    }
}

TEST_CASE("no token follows a cancel, at any chunk boundary of a batch of three") {
  for (int boundary = 0; boundary < 12; ++boundary)
    for (std::size_t victim = 0; victim < 3; ++victim) {
      auto limits = small_limits();
      limits.step_tokens = 9;
      fake_runner runner(limits);
      engine_counters counters;
      scheduler target(runner, {.prefill_chunk_tokens = 4}, counters);
      std::vector<pending> items;
      for (std::uint64_t i = 0; i < 3; ++i) items.push_back(add(target, request_of(i, 20 + i, 10)));
      // The cancel arrives while the step is running.
      runner.before_step = [&](auto) {
        if (runner.steps == boundary + 1) items[victim].handle->cancel();
      };
      std::size_t before = 0;
      for (int i = 0; i <= boundary; ++i) {
        before = items[victim].sink->tokens.size();
        target.step();
      }
      const bool finished_earlier =
          items[victim].sink->end.has_value() && items[victim].sink->end->reason != finish_reason::cancelled;
      run_all(target);
      if (!finished_earlier) CHECK(items[victim].sink->tokens.size() == before);
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(items[i].sink->ends == 1);
        for (const auto id : items[i].sink->tokens) CHECK(id >= 0);
        if (i != victim) CHECK(items[i].sink->tokens == alone(request_of(i, 20 + i, 10)));
      }
    }
}

TEST_CASE("six hundred requests with random cancels leave pages and slots as they were") {
  std::mt19937 random(1);
  const auto limits = small_limits();
  fake_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  std::vector<pending> items;
  std::vector<generation_request> requests;
  for (int round = 0; round < 600; ++round) {
    requests.push_back(request_of(static_cast<std::uint64_t>(round), 1 + random() % 60,
                                  1 + static_cast<int>(random() % 40)));
    items.push_back(add(target, requests.back()));
    for (auto i = random() % 8; i > 0; --i) target.step();
    for (int i = 0; i < 2; ++i)
      if (random() % 2) items[random() % items.size()].handle->cancel();
  }
  std::vector<pending> last;
  for (std::uint64_t i = 0; i < 4; ++i) last.push_back(add(target, request_of(i, 10, 10)));
  run_all(target);
  std::size_t cancelled = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    REQUIRE(items[i].sink->ends == 1);
    CHECK(items[i].sink->tokens_after_end == 0);
    if (items[i].sink->end->reason == finish_reason::cancelled) {
      ++cancelled;
    } else {
      CHECK(items[i].sink->end->message.empty());
      CHECK(items[i].sink->tokens == alone(requests[i]));
    }
  }
  CHECK(cancelled == counters.aborted);
  CHECK(cancelled > 100);
  for (std::uint64_t i = 0; i < 4; ++i) CHECK(last[i].sink->tokens == alone(request_of(i, 10, 10)));
  CHECK(target.free_pages() == limits.pages);
  CHECK(target.free_slots() == limits.slots);
  CHECK(counters.running == 0);
  CHECK(counters.queued == 0);
  CHECK(target.idle());
}

TEST_CASE("ids without a token are never drawn, likely as they may be") {
  const auto request = request_of(3, 9, 30);
  const auto plain = alone(request);
  fake_runner runner(small_limits());
  engine_counters counters;
  const std::int32_t unwanted = plain.front();
  scheduler target(runner, {.unnamed_tokens = {unwanted}}, counters);
  const auto item = add(target, request);
  run_all(target);
  CHECK(item.sink->tokens.size() == plain.size());
  CHECK(std::count(item.sink->tokens.begin(), item.sink->tokens.end(), unwanted) == 0);
  CHECK_THROWS_AS(scheduler(runner, {.unnamed_tokens = {-1}}, counters), nibble::error);
  CHECK_THROWS_AS(scheduler(runner, {.unnamed_tokens = {small_limits().vocab_size}}, counters),
                  nibble::error);
}
