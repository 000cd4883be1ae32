// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>

#include "drawing_runner.hpp"
#include "recording_sink.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

namespace {

constexpr stream_kind every_kind[] = {stream_kind::late, stream_kind::early, stream_kind::thread};

// Options of every kind, by number.
generation_request varied(std::uint64_t seed, std::size_t prompt_tokens, int max_tokens) {
  auto request = request_of(seed, prompt_tokens, max_tokens);
  auto& options = request.sampling;
  const auto bits = mix(seed + 77);
  if (bits % 5 == 0) options.temperature = 0;
  if (bits / 5 % 3 == 0) options.top_k = 7;
  if (bits / 16 % 3 == 0) options.top_p = 0.8f;
  if (bits / 64 % 4 == 0) options.min_p = 0.05f;
  if (bits / 256 % 3 == 0) options.repetition_penalty = 1.4f;
  if (bits / 1024 % 3 == 0) options.frequency_penalty = 0.7f;
  if (bits / 4096 % 3 == 0) options.presence_penalty = 0.3f;
  if (bits / 16384 % 3 == 0) options.logit_bias = {{3, 2.0f}, {9, -4.0f}, {3, 1.0f}};
  if (bits / 65536 % 4 == 0) options.allowed = {0x0f0ff0f1u, 0xff00u};
  if (bits / (1 << 20) % 3 == 0) options.logprobs = static_cast<int>(bits / (1 << 23) % 6);
  if (bits / (1 << 27) % 2 == 0) request.stop_tokens = {5, 13};
  return request;
}

void check_nothing_left(const scheduler& target, const drawing_runner& runner,
                        const engine_counters& counters) {
  CHECK(target.free_pages() == runner.limits().pages);
  CHECK(target.free_slots() == runner.limits().slots);
  CHECK(counters.running == 0);
  CHECK(counters.queued == 0);
  CHECK(target.idle());
  CHECK(runner.in_flight() == 0);
  CHECK(runner.violations == std::vector<std::string>{});
}

}  // namespace

TEST_CASE("a step is submitted before the one before it is read, and the answer is the same") {
  for (const auto kind : every_kind) {
    drawing_runner runner(small_limits(), kind);
    engine_counters counters;
    scheduler target(runner, {}, counters);
    const auto item = add(target, request_of(1, 9, 40));
    run_all(target);
    CHECK(item.sink->tokens == alone(request_of(1, 9, 40)));
    CHECK(item.sink->end->reason == finish_reason::length);
    CHECK(runner.host_steps == 0);
    CHECK(runner.begun == 40);  // known ahead: not one step in vain
    CHECK(runner.begun_ahead == 39);
    CHECK(counters.completion_tokens == 40);
    CHECK(counters.prompt_tokens == 9);
    check_nothing_left(target, runner, counters);
  }
}

TEST_CASE("a token is delivered before the step after the next is submitted") {
  drawing_runner runner(small_limits());
  engine_counters counters;
  scheduler target(runner, {}, counters);
  const auto item = add(target, request_of(1, 3, 30));
  for (std::size_t i = 0; i < 20; ++i) {
    target.step();
    CHECK(item.sink->tokens.size() == i);
    CHECK(runner.in_flight() == 1);
  }
}

TEST_CASE("prefill and decode share steps in flight, in chunks of any size") {
  std::vector<generation_request> requests;
  for (std::uint64_t i = 0; i < 9; ++i)
    requests.push_back(varied(i, 3 + 13 * (i % 5), 4 + 5 * static_cast<int>(i)));
  for (const auto kind : every_kind)
    for (const int step_tokens : {1, 2, 3, 7, 40})
      for (const int chunk : {0, 1, 5}) {
        auto limits = small_limits();
        limits.step_tokens = step_tokens;
        drawing_runner runner(limits, kind);
        engine_counters counters;
        scheduler target(runner, {.prefill_chunk_tokens = chunk}, counters);
        std::vector<pending> items;
        for (const auto& request : requests) items.push_back(add(target, request));
        run_all(target);
        for (std::size_t i = 0; i < items.size(); ++i) CHECK(items[i].sink->tokens == alone(requests[i]));
        CHECK(runner.begun_ahead > runner.begun / 2);
        check_nothing_left(target, runner, counters);
      }
}

TEST_CASE("an answer that a stop token ends runs once in vain, and its slot serves the next at once") {
  auto request = request_of(3, 5, 50);
  const auto full = alone(request);
  request.stop_tokens = {full[10]};
  const auto cut = std::find(full.begin(), full.end(), full[10]) - full.begin();
  auto limits = small_limits();
  limits.slots = 1;
  for (const auto kind : every_kind) {
    drawing_runner runner(limits, kind);
    engine_counters counters;
    scheduler target(runner, {}, counters);
    const auto item = add(target, request);
    const auto next = add(target, request_of(4, 30, 7));
    run_all(target);
    CHECK(item.sink->tokens == std::vector<std::int32_t>(full.begin(), full.begin() + cut));
    CHECK(item.sink->end->reason == finish_reason::stop);
    CHECK(item.sink->end->completion_tokens == static_cast<int>(cut) + 1);
    CHECK(next.sink->tokens == alone(request_of(4, 30, 7)));
    CHECK(runner.begun == static_cast<int>(cut) + 2 + 7);
    CHECK(counters.completion_tokens == static_cast<std::uint64_t>(cut) + 1 + 7);
    check_nothing_left(target, runner, counters);
  }
}

TEST_CASE("neither max_tokens nor the context is overrun by the step ahead") {
  auto limits = small_limits();
  for (const int pages : {96, 4}) {  // by the context, by the pages
    limits.pages = pages;
    for (const int prompt : {1, 20, 31}) {
      drawing_runner runner(limits);
      engine_counters counters;
      scheduler target(runner, {}, counters);
      const auto item = add(target, request_of(8, static_cast<std::size_t>(prompt), 1000));
      const auto one = add(target, request_of(9, 1, 1));
      run_all(target);
      CHECK(static_cast<int>(item.sink->tokens.size()) == target.context_tokens() - prompt);
      CHECK(one.sink->tokens.size() == 1);
      CHECK(item.sink->end->reason == finish_reason::length);
      check_nothing_left(target, runner, counters);
    }
  }
}

TEST_CASE("no token follows a cancel or a full client, whichever step is in flight") {
  for (const auto kind : {stream_kind::late, stream_kind::early})
    for (const bool satisfied : {false, true})
      for (int when = 0; when < 24; ++when) {
        auto limits = small_limits();
        limits.step_tokens = 9;
        drawing_runner runner(limits, kind);
        engine_counters counters;
        scheduler target(runner, {}, counters);
        std::vector<pending> items;
        for (std::uint64_t i = 0; i < 3; ++i) items.push_back(add(target, request_of(i, 20 + i, 10)));
        for (int i = 0; i < when; ++i) target.step();
        const auto& victim = items[static_cast<std::size_t>(when) % 3];
        const bool over = victim.sink->end.has_value();
        const auto before = victim.sink->tokens.size();
        satisfied ? victim.handle->satisfied() : victim.handle->cancel();
        target.step();
        REQUIRE(victim.sink->end);
        run_all(target);
        if (!over) {
          CHECK(victim.sink->tokens.size() == before);
          CHECK(victim.sink->end->reason == (satisfied ? finish_reason::stop : finish_reason::cancelled));
        }
        for (std::uint64_t i = 0; i < 3; ++i)
          if (&items[i] != &victim) CHECK(items[i].sink->tokens == alone(request_of(i, 20 + i, 10)));
        check_nothing_left(target, runner, counters);
      }
}

TEST_CASE("sequences that give their pages back begin again with the token that was in flight") {
  auto limits = small_limits();
  limits.pages = 10;
  limits.step_tokens = 12;
  for (const auto kind : every_kind) {
    drawing_runner runner(limits, kind);
    engine_counters counters;
    scheduler target(runner, {}, counters);
    std::vector<pending> items;
    for (std::uint64_t i = 0; i < 6; ++i) items.push_back(add(target, varied(i, 10, 50)));
    run_all(target);
    CHECK(counters.preempted > 0);
    for (std::uint64_t i = 0; i < 6; ++i) CHECK(items[i].sink->tokens == alone(varied(i, 10, 50)));
    check_nothing_left(target, runner, counters);
  }
}

TEST_CASE("nobody gives pages back while the step in flight may free some") {
  auto limits = small_limits();
  limits.pages = 3;
  drawing_runner runner(limits);
  engine_counters counters;
  scheduler target(runner, {}, counters);
  // The first one's last token is in flight when the second needs the page that it still holds.
  const auto first = add(target, request_of(1, 7, 4));
  const auto second = add(target, request_of(2, 5, 12));
  run_all(target);
  CHECK(first.sink->tokens == alone(request_of(1, 7, 4)));
  CHECK(second.sink->tokens == alone(request_of(2, 5, 12)));
  CHECK(counters.preempted == 0);
  check_nothing_left(target, runner, counters);
}

TEST_CASE("options that the runner cannot take are drawn here, and the others go back to it") {
  auto wide = request_of(2, 9, 12);
  wide.sampling.logprobs = 8;
  wide.sampling.frequency_penalty = 0.5f;
  auto penalised = request_of(5, 9, 60);
  penalised.sampling.repetition_penalty = 1.3f;
  penalised.sampling.presence_penalty = 0.6f;
  for (const auto kind : every_kind) {
    drawing_runner runner(small_limits(), kind);
    runner.most_logprobs = 5;
    engine_counters counters;
    scheduler target(runner, {}, counters);
    const auto first = add(target, penalised);
    for (int i = 0; i < 10; ++i) target.step();
    CHECK(runner.host_steps == 0);
    const auto second = add(target, wide);
    run_all(target);
    CHECK(first.sink->tokens == alone(penalised));
    CHECK(second.sink->tokens == alone(wide));
    CHECK(runner.host_steps == 12);
    CHECK(runner.begun >= 48);
    check_nothing_left(target, runner, counters);
  }
}

TEST_CASE("ids without a token are told to the runner once and never drawn") {
  const auto request = request_of(3, 9, 30);
  const std::int32_t unwanted = alone(request).front();
  std::vector<std::int32_t> answers[2];
  for (int drawn_there = 0; drawn_there < 2; ++drawn_there) {
    drawing_runner drawing(small_limits());
    fake_runner plain(small_limits());
    engine_counters counters;
    scheduler target(drawn_there ? static_cast<model_runner&>(drawing) : plain,
                     {.unnamed_tokens = {unwanted, 1}}, counters);
    const auto item = add(target, request);
    run_all(target);
    answers[drawn_there] = item.sink->tokens;
  }
  CHECK(answers[0].size() == 30);
  CHECK(answers[0] == answers[1]);
  CHECK(std::count(answers[1].begin(), answers[1].end(), unwanted) == 0);
}

TEST_CASE("log-probabilities are those of the host") {
  struct keeping_sink : generation_sink {
    std::vector<sampled_token> tokens;
    void on_token(const sampled_token& token) override { tokens.push_back(token); }
    void on_finish(const generation_end&) override {}
  };
  for (const int count : {0, 1, 5}) {
    auto request = request_of(1, 9, 10);
    request.sampling.logprobs = count;
    std::shared_ptr<keeping_sink> sinks[2];
    for (int drawn_there = 0; drawn_there < 2; ++drawn_there) {
      drawing_runner drawing(small_limits());
      fake_runner plain(small_limits());
      engine_counters counters;
      scheduler target(drawn_there ? static_cast<model_runner&>(drawing) : plain, {}, counters);
      sinks[drawn_there] = std::make_shared<keeping_sink>();
      target.add(std::make_shared<generation>(request, sinks[drawn_there]));
      run_all(target);
    }
    REQUIRE(sinks[0]->tokens.size() == 10);
    REQUIRE(sinks[1]->tokens.size() == 10);
    for (std::size_t i = 0; i < 10; ++i) {
      const auto &a = sinks[0]->tokens[i], &b = sinks[1]->tokens[i];
      CHECK(a.id == b.id);
      CHECK(a.logprob == b.logprob);
      REQUIRE(a.top.size() == static_cast<std::size_t>(count));
      REQUIRE(b.top.size() == a.top.size());
      for (std::size_t k = 0; k < a.top.size(); ++k) {
        CHECK(a.top[k].token == b.top[k].token);
        CHECK(a.top[k].logprob == b.top[k].logprob);
      }
    }
  }
}

TEST_CASE("random work on any pool: the tokens of the engine that waits for each step, and nothing left") {
  std::mt19937 random(11);
  std::size_t whole = 0, cut = 0;
  std::uint64_t preempted = 0;
  for (int round = 0; round < 150; ++round) {
    auto limits = small_limits();
    limits.page_tokens = 1 + static_cast<int>(random() % 9);
    limits.pages = 4 + static_cast<int>(random() % (round % 2 ? 12 : 80));
    limits.slots = 1 + static_cast<int>(random() % 6);
    limits.step_tokens = 1 + static_cast<int>(random() % 20);
    drawing_runner runner(limits, every_kind[round % 3]);
    runner.most_logprobs = round % 4 == 0 ? 2 : 20;
    engine_counters counters;
    scheduler target(runner, {.prefill_chunk_tokens = static_cast<int>(random() % 6)}, counters);
    std::vector<pending> items;
    std::vector<generation_request> requests;
    for (int i = 0; i < 25; ++i) {
      auto request = varied(random(), 1 + random() % 20, 1 + static_cast<int>(random() % 30));
      if (!target.refusal(request).empty()) continue;
      requests.push_back(request);
      items.push_back(add(target, request));
      if (random() % 5 == 0) {
        const auto enough = 1 + random() % 8;
        items.back().sink->on_each = [enough, handle = items.back().handle.get()](recording_sink& sink) {
          if (sink.tokens.size() == enough) handle->satisfied();
        };
      }
      for (auto n = random() % 6; n > 0; --n) target.step();
      if (random() % 5 == 0) items[random() % items.size()].handle->cancel();
    }
    run_all(target);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto& sink = *items[i].sink;
      REQUIRE(sink.ends == 1);
      CHECK(sink.tokens_after_end == 0);
      REQUIRE(sink.end->reason != finish_reason::error);
      const auto expected = alone(requests[i], limits);
      if (items[i].handle->ending_asked()) {
        ++cut;
        REQUIRE(sink.tokens.size() <= expected.size());
        CHECK(std::equal(sink.tokens.begin(), sink.tokens.end(), expected.begin()));
      } else {
        ++whole;
        CHECK(sink.tokens == expected);
      }
    }
    preempted += counters.preempted;
    check_nothing_left(target, runner, counters);
  }
  CHECK(whole > 500);
  CHECK(cut > 200);
  CHECK(preempted > 100);
}
