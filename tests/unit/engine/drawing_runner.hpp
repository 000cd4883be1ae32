// SPDX-License-Identifier: Apache-2.0
/// \file
/// A fake_runner that draws tokens itself, as a device does: calls go into a stream and take effect later, in
/// their order, on copies of their arguments. It refuses every use that the contract of model_runner forbids.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "fake_runner.hpp"
#include "nibble/core/driver_error.hpp"
#include "nibble/host/sampling.hpp"

namespace qwen3_moe::testing {

/// When what was submitted takes effect.
enum class stream_kind {
  late,    ///< when somebody waits for it
  early,   ///< at once
  thread,  ///< some time, on a thread of its own; hooks run there too
};

class drawing_runner : public fake_runner {
 public:
  explicit drawing_runner(runner_limits limits, stream_kind kind = stream_kind::late)
      : fake_runner(limits), kind_(kind), draws_(static_cast<std::size_t>(limits.slots)) {
    if (kind_ == stream_kind::thread) worker_ = std::thread([this] { work(); });
  }
  ~drawing_runner() override {
    if (!worker_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    arrived_.notify_one();
    worker_.join();
  }
  drawing_runner(const drawing_runner&) = delete;
  drawing_runner& operator=(const drawing_runner&) = delete;

  bool draws() const override { return true; }
  bool can_draw(const sampling_options& options) const override {
    return !options.logprobs || *options.logprobs <= most_logprobs;
  }
  void forbid(std::span<const std::int32_t> ids) override {
    call("forbid");
    forbidden_.assign(ids.begin(), ids.end());
  }

  void clear_slot(int slot) override {
    call("clear_slot");
    if (on_clear) on_clear(slot);
    push([this, slot] {
      fake_runner::clear_slot(slot);
      draws_.at(static_cast<std::size_t>(slot)) = {};
    });
  }

  void set_draws(int slot, const sampling_options& options, const draw_history& history) override {
    call("set_draws");
    if (on_set) on_set(options);
    std::vector<nibble::host::token_counter::seen_token> seen(history.seen.begin(), history.seen.end());
    push([this, slot, options, drawn = history.drawn, seen = std::move(seen)] {
      auto& state = draws_.at(static_cast<std::size_t>(slot));
      state.options = options;
      state.drawn = drawn;
      state.seen = {};
      for (const auto& item : seen) {
        state.seen.add_prompt(std::span(&item.token, 1));
        for (int i = 0; i < item.generated; ++i) state.seen.add_generated(item.token);
      }
    });
  }

  void step(std::span<const step_sequence> sequences, std::span<float> logits) override {
    call("step");
    ++host_steps;
    refuse(!in_flight_.empty(), "step with a step in flight");
    // What was drawn elsewhere is not known here.
    auto done = std::make_shared<std::promise<void>>();
    auto waiting = done->get_future();
    push([this, sequences, logits, done] {
      for (const auto& sequence : sequences)
        if (sequence.logits != wanted_logits::none) {
          draws_.at(static_cast<std::size_t>(sequence.slot)).options.reset();
          draws_.at(static_cast<std::size_t>(sequence.slot)).previous.reset();
        }
      try {
        fake_runner::step(sequences, logits);
        done->set_value();
      } catch (...) {
        done->set_exception(std::current_exception());
      }
    });
    wait_for(waiting);
    waiting.get();
  }

  void begin(std::span<const step_sequence> sequences) override {
    call("begin");
    if (on_begin) on_begin(sequences);
    refuse(in_flight_.size() >= static_cast<std::size_t>(max_steps_in_flight), "too many steps in flight");
    refuse(sequences.empty(), "a step of nobody");
    ++begun;
    if (!in_flight_.empty()) ++begun_ahead;
    std::vector<copied> parts;
    for (const auto& sequence : sequences) {
      refuse(sequence.logits == wanted_logits::all, "all rows in a step that draws");
      parts.push_back({.tokens = {sequence.tokens.begin(), sequence.tokens.end()},
                       .pages = {sequence.pages.begin(), sequence.pages.end()},
                       .position = sequence.position,
                       .slot = sequence.slot,
                       .logits = sequence.logits});
    }
    auto result = std::make_shared<std::promise<rows>>();
    in_flight_.push_back(result->get_future());
    push([this, parts = std::move(parts), result]() mutable {
      try {
        result->set_value(execute(parts));
      } catch (...) {
        result->set_exception(std::current_exception());
      }
    });
  }

  std::span<const nibble::sampled_row> finish() override {
    call("finish");
    refuse(in_flight_.empty(), "finish with nothing in flight");
    auto waiting = std::move(in_flight_.front());
    in_flight_.pop_front();
    wait_for(waiting);
    if (on_finish) on_finish();
    read_ = waiting.get();
    return read_;
  }

  int most_logprobs = nibble::max_top_logprobs;
  std::function<void(int)> on_clear;  ///< these may throw
  std::function<void(const sampling_options&)> on_set;
  std::function<void(std::span<const step_sequence>)> on_begin;
  std::function<void()> on_finish;  ///< in place of the step's own failure
  bool lost = false;                ///< set by a test that throws context_lost_error: no call may follow
  int begun = 0;
  int begun_ahead = 0;  ///< begun before the step before was read
  int host_steps = 0;
  int in_flight() const { return static_cast<int>(in_flight_.size()); }
  /// Uses that the contract forbids; an engine may have turned their errors into answers.
  std::vector<std::string> violations;

 private:
  using rows = std::vector<nibble::sampled_row>;
  struct copied {
    std::vector<std::int32_t> tokens, pages;
    int position, slot;
    wanted_logits logits;
  };
  struct slot_draws {
    std::optional<sampling_options> options;
    std::uint64_t drawn = 0;
    nibble::host::token_counter seen;
    std::optional<std::int32_t> previous;
  };

  void refuse(bool wrong, const char* what) {
    if (!wrong) return;
    violations.emplace_back(what);
    throw nibble::error(std::string("drawing runner: ") + what);
  }
  void call(const char* what) {
    if (lost) violations.push_back(std::string(what) + " after the context was lost");
  }

  rows execute(std::vector<copied>& parts) {
    std::vector<step_sequence> sequences;
    std::size_t wanted = 0;
    for (auto& part : parts) {
      for (auto& token : part.tokens) {
        if (token != previous_token) continue;
        const auto& previous = draws_.at(static_cast<std::size_t>(part.slot)).previous;
        refuse(part.tokens.size() != 1, "the previous token among others");
        refuse(!previous, "a previous token that was never drawn");
        token = std::max(*previous, 0);  // a failed draw left none
      }
      if (part.logits == wanted_logits::last) ++wanted;
      sequences.push_back({.tokens = part.tokens,
                           .position = part.position,
                           .slot = part.slot,
                           .pages = part.pages,
                           .logits = part.logits});
    }
    const auto vocab = static_cast<std::size_t>(limits().vocab_size);
    std::vector<float> logits(wanted * vocab);
    fake_runner::step(sequences, logits);
    rows result;
    for (const auto& part : parts)
      if (part.logits == wanted_logits::last) {
        auto& state = draws_.at(static_cast<std::size_t>(part.slot));
        refuse(!state.options, "a draw without options");
        result.push_back(draw(state, std::span(logits).subspan(result.size() * vocab, vocab)));
        state.previous = result.back().token;
      }
    return result;
  }

  nibble::sampled_row draw(slot_draws& state, std::span<float> row) const {
    const auto& options = *state.options;
    nibble::sampled_row result{};
    const std::vector<float> raw(row.begin(), row.end());
    for (const auto id : forbidden_) row[static_cast<std::size_t>(id)] = -HUGE_VALF;
    if (!options.allowed.empty())
      for (std::size_t id = 0; id < row.size(); ++id)
        if ((options.allowed[id / 32] >> (id % 32) & 1u) == 0) row[id] = -HUGE_VALF;
    if (options.penalised())
      nibble::host::apply_penalties(row, state.seen.seen(),
                                    {.repetition = options.repetition_penalty,
                                     .presence = options.presence_penalty,
                                     .frequency = options.frequency_penalty});
    nibble::host::apply_logit_bias(row, options.logit_bias);
    nibble::host::sampling_workspace workspace;
    const auto drawn = nibble::host::sample(row,
                                            {.temperature = options.temperature,
                                             .top_k = options.top_k,
                                             .top_p = options.top_p,
                                             .min_p = options.min_p,
                                             .seed = options.seed},
                                            state.drawn++, workspace);
    result.token = drawn.token;
    result.status = drawn.status == nibble::host::sample_status::ok ? 0 : 1;
    if (result.status != 0) return result;
    state.seen.add_generated(drawn.token);
    if (!options.logprobs) return result;
    const auto report = nibble::host::logprobs(raw, drawn.token, *options.logprobs);
    result.logprob = report.chosen.logprob;
    result.top_count = static_cast<std::int32_t>(report.top.size());
    for (std::size_t i = 0; i < report.top.size(); ++i) {
      result.top_token[i] = report.top[i].token;
      result.top_logprob[i] = report.top[i].logprob;
    }
    return result;
  }

  void push(std::function<void()> job) {
    if (kind_ == stream_kind::early) return job();
    {
      const std::lock_guard lock(mutex_);
      stream_.push_back(std::move(job));
    }
    arrived_.notify_one();
  }
  template <class Result>
  void wait_for(std::future<Result>& result) {
    while (kind_ == stream_kind::late &&
           result.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      auto job = std::move(stream_.front());
      stream_.pop_front();
      job();
    }
    result.wait();
  }
  void work() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [this] { return closing_ || !stream_.empty(); });
        if (stream_.empty()) return;
        job = std::move(stream_.front());
        stream_.pop_front();
      }
      job();
    }
  }

  stream_kind kind_;
  std::vector<slot_draws> draws_;
  std::vector<std::int32_t> forbidden_;
  std::deque<std::future<rows>> in_flight_;
  rows read_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> stream_;
  bool closing_ = false;
  std::thread worker_;
};

}  // namespace qwen3_moe::testing
