// SPDX-License-Identifier: Apache-2.0
#include <random>

#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

TEST_CASE("C099: slots come back however a request ends, and are never shared when there is none") {
  auto limits = small_limits();
  limits.slots = 2;
  limits.step_tokens = 8;
  fake_runner runner(limits);  // throws when two sequences of a step have one slot
  engine_counters counters;
  scheduler target(runner, {}, counters);
  for (std::uint64_t round = 0; round < 50; ++round) {
    auto stopping = request_of(round, 9, 30);
    stopping.stop_tokens = {alone(stopping)[3]};
    const auto by_stop = add(target, stopping);
    run_all(target);
    CHECK(by_stop.sink->end->reason == finish_reason::stop);
    CHECK(target.free_slots() == 2);

    const auto by_length = add(target, request_of(round, 9, 5));
    run_all(target);
    CHECK(by_length.sink->end->reason == finish_reason::length);
    CHECK(target.free_slots() == 2);

    const auto by_error = add(target, request_of(round, 9, 5));
    const int fatal = runner.steps + 2;
    runner.before_step = [&](auto) {
      if (runner.steps == fatal) throw nibble::error("this step fails");
    };
    run_all(target);
    runner.before_step = nullptr;
    CHECK(by_error.sink->end->reason == finish_reason::error);
    CHECK(target.free_slots() == 2);

    for (const int steps : {1, 6}) {  // in the prompt of 20, and behind it
      const auto cancelled = add(target, request_of(round, 20, 30));
      for (int i = 0; i < steps; ++i) target.step();
      cancelled.handle->cancel();
      run_all(target);
      CHECK(cancelled.sink->end->reason == finish_reason::cancelled);
      CHECK(target.free_slots() == 2);
    }

    const auto gone = add(target, request_of(round, 9, 30));  // the client's socket throws
    gone.sink->on_each = [](recording_sink&) { throw nibble::error("nobody listens"); };
    run_all(target);
    CHECK(gone.sink->end->reason == finish_reason::error);
    CHECK(target.free_slots() == 2);
    CHECK(target.free_pages() == limits.pages);
  }
  // More than there are slots: they wait.
  std::vector<pending> many;
  for (std::uint64_t i = 0; i < 5; ++i) many.push_back(add(target, request_of(i, 9, 20)));
  while (target.step()) CHECK(counters.running <= 2);
  for (std::uint64_t i = 0; i < 5; ++i) CHECK(many[i].sink->tokens == alone(request_of(i, 9, 20)));
}
