// SPDX-License-Identifier: Apache-2.0
// The routes that turn text into tokens: chat, completions, tokenize, detokenize.
#include <algorithm>
#include <array>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <random>
#include <utility>

#include "api_error.hpp"
#include "api_service.hpp"
#include "generation_session.hpp"
#include "schema.hpp"

namespace qwen3_moe {
namespace {

json::value body_of(const http_request& request) { return parse_json(request.body, "the request body"); }

std::int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void check_model(const served_model& model, const std::optional<std::string>& wanted) {
  if (wanted && !model.answers_to(*wanted))
    throw api_error(404, "this server has no model of that name; it serves " + model.name(),
                    "invalid_request_error", "model", "model_not_found");
}

void check_context(const served_model& model, std::size_t prompt_tokens, const char* field) {
  const auto limit = static_cast<std::size_t>(model.engine->context_tokens());
  if (prompt_tokens < limit) return;
  throw api_error(400,
                  "the prompt has " + std::to_string(prompt_tokens) +
                      " tokens, and prompt and answer together may have " + std::to_string(limit) +
                      " (--context of the server, which the model bounds); shorten the prompt",
                  "invalid_request_error", field, "context_length_exceeded");
}

std::vector<generation_request> requests_of(const served_model& model, const generation_fields& fields,
                                            std::vector<std::int32_t> prompt, std::optional<int> logprobs) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  const auto random_seed = random();
  const auto count = static_cast<std::size_t>(fields.n.value_or(1));
  std::vector<generation_request> requests(count);
  for (std::size_t i = 0; i < count; ++i) {
    requests[i].prompt = i + 1 == count ? std::move(prompt) : prompt;
    requests[i].max_tokens = static_cast<int>(fields.max_tokens.value_or(request_limits::tokens));
    requests[i].stop_tokens = model.stop_tokens;
    requests[i].sampling = sampling_of(fields, model.sampling, random_seed, i);
    requests[i].sampling.logprobs = logprobs;
  }
  return requests;
}

session_options session_of(const generation_fields& fields, bool report_tokens) {
  session_options options;
  options.stream = fields.stream.value_or(false);
  options.include_usage = fields.include_usage.value_or(false);
  options.report_tokens = report_tokens;
  options.answer.stop = fields.stop;
  return options;
}

answer_identity identity_of(const served_model& model, const session_options& options,
                            std::string_view prefix) {
  return {.id = fresh_id(prefix),
          .model = model.name(),
          .created = seconds_now(),
          .with_usage = options.stream && options.include_usage,
          .with_logprobs = options.report_tokens};
}

struct tokenize_request {
  std::optional<std::string> model, prompt, content;
  std::optional<bool> parse_special;
};

constexpr std::array tokenize_table{
    field<tokenize_request>{"model", string_field<tokenize_request>{1024, &tokenize_request::model}},
    field<tokenize_request>{"prompt",
                            string_field<tokenize_request>{std::string::npos, &tokenize_request::prompt}},
    field<tokenize_request>{"content",
                            string_field<tokenize_request>{std::string::npos, &tokenize_request::content}},
    field<tokenize_request>{"parse_special",
                            boolean_field<tokenize_request>{&tokenize_request::parse_special}},
};

}  // namespace

void api_service::chat(const std::shared_ptr<http_exchange>& exchange) {
  const auto ready = model();
  std::vector<generation_request> requests;
  session_options options;
  {
    // What the body takes in memory is given back before the answer begins.
    const auto request = parse_chat_request(body_of(exchange->request()), ready->text->tokens().vocab_size());
    check_model(*ready, request.model);
    auto prompt = ready->text->prompt_of(request);
    check_context(*ready, prompt.ids.size(), "messages");
    options = session_of(request, request.logprobs.value_or(false));
    options.answer.in_reasoning = prompt.in_reasoning;
    options.answer.tools = request.tools;
    requests =
        requests_of(*ready, request, std::move(prompt.ids),
                    options.report_tokens ? std::optional(static_cast<int>(request.top_logprobs.value_or(0)))
                                          : std::nullopt);
  }
  auto writer = make_chat_writer(identity_of(*ready, options, "chatcmpl-"));
  std::make_shared<generation_session>(exchange, ready, pool_, std::move(options), std::move(writer),
                                       options_.log)
      ->start(std::move(requests));
}

void api_service::completions(const std::shared_ptr<http_exchange>& exchange) {
  const auto ready = model();
  std::vector<generation_request> requests;
  session_options options;
  {
    auto request = parse_completion_request(body_of(exchange->request()), ready->engine->vocab_size());
    check_model(*ready, request.model);
    // The prompt is all of the model's input here, so the markers in it are meant.
    auto ids =
        std::holds_alternative<std::string>(request.prompt)
            ? ready->text->tokens().encode(std::get<std::string>(request.prompt), added_tokens_mode::all)
            : std::get<std::vector<std::int32_t>>(std::move(request.prompt));
    check_context(*ready, ids.size(), "prompt");
    options = session_of(request, request.logprobs.has_value());
    options.answer.split = false;
    const auto logprobs =
        request.logprobs ? std::optional(static_cast<int>(*request.logprobs)) : std::nullopt;
    requests = requests_of(*ready, request, std::move(ids), logprobs);
  }
  auto writer = make_completion_writer(identity_of(*ready, options, "cmpl-"));
  std::make_shared<generation_session>(exchange, ready, pool_, std::move(options), std::move(writer),
                                       options_.log)
      ->start(std::move(requests));
}

void api_service::tokenize(const std::shared_ptr<http_exchange>& exchange) {
  const auto ready = model();
  const auto body = body_of(exchange->request());
  tokenize_request request;
  const auto& object = checked_object(body, "body");
  read_fields<tokenize_request>(object, "", tokenize_table, request);
  check_model(*ready, request.model);
  std::vector<std::int32_t> ids;
  if (object.contains("messages")) {
    const auto chat = parse_chat_request(body, ready->text->tokens().vocab_size());
    ids = ready->text->prompt_of(chat).ids;
  } else {
    if (!request.prompt) request.prompt = std::move(request.content);
    if (!request.prompt) throw bad_field("prompt", "is missing");
    ids = ready->text->tokens().encode(*request.prompt, request.parse_special.value_or(false)
                                                            ? added_tokens_mode::all
                                                            : added_tokens_mode::none);
  }
  json::array list;
  for (const auto id : ids) list.push_back(id);
  http_response response;
  response.body = json::serialize(json::object{{"count", ids.size()},
                                               {"max_model_len", ready->engine->context_tokens()},
                                               {"tokens", std::move(list)}});
  exchange->send(std::move(response));
}

void api_service::detokenize(const std::shared_ptr<http_exchange>& exchange) {
  const auto ready = model();
  const auto body = body_of(exchange->request());
  const auto& object = checked_object(body, "body");
  const auto* tokens = object.if_contains("tokens");
  if (!tokens) throw bad_field("tokens", "is missing");
  std::vector<std::int32_t> ids;
  const auto& list = checked_array(*tokens, "tokens", http_limits{}.body_bytes);
  for (std::size_t i = 0; i < list.size(); ++i)
    ids.push_back(static_cast<std::int32_t>(
        schema_detail::checked_integer(list[i], item_path("tokens", i), 0, ready->engine->vocab_size() - 1)));
  const auto text = ready->text->tokens().decode(ids);
  http_response response;
  response.body = json::serialize(json::object{{"prompt", text}, {"content", text}});
  exchange->send(std::move(response));
}

}  // namespace qwen3_moe
