// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>

#include "drawing_runner.hpp"
#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

namespace {

// What nibble::require makes of a CUDA error.
[[noreturn]] void cuda_error(int code) {
  nibble::status what;
  what.code = nibble::status_code::cuda_error;
  what.cuda_error = code;
  what.where = "fake";
  what.text = "the device said no";
  nibble::require(what);
  throw std::logic_error("that was no error");
}

}  // namespace

TEST_CASE("a step in flight that fails ends its own sequences, and those that joined later go on") {
  for (const int out_of_memory : {0, 1}) {
    drawing_runner runner(small_limits());
    engine_counters counters;
    scheduler target(runner, {.max_running = 3}, counters);
    const auto a = add(target, request_of(1, 4, 30));
    const auto b = add(target, request_of(2, 4, 30));
    for (int i = 0; i < 4; ++i) target.step();
    CHECK(a.sink->tokens.size() == 3);
    CHECK(runner.in_flight() == 1);
    // In the step after the one that fails, beside two that are no more.
    const auto later = add(target, request_of(3, 4, 30));
    const auto queued = add(target, request_of(4, 4, 30));
    bool failed = false;
    runner.on_finish = [&] {
      if (!std::exchange(failed, true)) cuda_error(out_of_memory ? 2 : 1);
    };
    target.step();
    for (const auto& item : {a, b}) {
      REQUIRE(item.sink->end);
      CHECK(item.sink->end->reason == finish_reason::error);
      CHECK(item.sink->end->message.find("the device said no") != std::string::npos);
      CHECK(item.sink->tokens.size() == 3);
    }
    run_all(target);
    CHECK(later.sink->tokens == alone(request_of(3, 4, 30)));
    CHECK(queued.sink->tokens == alone(request_of(4, 4, 30)));
    CHECK(target.failure().empty());
    CHECK(counters.finished_error == 2);
    CHECK(target.free_pages() == runner.limits().pages);
    CHECK(target.free_slots() == runner.limits().slots);
    CHECK(runner.violations.empty());
  }
}

TEST_CASE("a step that cannot begin ends its sequences, with one in flight too") {
  for (const int when : {0, 1, 5}) {
    drawing_runner runner(small_limits());
    engine_counters counters;
    scheduler target(runner, {.max_running = 2}, counters);
    const auto a = add(target, request_of(1, 4, 30));
    const auto b = add(target, request_of(2, 4, 30));
    const auto waiting = add(target, request_of(3, 4, 30));
    runner.on_begin = [&](auto) {
      if (runner.begun == when && !b.sink->end) cuda_error(1);
    };
    run_all(target);
    for (const auto& item : {a, b}) {
      REQUIRE(item.sink->end);
      CHECK(item.sink->end->reason == finish_reason::error);
      CHECK(item.sink->ends == 1);
      CHECK(item.sink->tokens_after_end == 0);
    }
    CHECK(waiting.sink->tokens == alone(request_of(3, 4, 30)));
    CHECK(runner.in_flight() == 0);
    CHECK(target.free_pages() == runner.limits().pages);
    CHECK(runner.violations.empty());
  }
}

TEST_CASE("options that the runner refuses when it gets them end their own request only") {
  drawing_runner runner(small_limits());
  runner.on_set = [](const sampling_options& options) {
    if (options.seed == 2) cuda_error(2);
  };
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto good = add(target, request_of(1, 4, 30));
  const auto bad = add(target, request_of(2, 4, 30));
  run_all(target);
  CHECK(good.sink->tokens == alone(request_of(1, 4, 30)));
  REQUIRE(bad.sink->end);
  CHECK(bad.sink->end->reason == finish_reason::error);
  CHECK(bad.sink->tokens.empty());
  CHECK(target.free_slots() == runner.limits().slots);
}

TEST_CASE("a row without a distribution ends its own request, the step ahead or not") {
  drawing_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto good = add(target, request_of(1, 9, 25));
  const auto ill = add(target, request_of(2, 5, 25));
  // The bad row comes while the next step of the sequence is on its way.
  runner.after_row = [&](const step_sequence& sequence, std::span<float> row) {
    if (sequence.slot == 1 && sequence.position == 11)
      std::fill(row.begin(), row.end(), std::numeric_limits<float>::quiet_NaN());
  };
  run_all(target);
  CHECK(good.sink->tokens == alone(request_of(1, 9, 25)));
  REQUIRE(ill.sink->end);
  CHECK(ill.sink->end->reason == finish_reason::error);
  CHECK(ill.sink->end->message.find("not numbers") != std::string::npos);
  CHECK(ill.sink->tokens.size() == 7);
  CHECK(target.free_slots() == runner.limits().slots);
  CHECK(runner.violations.empty());
}

TEST_CASE("a lost context ends every request with the reason, and nobody calls the runner again") {
  enum place { in_clear, in_set, in_begin, in_finish, in_step };
  for (const auto where : {in_clear, in_set, in_begin, in_finish, in_step})
    for (const int after : {0, 1, 2, 7}) {
      drawing_runner runner(small_limits());
      if (where == in_step) runner.most_logprobs = -1;
      engine_counters counters;
      scheduler target(runner, {}, counters);
      int calls = 0;
      const auto lose = [&] {
        if (calls++ < after) return;
        runner.lost = true;
        cuda_error(700);
      };
      runner.on_clear = [&](int) { where == in_clear ? lose() : void(); };
      runner.on_set = [&](const sampling_options&) { where == in_set ? lose() : void(); };
      runner.on_begin = [&](auto) { where == in_begin ? lose() : void(); };
      runner.on_finish = [&] { where == in_finish ? lose() : void(); };
      runner.before_step = [&](auto) { where == in_step ? lose() : void(); };
      std::vector<pending> items;
      for (std::uint64_t i = 0; i < 12; ++i) {
        auto request = request_of(i, 6, 12);
        if (where == in_step) request.sampling.logprobs = 0;
        items.push_back(add(target, request));
      }
      run_all(target);
      REQUIRE(runner.lost);
      CHECK(target.failure().find("the device said no") != std::string::npos);
      CHECK(target.failure().find("started again") != std::string::npos);
      int failed = 0;
      for (const auto& item : items) {
        REQUIRE(item.sink->ends == 1);
        if (item.sink->end->reason != finish_reason::error) continue;
        ++failed;
        CHECK(item.sink->end->message == target.failure());
      }
      CHECK(failed > 0);
      const auto late = add(target, request_of(50, 6, 12));
      REQUIRE(late.sink->end);
      CHECK(late.sink->end->reason == finish_reason::error);
      CHECK(late.sink->end->message == target.failure());
      CHECK_FALSE(target.step());
      target.cancel_all("stop");
      CHECK(late.sink->ends == 1);
      CHECK(target.idle());
      CHECK(counters.running == 0);
      CHECK(counters.queued == 0);
      CHECK(target.free_pages() == runner.limits().pages);
      CHECK(target.free_slots() == runner.limits().slots);
      CHECK(runner.violations == std::vector<std::string>{});
    }
}

TEST_CASE("a lost context on the way of logits ends everything too") {
  fake_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  runner.before_step = [&](auto) {
    if (runner.steps == 5) cuda_error(719);
  };
  const auto item = add(target, request_of(1, 6, 30));
  const auto other = add(target, request_of(2, 6, 30));
  run_all(target);
  CHECK(runner.steps == 5);
  for (const auto& ended : {item, other}) {
    REQUIRE(ended.sink->end);
    CHECK(ended.sink->end->message == target.failure());
  }
}

TEST_CASE("steps that fail at random end the requests they hold and lose nothing") {
  std::mt19937 random(3);
  int failed = 0, whole = 0;
  for (int round = 0; round < 60; ++round) {
    auto limits = small_limits();
    limits.pages = 6 + static_cast<int>(random() % 20);
    limits.step_tokens = 1 + static_cast<int>(random() % 20);
    drawing_runner runner(limits, round % 2 ? stream_kind::late : stream_kind::early);
    const auto sometimes = [&] {
      if (random() % 40 == 0) cuda_error(random() % 2 ? 1 : 2);
    };
    runner.on_clear = [&](int) { sometimes(); };
    runner.on_set = [&](const sampling_options&) { sometimes(); };
    runner.on_begin = [&](auto) { sometimes(); };
    runner.on_finish = [&] { sometimes(); };
    engine_counters counters;
    scheduler target(runner, {}, counters);
    std::vector<pending> items;
    std::vector<generation_request> requests;
    for (int i = 0; i < 20; ++i) {
      requests.push_back(request_of(random(), 1 + random() % 20, 1 + static_cast<int>(random() % 20)));
      if (!target.refusal(requests.back()).empty()) {
        requests.pop_back();
        continue;
      }
      items.push_back(add(target, requests.back()));
      for (auto n = random() % 4; n > 0; --n) target.step();
    }
    run_all(target);
    for (std::size_t i = 0; i < items.size(); ++i) {
      REQUIRE(items[i].sink->ends == 1);
      CHECK(items[i].sink->tokens_after_end == 0);
      const auto expected = alone(requests[i], limits);
      if (items[i].sink->end->reason == finish_reason::error) {
        ++failed;
        REQUIRE(items[i].sink->tokens.size() <= expected.size());
        CHECK(std::equal(items[i].sink->tokens.begin(), items[i].sink->tokens.end(), expected.begin()));
      } else {
        ++whole;
        CHECK(items[i].sink->tokens == expected);
      }
    }
    CHECK(target.free_pages() == limits.pages);
    CHECK(target.free_slots() == limits.slots);
    CHECK(counters.running == 0);
    CHECK(counters.queued == 0);
    CHECK(runner.in_flight() == 0);
    CHECK(runner.violations.empty());
  }
  CHECK(failed > 50);
  CHECK(whole > 50);
}
