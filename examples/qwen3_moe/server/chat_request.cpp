// SPDX-License-Identifier: Apache-2.0
#include "chat_request.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include "chat_messages.hpp"
#include "schema.hpp"

namespace qwen3_moe {
namespace {

std::string_view text_of(const json::value& value) {
  const auto& text = value.get_string();
  return {text.data(), text.size()};
}

template <class Request>
void read_stop(const json::value& value, const std::string& path, Request& out) {
  const auto add = [&](const json::value& item, const std::string& item_name) {
    auto text = schema_detail::checked_string(item, item_name, request_limits::stop_bytes);
    if (text.empty()) throw bad_field(item_name, "must not be empty");
    out.stop.push_back(std::move(text));
  };
  if (value.is_string()) return add(value, path);
  if (!value.is_array())
    throw bad_field(path, "must be a string or an array of strings, got " + std::string(kind_name(value)));
  const auto& list = checked_array(value, path, request_limits::stop_strings);
  for (std::size_t i = 0; i < list.size(); ++i) add(list[i], item_path(path, i));
}

template <class Request>
void read_logit_bias(const json::value& value, const std::string& path, Request& out) {
  const auto& object = checked_object(value, path);
  if (object.size() > request_limits::logit_bias)
    throw bad_field(path, "has " + std::to_string(object.size()) + " entries, at most " +
                              std::to_string(request_limits::logit_bias) + " are allowed");
  for (const auto& item : object) {
    const std::string_view key(item.key().data(), item.key().size());
    std::int32_t token = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size() || token < 0)
      throw bad_field(path, "has a key that is no token id");
    const auto bias = schema_detail::checked_number(item.value(), field_path(path, key), -100, 100, false);
    out.logit_bias.push_back({token, static_cast<float>(bias)});
  }
}

template <class Request>
void read_seed(const json::value& value, const std::string& path, Request& out) {
  if (value.is_uint64())
    out.seed = value.get_uint64();
  else if (value.is_int64())
    out.seed = static_cast<std::uint64_t>(value.get_int64());
  else
    throw bad_field(path, "must be an integer of 64 bits, got " + std::string(kind_name(value)));
}

template <class Request>
void read_stream_options(const json::value& value, const std::string& path, Request& out) {
  static constexpr std::array table{field<generation_fields>{
      "include_usage", boolean_field<generation_fields>{&generation_fields::include_usage}}};
  out.has_stream_options = true;
  read_fields<generation_fields>(checked_object(value, path), path, table, out);
}

template <class Request>
void refuse(const json::value&, const std::string& path, Request&) {
  throw bad_field(path, "is not supported");
}

void read_response_format(const json::value& value, const std::string& path, chat_request&) {
  const auto& object = checked_object(value, path);
  const auto* type = object.if_contains("type");
  if (!type || !type->is_string() || text_of(*type) != "text")
    throw bad_field(field_path(path, "type"), "must be \"text\"; this server does not enforce other formats");
}

// What both routes have in common, for one of the two request types.
template <class Request>
constexpr std::array shared_table{
    field<Request>{"model", string_field<Request>{1024, &Request::model}},
    field<Request>{"stream", boolean_field<Request>{&Request::stream}},
    field<Request>{"stream_options", custom_field<Request>{&read_stream_options<Request>}},
    field<Request>{"max_tokens", integer_field<Request>{1, request_limits::tokens, &Request::max_tokens}},
    field<Request>{"n", integer_field<Request>{1, request_limits::choices, &Request::n}},
    field<Request>{"temperature", number_field<Request>{0, 2, &Request::temperature}},
    field<Request>{"top_p", number_field<Request>{0, 1, &Request::top_p}},
    field<Request>{"top_k", integer_field<Request>{-1, request_limits::tokens, &Request::top_k}},
    field<Request>{"min_p", number_field<Request>{0, 1, &Request::min_p}},
    field<Request>{"presence_penalty", number_field<Request>{-2, 2, &Request::presence_penalty}},
    field<Request>{"frequency_penalty", number_field<Request>{-2, 2, &Request::frequency_penalty}},
    field<Request>{"repetition_penalty", number_field<Request>{0, 10, &Request::repetition_penalty, true}},
    field<Request>{"seed", custom_field<Request>{&read_seed<Request>}},
    field<Request>{"stop", custom_field<Request>{&read_stop<Request>}},
    field<Request>{"logit_bias", custom_field<Request>{&read_logit_bias<Request>}},
};

constexpr std::array chat_table{
    field<chat_request>{"messages", custom_field<chat_request>{&chat_messages::read_messages}},
    field<chat_request>{"tools", custom_field<chat_request>{&chat_messages::read_tools}},
    field<chat_request>{"tool_choice", custom_field<chat_request>{&chat_messages::read_tool_choice}},
    field<chat_request>{"response_format", custom_field<chat_request>{&read_response_format}},
    field<chat_request>{"chat_template_kwargs",
                        custom_field<chat_request>{&chat_messages::read_template_arguments}},
    field<chat_request>{"enable_thinking", boolean_field<chat_request>{&chat_request::enable_thinking}},
    field<chat_request>{
        "max_completion_tokens",
        integer_field<chat_request>{1, request_limits::tokens, &chat_request::max_completion_tokens}},
    field<chat_request>{"logprobs", boolean_field<chat_request>{&chat_request::logprobs}},
    field<chat_request>{"top_logprobs", integer_field<chat_request>{0, request_limits::top_logprobs,
                                                                    &chat_request::top_logprobs}},
    field<chat_request>{"functions", custom_field<chat_request>{&refuse<chat_request>}},
    field<chat_request>{"function_call", custom_field<chat_request>{&refuse<chat_request>}},
};

void read_prompt(const json::value& value, const std::string& path, completion_request& out) {
  if (value.is_string()) {
    out.prompt = std::string(text_of(value));
    return;
  }
  if (!value.is_array())
    throw bad_field(path, "must be a string or an array of token ids, got " + std::string(kind_name(value)));
  const auto& list = value.get_array();
  if (list.size() == 1 && list[0].is_string()) {
    out.prompt = std::string(text_of(list[0]));
    return;
  }
  if (!list.empty() && (list[0].is_string() || list[0].is_array()))
    throw bad_field(path, "holds several prompts; send one request for each");
  std::vector<std::int32_t> ids;
  ids.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i)
    ids.push_back(static_cast<std::int32_t>(
        schema_detail::checked_integer(list[i], item_path(path, i), 0, request_limits::tokens)));
  out.prompt = std::move(ids);
}

void read_echo(const json::value& value, const std::string& path, completion_request&) {
  if (schema_detail::checked_boolean(value, path)) throw bad_field(path, "is not supported");
}

void read_best_of(const json::value& value, const std::string& path, completion_request& out) {
  if (schema_detail::checked_integer(value, path, 1, request_limits::choices) > out.n.value_or(1))
    throw bad_field(path, "above n is not supported");
}

void read_suffix(const json::value& value, const std::string& path, completion_request&) {
  if (!schema_detail::checked_string(value, path, std::string::npos).empty())
    throw bad_field(path, "is not supported");
}

constexpr std::array completion_table{
    field<completion_request>{"prompt", custom_field<completion_request>{&read_prompt}},
    field<completion_request>{"echo", custom_field<completion_request>{&read_echo}},
    field<completion_request>{"best_of", custom_field<completion_request>{&read_best_of}},
    field<completion_request>{"suffix", custom_field<completion_request>{&read_suffix}},
    field<completion_request>{"logprobs",
                              integer_field<completion_request>{0, 5, &completion_request::logprobs}},
};

const json::object& body_object(const json::value& body) {
  if (!body.is_object())
    throw api_error(400, "the request body must be a JSON object, got " + std::string(kind_name(body)));
  return body.get_object();
}

void check_shared(const generation_fields& fields, std::int32_t vocab_size) {
  if (fields.has_stream_options.value_or(false) && !fields.stream.value_or(false))
    throw bad_field("stream_options", "is only allowed with stream true");
  for (const auto& item : fields.logit_bias)
    if (item.token >= vocab_size)
      throw bad_field("logit_bias", "names token " + std::to_string(item.token) + ", the vocabulary has " +
                                        std::to_string(vocab_size));
}

}  // namespace

chat_request parse_chat_request(const json::value& body, std::int32_t vocab_size) {
  const auto& object = body_object(body);
  chat_request request;
  read_fields<chat_request>(object, "", shared_table<chat_request>, request);
  read_fields<chat_request>(object, "", chat_table, request);
  if (request.messages.empty()) throw bad_field("messages", "is missing");
  if (request.top_logprobs && !request.logprobs.value_or(false))
    throw bad_field("top_logprobs", "is only allowed with logprobs true");
  check_shared(request, vocab_size);
  // The top-level form is what some clients send; the template only knows its own arguments.
  if (request.enable_thinking && !request.template_arguments.contains("enable_thinking"))
    request.template_arguments["enable_thinking"] = *request.enable_thinking;
  if (request.max_completion_tokens) request.max_tokens = request.max_completion_tokens;
  if (!request.use_tools) request.tools.clear();
  return request;
}

completion_request parse_completion_request(const json::value& body, std::int32_t vocab_size) {
  const auto& object = body_object(body);
  completion_request request;
  read_fields<completion_request>(object, "", shared_table<completion_request>, request);
  read_fields<completion_request>(object, "", completion_table, request);
  const auto* prompt = object.if_contains("prompt");
  if (!prompt || prompt->is_null()) throw bad_field("prompt", "is missing");
  check_shared(request, vocab_size);
  if (const auto* ids = std::get_if<std::vector<std::int32_t>>(&request.prompt)) {
    if (ids->empty()) throw bad_field("prompt", "must not be empty");
    for (std::size_t i = 0; i < ids->size(); ++i)
      if ((*ids)[i] >= vocab_size)
        throw bad_field(item_path("prompt", i), "is token " + std::to_string((*ids)[i]) +
                                                    ", the vocabulary has " + std::to_string(vocab_size));
  } else if (std::get<std::string>(request.prompt).empty()) {
    throw bad_field("prompt", "must not be empty");
  }
  return request;
}

sampling_options sampling_of(const generation_fields& fields, const sampling_defaults& defaults,
                             std::uint64_t random_seed, std::size_t index) {
  sampling_options options;
  options.temperature = fields.temperature.value_or(defaults.temperature);
  options.top_k = static_cast<int>(fields.top_k.value_or(defaults.top_k));
  options.top_p = fields.top_p.value_or(defaults.top_p);
  options.min_p = fields.min_p.value_or(defaults.min_p);
  options.repetition_penalty = fields.repetition_penalty.value_or(defaults.repetition_penalty);
  options.presence_penalty = fields.presence_penalty.value_or(0);
  options.frequency_penalty = fields.frequency_penalty.value_or(0);
  // An odd constant keeps the seeds of the choices of one request apart for every request seed.
  options.seed = fields.seed.value_or(random_seed) + index * 0x9E3779B97F4A7C15u;
  options.logit_bias = fields.logit_bias;
  return options;
}

}  // namespace qwen3_moe
