// SPDX-License-Identifier: Apache-2.0
/// \file
/// A whole server on a real socket over a scripted model.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "byte_text.hpp"
#include "raw_client.hpp"
#include "script_runner.hpp"
#include "server/api_service.hpp"
#include "server/http_server.hpp"

namespace qwen3_moe::testing {

struct test_setup {
  std::string answer = "ok";  ///< markers such as <think> are single tokens; <|im_end|> follows
  bool endless = false;       ///< the answer begins anew instead of ending
  runner_limits limits{.vocab_size = byte_vocab_size,
                       .context_tokens = 2048,
                       .page_tokens = 16,
                       .pages = 1024,
                       .slots = 4,
                       .step_tokens = 256};
  int max_queued = 256;
  http_limits http;
  std::vector<std::string> api_keys;
  bool ready = true;
  std::string host = "127.0.0.1";
};

class test_server {
 public:
  explicit test_server(test_setup setup = {})
      : text(byte_text()),
        answer_ids(byte_ids(text.tokens(), setup.answer)),
        runner(setup.limits,
               [this, endless = setup.endless](std::span<const std::int32_t>, std::size_t index) {
                 if (endless) return answer_ids[index % answer_ids.size()];
                 return index < answer_ids.size() ? answer_ids[index] : static_cast<std::int32_t>(im_end);
               }),
        engine(runner, {.max_queued = setup.max_queued, .scheduler = {}}),
        pool(2),
        service(pool, {.api_keys = setup.api_keys,
                       .stalled_after = std::chrono::milliseconds(300'000),
                       .log = [](const auto&) {}}),
        server(
            {.host = setup.host, .port = 0, .allowed_hosts = {"allowed.example"}, .limits = setup.http},
            [this](std::shared_ptr<http_exchange> exchange) { service.handle(std::move(exchange)); },
            api_service::error_body) {
    server.start();
    if (setup.ready) make_ready();
  }

  ~test_server() {
    engine.stop();
    pool.stop();
    service.stop();
    server.stop();
  }

  void make_ready() {
    auto model = std::make_shared<served_model>();
    model->names = {"scripted", "alias"};
    model->text = &text;
    model->engine = &engine;
    model->sampling.temperature = 0;
    model->stop_tokens = {im_end, end_of_text};
    model->created = 1700000000;
    service.set_ready(std::move(model));
  }

  raw_client connect(int receive_seconds = 20) { return raw_client(server.port(), receive_seconds); }

  raw_response get(const std::string& path, const std::string& fields = {}) {
    raw_client client(server.port());
    client.get(path, fields);
    return client.response();
  }
  raw_response post(const std::string& path, const std::string& body, const std::string& fields = {}) {
    raw_client client(server.port());
    client.post(path, body, fields);
    return client.response();
  }
  /// POST /v1/chat/completions with one user message and `more` fields ("\"stream\":true"). Thinking is off
  /// unless they say otherwise.
  raw_response chat(const std::string& more = {}, const std::string& content = "hi") {
    return post("/v1/chat/completions", chat_body(more, content));
  }
  /// Thinking is off unless `more` says otherwise.
  static std::string chat_body(const std::string& more = {}, const std::string& content = "hi") {
    auto body = R"({"messages":[{"role":"user","content":)" +
                boost::json::serialize(boost::json::value(content)) + "}]";
    if (!more.empty()) body += "," + more;
    if (more.find("enable_thinking") == std::string::npos) body += ",\"enable_thinking\":false";
    return body + "}";
  }

  /// Waits until `done` holds; false after ten seconds.
  static bool eventually(const std::function<bool()>& done) {
    for (int i = 0; i < 1000; ++i) {
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  bool idle() {
    return eventually([this] { return engine.counters().running == 0 && engine.counters().queued == 0; });
  }

  text_model text;
  std::vector<std::int32_t> answer_ids;
  script_runner runner;
  qwen3_moe::engine engine;
  task_pool pool;
  api_service service;
  http_server server;
};

}  // namespace qwen3_moe::testing
