// SPDX-License-Identifier: Apache-2.0
/// \file
/// The commands, without knowledge of how a model is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "chat_request.hpp"
#include "engine/engine.hpp"
#include "engine/model_runner.hpp"
#include "http_server.hpp"
#include "nibble/core/error.hpp"
#include "text_model.hpp"

namespace qwen3_moe {

/// Exit codes of every command.
enum exit_code : int {
  exit_ok = 0,
  exit_differs = 1,  ///< verify: past the tolerance
  exit_usage = 2,    ///< bad options, files or addresses
  exit_runtime = 3,  ///< something failed while it ran
};

/// Most bytes of a prompt, or of one line, on standard input; without a bound endless input takes all memory.
inline constexpr std::size_t input_limit_bytes = std::size_t{16} << 20;

/// What an exception ends a command with.
struct told_failure {
  const char* text;  ///< lives as long as the exception
  exit_code code;
};
[[nodiscard]] inline told_failure failure_of(const std::exception& problem) {
  if (dynamic_cast<const nibble::format_error*>(&problem) != nullptr ||
      dynamic_cast<const std::filesystem::filesystem_error*>(&problem) !=
          nullptr)  // a path that leads nowhere
    return {problem.what(), exit_usage};
  if (dynamic_cast<const std::bad_alloc*>(&problem) != nullptr)
    return {"not enough memory; a smaller --context or --max-running needs less", exit_runtime};
  if (const auto* const system = dynamic_cast<const std::system_error*>(&problem);
      system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
    return {
        "the system starts no further thread: the limit of processes (ulimit -u), of memory (ulimit -v) or "
        "of a "
        "container is reached",
        exit_runtime};
  return {problem.what(), exit_runtime};
}

/// A model ready to run.
struct app_model {
  app_model(std::shared_ptr<void> keeps, model_runner& r, text_model t)
      : owner(std::move(keeps)), runner(&r), text(std::move(t)) {}

  std::shared_ptr<void> owner;  ///< keeps the runner alive
  model_runner* runner;
  text_model text;
  sampling_defaults sampling;
  std::vector<std::int32_t> stop_tokens;
  std::string name;
  std::vector<std::string> notes;  ///< lines for a person: what was loaded, on which device and why
};

/// What an engine must know of the model's text side: ids that no token of the tokenizer stands for.
[[nodiscard]] engine_options engine_options_for(const app_model& model);

/// May take long. Throws nibble::error.
using model_loader = std::function<std::unique_ptr<app_model>()>;

struct serve_options {
  http_options http;
  std::vector<std::string> api_keys;
  std::vector<std::string> names;     ///< what the model answers to; empty: its own name
  std::vector<std::string> warnings;  ///< told once the address is had
  int max_queued = 256;
  int drain_seconds = 30;  ///< how long answers may go on after the first signal
};

/// Serves until SIGINT, SIGTERM or SIGHUP, which must not be blocked when it is called. A second one ends the
/// process at once, unless it is SIGHUP. SIGHUP that is ignored, as under nohup, stays so.
int serve(const serve_options& options, const model_loader& load);

struct talk_options {
  std::string system;
  bool thinking = true;
  std::optional<float> temperature, top_p, min_p;
  std::optional<int> top_k;
  std::optional<std::uint64_t> seed;
  std::optional<int> max_tokens;
};

/// A conversation over stdin and stdout, streamed. One line is one message.
int chat(const talk_options& options, const model_loader& load);

/// Continues `prompt` on stdout.
int complete(const std::string& prompt, const talk_options& options, const model_loader& load);

/// Reads `--…` and runs what they ask for; the program's main function.
int run_command_line(int argc, const char* const* argv);

}  // namespace qwen3_moe
