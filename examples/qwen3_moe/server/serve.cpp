// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <thread>

#include "api_service.hpp"
#include "app.hpp"
#include "engine/engine.hpp"
#include "http_server.hpp"
#include "nibble/core/error.hpp"
#include "one_line.hpp"

namespace qwen3_moe {
namespace {

using namespace std::chrono_literals;

void log_to_stderr(const std::string& line) {
  std::fprintf(stderr, "qwen3-moe: %s\n", one_line(line).c_str());
}

// SIGINT, SIGTERM and SIGHUP (the terminal went away) wait until somebody asks for them, in every thread made
// afterwards, and whoever stops reading our output does not end us. Undone at the end, for programs that go
// on.
class held_signals {
 public:
  held_signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    // Unless it is ignored, as nohup has it: a signal that is blocked would come nevertheless.
    struct sigaction hang_up {};
    sigaction(SIGHUP, nullptr, &hang_up);
    if (hang_up.sa_handler != SIG_IGN) sigaddset(&set_, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set_, &before_);
    pipe_before_ = std::signal(SIGPIPE, SIG_IGN);
  }
  ~held_signals() {
    std::signal(SIGPIPE, pipe_before_);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  held_signals(const held_signals&) = delete;
  held_signals& operator=(const held_signals&) = delete;

  /// The signal that came, 0 if none did.
  int came_within(std::chrono::milliseconds limit) const {
    const timespec time{.tv_sec = static_cast<std::time_t>(limit.count() / 1000),
                        .tv_nsec = static_cast<long>(limit.count() % 1000) * 1'000'000};
    return std::max(0, sigtimedwait(&set_, nullptr, &time));
  }

 private:
  sigset_t set_{};
  sigset_t before_{};
  void (*pipe_before_)(int) = SIG_DFL;
};

// The model and its engine, made on a thread of their own while the socket already answers.
struct loading {
  std::unique_ptr<app_model> model;
  std::unique_ptr<engine> runner;
  std::string problem;
  int code = exit_ok;
  std::atomic<bool> done{false};

  void run(const serve_options& options, const model_loader& load, api_service& service) {
    try {
      model = load();
      auto engine_settings = engine_options_for(*model);
      engine_settings.max_queued = options.max_queued;
      runner = std::make_unique<engine>(*model->runner, engine_settings);
      auto served = std::make_shared<served_model>();
      served->names = options.names.empty() ? std::vector{model->name} : options.names;
      served->text = &model->text;
      served->engine = runner.get();
      served->sampling = model->sampling;
      served->stop_tokens = model->stop_tokens;
      served->created = static_cast<std::int64_t>(std::time(nullptr));
      service.set_ready(std::move(served));
    } catch (const std::exception& error) {
      const told_failure failure = failure_of(error);
      problem = failure.text;
      code = failure.code;
    }
    done = true;
  }
};

std::string url_of(const serve_options& options, std::uint16_t port) {
  auto host = options.http.host;
  if (host.find(':') != std::string::npos && host.front() != '[') host = "[" + host + "]";
  return "http://" + host + ":" + std::to_string(port);
}

}  // namespace

int serve(const serve_options& options, const model_loader& load) {
  const held_signals signals;
  // Two at least, so that one long prompt being tokenised holds up nobody else.
  task_pool pool(std::min(4u, std::max(2u, std::thread::hardware_concurrency())));
  service_options service_settings;
  service_settings.api_keys = options.api_keys;
  service_settings.log = log_to_stderr;
  api_service service(pool, std::move(service_settings));
  http_server server(
      options.http, [&](std::shared_ptr<http_exchange> exchange) { service.handle(std::move(exchange)); },
      api_service::error_body);
  server.start();
  for (const auto& warning : options.warnings) log_to_stderr("warning: " + warning);
  const auto url = url_of(options, server.port());
  std::printf("qwen3-moe: listening on %s, loading the model\n", url.c_str());
  std::fflush(stdout);

  loading model;
  std::thread loader([&] { model.run(options, load, service); });
  bool stop_asked = false;
  while (!model.done) {
    if (signals.came_within(20ms) == 0) continue;
    stop_asked = true;
    if (model.done) break;  // it was serving already
    // Loading cannot be broken off, and holds nothing that outlives the process.
    std::fprintf(stderr, "qwen3-moe: stopped while loading\n");
    std::fflush(nullptr);
    std::_Exit(exit_ok);
  }
  loader.join();
  if (!model.problem.empty()) {
    server.stop();
    pool.stop();
    log_to_stderr(model.problem);
    return model.code;
  }
  for (const auto& note : model.model->notes) std::printf("qwen3-moe: %s\n", note.c_str());
  std::printf("qwen3-moe: ready, serving %s at %s/v1\n",
              (options.names.empty() ? model.model->name : options.names.front()).c_str(), url.c_str());
  std::fflush(stdout);

  while (!stop_asked) stop_asked = signals.came_within(1000ms) != 0;
  service.set_stopping();
  const auto& counters = model.runner->counters();
  std::fprintf(
      stderr,
      "qwen3-moe: stopping; %d running and %d queued answers may end first, Ctrl-C again to leave at once\n",
      counters.running.load(), counters.queued.load());
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(options.drain_seconds);
  const auto leave_on_signal = [&] {
    const int sign = signals.came_within(1ms);
    if (sign == 0 || sign == SIGHUP) return;  // a terminal's shell and the system may both say that it went
    std::fprintf(stderr, "qwen3-moe: left at once\n");
    std::fflush(nullptr);
    std::_Exit(128 + sign);
  };
  while (!model.runner->drain(100ms) && std::chrono::steady_clock::now() < until) leave_on_signal();
  if (const int cut = counters.running.load() + counters.queued.load(); cut > 0)
    std::fprintf(stderr,
                 "qwen3-moe: %d of the answers did not end in %d s and are cut off (see --drain-seconds)\n",
                 cut, options.drain_seconds);
  model.runner->stop();
  server.close_listener();
  // The last bytes of the last answers.
  const auto flushed = std::chrono::steady_clock::now() + 3s;
  while (server.connections() > 0 && std::chrono::steady_clock::now() < flushed) {
    std::this_thread::sleep_for(10ms);
    leave_on_signal();
  }
  pool.stop();
  service.stop();
  server.stop();
  std::fprintf(stderr, "qwen3-moe: stopped\n");
  return exit_ok;
}

}  // namespace qwen3_moe
