// SPDX-License-Identifier: Apache-2.0
#include "generation_session.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "api_error.hpp"

namespace qwen3_moe {

class generation_session::sink final : public generation_sink {
 public:
  sink(std::shared_ptr<generation_session> session, std::size_t index)
      : session_(std::move(session)), index_(index) {}

  void on_token(const sampled_token& token) override {
    {
      const std::lock_guard lock(session_->mutex_);
      session_->choices_[index_].arrived.push_back(token);
    }
    session_->schedule();
  }
  void on_finish(const generation_end& end) override {
    {
      const std::lock_guard lock(session_->mutex_);
      session_->choices_[index_].end_arrived = end;
    }
    session_->schedule();
  }

 private:
  std::shared_ptr<generation_session> session_;
  std::size_t index_;
};

generation_session::generation_session(std::shared_ptr<http_exchange> exchange,
                                       std::shared_ptr<const served_model> model, task_pool& pool,
                                       session_options options, std::unique_ptr<answer_writer> writer,
                                       log_line log)
    : exchange_(std::move(exchange)),
      model_(std::move(model)),
      pool_(pool),
      options_(std::move(options)),
      writer_(std::move(writer)),
      log_(std::move(log)) {}

void generation_session::start(std::vector<generation_request> requests) {
  prompt_tokens_ = static_cast<int>(requests.front().prompt.size());
  choices_.reserve(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i)
    choices_.emplace_back(answer_stream(model_->text->tokens(), options_.answer));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    auto sent = model_->engine->submit(std::move(requests[i]), std::make_shared<sink>(shared_from_this(), i));
    if (sent.status == submit_status::accepted) {
      choices_[i].handle = std::move(sent.handle);
      continue;
    }
    cancel();
    closed_ = true;
    exchange_.reset();
    if (sent.status == submit_status::queue_full) throw error_of_status(429, sent.message);
    if (sent.status == submit_status::stopping || sent.status == submit_status::failed)
      throw error_of_status(503, sent.message);
    throw api_error(400, sent.message);
  }
  exchange_->on_disconnect([weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->cancel();
      self->schedule();
    }
  });
  if (options_.stream) {
    http_response head;
    head.content_type = "text/event-stream; charset=utf-8";
    head.fields = {{"Cache-Control", "no-cache, no-transform"}, {"X-Accel-Buffering", "no"}};
    exchange_->start_stream(std::move(head), ": keep-alive\n\n");
    for (std::size_t i = 0; i < choices_.size(); ++i) write_event(writer_->first(i));
  }
  pump();
}

// Nobody pumps a session twice at once, and what arrives while it is pumped is not forgotten.
void generation_session::schedule() {
  {
    const std::lock_guard lock(mutex_);
    if (running_) {
      again_ = true;
      return;
    }
    running_ = true;
  }
  pool_.post([self = shared_from_this()] { self->pump(); });
}

void generation_session::pump() {
  for (;;) {
    try {
      if (pump_once())
        // Perhaps nobody else holds the session any more: the tokens are all here, the client has to take
        // them.
        exchange_->on_writable([self = shared_from_this()] { self->schedule(); });
    } catch (const std::exception& problem) {
      log_(std::string("answer abandoned: ") + problem.what());
      fail(500, "the answer could not be written");
    }
    const std::lock_guard lock(mutex_);
    if (!std::exchange(again_, false)) {
      running_ = false;
      return;
    }
  }
}

// True when the client must take bytes first.
bool generation_session::pump_once() {
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    if (closed_) return false;
    if (aborted_) {
      closed_ = true;
      exchange_.reset();  // closes what is left of the connection
      return false;
    }
    if (options_.stream && exchange_->congested()) return true;
    std::vector<sampled_token> tokens;
    std::optional<generation_end> over;
    {
      const std::lock_guard lock(mutex_);
      tokens.swap(choices_[i].arrived);
      over.swap(choices_[i].end_arrived);
    }
    for (const auto& token : tokens) take(i, token);
    if (over) end(i, *over);
  }
  return false;
}

void generation_session::take(std::size_t index, const sampled_token& token) {
  auto& choice = choices_[index];
  if (choice.done || closed_) return;
  ++choice.completion_tokens;
  if (options_.report_tokens) choice.unsettled.push_back(report(token));
  emit(index, choice.text.push(token.id));
  if (!choice.text.stopped()) return;
  choice.handle->satisfied();
  close_choice(index, "stop");
}

void generation_session::end(std::size_t index, const generation_end& end) {
  auto& choice = choices_[index];
  if (choice.done || closed_) return;
  choice.completion_tokens = end.completion_tokens;
  switch (end.reason) {
    case finish_reason::stop:
    case finish_reason::length: {
      emit(index, choice.text.finish());
      return close_choice(index, end.reason == finish_reason::stop ? "stop" : "length");
    }
    case finish_reason::error:
      log_("generation failed: " + end.message);
      return fail(500, end.message);
    case finish_reason::cancelled:
      return fail(503, end.message.empty() ? "the request was cancelled" : end.message);
  }
}

void generation_session::emit(std::size_t index, answer_delta delta) {
  auto& choice = choices_[index];
  const auto settled = std::min(delta.settled_tokens, choice.unsettled.size());
  const std::span<const token_report> tokens(choice.unsettled.data(), settled);
  if (options_.stream) {
    write_event(writer_->piece(index, delta, tokens));
  } else {
    choice.whole.add(delta);
    choice.whole.tokens.insert(choice.whole.tokens.end(), tokens.begin(), tokens.end());
  }
  choice.unsettled.erase(choice.unsettled.begin(),
                         choice.unsettled.begin() + static_cast<std::ptrdiff_t>(settled));
}

void generation_session::close_choice(std::size_t index, const char* reason) {
  auto& choice = choices_[index];
  choice.done = true;
  choice.whole.finish_reason =
      std::string_view(reason) == "stop" && choice.text.has_calls() ? "tool_calls" : reason;
  if (options_.stream) write_event(writer_->last(index, choice.whole.finish_reason));
  if (std::all_of(choices_.begin(), choices_.end(), [](const auto& item) { return item.done; })) complete();
}

void generation_session::complete() {
  token_usage usage{.prompt_tokens = prompt_tokens_};
  for (const auto& choice : choices_) {
    usage.completion_tokens += choice.completion_tokens;
    usage.reasoning_tokens += choice.text.reasoning_tokens();
  }
  if (options_.stream) {
    if (options_.include_usage) write_event(writer_->usage(usage));
    write_event("[DONE]");
    exchange_->end_stream();
  } else {
    std::vector<choice_text> texts;
    for (auto& choice : choices_) texts.push_back(std::move(choice.whole));
    http_response response;
    response.body = writer_->whole(texts, usage);
    exchange_->send(std::move(response));
  }
  closed_ = true;
  exchange_.reset();
}

void generation_session::fail(int status, const std::string& message) {
  if (std::exchange(closed_, true)) return;
  for (auto& choice : choices_)
    if (choice.handle) choice.handle->cancel();
  const auto problem = error_of_status(status, message);
  if (options_.stream) {
    // The status is long gone; the event is all a client can see, and no [DONE] follows it.
    write_event(problem.body());
    exchange_->end_stream();
  } else {
    http_response response;
    response.status = status;
    response.body = problem.body();
    if (status == 503) response.fields.emplace_back("Retry-After", "5");
    exchange_->send(std::move(response));
  }
  exchange_.reset();
}

void generation_session::cancel() {
  aborted_ = true;
  for (auto& choice : choices_)
    if (choice.handle) choice.handle->cancel();
}

void generation_session::write_event(const std::string& json) {
  if (!json.empty()) exchange_->write("data: " + json + "\n\n");
}

token_report generation_session::report(const sampled_token& token) const {
  const auto bytes = [&](std::int32_t id) { return std::string(model_->text->tokens().token_bytes(id)); };
  token_report result{.bytes = bytes(token.id), .logprob = token.logprob.value_or(0), .top = {}};
  for (const auto& other : token.top) result.top.push_back({bytes(other.token), other.logprob});
  return result;
}

}  // namespace qwen3_moe
