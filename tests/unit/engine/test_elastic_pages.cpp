// SPDX-License-Identifier: Apache-2.0
// Others use the device too: the pool of pages shrinks and grows while requests run.
#include <algorithm>
#include <map>
#include <random>

#include "drawing_runner.hpp"
#include "nibble/core/driver_error.hpp"
#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

namespace {

/// A runner that has `wanted` pages when asked, if what is in use allows it.
template <class Runner>
class elastic_runner : public Runner {
 public:
  using Runner::Runner;
  int wanted = 1 << 20;
  int asked = 0, asked_now = 0;
  int pages = 1 << 20;  ///< there are now

  int adapt_pages(int pages_in_use, bool now) override {
    ++asked, asked_now += now;
    if (change) change();
    pages = std::clamp(wanted, pages_in_use, this->limits().pages);
    return pages;
  }
  std::function<void()> change;
};

void check_pages(int pages, std::span<const step_sequence> sequences) {
  for (const auto& sequence : sequences)
    for (const auto page : sequence.pages) REQUIRE(page < pages);
}

}  // namespace

TEST_CASE("a pool that changes under random requests changes none of their tokens") {
  std::mt19937 random(5);
  elastic_runner<drawing_runner> runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  runner.change = [&] { runner.wanted = static_cast<int>(24 + random() % 73); };
  runner.on_begin = [&](auto sequences) { check_pages(runner.pages, sequences); };
  std::map<int, pending> items;
  for (int i = 0; i < 120; ++i)
    items.emplace(i, add(target, request_of(static_cast<std::uint64_t>(i), 1 + random() % 40,
                                            static_cast<int>(1 + random() % 60))));
  run_all(target);
  CHECK(runner.asked > 5);
  for (const auto& [i, item] : items) {
    REQUIRE(item.sink->end);
    // 40 + 60 tokens are 13 pages: the pool always holds them.
    CHECK(item.sink->end->reason == finish_reason::length);
    const auto request = request_of(static_cast<std::uint64_t>(i), item.sink->end->prompt_tokens,
                                    static_cast<int>(item.sink->tokens.size()));
    CHECK(item.sink->tokens == alone(request));
  }
  CHECK(target.free_slots() == runner.limits().slots);
  CHECK(target.free_pages() == std::min(runner.pages, runner.limits().pages));
}

TEST_CASE("a request that the shrunken pool cannot hold ends with a sentence, and others go on") {
  elastic_runner<fake_runner> runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  runner.wanted = 5;  // fewer than are in use when the scheduler looks: it keeps those
  const auto warm = add(target, request_of(1, 4, 200));
  run_all(target);  // long enough for the scheduler to look
  REQUIRE(runner.asked >= 1);
  CHECK(warm.sink->end->reason == finish_reason::error);  // it grew past what was left
  CHECK(warm.sink->end->message.find("other programs took the device's memory") != std::string::npos);
  REQUIRE(runner.pages < 20);
  const auto large = add(target, request_of(2, 160, 4));
  const auto small = add(target, request_of(3, 8, 4));
  run_all(target);
  CHECK(large.sink->end->reason == finish_reason::error);
  CHECK(small.sink->tokens == alone(request_of(3, 8, 4)));
  runner.wanted = 96;
  const auto turns = add(target, request_of(4, 4, 30));
  run_all(target);
  for (int i = 0; i < 5; ++i) {
    add(target, request_of(static_cast<std::uint64_t>(10 + i), 4, 30));
    run_all(target);
  }
  const auto again = add(target, request_of(2, 160, 4));
  run_all(target);
  CHECK(again.sink->tokens == alone(request_of(2, 160, 4)));
  CHECK(turns.sink->end->reason == finish_reason::length);
  CHECK(target.free_pages() == 96);
}

TEST_CASE("a step that runs out of memory asks for room at once") {
  elastic_runner<fake_runner> runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto first = add(target, request_of(1, 4, 30));
  bool failed = false;
  runner.before_step = [&](auto) {
    if (!std::exchange(failed, true)) throw nibble::out_of_memory("no memory for the step");
  };
  target.step();
  REQUIRE(first.sink->end);
  CHECK(first.sink->end->message == "no memory for the step");
  CHECK(runner.asked_now == 0);
  const auto second = add(target, request_of(2, 4, 30));
  target.step();
  CHECK(runner.asked_now == 1);
  run_all(target);
  CHECK(second.sink->tokens == alone(request_of(2, 4, 30)));
  CHECK(runner.asked_now == 1);
}

TEST_CASE("a device that is lost while memory is looked at ends every request") {
  elastic_runner<fake_runner> runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  runner.change = [] {
    nibble::status what;
    what.code = nibble::status_code::cuda_error;
    what.cuda_error = 700;
    what.where = "fake", what.text = "gone";
    nibble::require(what);
  };
  const auto item = add(target, request_of(1, 4, 250));
  run_all(target);
  REQUIRE(item.sink->end);
  CHECK(item.sink->end->reason == finish_reason::error);
  CHECK_FALSE(target.failure().empty());
}
