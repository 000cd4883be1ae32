// SPDX-License-Identifier: Apache-2.0
/// \file
/// The routes: from HTTP requests to answers.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "http_server.hpp"
#include "served_model.hpp"
#include "task_pool.hpp"

namespace qwen3_moe {

struct service_options {
  std::vector<std::string> api_keys;  ///< with any, every route but the health ones wants one of them
  /// A step that runs longer makes /health report the engine as stalled.
  std::chrono::milliseconds stalled_after{300'000};
  std::function<void(const std::string&)> log = [](const std::string&) {};  ///< called from several threads
};

/// Answers requests. All members may be called from any thread.
class api_service {
 public:
  api_service(task_pool& pool, service_options options);

  /// Takes a request on the I/O thread and answers it from the pool.
  void handle(std::shared_ptr<http_exchange> exchange);

  /// Until this is called the API answers 503. What the model points to must live until stop().
  void set_ready(std::shared_ptr<const served_model> model);
  /// From here on /health answers 503, and so does what would start new work.
  void set_stopping();
  /// Lets go of the model.
  void stop();

  /// The body of an error that the HTTP layer answers by itself.
  static std::string error_body(int status, std::string_view message);

 private:
  enum class state { loading, ready, stopping };
  struct route;
  static const std::vector<route>& routes();

  void answer(const std::shared_ptr<http_exchange>& exchange);
  void dispatch(const std::shared_ptr<http_exchange>& exchange);
  void check_key(const http_request& request) const;
  std::shared_ptr<const served_model> model() const;
  std::shared_ptr<const served_model> model_for(const http_request& request) const;

  void health(const std::shared_ptr<http_exchange>& exchange);
  void live(const std::shared_ptr<http_exchange>& exchange);
  void models(const std::shared_ptr<http_exchange>& exchange);
  void one_model(const std::shared_ptr<http_exchange>& exchange);
  void metrics(const std::shared_ptr<http_exchange>& exchange);
  void tokenize(const std::shared_ptr<http_exchange>& exchange);
  void detokenize(const std::shared_ptr<http_exchange>& exchange);
  void chat(const std::shared_ptr<http_exchange>& exchange);
  void completions(const std::shared_ptr<http_exchange>& exchange);

  task_pool& pool_;
  service_options options_;
  mutable std::mutex mutex_;
  state state_ = state::loading;
  std::shared_ptr<const served_model> model_;
};

/// True when `given` is one of `keys`. The time taken depends on the lengths, not on where texts differ.
bool key_matches(std::string_view given, const std::vector<std::string>& keys);

}  // namespace qwen3_moe
