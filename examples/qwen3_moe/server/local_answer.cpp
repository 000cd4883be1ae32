// SPDX-License-Identifier: Apache-2.0
#include "local_answer.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe {

engine_options engine_options_for(const app_model& model) {
  engine_options options;
  const auto& tokens = model.text.tokens();
  for (std::int32_t id = 0; id < model.runner->limits().vocab_size; ++id)
    if (!tokens.contains(id)) options.scheduler.unnamed_tokens.push_back(id);
  if (options.scheduler.unnamed_tokens.size() == static_cast<std::size_t>(model.runner->limits().vocab_size))
    throw nibble::format_error("tokenizer.json names none of the model's " +
                               std::to_string(model.runner->limits().vocab_size) +
                               " tokens; it belongs to another checkpoint");
  return options;
}
namespace {

struct waiting_sink : generation_sink {
  std::mutex mutex;
  std::condition_variable arrived;
  std::vector<std::int32_t> tokens;
  std::optional<generation_end> end;

  void on_token(const sampled_token& token) override {
    const std::lock_guard lock(mutex);
    tokens.push_back(token.id);
    arrived.notify_one();
  }
  void on_finish(const generation_end& result) override {
    const std::lock_guard lock(mutex);
    end = result;
    arrived.notify_one();
  }
};

}  // namespace

choice_text local_answer(engine& target, const tokenizer& tokens, generation_request request,
                         answer_options options, const std::function<void(const answer_delta&)>& show,
                         const std::function<bool()>& interrupted) {
  answer_stream text(tokens, std::move(options));
  choice_text whole;
  const auto take = [&](const answer_delta& delta) {
    whole.add(delta);
    show(delta);
  };
  const auto sink = std::make_shared<waiting_sink>();
  const auto sent = target.submit(std::move(request), sink);
  if (sent.status != submit_status::accepted) throw nibble::error(sent.message);
  for (;;) {
    std::vector<std::int32_t> ids;
    std::optional<generation_end> end;
    {
      std::unique_lock lock(sink->mutex);
      sink->arrived.wait_for(lock, std::chrono::milliseconds(100),
                             [&] { return sink->end || !sink->tokens.empty(); });
      ids.swap(sink->tokens);
      end = sink->end;
    }
    if (interrupted()) sent.handle->satisfied();
    for (const auto id : ids) {
      take(text.push(id));
      if (text.stopped()) sent.handle->satisfied();
    }
    if (!end) continue;
    if (end->reason == finish_reason::error || end->reason == finish_reason::cancelled)
      throw nibble::error(end->message);
    take(text.finish());
    whole.finish_reason = end->reason == finish_reason::length ? "length"
                          : whole.calls.empty()                ? "stop"
                                                               : "tool_calls";
    return whole;
  }
}

}  // namespace qwen3_moe
