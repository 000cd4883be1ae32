// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "drawing_runner.hpp"
#include "engine/engine.hpp"
#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;
using namespace std::chrono_literals;

namespace {

// Fulfils a future when the answer is complete.
struct waiting_sink : generation_sink {
  std::vector<std::int32_t> tokens;
  std::promise<generation_end> done;
  std::atomic<int> seen{0};

  void on_token(const sampled_token& token) override {
    tokens.push_back(token.id);
    ++seen;
  }
  void on_finish(const generation_end& end) override { done.set_value(end); }
};

struct client {
  std::shared_ptr<waiting_sink> sink = std::make_shared<waiting_sink>();
  std::future<generation_end> result = sink->done.get_future();
  submission sent;

  client(engine& target, generation_request request) { sent = target.submit(std::move(request), sink); }
  bool accepted() const { return sent.status == submit_status::accepted; }
  generation_end get() {
    if (result.wait_for(60s) != std::future_status::ready) throw nibble::error("no answer came");
    return result.get();
  }
};

}  // namespace

TEST_CASE("the engine answers from its own thread") {
  fake_runner runner(small_limits());
  engine target(runner, {});
  client one(target, request_of(1, 12, 20));
  client two(target, request_of(2, 30, 10));
  CHECK(one.get().reason == finish_reason::length);
  CHECK(two.get().reason == finish_reason::length);
  CHECK(one.sink->tokens == alone(request_of(1, 12, 20)));
  CHECK(two.sink->tokens == alone(request_of(2, 30, 10)));
  CHECK(target.context_tokens() == 256);
  target.stop();
  CHECK(target.counters().expert_misses == static_cast<std::uint64_t>(runner.steps));
  CHECK(target.counters().expert_hits == 3 * target.counters().expert_misses);
}

TEST_CASE("requests that cannot run are refused at the door") {
  fake_runner runner(small_limits());
  engine target(runner, {});
  client empty(target, request_of(1, 0, 5));
  CHECK(empty.sent.status == submit_status::invalid);
  CHECK_FALSE(empty.sent.message.empty());
  CHECK(empty.sent.handle == nullptr);
}

TEST_CASE("two hundred clients at one slot: each is answered or told that the queue is full") {
  auto limits = small_limits();
  limits.slots = 1;
  fake_runner runner(limits);
  engine target(runner, {.max_queued = 4, .scheduler = {}});
  std::atomic<int> answered{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 20; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        client mine(target, request_of(static_cast<std::uint64_t>(t * 10 + i), 8, 12));
        if (mine.accepted()) {
          if (mine.get().reason == finish_reason::length) ++answered;
        } else if (mine.sent.status == submit_status::queue_full) {
          ++refused;
        }
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(answered + refused == 200);
  CHECK(answered >= 5);
  CHECK(target.counters().rejected == static_cast<std::uint64_t>(refused.load()));
  CHECK(target.drain(10s));
  CHECK(target.counters().running == 0);
  CHECK(target.counters().queued == 0);
  CHECK(target.counters().free_slots == 1);
}

TEST_CASE("five hundred disconnects from many threads, then four normal answers") {
  const auto limits = small_limits();
  fake_runner runner(limits);
  engine target(runner, {.max_queued = 1000, .scheduler = {}});
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (unsigned t = 0; t < 10; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 50; ++i) {
        client mine(target, request_of(random(), 1 + random() % 100, 100));
        if (random() % 3 == 0) {
          const int wanted = static_cast<int>(random() % 20);
          while (mine.sink->seen < wanted && mine.result.wait_for(0s) != std::future_status::ready)
            std::this_thread::yield();
        }
        mine.sent.handle->cancel();
        const auto end = mine.get();
        if (end.reason == finish_reason::cancelled || end.reason == finish_reason::length) ++ended;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(ended == 500);
  std::vector<std::unique_ptr<client>> last;
  for (std::uint64_t i = 0; i < 4; ++i)
    last.push_back(std::make_unique<client>(target, request_of(i, 10, 10)));
  for (std::uint64_t i = 0; i < 4; ++i) {
    CHECK(last[i]->get().reason == finish_reason::length);
    CHECK(last[i]->sink->tokens == alone(request_of(i, 10, 10)));
  }
  CHECK(target.drain(10s));
  CHECK(target.counters().running == 0);
  CHECK(target.counters().free_pages == limits.pages);
  CHECK(target.counters().free_slots == limits.slots);
  CHECK(target.counters().aborted > 0);
}

TEST_CASE("drain lets answers end and refuses new ones") {
  fake_runner runner(small_limits());
  engine target(runner, {});
  client running(target, request_of(1, 12, 200));
  CHECK(target.drain(30s));
  CHECK(running.get().reason == finish_reason::length);
  client late(target, request_of(1, 12, 200));
  CHECK(late.sent.status == submit_status::stopping);
}

TEST_CASE("stop ends answers in the middle as cancelled, once") {
  fake_runner runner(small_limits());
  std::promise<void> stepping;
  std::atomic<bool> told{false};
  runner.before_step = [&](auto) {
    if (!told.exchange(true)) stepping.set_value();
    std::this_thread::sleep_for(1ms);
  };
  engine target(runner, {});
  std::vector<std::unique_ptr<client>> clients;
  for (std::uint64_t i = 0; i < 8; ++i)
    clients.push_back(std::make_unique<client>(target, request_of(i, 12, 244)));
  stepping.get_future().wait();
  target.stop();
  target.stop();
  for (auto& item : clients) {
    const auto end = item->get();
    CHECK(end.reason == finish_reason::cancelled);
    CHECK_FALSE(end.message.empty());
  }
  CHECK(target.counters().running == 0);
  CHECK(target.counters().queued == 0);
}

TEST_CASE("a step that throws does not end the engine") {
  fake_runner runner(small_limits());
  std::atomic<bool> fail{true};
  runner.before_step = [&](auto) {
    if (fail.exchange(false)) throw std::runtime_error("once");
  };
  engine target(runner, {});
  client first(target, request_of(1, 12, 20));
  const auto end = first.get();
  CHECK(end.reason == finish_reason::error);
  CHECK(end.message == "once");
  client second(target, request_of(2, 12, 20));
  CHECK(second.get().reason == finish_reason::length);
  CHECK(second.sink->tokens == alone(request_of(2, 12, 20)));
}

TEST_CASE("clients come and go while a runner draws on its own thread") {
  auto limits = small_limits();
  limits.pages = 24;
  drawing_runner runner(limits, stream_kind::thread);
  runner.most_logprobs = 2;
  engine target(runner, {.max_queued = 1000, .scheduler = {}});
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0}, whole{0};
  for (unsigned t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 30; ++i) {
        auto request = request_of(random(), 1 + random() % 40, 1 + static_cast<int>(random() % 40));
        if (random() % 8 == 0) request.sampling.logprobs = 3;
        if (random() % 3 == 0) request.sampling.frequency_penalty = 0.4f;
        client mine(target, request);
        if (random() % 3 == 0) {
          const int wanted = static_cast<int>(random() % 20);
          while (mine.sink->seen < wanted && mine.result.wait_for(0s) != std::future_status::ready)
            std::this_thread::yield();
          mine.sent.handle->cancel();
        }
        const auto end = mine.get();
        if (end.reason == finish_reason::error) ++wrong;
        if (end.reason != finish_reason::length) continue;
        ++whole;
        if (mine.sink->tokens != alone(request)) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(whole > 60);
  CHECK(target.drain(10s));
  CHECK(target.counters().free_pages == limits.pages);
  CHECK(target.counters().free_slots == limits.slots);
  target.stop();
  CHECK(runner.in_flight() == 0);
  CHECK(runner.begun_ahead > 0);
  CHECK(runner.violations.empty());
}

TEST_CASE("stop with steps in flight reads them and ends their requests") {
  drawing_runner runner(small_limits(), stream_kind::thread);
  engine target(runner, {});
  std::vector<std::unique_ptr<client>> clients;
  for (std::uint64_t i = 0; i < 6; ++i)
    clients.push_back(std::make_unique<client>(target, request_of(i, 12, 244)));
  while (clients[0]->sink->seen == 0) std::this_thread::yield();
  target.stop();
  for (auto& item : clients) {
    const auto end = item->get();
    CHECK((end.reason == finish_reason::cancelled || end.reason == finish_reason::length));
  }
  CHECK(runner.in_flight() == 0);
  CHECK(runner.violations.empty());
}

TEST_CASE("a lost device ends the requests, refuses new ones and lets the engine stop") {
  drawing_runner runner(small_limits(), stream_kind::thread);
  runner.on_finish = [&] {
    if (runner.begun < 30) return;
    runner.lost = true;
    nibble::require(nibble::status::cuda(700, "fake", "an illegal address"));
  };
  engine target(runner, {});
  CHECK(target.failure().empty());
  std::vector<std::unique_ptr<client>> clients;
  for (std::uint64_t i = 0; i < 8; ++i)
    clients.push_back(std::make_unique<client>(target, request_of(i, 12, 200)));
  for (auto& item : clients) {
    const auto end = item->get();
    CHECK(end.reason == finish_reason::error);
    CHECK(end.message.find("an illegal address") != std::string::npos);
  }
  // The engine says so a moment after the requests hear it; until then it ends newcomers itself.
  for (int i = 0; i < 10'000 && target.failure().empty(); ++i) {
    client early(target, request_of(9, 12, 20));
    if (early.accepted()) CHECK(early.get().reason == finish_reason::error);
    std::this_thread::sleep_for(1ms);
  }
  CHECK(target.failure().find("an illegal address") != std::string::npos);
  client late(target, request_of(9, 12, 20));
  CHECK(late.sent.status == submit_status::failed);
  CHECK(late.sent.message == target.failure());
  CHECK(target.drain(10s));
  CHECK(target.counters().running == 0);
  CHECK(target.counters().queued == 0);
  CHECK(target.step_age() == 0ms);
  target.stop();
  CHECK(runner.violations.empty());
}

TEST_CASE("a runner that could run nothing is refused") {
  for (const auto change :
       {+[](runner_limits& l) { l.slots = 0; }, +[](runner_limits& l) { l.pages = 0; },
        +[](runner_limits& l) { l.context_tokens = 1; }, +[](runner_limits& l) { l.step_tokens = 0; },
        +[](runner_limits& l) { l.page_tokens = 0; }}) {
    auto limits = small_limits();
    change(limits);
    fake_runner runner(limits);
    CHECK_THROWS_AS(engine(runner, {}), nibble::error);
  }
}
