// SPDX-License-Identifier: Apache-2.0
/// \file
/// The seam between the scheduler and a compiled model on a backend.
#pragma once

#include <cstdint>
#include <span>

namespace qwen3_moe {

/// What the scheduler must respect.
struct runner_limits {
  int vocab_size;      ///< columns of a logits row
  int context_tokens;  ///< longest sequence, prompt and answer together
  int page_tokens;     ///< tokens a KV page holds
  int pages;           ///< pages in the pool, ids 0 … pages-1
  int slots;           ///< recurrent-state slots, ids 0 … slots-1: the most sequences at once
  int step_tokens;     ///< most tokens one step may carry over all its sequences
};

enum class wanted_logits { none, last, all };

/// One sequence's share of a step: `tokens` are appended at `position`, prefill and decode alike.
struct step_sequence {
  std::span<const std::int32_t> tokens;  ///< at least one, each in [0, vocab_size)
  int position;                          ///< tokens of this sequence already in the caches
  int slot;
  std::span<const std::int32_t> pages;  ///< at least ceil((position + tokens.size()) / page_tokens) ids
  wanted_logits logits;
};

/// A loaded model with its caches. Not thread-safe: the engine thread owns it.
class model_runner {
 public:
  virtual ~model_runner() = default;
  virtual const runner_limits& limits() const = 0;
  /// Forgets the recurrent state of `slot`; called before a new sequence takes it.
  virtual void clear_slot(int slot) = 0;
  /// Runs one step over any mix of prefill and decode. `logits` takes vocab_size floats for each wanted
  /// row, in the order of the sequences. Throws nibble::error and leaves other sequences' caches intact.
  virtual void step(std::span<const step_sequence> sequences, std::span<float> logits) = 0;
};

}  // namespace qwen3_moe
