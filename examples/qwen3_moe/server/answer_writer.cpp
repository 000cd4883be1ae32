// SPDX-License-Identifier: Apache-2.0
#include "answer_writer.hpp"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <random>
#include <string_view>
#include <utility>

#include "text/unicode.hpp"

namespace qwen3_moe {
namespace {

constexpr float least_logprob = -9999;  // JSON has no -inf, and clients want a number

double reported(float logprob) {
  return std::isfinite(logprob) ? std::max(logprob, least_logprob) : least_logprob;
}

json::array byte_values(std::string_view bytes) {
  json::array values;
  for (const char c : bytes) values.push_back(static_cast<std::int64_t>(static_cast<unsigned char>(c)));
  return values;
}

json::value usage_value(const token_usage& usage) {
  return json::object{
      {"prompt_tokens", usage.prompt_tokens},
      {"completion_tokens", usage.completion_tokens},
      {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
      {"completion_tokens_details", json::object{{"reasoning_tokens", usage.reasoning_tokens}}}};
}

class chat_writer final : public answer_writer {
 public:
  using answer_writer::answer_writer;

  std::string first(std::size_t choice) const override {
    return chunk(choice, {{"role", "assistant"}, {"content", ""}}, {}, nullptr);
  }

  std::string piece(std::size_t choice, const answer_delta& delta,
                    std::span<const token_report> tokens) override {
    json::object value;
    if (!delta.reasoning.empty()) value["reasoning_content"] = delta.reasoning;
    if (!delta.content.empty()) value["content"] = delta.content;
    if (!delta.calls.empty()) {
      json::array calls;
      for (const auto& call : delta.calls) {
        json::object item{{"index", call.index}};
        json::object function;
        if (call.id) {
          item["id"] = *call.id;
          item["type"] = "function";
        }
        if (call.name) function["name"] = *call.name;
        function["arguments"] = call.arguments;
        item["function"] = std::move(function);
        calls.push_back(std::move(item));
      }
      value["tool_calls"] = std::move(calls);
    }
    if (value.empty() && tokens.empty()) return {};
    return chunk(choice, std::move(value), tokens, nullptr);
  }

  std::string last(std::size_t choice, const std::string& finish_reason) const override {
    return chunk(choice, {}, {}, json::value(finish_reason));
  }

  std::string usage(const token_usage& usage) const override {
    auto body = head("chat.completion.chunk");
    body["choices"] = json::array();
    body["usage"] = usage_value(usage);
    return json::serialize(body);
  }

  std::string whole(std::span<const choice_text> choices, const token_usage& usage) const override {
    auto body = head("chat.completion");
    json::array list;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      const auto& choice = choices[i];
      json::object message{{"role", "assistant"}};
      message["content"] = choice.content.empty() && !choice.calls.empty() ? json::value(nullptr)
                                                                           : json::value(choice.content);
      if (!choice.reasoning.empty()) message["reasoning_content"] = choice.reasoning;
      if (!choice.calls.empty()) {
        json::array calls;
        for (const auto& call : choice.calls)
          calls.push_back(
              json::object{{"id", call.id},
                           {"type", "function"},
                           {"function", json::object{{"name", call.name}, {"arguments", call.arguments}}}});
        message["tool_calls"] = std::move(calls);
      }
      list.push_back(json::object{{"index", i},
                                  {"message", std::move(message)},
                                  {"logprobs", logprobs(choice.tokens)},
                                  {"finish_reason", choice.finish_reason}});
    }
    body["choices"] = std::move(list);
    body["usage"] = usage_value(usage);
    return json::serialize(body);
  }

 private:
  json::object head(std::string_view object) const {
    return {{"id", identity_.id},
            {"object", json::string_view(object.data(), object.size())},
            {"created", identity_.created},
            {"model", identity_.model}};
  }

  json::value logprobs(std::span<const token_report> tokens) const {
    if (!identity_.with_logprobs) return nullptr;
    json::array content;
    const auto entry = [](std::string_view bytes, float logprob) {
      return json::object{
          {"token", to_valid_utf8(bytes)}, {"logprob", reported(logprob)}, {"bytes", byte_values(bytes)}};
    };
    for (const auto& token : tokens) {
      auto item = entry(token.bytes, token.logprob);
      json::array top;
      for (const auto& other : token.top) top.push_back(entry(other.bytes, other.logprob));
      item["top_logprobs"] = std::move(top);
      content.push_back(std::move(item));
    }
    return json::object{{"content", std::move(content)}};
  }

  std::string chunk(std::size_t choice, json::object delta, std::span<const token_report> tokens,
                    json::value finish_reason) const {
    auto body = head("chat.completion.chunk");
    body["choices"] =
        json::array{json::object{{"index", choice},
                                 {"delta", std::move(delta)},
                                 {"logprobs", tokens.empty() ? json::value(nullptr) : logprobs(tokens)},
                                 {"finish_reason", std::move(finish_reason)}}};
    if (identity_.with_usage) body["usage"] = nullptr;
    return json::serialize(body);
  }
};

class completion_writer final : public answer_writer {
 public:
  using answer_writer::answer_writer;

  std::string first(std::size_t) const override { return {}; }

  std::string piece(std::size_t choice, const answer_delta& delta,
                    std::span<const token_report> tokens) override {
    if (delta.content.empty() && tokens.empty()) return {};
    if (offsets_.size() <= choice) offsets_.resize(choice + 1);
    return chunk(choice, delta.content, logprobs(tokens, offsets_[choice]), nullptr);
  }

  std::string last(std::size_t choice, const std::string& finish_reason) const override {
    return chunk(choice, "", nullptr, json::value(finish_reason));
  }

  std::string usage(const token_usage& usage) const override {
    auto body = head();
    body["choices"] = json::array();
    body["usage"] = usage_value(usage);
    return json::serialize(body);
  }

  std::string whole(std::span<const choice_text> choices, const token_usage& usage) const override {
    auto body = head();
    json::array list;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      std::size_t offset = 0;
      list.push_back(json::object{{"index", i},
                                  {"text", choices[i].content},
                                  {"logprobs", logprobs(choices[i].tokens, offset)},
                                  {"finish_reason", choices[i].finish_reason}});
    }
    body["choices"] = std::move(list);
    body["usage"] = usage_value(usage);
    return json::serialize(body);
  }

 private:
  json::object head() const {
    return {{"id", identity_.id},
            {"object", "text_completion"},
            {"created", identity_.created},
            {"model", identity_.model}};
  }

  // text_offset counts bytes of the text, token by token.
  json::value logprobs(std::span<const token_report> tokens, std::size_t& offset) const {
    if (!identity_.with_logprobs) return nullptr;
    json::array texts, values, tops, offsets;
    for (const auto& token : tokens) {
      texts.push_back(json::value(to_valid_utf8(token.bytes)));
      values.push_back(reported(token.logprob));
      json::object top;
      for (const auto& other : token.top) top[to_valid_utf8(other.bytes)] = reported(other.logprob);
      tops.push_back(std::move(top));
      offsets.push_back(offset);
      offset += token.bytes.size();
    }
    return json::object{{"tokens", std::move(texts)},
                        {"token_logprobs", std::move(values)},
                        {"top_logprobs", std::move(tops)},
                        {"text_offset", std::move(offsets)}};
  }

  std::string chunk(std::size_t choice, std::string_view text, json::value logprobs,
                    json::value finish_reason) const {
    auto body = head();
    body["choices"] = json::array{json::object{{"index", choice},
                                               {"text", json::string_view(text.data(), text.size())},
                                               {"logprobs", std::move(logprobs)},
                                               {"finish_reason", std::move(finish_reason)}}};
    if (identity_.with_usage) body["usage"] = nullptr;
    return json::serialize(body);
  }

  std::vector<std::size_t> offsets_;
};

}  // namespace

void choice_text::add(const answer_delta& delta) {
  reasoning += delta.reasoning;
  content += delta.content;
  for (const auto& piece : delta.calls) {
    if (calls.size() <= piece.index) calls.resize(piece.index + 1);
    auto& call = calls[piece.index];
    if (piece.id) call.id = *piece.id;
    if (piece.name) call.name = *piece.name;
    call.arguments += piece.arguments;
  }
}

std::unique_ptr<answer_writer> make_chat_writer(answer_identity identity) {
  return std::make_unique<chat_writer>(std::move(identity));
}

std::unique_ptr<answer_writer> make_completion_writer(answer_identity identity) {
  return std::make_unique<completion_writer>(std::move(identity));
}

std::string fresh_id(std::string_view prefix) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  constexpr std::string_view letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::string id(prefix);
  for (int i = 0; i < 24; ++i) id += letters[random() % letters.size()];
  return id;
}

}  // namespace qwen3_moe
