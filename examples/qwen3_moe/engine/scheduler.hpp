// SPDX-License-Identifier: Apache-2.0
/// \file
/// Continuous batching: which sequences share the next step, and what becomes of their logits.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "counters.hpp"
#include "generation.hpp"
#include "id_pool.hpp"
#include "model_runner.hpp"

namespace qwen3_moe {

struct scheduler_options {
  int max_running = 0;           ///< most sequences at once; 0 means the runner's slots
  int prefill_chunk_tokens = 0;  ///< most prompt tokens of one sequence in a step; 0 means the step's limit
  /// Ids that are never drawn: rows of the LM head that no token stands for. At least one id must remain.
  std::vector<std::int32_t> unnamed_tokens{};
};

/// Runs sequences over a model_runner. Belongs to one thread.
///
/// - First come, first admitted: a request is admitted when a slot is free and the pages for its tokens
///   so far are, with one page to spare for each sequence that runs already.
/// - A step gives one token to each decoding sequence, least recently served first, and what is left of
///   step_tokens to prefills, least recently served first; with both waiting, prefill gets at least one
///   token.
/// - An answer takes a further page when it needs one. When none is free the youngest running sequence gives
///   its slot and pages back and returns to the queue with its tokens and its random state, to be computed
///   again: it continues with the same answer. The oldest sequence always goes on, so nothing waits for ever.
/// - A step that throws ends the sequences of that step with an error; the others go on. After a
///   nibble::context_lost_error nothing goes on: every request, those that come later too, ends with an
///   error.
///
/// With a runner that draws tokens itself two steps are in flight: step n + 1 is submitted before the tokens
/// of step n are read, and takes them from the device.
/// - max_tokens and the context are counted ahead. Whatever else may end an answer at step n (a stop token,
/// the
///   client, a bad row) is not known in time: step n + 1 then runs in vain for that sequence and its token is
///   dropped. Slot and pages are given away at once; model_runner says why that is safe.
/// - What needs all tokens known, such as taking pages from a running sequence, first reads the step in
/// flight.
/// - A step in which a sequence draws whose options the runner cannot take is run for its logits, for all its
///   sequences and with nothing in flight; the others are drawn by the runner again after it.
/// The tokens of a request are the same either way, whenever runner and host draw alike.
class scheduler {
 public:
  scheduler(model_runner& runner, const scheduler_options& options, engine_counters& counters);

  /// Why a request can never run, or an empty text.
  std::string refusal(const generation_request& request) const;

  /// Longest prompt and answer together: the model's context or what all pages hold, whichever is less.
  int context_tokens() const { return context_tokens_; }

  /// Queues a request that `refusal` has nothing against.
  void add(std::shared_ptr<generation> item);

  /// Runs one step. False when nothing is left to do.
  bool step();

  /// Ends everything, queued and running, as cancelled.
  void cancel_all(const std::string& message);

  /// Why nothing can run any more, or an empty text. Never becomes empty again.
  const std::string& failure() const { return failure_; }

  bool idle() const { return waiting_.empty() && running_.empty() && in_flight_.empty(); }
  int free_pages() const { return pages_.free(); }
  int free_slots() const { return slots_.free(); }

 private:
  // What a sequence does in a step.
  struct share {
    std::shared_ptr<generation> item;
    int tokens;
    bool draws;             // the step holds its last known or unread token
    int prompt_tokens = 0;  // how many of `tokens` are of the prompt
  };
  using shares = std::vector<share>;

  int pages_for(int tokens) const { return (tokens + limits_.page_tokens - 1) / limits_.page_tokens; }
  void adapt();
  void sweep_ended();
  void admit();
  bool grow_pages();
  void preempt(std::shared_ptr<generation> item);
  void release(generation& item);
  void finish(generation& item, finish_reason reason, std::string message = {});
  void lose(const std::string& why);
  void drop_finished();
  void publish();

  // steps.cpp
  shares compose();
  bool needs_logits(const shares& parts) const;
  void describe(const shares& parts);
  void advance(shares& parts);
  void fail(const shares& parts, const std::string& why);
  void run(shares& parts);
  void submit(shares parts);
  bool set_draws(shares& parts);
  void collect();
  void drain();
  template <class Draw>
  void deliver(generation& item, Draw&& draw);

  model_runner& runner_;
  runner_limits limits_;
  engine_counters& counters_;
  int context_tokens_;
  int max_running_;
  int prefill_chunk_tokens_;
  std::vector<std::int32_t> unnamed_tokens_;
  kv_page_pool pages_;
  slot_pool slots_;
  std::deque<std::shared_ptr<generation>> waiting_;   // by arrival
  std::vector<std::shared_ptr<generation>> running_;  // by arrival
  bool draws_;
  std::deque<shares> in_flight_;          // begun and not finished, oldest first
  std::vector<step_sequence> sequences_;  // of the step being composed
  std::vector<float> logits_;             // made when first needed
  std::string failure_;
  std::uint64_t next_arrival_ = 1;
  std::uint64_t tick_ = 1;
  /// A look at free memory costs about as much as a launch, so not every step takes one.
  static constexpr int steps_between_adapting = 128;
  int steps_since_adapting_ = 0;
  bool memory_ran_out_ = false;
};

}  // namespace qwen3_moe
