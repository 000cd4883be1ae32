// SPDX-License-Identifier: Apache-2.0
/// \file
/// Answers as the JSON of OpenAI's two routes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "answer_stream.hpp"

namespace qwen3_moe {

/// A token with its log-probability, as text.
struct token_report {
  struct alternative {
    std::string bytes;  ///< what the token adds to the text, perhaps half a character
    float logprob;
  };
  std::string bytes;
  float logprob = 0;
  std::vector<alternative> top;
};

struct tool_call_text {
  std::string id, name, arguments;
};

/// One complete choice.
struct choice_text {
  std::string reasoning;
  std::string content;
  std::vector<tool_call_text> calls;
  std::vector<token_report> tokens;
  std::string finish_reason;  ///< stop, length or tool_calls

  void add(const answer_delta& delta);
};

struct token_usage {
  int prompt_tokens = 0;
  int completion_tokens = 0;
  int reasoning_tokens = 0;
};

struct answer_identity {
  std::string id;  ///< chatcmpl-… or cmpl-…
  std::string model;
  std::int64_t created = 0;
  bool with_usage = false;  ///< the stream ends with a usage chunk, so the others carry "usage": null
  bool with_logprobs = false;
};

/// Builds bodies. Chunks are JSON texts without SSE framing; an empty one is not sent.
class answer_writer {
 public:
  explicit answer_writer(answer_identity identity) : identity_(std::move(identity)) {}
  virtual ~answer_writer() = default;

  virtual std::string first(std::size_t choice) const = 0;
  virtual std::string piece(std::size_t choice, const answer_delta& delta,
                            std::span<const token_report> tokens) = 0;
  virtual std::string last(std::size_t choice, const std::string& finish_reason) const = 0;
  virtual std::string usage(const token_usage& usage) const = 0;
  virtual std::string whole(std::span<const choice_text> choices, const token_usage& usage) const = 0;

 protected:
  answer_identity identity_;
};

std::unique_ptr<answer_writer> make_chat_writer(answer_identity identity);
std::unique_ptr<answer_writer> make_completion_writer(answer_identity identity);

/// A fresh id: `prefix` and 24 random letters and digits.
std::string fresh_id(std::string_view prefix);

}  // namespace qwen3_moe
