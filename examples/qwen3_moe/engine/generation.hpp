// SPDX-License-Identifier: Apache-2.0
/// \file
/// A request for tokens, what comes back, and the handle that both sides hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "token_sampler.hpp"

namespace qwen3_moe {

/// Token ids in, token ids out: the engine knows no text.
struct generation_request {
  std::vector<std::int32_t> prompt;       ///< at least one id, each in [0, vocab_size)
  int max_tokens = 1;                     ///< at least 1; cut to what the context has room for
  std::vector<std::int32_t> stop_tokens;  ///< ids that end the answer and are not delivered
  sampling_options sampling;
};

enum class finish_reason {
  stop,       ///< a stop token came
  length,     ///< max_tokens or the context is used up
  error,      ///< the step failed or gave no usable number; `message` says why
  cancelled,  ///< the client asked, or the engine stopped
};

struct generation_end {
  finish_reason reason = finish_reason::error;
  std::string message;
  int prompt_tokens = 0;
  int completion_tokens = 0;  ///< tokens chosen, the stop token among them
};

/// Receives an answer, on the engine thread. Calls must return quickly and must not wait for the engine.
/// `on_finish` comes exactly once and last. An exception ends this request only.
class generation_sink {
 public:
  virtual ~generation_sink() = default;
  virtual void on_token(const sampled_token& token) = 0;
  virtual void on_finish(const generation_end& end) = 0;
};

/// One request in flight. `cancel` and `satisfied` may be called from any thread, any number of times;
/// everything else belongs to the engine thread.
class generation {
 public:
  generation(generation_request request, std::shared_ptr<generation_sink> sink)
      : tokens_(std::move(request.prompt)),
        prompt_tokens_(static_cast<int>(tokens_.size())),
        max_tokens_(request.max_tokens),
        stop_tokens_(std::move(request.stop_tokens)),
        sampler_(request.sampling, tokens_),
        sink_(std::move(sink)) {}

  /// The answer ends within one step, in the queue, in prefill or in decode; no token is chosen for it after
  /// that.
  void cancel() { ask(ending::cancelled); }
  /// As cancel(), but the client has all it wanted: the answer ends with `stop` and counts as finished.
  void satisfied() { ask(ending::satisfied); }
  bool ending_asked() const { return ending_.load(std::memory_order_acquire) != ending::none; }

 private:
  friend class scheduler;
  friend class engine;

  enum class ending { none, satisfied, cancelled };

  // The first wish counts.
  void ask(ending wish) {
    auto none = ending::none;
    ending_.compare_exchange_strong(none, wish, std::memory_order_acq_rel);
  }
  finish_reason asked_reason() const {
    return ending_.load(std::memory_order_acquire) == ending::satisfied ? finish_reason::stop
                                                                        : finish_reason::cancelled;
  }
  // Known tokens and those drawn whose step was not read yet.
  int length() const { return static_cast<int>(tokens_.size()) + unread_; }
  int pending() const { return length() - position_; }
  bool prefilling() const { return pending() > 1; }
  // Whether the answer may need one more token than were drawn already.
  bool wants_more() const { return completion_tokens() + unread_ < max_tokens_; }
  int completion_tokens() const {
    return static_cast<int>(tokens_.size()) - prompt_tokens_ + (stopped_ ? 1 : 0);
  }

  std::vector<std::int32_t> tokens_;  // prompt, then the answer: what a preempted request computes again
  int prompt_tokens_;
  int max_tokens_;
  std::vector<std::int32_t> stop_tokens_;
  token_sampler sampler_;
  std::shared_ptr<generation_sink> sink_;
  std::atomic<ending> ending_{ending::none};

  std::uint64_t arrival_ = 0;
  std::uint64_t last_served_ = 0;
  int position_ = 0;        // tokens that are in the caches, or will be after the steps in flight
  int unread_ = 0;          // tokens drawn in steps in flight; 0 wherever the request gives up its slot alive
  bool on_host_ = false;    // the runner cannot draw for these options
  bool draws_set_ = false;  // the runner knows what its slot's next draw starts from
  int slot_ = -1;
  std::vector<std::int32_t> pages_;
  bool stopped_ = false;
  bool finished_ = false;
  bool counted_queued_ = false;
};

}  // namespace qwen3_moe
