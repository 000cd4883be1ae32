// SPDX-License-Identifier: Apache-2.0
/// \file
/// The two pre-tokenizer patterns of the Qwen families, as a scanner.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace qwen3_moe {

enum class split_pattern {
  qwen2,   ///< Qwen2 and Qwen3: words are letters
  qwen3_5  ///< Qwen3.5 and Qwen3.6: words are letters and marks
};

/// The pattern a tokenizer.json spells as this regular expression; nothing for any other spelling.
std::optional<split_pattern> pattern_of(std::string_view regular_expression) noexcept;

/// End of the piece that starts at `at` (< text.size()). `text` must be well-formed UTF-8. A walk over all
/// pieces looks at no character more than a fixed number of times.
std::size_t piece_end(std::string_view text, std::size_t at, split_pattern pattern);

}  // namespace qwen3_moe
