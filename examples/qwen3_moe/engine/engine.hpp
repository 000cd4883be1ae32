// SPDX-License-Identifier: Apache-2.0
/// \file
/// The engine thread: the scheduler behind a thread-safe door.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "counters.hpp"
#include "generation.hpp"
#include "model_runner.hpp"
#include "scheduler.hpp"

namespace qwen3_moe {

struct engine_options {
  int max_queued = 256;  ///< requests accepted and not yet running; one more is refused
  scheduler_options scheduler;
};

enum class submit_status {
  accepted,
  queue_full,  ///< try again later
  stopping,    ///< drain or stop was called
  failed,      ///< the device is lost: only a new process helps; `message` says what happened
  invalid,     ///< the request can never run; `message` says why
};

struct submission {
  submit_status status = submit_status::invalid;
  std::string message;
  std::shared_ptr<generation> handle;  ///< set when accepted
};

/// Owns the one thread that touches the model_runner. All members may be called from any thread but a
/// sink's: a sink runs on the engine thread and may only submit, cancel and read counters.
class engine {
 public:
  /// `runner` must outlive the engine. Throws nibble::error for limits no sequence could run in.
  engine(model_runner& runner, const engine_options& options);
  /// Stops; see stop().
  ~engine();
  engine(const engine&) = delete;
  engine& operator=(const engine&) = delete;

  /// Never blocks on a step. The sink hears nothing of a request that was not accepted.
  submission submit(generation_request request, std::shared_ptr<generation_sink> sink);

  /// Refuses new requests from now on.
  void close();
  /// Refuses new requests and waits until none is left, at most `limit`. True when none is left.
  bool drain(std::chrono::milliseconds limit);
  /// Refuses new requests, ends all others as cancelled, joins the thread. Calling again does nothing.
  void stop();

  /// Tokens of prompt and answer together that a request may have.
  int context_tokens() const { return context_tokens_; }
  int vocab_size() const { return vocab_size_; }
  const engine_counters& counters() const { return counters_; }
  /// Why no request can be answered any more, or an empty text. All that were accepted have ended with an
  /// error.
  std::string failure() const;
  /// How long the present step has been running; zero between steps.
  std::chrono::milliseconds step_age() const;

 private:
  void loop();
  bool take_inbox(bool wait);

  engine_options options_;
  engine_counters counters_;
  scheduler scheduler_;
  int context_tokens_;
  int vocab_size_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<std::shared_ptr<generation>> inbox_;
  std::string failure_;
  bool closed_ = false;
  bool stopping_ = false;
  bool busy_ = false;
  std::atomic<std::int64_t> step_started_ms_{-1};
  std::mutex join_mutex_;
  std::thread thread_;  // last: everything above is ready when it starts
};

}  // namespace qwen3_moe
