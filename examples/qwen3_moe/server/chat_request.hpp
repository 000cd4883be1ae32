// SPDX-License-Identifier: Apache-2.0
/// \file
/// The bodies of POST /v1/chat/completions and /v1/completions, checked and in the engine's terms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/token_sampler.hpp"
#include "json.hpp"

namespace qwen3_moe {

/// Bounds of what a request may hold; the schema tables and the tests read them here.
struct request_limits {
  static constexpr std::size_t messages = 4096;
  static constexpr std::size_t tools = 128;
  static constexpr std::size_t tool_calls = 128;      ///< of one message
  static constexpr std::size_t content_parts = 4096;  ///< of one message
  static constexpr std::size_t stop_strings = 16;
  static constexpr std::size_t stop_bytes = 256;
  static constexpr std::size_t logit_bias = 1024;
  static constexpr std::size_t template_arguments = 64;
  static constexpr std::int64_t choices = 8;
  static constexpr std::int64_t top_logprobs = 20;
  static constexpr std::int64_t tokens = 2'147'483'647;
};

/// What a request that says nothing gets: the checkpoint's generation_config.json.
struct sampling_defaults {
  float temperature = 1;
  int top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
};

/// Fields that both routes share.
struct generation_fields {
  std::optional<std::string> model;
  std::optional<bool> stream;
  std::optional<bool> include_usage;  ///< stream_options.include_usage
  std::optional<bool> has_stream_options;
  std::optional<std::int64_t> max_tokens;
  std::optional<std::int64_t> n;
  std::optional<float> temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
  std::optional<std::int64_t> top_k;
  std::optional<std::uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<nibble::host::token_bias> logit_bias;
};

struct chat_request : generation_fields {
  std::optional<std::int64_t> max_completion_tokens;  ///< wins over max_tokens
  std::optional<bool> logprobs;
  std::optional<std::int64_t> top_logprobs;
  std::optional<bool> enable_thinking;
  bool use_tools = true;  ///< false for tool_choice "none"
  /// For the template: role, content (always a string), reasoning_content, tool_calls with arguments as
  /// objects, tool_call_id, name. "developer" has become "system".
  json::array messages;
  json::array tools;  ///< as sent
  json::object template_arguments;
};

struct completion_request : generation_fields {
  std::variant<std::string, std::vector<std::int32_t>> prompt;
  std::optional<std::int64_t> logprobs;
};

/// Both throw api_error 400 whose `param` is the path of the field. Fields that are not known are ignored.
chat_request parse_chat_request(const json::value& body, std::int32_t vocab_size);
completion_request parse_completion_request(const json::value& body, std::int32_t vocab_size);

/// Sampling for choice `index` of a request: what it says, else the defaults. Without a seed, `random_seed`
/// is used; each choice has a seed of its own.
sampling_options sampling_of(const generation_fields& fields, const sampling_defaults& defaults,
                             std::uint64_t random_seed, std::size_t index);

}  // namespace qwen3_moe
