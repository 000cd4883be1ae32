// SPDX-License-Identifier: Apache-2.0
#include "scheduler.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "nibble/core/error.hpp"

namespace qwen3_moe {
namespace {

bool older(std::uint64_t a, std::uint64_t b) { return a < b; }

}  // namespace

scheduler::scheduler(model_runner& runner, const scheduler_options& options, engine_counters& counters)
    : runner_(runner),
      limits_(runner.limits()),
      counters_(counters),
      context_tokens_(static_cast<int>(std::min<std::int64_t>(
          limits_.context_tokens, static_cast<std::int64_t>(limits_.pages) * limits_.page_tokens))),
      max_running_(options.max_running > 0 ? std::min(options.max_running, limits_.slots) : limits_.slots),
      prefill_chunk_tokens_(options.prefill_chunk_tokens > 0
                                ? std::min(options.prefill_chunk_tokens, limits_.step_tokens)
                                : limits_.step_tokens),
      unnamed_tokens_(options.unnamed_tokens),
      pages_(limits_.pages),
      slots_(limits_.slots) {
  for (const auto id : unnamed_tokens_)
    if (id < 0 || id >= limits_.vocab_size)
      throw nibble::error("unnamed token " + std::to_string(id) + " is outside the vocabulary of " +
                          std::to_string(limits_.vocab_size));
  // A step holds at most one wanted row a sequence; the buffer is made once.
  logits_.resize(static_cast<std::size_t>(limits_.vocab_size) *
                 static_cast<std::size_t>(std::min(max_running_, limits_.step_tokens)));
  publish();
}

std::string scheduler::refusal(const generation_request& request) const {
  if (request.prompt.empty()) return "the prompt holds no token";
  if (request.max_tokens < 1)
    return "max_tokens is " + std::to_string(request.max_tokens) + ", at least 1 is needed";
  if (request.prompt.size() >= static_cast<std::size_t>(context_tokens_))
    return "the prompt has " + std::to_string(request.prompt.size()) + " tokens, and the context of " +
           std::to_string(context_tokens_) + " tokens leaves no room for an answer";
  for (const auto id : request.prompt)
    if (id < 0 || id >= limits_.vocab_size)
      return "token id " + std::to_string(id) + " is outside the vocabulary of " +
             std::to_string(limits_.vocab_size);
  return sampling_refusal(request.sampling, limits_.vocab_size);
}

void scheduler::add(std::shared_ptr<generation> item) {
  item->arrival_ = next_arrival_++;
  if (!std::exchange(item->counted_queued_, true)) counters_.queued.fetch_add(1, std::memory_order_relaxed);
  item->max_tokens_ = std::min(item->max_tokens_, context_tokens_ - item->prompt_tokens_);
  waiting_.push_back(std::move(item));
}

bool scheduler::step() {
  sweep_ended();
  admit();
  grow_pages();
  auto shares = compose();
  if (!shares.empty()) run(shares);
  drop_finished();
  publish();
  return !idle();
}

void scheduler::cancel_all(const std::string& message) {
  for (auto& item : running_) finish(*item, finish_reason::cancelled, message);
  for (auto& item : waiting_) finish(*item, finish_reason::cancelled, message);
  drop_finished();
  publish();
}

void scheduler::sweep_ended() {
  for (auto& item : running_)
    if (item->ending_asked()) finish(*item, item->asked_reason());
  for (auto& item : waiting_)
    if (item->ending_asked()) finish(*item, item->asked_reason());
  drop_finished();
}

void scheduler::admit() {
  while (!waiting_.empty() && static_cast<int>(running_.size()) < max_running_) {
    auto& item = waiting_.front();
    const int need = pages_for(static_cast<int>(item->tokens_.size()));
    if (need + static_cast<int>(running_.size()) > pages_.free()) return;
    const auto slot = slots_.take();
    if (!slot) return;
    pages_.take(need, item->pages_);
    item->slot_ = *slot;
    counters_.running.fetch_add(1, std::memory_order_relaxed);
    item->position_ = 0;
    item->last_served_ = 0;
    if (std::exchange(item->counted_queued_, false)) counters_.queued.fetch_sub(1, std::memory_order_relaxed);
    try {
      runner_.clear_slot(item->slot_);
    } catch (const std::exception& problem) {
      finish(*item, finish_reason::error, problem.what());
      waiting_.pop_front();
      continue;
    }
    const auto place = std::find_if(running_.begin(), running_.end(), [&](const auto& other) {
      return older(item->arrival_, other->arrival_);
    });
    running_.insert(place, std::move(item));
    waiting_.pop_front();
  }
}

void scheduler::grow_pages() {
  // Oldest first, so that the pages of the youngest go to those who wait longest.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const auto item = running_[i];
    const int missing =
        pages_for(static_cast<int>(item->tokens_.size())) - static_cast<int>(item->pages_.size());
    if (missing <= 0) continue;
    while (!pages_.take(missing, item->pages_)) {
      const auto youngest = running_.back();
      preempt(youngest);
      if (youngest == item) break;
    }
  }
}

std::vector<scheduler::share> scheduler::compose() {
  std::vector<std::shared_ptr<generation>> order(running_);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return older(a->last_served_, b->last_served_); });
  const bool any_prefill =
      std::any_of(order.begin(), order.end(), [](const auto& item) { return item->prefilling(); });
  int left = limits_.step_tokens;
  std::vector<share> shares;
  if (left == 1) {
    if (!order.empty()) shares.push_back({order.front(), 1});
    return shares;
  }
  for (const auto& item : order) {
    if (left <= (any_prefill ? 1 : 0)) break;
    if (item->prefilling()) continue;
    shares.push_back({item, 1});
    --left;
  }
  for (const auto& item : order) {
    if (left == 0) break;
    if (!item->prefilling()) continue;
    const int tokens = std::min({left, item->pending(), prefill_chunk_tokens_});
    shares.push_back({item, tokens});
    left -= tokens;
  }
  return shares;
}

void scheduler::run(std::vector<share>& shares) {
  const auto vocab = static_cast<std::size_t>(limits_.vocab_size);
  std::vector<step_sequence> sequences;
  std::size_t rows = 0;
  for (const auto& [item, tokens] : shares) {
    const bool last = tokens == item->pending();
    rows += last ? 1 : 0;
    sequences.push_back(
        {.tokens = std::span(item->tokens_)
                       .subspan(static_cast<std::size_t>(item->position_), static_cast<std::size_t>(tokens)),
         .position = item->position_,
         .slot = item->slot_,
         .pages = item->pages_,
         .logits = last ? wanted_logits::last : wanted_logits::none});
  }
  counters_.steps.fetch_add(1, std::memory_order_relaxed);
  try {
    runner_.step(sequences, std::span(logits_).first(rows * vocab));
  } catch (const std::exception& problem) {
    for (auto& part : shares) finish(*part.item, finish_reason::error, problem.what());
    return;
  }
  std::size_t row = 0;
  for (auto& [item, tokens] : shares) {
    const int prompt_part = std::clamp(item->prompt_tokens_ - item->position_, 0, tokens);
    counters_.prompt_tokens.fetch_add(static_cast<std::uint64_t>(prompt_part), std::memory_order_relaxed);
    item->position_ += tokens;
    item->last_served_ = ++tick_;  // a number of its own, so that turns rotate within a step too
    if (item->pending() != 0) continue;
    const auto logits = std::span(logits_).subspan(vocab * row++, vocab);
    for (const auto id : unnamed_tokens_) logits[static_cast<std::size_t>(id)] = -HUGE_VALF;
    deliver(*item, logits);
  }
}

void scheduler::deliver(generation& item, std::span<float> logits) {
  if (item.ending_asked()) return finish(item, item.asked_reason());
  sampled_token token;
  try {
    token = item.sampler_.choose(logits);
  } catch (const std::exception& problem) {
    return finish(item, finish_reason::error, problem.what());
  }
  counters_.completion_tokens.fetch_add(1, std::memory_order_relaxed);
  if (std::find(item.stop_tokens_.begin(), item.stop_tokens_.end(), token.id) != item.stop_tokens_.end()) {
    item.stopped_ = true;
    return finish(item, finish_reason::stop);
  }
  item.tokens_.push_back(token.id);
  try {
    item.sink_->on_token(token);
  } catch (const std::exception& problem) {
    return finish(item, finish_reason::error, problem.what());
  }
  if (item.completion_tokens() >= item.max_tokens_) finish(item, finish_reason::length);
}

void scheduler::preempt(std::shared_ptr<generation> item) {
  release(*item);
  item->position_ = 0;
  item->counted_queued_ = true;
  counters_.queued.fetch_add(1, std::memory_order_relaxed);
  counters_.preempted.fetch_add(1, std::memory_order_relaxed);
  running_.erase(std::find(running_.begin(), running_.end(), item));
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& other) { return older(item->arrival_, other->arrival_); });
  waiting_.insert(place, std::move(item));
}

void scheduler::release(generation& item) {
  pages_.release(item.pages_);
  if (slots_.release(std::exchange(item.slot_, -1)))
    counters_.running.fetch_sub(1, std::memory_order_relaxed);
  publish();
}

void scheduler::finish(generation& item, finish_reason reason, std::string message) {
  if (std::exchange(item.finished_, true)) return;
  release(item);
  if (std::exchange(item.counted_queued_, false)) counters_.queued.fetch_sub(1, std::memory_order_relaxed);
  auto& count = reason == finish_reason::stop     ? counters_.finished_stop
                : reason == finish_reason::length ? counters_.finished_length
                : reason == finish_reason::error  ? counters_.finished_error
                                                  : counters_.aborted;
  count.fetch_add(1, std::memory_order_relaxed);
  // Whoever listens may hold the generation: the circle is opened here.
  const auto sink = std::move(item.sink_);
  try {
    sink->on_finish({.reason = reason,
                     .message = std::move(message),
                     .prompt_tokens = item.prompt_tokens_,
                     .completion_tokens = item.completion_tokens()});
  } catch (const std::exception&) {
    // The request is over either way; a sink that throws here has nobody left to tell.
  }
}

void scheduler::drop_finished() {
  const auto over = [](const auto& item) { return item->finished_; };
  std::erase_if(running_, over);
  std::erase_if(waiting_, over);
}

void scheduler::publish() {
  counters_.free_pages.store(pages_.free(), std::memory_order_relaxed);
  counters_.free_slots.store(slots_.free(), std::memory_order_relaxed);
}

}  // namespace qwen3_moe
