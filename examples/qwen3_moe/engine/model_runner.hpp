// SPDX-License-Identifier: Apache-2.0
/// \file
/// The seam between the scheduler and a compiled model on a backend.
#pragma once

#include <cstdint>
#include <span>

#include "nibble/core/error.hpp"
#include "nibble/kernels/sampling_types.hpp"
#include "sampling_options.hpp"

namespace qwen3_moe {

/// What the scheduler must respect.
struct runner_limits {
  int vocab_size;      ///< columns of a logits row
  int context_tokens;  ///< longest sequence, prompt and answer together
  int page_tokens;     ///< tokens a KV page holds
  int pages;           ///< pages in the pool, ids 0 … pages-1
  int slots;           ///< recurrent-state slots, ids 0 … slots-1: the most sequences at once
  int step_tokens;     ///< most tokens one step may carry over all its sequences
  /// Prompts that are cut at multiples of so many tokens give the bits of uncut ones; cut elsewhere, they
  /// agree within rounding. 1: wherever they are cut.
  int piece_tokens = 1;
};

enum class wanted_logits { none, last, all };

/// In place of a token id: the token drawn last for the sequence's slot, which the host may not know yet.
/// Only in begin(), only as the one token of a sequence.
inline constexpr std::int32_t previous_token = -1;

/// One sequence's share of a step: `tokens` are appended at `position`, prefill and decode alike.
struct step_sequence {
  std::span<const std::int32_t> tokens;  ///< at least one, each in [0, vocab_size), or one previous_token
  int position;                          ///< tokens of this sequence already in the caches
  int slot;
  std::span<const std::int32_t> pages;  ///< at least ceil((position + tokens.size()) / page_tokens) ids
  wanted_logits logits;
};

/// Steps that may have begun and not been finished: one runs, the next waits behind it.
inline constexpr int max_steps_in_flight = 2;

/// What a slot's draws start from, beside the options.
struct draw_history {
  std::uint64_t drawn = 0;  ///< tokens this request has drawn before
  /// Tokens of prompt and answer so far, each once. Empty where the options hold no penalty.
  std::span<const nibble::host::token_counter::seen_token> seen;
};

/// Distinct routed experts of every layer's call so far: on the device already, or to be brought.
struct expert_traffic {
  std::uint64_t hits = 0, misses = 0;
  std::uint64_t ahead = 0;       ///< fetched for the layer after, before it asked
  std::uint64_t ahead_used = 0;  ///< that it then asked for; they are hits
};

/// A loaded model with its caches. Not thread-safe: the engine thread owns it.
///
/// Two ways to run a step. `step` gives logits and every runner has it. A runner with `draws()` also draws:
/// `begin` submits a step, `finish` waits for its tokens. Calls take effect in the order in which they are
/// made: what clear_slot, set_draws and begin change is changed after all steps begun earlier and before all
/// begun later. So a slot, and a page, may be given to another sequence while a step that still writes it is
/// in flight: whatever that step leaves there is cleared or overwritten before the new sequence reads it.
///
/// Errors are nibble::error. After a nibble::context_lost_error no member is called again except the
/// destructor; steps in flight are forgotten. After any other error the runner goes on, and caches of
/// sequences that were not in the failing call are as they were.
class model_runner {
 public:
  virtual ~model_runner() = default;
  virtual const runner_limits& limits() const = 0;
  /// Forgets the recurrent state of `slot`; called before a new sequence takes it.
  virtual void clear_slot(int slot) = 0;
  /// Runs one step over any mix of prefill and decode. `logits` takes vocab_size floats for each wanted
  /// row, in the order of the sequences. Never called with a step in flight.
  virtual void step(std::span<const step_sequence> sequences, std::span<float> logits) = 0;

  /// Called between steps now and then, and with `now` after an allocation failed: a runner whose memory
  /// others use too may give KV pages back or take them again. Pages 0 … pages_in_use - 1 keep what they
  /// hold, also for steps in flight. \return how many pages there are from now on: at least pages_in_use, at
  /// most limits().pages
  virtual int adapt_pages(int pages_in_use, bool now) {
    (void)pages_in_use, (void)now;
    return limits().pages;
  }

  /// Of the steps that were finished. Zeros where every expert is where it is needed.
  virtual expert_traffic experts() const { return {}; }

  /// True when begin, finish and what belongs to them can be used. Never changes.
  virtual bool draws() const { return false; }

  /// Whether a sequence with these options can be drawn in begin(). \pre sampling_refusal has nothing to say.
  virtual bool can_draw(const sampling_options&) const { return false; }

  /// Ids that begin() never draws, whatever a sequence's options say. Called once, before the first begin.
  virtual void forbid(std::span<const std::int32_t>) { no_draws(); }

  /// From the next begin on, `slot` draws with these options. The runner keeps them, and from here on counts
  /// the slot's draws and the tokens seen itself. Called before a sequence's first draw, and again after one
  /// of its tokens was drawn elsewhere; never with a draw of that sequence in flight (one of the slot's last
  /// owner may be). The arguments may go away when the call returns.
  virtual void set_draws(int slot, const sampling_options& options, const draw_history& history) {
    (void)slot, (void)options, (void)history;
    no_draws();
  }

  /// Submits a step and returns without waiting for it; at most max_steps_in_flight are begun and not
  /// finished. wanted_logits::last draws one token from the sequence's last row, which becomes its slot's
  /// previous token; `all` is not used. The arguments may go away when the call returns. Where a draw failed
  /// (sampled_row::status) or its sequence had ended, a step already begun may still take the slot's previous
  /// token: it must then be read as some id of the vocabulary, and what comes of it is dropped.
  /// When begin throws, the step is not in flight.
  virtual void begin(std::span<const step_sequence> sequences) {
    (void)sequences;
    no_draws();
  }

  /// Waits for the oldest step in flight, which is in flight no more, whether this throws or not. Gives a row
  /// for each sequence with wanted_logits::last, in the order of begin's sequences. The rows stay until the
  /// next call of begin, finish or step. Log-probabilities are filled where the options ask for them.
  virtual std::span<const nibble::sampled_row> finish() { no_draws(); }

 private:
  [[noreturn]] static void no_draws() { throw nibble::error("this runner gives logits and draws no tokens"); }
};

}  // namespace qwen3_moe
