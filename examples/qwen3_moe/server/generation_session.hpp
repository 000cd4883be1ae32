// SPDX-License-Identifier: Apache-2.0
/// \file
/// One request that generates, from its submission to the last byte of its answer.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "answer_stream.hpp"
#include "answer_writer.hpp"
#include "engine/engine.hpp"
#include "http_server.hpp"
#include "served_model.hpp"
#include "task_pool.hpp"

namespace qwen3_moe {

struct session_options {
  bool stream = false;
  bool include_usage = false;
  bool report_tokens = false;  ///< log-probabilities were asked for
  answer_options answer;
};

/// The engine's sinks only queue tokens; text and JSON are made on the task pool, one task at a time for each
/// session, and wait while the client is slow to read. A client that leaves cancels its generations.
class generation_session : public std::enable_shared_from_this<generation_session> {
 public:
  using log_line = std::function<void(const std::string&)>;

  generation_session(std::shared_ptr<http_exchange> exchange, std::shared_ptr<const served_model> model,
                     task_pool& pool, session_options options, std::unique_ptr<answer_writer> writer,
                     log_line log);

  /// Submits one generation for each choice. Throws api_error, with nothing left running, when one is
  /// refused.
  void start(std::vector<generation_request> requests);

 private:
  class sink;
  struct choice_state {
    explicit choice_state(answer_stream stream) : text(std::move(stream)) {}
    std::shared_ptr<generation> handle;
    answer_stream text;
    std::vector<sampled_token> arrived;         // guarded by mutex_
    std::optional<generation_end> end_arrived;  // guarded by mutex_
    std::vector<token_report> unsettled;
    choice_text whole;
    int completion_tokens = 0;
    bool done = false;
  };

  void schedule();
  void pump();
  bool pump_once();
  void take(std::size_t index, const sampled_token& token);
  void end(std::size_t index, const generation_end& end);
  void emit(std::size_t index, answer_delta delta);
  void close_choice(std::size_t index, const char* reason);
  void complete();
  void fail(int status, const std::string& message);
  void cancel();
  void write_event(const std::string& json);
  token_report report(const sampled_token& token) const;

  std::shared_ptr<http_exchange> exchange_;
  std::shared_ptr<const served_model> model_;
  task_pool& pool_;
  session_options options_;
  std::unique_ptr<answer_writer> writer_;
  log_line log_;
  int prompt_tokens_ = 0;

  std::mutex mutex_;
  bool running_ = true;  // guarded: a task is pumping; true until start() is through
  bool again_ = false;   // guarded: there is more since
  std::atomic<bool> aborted_{false};
  bool closed_ = false;  // the answer is complete, or was given up
  std::vector<choice_state> choices_;
};

}  // namespace qwen3_moe
