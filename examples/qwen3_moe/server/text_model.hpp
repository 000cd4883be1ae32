// SPDX-License-Identifier: Apache-2.0
/// \file
/// A checkpoint's tokenizer and chat template: from requests to token ids and back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat_request.hpp"
#include "text/chat_template.hpp"
#include "text/tokenizer.hpp"

namespace qwen3_moe {

struct chat_prompt {
  std::vector<std::int32_t> ids;
  bool in_reasoning = false;  ///< it ends inside an open <think>
};

class text_model {
 public:
  text_model(tokenizer tokens, chat_template form) : tokens_(std::move(tokens)), form_(std::move(form)) {}

  /// Reads tokenizer.json and the template of a checkpoint, and tries the template on one message. Throws
  /// nibble::error.
  static text_model load(const std::filesystem::path& folder);

  /// Special tokens exist only where the template wrote them. Throws api_error 400 when the template refuses
  /// the conversation.
  chat_prompt prompt_of(const chat_request& request) const;
  const tokenizer& tokens() const { return tokens_; }

 private:
  void check_template() const;

  tokenizer tokens_;
  chat_template form_;
};

}  // namespace qwen3_moe
