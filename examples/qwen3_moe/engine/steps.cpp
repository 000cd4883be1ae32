// SPDX-License-Identifier: Apache-2.0
// The scheduler's steps: who shares one, how it is run or submitted, and what becomes of its tokens.
#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "nibble/core/driver_error.hpp"
#include "nibble/core/error.hpp"
#include "scheduler.hpp"

namespace qwen3_moe {
namespace {

constexpr std::int32_t token_on_device[] = {previous_token};

}  // namespace

scheduler::shares scheduler::compose() {
  std::vector<std::shared_ptr<generation>> order;
  order.reserve(running_.size());
  for (const auto& item : running_)
    if (item->wants_more()) order.push_back(item);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a->last_served_ < b->last_served_; });
  const bool any_prefill =
      std::any_of(order.begin(), order.end(), [](const auto& item) { return item->prefilling(); });
  int left = limits_.step_tokens;
  shares parts;
  parts.reserve(order.size());
  const auto add = [&](const std::shared_ptr<generation>& item, int tokens) {
    parts.push_back({.item = item, .tokens = tokens, .draws = tokens == item->pending()});
    left -= tokens;
  };
  if (left == 1) {
    if (!order.empty()) add(order.front(), 1);
    return parts;
  }
  for (const auto& item : order) {
    if (left <= (any_prefill ? 1 : 0)) break;
    if (!item->prefilling()) add(item, 1);
  }
  // A piece that is not the prompt's last ends where a cut changes no bits, if it reaches so far: an answer
  // should not depend on who shares its steps.
  const auto piece_of = [&](const generation& item, int tokens) {
    if (tokens == item.pending()) return tokens;
    const int end = (item.position_ + tokens) / limits_.piece_tokens * limits_.piece_tokens;
    return end > item.position_ ? end - item.position_ : tokens;
  };
  for (const auto& item : order) {
    if (left == 0) break;
    if (item->prefilling())
      add(item, piece_of(*item, std::min({left, item->pending(), prefill_chunk_tokens_})));
  }
  return parts;
}

bool scheduler::needs_logits(const shares& parts) const {
  return !draws_ || std::any_of(parts.begin(), parts.end(),
                                [](const share& part) { return part.draws && part.item->on_host_; });
}

void scheduler::describe(const shares& parts) {
  sequences_.clear();
  for (const auto& part : parts) {
    const auto& item = *part.item;
    // Only the last token can be unread, and it is then all that the sequence has to run.
    const auto known = static_cast<std::size_t>(item.position_) < item.tokens_.size();
    sequences_.push_back({.tokens = known ? std::span(item.tokens_)
                                                .subspan(static_cast<std::size_t>(item.position_),
                                                         static_cast<std::size_t>(part.tokens))
                                          : std::span<const std::int32_t>(token_on_device),
                          .position = item.position_,
                          .slot = item.slot_,
                          .pages = item.pages_,
                          .logits = part.draws ? wanted_logits::last : wanted_logits::none});
  }
}

void scheduler::advance(shares& parts) {
  for (auto& part : parts) {
    auto& item = *part.item;
    part.prompt_tokens = std::clamp(item.prompt_tokens_ - item.position_, 0, part.tokens);
    item.position_ += part.tokens;
    item.last_served_ = ++tick_;  // a number of its own, so that turns rotate within a step too
  }
}

void scheduler::fail(const shares& parts, const std::string& why) {
  for (const auto& part : parts) finish(*part.item, finish_reason::error, why);
}

void scheduler::run(shares& parts) {
  describe(parts);
  const auto vocab = static_cast<std::size_t>(limits_.vocab_size);
  const auto rows = static_cast<std::size_t>(
      std::count_if(parts.begin(), parts.end(), [](const share& part) { return part.draws; }));
  counters_.steps.fetch_add(1, std::memory_order_relaxed);
  try {
    // A step holds at most one wanted row a sequence.
    if (logits_.empty())
      logits_.resize(vocab * static_cast<std::size_t>(std::min(max_running_, limits_.step_tokens)));
    runner_.step(sequences_, std::span(logits_).first(rows * vocab));
  } catch (const nibble::context_lost_error& problem) {
    return lose(problem.what());
  } catch (const std::exception& problem) {
    memory_ran_out_ = dynamic_cast<const nibble::out_of_memory*>(&problem) != nullptr;
    return fail(parts, problem.what());
  }
  advance(parts);
  std::size_t row = 0;
  for (auto& part : parts) {
    counters_.prompt_tokens.fetch_add(static_cast<std::uint64_t>(part.prompt_tokens),
                                      std::memory_order_relaxed);
    if (!part.draws) continue;
    const auto logits = std::span(logits_).subspan(vocab * row++, vocab);
    for (const auto id : unnamed_tokens_) logits[static_cast<std::size_t>(id)] = -HUGE_VALF;
    part.item->draws_set_ = false;
    deliver(*part.item, [&](token_sampler& sampler) { return sampler.choose(logits); });
  }
}

void scheduler::submit(shares parts) {
  if (!set_draws(parts) || parts.empty()) return;
  describe(parts);
  counters_.steps.fetch_add(1, std::memory_order_relaxed);
  try {
    runner_.begin(sequences_);
  } catch (const nibble::context_lost_error& problem) {
    return lose(problem.what());
  } catch (const std::exception& problem) {
    memory_ran_out_ = dynamic_cast<const nibble::out_of_memory*>(&problem) != nullptr;
    return fail(parts, problem.what());
  }
  advance(parts);
  for (auto& part : parts)
    if (part.draws) ++part.item->unread_;
  in_flight_.push_back(std::move(parts));
}

// Tells the runner what the first draws of a slot start from. False when nothing can run any more.
bool scheduler::set_draws(shares& parts) {
  for (auto& part : parts) {
    auto& item = *part.item;
    if (!part.draws || std::exchange(item.draws_set_, true)) continue;
    try {
      runner_.set_draws(item.slot_, item.sampler_.options(),
                        {.drawn = item.sampler_.drawn(), .seen = item.sampler_.seen()});
    } catch (const nibble::context_lost_error& problem) {
      lose(problem.what());
      return false;
    } catch (const std::exception& problem) {
      finish(item, finish_reason::error, problem.what());
    }
  }
  std::erase_if(parts, [](const share& part) { return part.item->finished_; });
  return true;
}

// Reads the oldest step in flight, if there is one.
void scheduler::collect() {
  if (in_flight_.empty()) return;
  const auto parts = std::move(in_flight_.front());
  in_flight_.pop_front();
  std::span<const nibble::sampled_row> rows;
  const auto wanted = static_cast<std::size_t>(
      std::count_if(parts.begin(), parts.end(), [](const share& part) { return part.draws; }));
  try {
    rows = runner_.finish();
    if (rows.size() != wanted)
      throw nibble::error("the step gave " + std::to_string(rows.size()) + " tokens, " +
                          std::to_string(wanted) + " were to be drawn");
  } catch (const nibble::context_lost_error& problem) {
    return lose(problem.what());
  } catch (const std::exception& problem) {
    memory_ran_out_ = dynamic_cast<const nibble::out_of_memory*>(&problem) != nullptr;
    return fail(parts, problem.what());
  }
  std::size_t next = 0;
  for (const auto& part : parts) {
    auto& item = *part.item;
    const auto* row = part.draws ? &rows[next++] : nullptr;
    if (item.finished_) continue;  // it ran in vain
    counters_.prompt_tokens.fetch_add(static_cast<std::uint64_t>(part.prompt_tokens),
                                      std::memory_order_relaxed);
    if (row == nullptr) continue;
    --item.unread_;
    deliver(item, [&](token_sampler& sampler) { return sampler.accept(*row); });
  }
}

void scheduler::drain() {
  while (!in_flight_.empty()) collect();
}

template <class Draw>
void scheduler::deliver(generation& item, Draw&& draw) {
  if (item.ending_asked()) return finish(item, item.asked_reason());
  sampled_token token;
  try {
    token = draw(item.sampler_);
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

}  // namespace qwen3_moe
