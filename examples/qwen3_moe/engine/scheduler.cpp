// SPDX-License-Identifier: Apache-2.0
#include "scheduler.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "nibble/core/driver_error.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe {

namespace {

constexpr const char* pages_gone =
    "other programs took the device's memory, and what is left does not hold this request; try again later";

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
      slots_(limits_.slots),
      draws_(runner.draws()) {
  for (const auto id : unnamed_tokens_)
    if (id < 0 || id >= limits_.vocab_size)
      throw nibble::error("unnamed token " + std::to_string(id) + " is outside the vocabulary of " +
                          std::to_string(limits_.vocab_size));
  if (draws_) runner_.forbid(unnamed_tokens_);
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
  if (!failure_.empty()) return finish(*item, finish_reason::error, failure_);
  item->max_tokens_ = std::min(item->max_tokens_, context_tokens_ - item->prompt_tokens_);
  item->on_host_ = draws_ && !runner_.can_draw(item->sampler_.options());
  waiting_.push_back(std::move(item));
}

bool scheduler::step() {
  sweep_ended();
  adapt();
  admit();
  if (!grow_pages()) {
    collect();  // brings the tokens that a preempted sequence begins again with, and perhaps pages
  } else if (auto parts = compose(); parts.empty()) {
    collect();
  } else if (!needs_logits(parts)) {
    submit(std::move(parts));
    if (in_flight_.size() >= static_cast<std::size_t>(max_steps_in_flight)) collect();
  } else if (in_flight_.empty()) {
    run(parts);
  } else {
    collect();
  }
  drop_finished();
  publish();
  return !idle();
}

void scheduler::cancel_all(const std::string& message) {
  for (auto& item : running_) finish(*item, finish_reason::cancelled, message);
  for (auto& item : waiting_) finish(*item, finish_reason::cancelled, message);
  drop_finished();
  drain();
  publish();
}

// Others use the device's memory too: the pool follows what the runner has.
void scheduler::adapt() {
  const bool now = std::exchange(memory_ran_out_, false);
  if (!now && ++steps_since_adapting_ < steps_between_adapting) return;
  steps_since_adapting_ = 0;
  try {
    pages_.resize(std::min(limits_.pages, runner_.adapt_pages(pages_.used_end(), now)));
  } catch (const nibble::context_lost_error& problem) {
    lose(problem.what());
  } catch (const std::exception&) {
    // The pool stays as it is; a step that fails for lack of memory says so.
  }
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
    if (need > pages_.size()) {
      finish(*item, finish_reason::error, pages_gone);
      waiting_.pop_front();
      continue;
    }
    if (need + static_cast<int>(running_.size()) > pages_.free()) return;
    const auto slot = slots_.take();
    if (!slot) return;
    pages_.take(need, item->pages_);
    item->slot_ = *slot;
    counters_.running.fetch_add(1, std::memory_order_relaxed);
    item->position_ = 0;
    item->last_served_ = 0;
    item->draws_set_ = false;
    if (std::exchange(item->counted_queued_, false)) counters_.queued.fetch_sub(1, std::memory_order_relaxed);
    try {
      runner_.clear_slot(item->slot_);
    } catch (const nibble::context_lost_error& problem) {
      return lose(problem.what());
    } catch (const std::exception& problem) {
      finish(*item, finish_reason::error, problem.what());
      waiting_.pop_front();
      continue;
    }
    const auto place = std::find_if(running_.begin(), running_.end(),
                                    [&](const auto& other) { return item->arrival_ < other->arrival_; });
    running_.insert(place, std::move(item));
    waiting_.pop_front();
  }
}

// False when pages must be taken from a sequence and a step in flight has to be read first.
bool scheduler::grow_pages() {
  // Oldest first, so that the pages of the youngest go to those who wait longest.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const auto item = running_[i];
    if (!item->wants_more()) continue;
    const int missing = pages_for(item->length()) - static_cast<int>(item->pages_.size());
    if (missing <= 0) continue;
    if (pages_for(item->length()) > pages_.size()) {
      finish(*item, finish_reason::error, pages_gone);
      continue;
    }
    while (!pages_.take(missing, item->pages_)) {
      if (!in_flight_.empty()) return false;
      const auto youngest = running_.back();
      preempt(youngest);
      if (youngest == item) break;
    }
  }
  return true;
}

void scheduler::preempt(std::shared_ptr<generation> item) {
  release(*item);
  item->position_ = 0;
  item->counted_queued_ = true;
  counters_.queued.fetch_add(1, std::memory_order_relaxed);
  counters_.preempted.fetch_add(1, std::memory_order_relaxed);
  running_.erase(std::find(running_.begin(), running_.end(), item));
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const auto& other) { return item->arrival_ < other->arrival_; });
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

void scheduler::lose(const std::string& why) {
  failure_ = why + "; no request can be answered until the server is started again";
  in_flight_.clear();
  for (auto& item : running_) finish(*item, finish_reason::error, failure_);
  for (auto& item : waiting_) finish(*item, finish_reason::error, failure_);
  drop_finished();
}

void scheduler::drop_finished() {
  const auto over = [](const auto& item) { return item->finished_; };
  std::erase_if(running_, over);
  std::erase_if(waiting_, over);
}

void scheduler::publish() {
  counters_.free_pages.store(pages_.free(), std::memory_order_relaxed);
  counters_.free_slots.store(slots_.free(), std::memory_order_relaxed);
  if (!failure_.empty()) return;  // a lost runner is asked nothing
  const auto experts = runner_.experts();
  counters_.expert_hits.store(experts.hits, std::memory_order_relaxed);
  counters_.expert_misses.store(experts.misses, std::memory_order_relaxed);
}

}  // namespace qwen3_moe
