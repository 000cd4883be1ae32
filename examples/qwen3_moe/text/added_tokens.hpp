// SPDX-License-Identifier: Apache-2.0
/// \file
/// Finds added tokens (<|im_end|>, <think>, …) in text: leftmost, then longest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "rendered_prompt.hpp"

namespace qwen3_moe {

/// Which added tokens encode() takes for themselves. The rest is ordinary text.
enum class added_tokens_mode {
  all,          ///< as the reference tokenizer does
  not_special,  ///< only those with special = false: <think>, <tool_call> and the like
  none
};

struct added_token_match {
  std::size_t begin, end;
  std::int32_t id;
};

/// A trie over the tokens' bytes. A search costs the text's length times the longest token at worst, and one
/// table look-up for a byte that starts no token.
class added_token_matcher {
 public:
  /// `content` must not be empty.
  void add(std::string_view content, std::int32_t id, bool special);
  bool empty() const noexcept { return nodes_.size() <= 1; }

  /// The first match at or behind `from`; begin == text.size() when there is none. With `segments`, a special
  /// token is one only where every byte of it lies in trusted segments; an empty span trusts everything.
  added_token_match find(std::string_view text, std::size_t from, added_tokens_mode mode,
                         std::span<const prompt_segment> segments = {}) const;

 private:
  struct node {
    std::int32_t id = -1;
    bool special = false;
    std::vector<std::pair<unsigned char, std::uint32_t>> children;  // sorted by byte
  };
  std::uint32_t child(std::uint32_t of, unsigned char byte) const noexcept;

  std::vector<node> nodes_{1};
  bool starts_[256] = {};
};

}  // namespace qwen3_moe
