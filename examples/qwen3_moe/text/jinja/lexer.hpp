// SPDX-License-Identifier: Apache-2.0
/// \file
/// Template source to tokens, with Jinja's white-space rules (trim_blocks and lstrip_blocks on, as chat
/// templates expect).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "template_error.hpp"
#include "value.hpp"

namespace qwen3_moe::jinja {

/// Byte offset in the source.
using position = std::uint32_t;

/// A template's text with what is needed to point into it. Line ends are made "\n", one final newline is
/// dropped.
class template_source {
 public:
  /// Throws template_error (syntax) when `text` is no UTF-8 or has more than `most_bytes` bytes.
  template_source(std::string_view text, std::string name, std::size_t most_bytes);
  std::string_view text() const noexcept { return text_; }
  [[noreturn]] void fail(template_fault fault, position at, const std::string& reason) const;

 private:
  std::string text_, name_;
};

enum class token_kind {
  data,
  print_begin,
  print_end,
  block_begin,
  block_end,
  name,
  string,
  integer,
  real,
  symbol,
  end
};

struct token {
  token_kind kind;
  position at;
  std::string_view symbol{};  ///< of name and symbol; points into the source
  text content{};             ///< of data and string
  value number{};             ///< of integer and real
};

std::vector<token> tokenize(const template_source& source);

}  // namespace qwen3_moe::jinja
