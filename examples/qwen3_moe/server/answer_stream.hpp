// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tokens of one answer to the parts a client sees: content, reasoning, tool calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "json.hpp"

namespace qwen3_moe {

class tokenizer;

/// A further piece of a tool call. id and name come with its first piece only; all pieces of `arguments`
/// together are one JSON object.
struct tool_call_piece {
  std::size_t index = 0;  ///< position among the calls of the answer
  std::optional<std::string> id;
  std::optional<std::string> name;
  std::string arguments;
};

/// What has become certain; every text is well-formed UTF-8.
struct answer_delta {
  std::string reasoning;
  std::string content;
  std::vector<tool_call_piece> calls;
  std::size_t settled_tokens = 0;  ///< tokens whose text is decided upon for good, since the last delta

  bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
};

struct answer_options {
  bool split = true;          ///< reasoning and tool calls apart; false leaves the text as it is
  bool in_reasoning = false;  ///< the prompt ended inside an open <think>
  json::array tools;          ///< as in the request; with none, tool-call markup stays text
  std::vector<std::string> stop;
};

/// detokenise → stop strings → reasoning → tool calls. The same bytes come out however the tokens are
/// grouped. Stop strings are looked for in all that the model writes, reasoning and tool calls included.
class answer_stream {
 public:
  /// `tokens` must outlive it.
  answer_stream(const tokenizer& tokens, answer_options options);
  ~answer_stream();
  answer_stream(answer_stream&&) noexcept;
  answer_stream& operator=(answer_stream&&) noexcept;

  /// After a stop string was found nothing comes out any more.
  answer_delta push(std::int32_t token);
  /// Releases what was held back. Nothing after a stop string.
  answer_delta finish();

  bool stopped() const;          ///< a stop string was found
  int reasoning_tokens() const;  ///< tokens before the end of the reasoning
  bool has_calls() const;        ///< at least one tool call has begun

 private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace qwen3_moe
