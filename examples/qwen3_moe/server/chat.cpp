// SPDX-License-Identifier: Apache-2.0
// The commands `chat` and `complete`: the model in this process, text on the terminal.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <limits>
#include <random>
#include <streambuf>
#include <string>
#include <string_view>
#include <utility>

#include "api_error.hpp"
#include "app.hpp"
#include "engine/engine.hpp"
#include "local_answer.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe {
namespace {

std::atomic<bool> interrupt_came{false};

// Ctrl-C ends an answer; between answers it ends the program. Puts the old behaviour back afterwards.
class interrupt_guard {
 public:
  interrupt_guard() {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupt_came = true; };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, &before_);  // no SA_RESTART: a waiting read returns
  }
  ~interrupt_guard() { sigaction(SIGINT, &before_, nullptr); }
  interrupt_guard(const interrupt_guard&) = delete;
  interrupt_guard& operator=(const interrupt_guard&) = delete;

 private:
  struct sigaction before_ {};
};

// On a terminal, what the model wrote must not be able to drive it.
void print(std::string_view text, bool terminal) {
  std::string out;
  for (const char c : text)
    out += terminal && static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? '?' : c;
  std::fwrite(out.data(), 1, out.size(), stdout);
  std::fflush(stdout);
}

// Like std::getline, but with an end to how much one line may take. False at the end of the input.
bool read_line(std::streambuf& in, std::string& line) {
  using traits = std::streambuf::traits_type;
  line.clear();
  for (;;) {
    const auto c = in.sbumpc();
    if (traits::eq_int_type(c, traits::eof())) return !line.empty();
    if (traits::to_char_type(c) == '\n') return true;
    if (line.size() == input_limit_bytes)
      throw nibble::format_error("a line on standard input has more than " +
                                 std::to_string(input_limit_bytes) + " bytes");
    line += traits::to_char_type(c);
  }
}

generation_request request_of(const app_model& model, const talk_options& options,
                              std::vector<std::int32_t> prompt) {
  generation_fields fields;
  fields.temperature = options.temperature;
  fields.top_p = options.top_p;
  fields.min_p = options.min_p;
  if (options.top_k) fields.top_k = *options.top_k;
  fields.seed = options.seed;
  generation_request request;
  request.prompt = std::move(prompt);
  request.max_tokens = options.max_tokens.value_or(std::numeric_limits<int>::max());
  request.stop_tokens = model.stop_tokens;
  request.sampling = sampling_of(fields, model.sampling, std::random_device{}(), 0);
  return request;
}

json::object message(const char* role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

// Shows reasoning dimmed on a terminal and not at all elsewhere, where the answer alone is wanted.
class shower {
 public:
  explicit shower(bool terminal) : terminal_(terminal) {}
  void operator()(const answer_delta& delta) {
    if (!delta.reasoning.empty() && terminal_) {
      if (!std::exchange(dim_, true)) std::fputs("\x1b[2m", stdout);
      print(delta.reasoning, true);
    }
    const bool more = !delta.content.empty() || !delta.calls.empty();
    if (more && std::exchange(dim_, false)) std::fputs("\x1b[0m\n", stdout);
    print(delta.content, terminal_);
    for (const auto& call : delta.calls) {
      if (call.name) print("\n[calls " + *call.name + "] ", terminal_);
      print(call.arguments, terminal_);
    }
  }
  void end() {
    if (std::exchange(dim_, false)) std::fputs("\x1b[0m", stdout);
    print("\n", false);
  }

 private:
  bool terminal_;
  bool dim_ = false;
};

}  // namespace

int chat(const talk_options& options, const model_loader& load) {
  const bool terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
  const auto model = load();
  engine target(*model->runner, engine_options_for(*model));
  if (terminal) {
    for (const auto& note : model->notes) std::fprintf(stderr, "%s\n", note.c_str());
    std::fprintf(stderr,
                 "One line is one message. /reset forgets the conversation, /exit or Ctrl-D ends it.\n");
  }
  const interrupt_guard guard;
  json::array history;
  const auto restart = [&] {
    history.clear();
    if (!options.system.empty()) history.push_back(message("system", options.system));
  };
  restart();
  std::string line;
  for (;;) {
    if (terminal) print("> ", false);
    interrupt_came = false;
    if (!read_line(*std::cin.rdbuf(), line)) break;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    if (line == "/exit") break;
    if (line == "/reset") {
      restart();
      continue;
    }
    auto request = chat_request{};
    history.push_back(message("user", line));
    request.messages = history;
    request.template_arguments["enable_thinking"] = options.thinking;
    auto prompt = model->text.prompt_of(request);
    if (prompt.ids.size() >= static_cast<std::size_t>(target.context_tokens())) {
      std::fprintf(stderr,
                   "qwen3-moe: the conversation has %zu tokens and the context is %d; /reset starts anew\n",
                   prompt.ids.size(), target.context_tokens());
      if (!terminal) return exit_usage;
      history.pop_back();
      continue;
    }
    shower show(terminal);
    answer_options answer;
    answer.in_reasoning = prompt.in_reasoning;
    const auto whole = local_answer(
        target, model->text.tokens(), request_of(*model, options, std::move(prompt.ids)), answer,
        [&](const answer_delta& delta) { show(delta); }, [] { return interrupt_came.load(); });
    show.end();
    if (terminal && whole.finish_reason == "length")
      std::fprintf(stderr, "[cut: no more tokens were allowed]\n");
    auto reply = message("assistant", whole.content);
    if (!whole.reasoning.empty()) reply["reasoning_content"] = whole.reasoning;
    history.push_back(std::move(reply));
  }
  if (terminal) print("\n", false);
  return exit_ok;
}

int complete(const std::string& prompt, const talk_options& options, const model_loader& load) {
  const auto model = load();
  engine target(*model->runner, engine_options_for(*model));
  const interrupt_guard guard;
  const bool terminal = isatty(STDOUT_FILENO);
  auto ids = model->text.tokens().encode(prompt, added_tokens_mode::all);
  if (ids.empty() || ids.size() >= static_cast<std::size_t>(target.context_tokens()))
    throw nibble::format_error("the prompt has " + std::to_string(ids.size()) + " tokens, between 1 and " +
                               std::to_string(target.context_tokens() - 1) + " fit");
  answer_options answer;
  answer.split = false;
  local_answer(
      target, model->text.tokens(), request_of(*model, options, std::move(ids)), answer,
      [&](const answer_delta& delta) { print(delta.content, terminal); },
      [] { return interrupt_came.load(); });
  print("\n", false);
  return exit_ok;
}

}  // namespace qwen3_moe
