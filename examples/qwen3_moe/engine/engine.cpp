// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <utility>

#include "nibble/core/error.hpp"

namespace qwen3_moe {
namespace {

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

model_runner& checked(model_runner& runner) {
  const auto& limits = runner.limits();
  const auto need = [](const char* name, int value, int least) {
    if (value < least)
      throw nibble::error(std::string("the model offers ") + name + " = " + std::to_string(value) +
                          ", the engine needs at least " + std::to_string(least) +
                          "; give it more memory or a longer context");
  };
  need("vocab_size", limits.vocab_size, 1);
  need("context_tokens", limits.context_tokens, 2);
  need("page_tokens", limits.page_tokens, 1);
  need("pages", limits.pages, 1);
  need("slots", limits.slots, 1);
  need("step_tokens", limits.step_tokens, 1);
  return runner;
}

}  // namespace

engine::engine(model_runner& runner, const engine_options& options)
    : options_(options),
      scheduler_(checked(runner), options.scheduler, counters_),
      context_tokens_(scheduler_.context_tokens()),
      vocab_size_(runner.limits().vocab_size),
      thread_([this] { loop(); }) {}

engine::~engine() { stop(); }

submission engine::submit(generation_request request, std::shared_ptr<generation_sink> sink) {
  // What refusal() reads never changes after construction.
  if (auto why = scheduler_.refusal(request); !why.empty())
    return {.status = submit_status::invalid, .message = std::move(why), .handle = nullptr};
  auto item = std::make_shared<generation>(std::move(request), std::move(sink));
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return {.status = submit_status::failed, .message = failure_, .handle = nullptr};
    if (closed_)
      return {.status = submit_status::stopping, .message = "the server is shutting down", .handle = nullptr};
    if (counters_.queued.load(std::memory_order_relaxed) >= options_.max_queued) {
      counters_.rejected.fetch_add(1, std::memory_order_relaxed);
      return {.status = submit_status::queue_full,
              .message = "all " + std::to_string(options_.max_queued) +
                         " places in the queue are taken; try again later",
              .handle = nullptr};
    }
    counters_.queued.fetch_add(1, std::memory_order_relaxed);
    item->counted_queued_ = true;
    inbox_.push_back(item);
  }
  wake_.notify_one();
  return {.status = submit_status::accepted, .message = {}, .handle = std::move(item)};
}

void engine::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool engine::drain(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  return idle_.wait_for(lock, limit, [this] { return inbox_.empty() && !busy_; });
}

void engine::stop() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    stopping_ = true;
  }
  wake_.notify_one();
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

std::string engine::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::chrono::milliseconds engine::step_age() const {
  const auto started = step_started_ms_.load(std::memory_order_relaxed);
  return std::chrono::milliseconds(started < 0 ? 0 : now_ms() - started);
}

bool engine::take_inbox(bool wait) {
  std::vector<std::shared_ptr<generation>> arrived;
  bool stop_now = false;
  {
    std::unique_lock lock(mutex_);
    if (wait && inbox_.empty()) {
      busy_ = false;
      idle_.notify_all();
      wake_.wait(lock, [this] { return stopping_ || !inbox_.empty(); });
    }
    busy_ = true;
    arrived.swap(inbox_);
    stop_now = stopping_;
  }
  for (auto& item : arrived) scheduler_.add(std::move(item));
  return !stop_now;
}

void engine::loop() {
  bool more = false;
  while (take_inbox(!more)) {
    step_started_ms_.store(now_ms(), std::memory_order_relaxed);
    more = scheduler_.step();
    step_started_ms_.store(-1, std::memory_order_relaxed);
    if (scheduler_.failure().empty()) continue;
    const std::lock_guard lock(mutex_);
    failure_ = scheduler_.failure();
  }
  scheduler_.cancel_all("the server is shutting down");
  const std::lock_guard lock(mutex_);
  busy_ = false;
  idle_.notify_all();
}

}  // namespace qwen3_moe
