// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tokens to text, one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "tokenizer.hpp"
#include "unicode.hpp"

namespace qwen3_moe {

/// Turns a stream of ids into text that is always complete characters. All pieces together equal
/// tokenizer::decode() of all ids. A character is delivered with the token that completes it.
/// Keeps a reference to the tokenizer, which must live longer.
class detokenizer {
 public:
  explicit detokenizer(const tokenizer& t, bool skip_special = true)
      : tokenizer_(&t), skip_special_(skip_special) {}

  /// The text that `id` completes, often empty for one token of a multi-byte character.
  std::string push(std::int32_t id) {
    if (skip_special_ && tokenizer_->is_special(id)) return {};
    return stream_.push(tokenizer_->token_bytes(id));
  }
  /// What is left: one U+FFFD when the stream ended inside a character. The object can be used again.
  std::string finish() { return stream_.finish(); }
  /// True when bytes of an unfinished character are held back.
  bool pending() const noexcept { return stream_.pending(); }

 private:
  const tokenizer* tokenizer_;
  utf8_stream stream_;
  bool skip_special_;
};

}  // namespace qwen3_moe
