// SPDX-License-Identifier: Apache-2.0
#include "pre_tokenizer.hpp"

#include "unicode.hpp"

namespace qwen3_moe {
namespace {

constexpr std::string_view qwen2_regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view qwen3_5_regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr bool is_newline(char32_t c) { return c == '\r' || c == '\n'; }

class cursor {
 public:
  cursor(std::string_view text, std::size_t at) : text_(text), at_(at) { read(); }

  bool done() const noexcept { return now_.bytes == 0; }
  std::size_t at() const noexcept { return at_; }
  char32_t value() const noexcept { return now_.value; }
  std::uint8_t classes() const noexcept { return classes_; }
  void next() {
    at_ += now_.bytes;
    read();
  }

 private:
  void read() {
    now_ = at_ < text_.size() ? decode_utf8(text_, at_) : decoded_character{0, 0, false};
    classes_ = done() ? 0 : classes_of(now_.value);
  }

  std::string_view text_;
  std::size_t at_;
  decoded_character now_{};
  std::uint8_t classes_ = 0;
};

// Length of an English contraction at an apostrophe, or 0. Case folding makes U+017F (long s) an s.
std::size_t contraction_bytes(std::string_view text) noexcept {
  const auto lower = [&](std::size_t i) -> char {
    if (i >= text.size()) return 0;
    const char c = text[i];
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  switch (lower(1)) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return 2;
    case 'r':
    case 'v':
      return lower(2) == 'e' ? 3 : 0;
    case 'l':
      return lower(2) == 'l' ? 3 : 0;
    default:
      return text.substr(1, 2) == "\xC5\xBF" ? 3 : 0;
  }
}

}  // namespace

std::optional<split_pattern> pattern_of(std::string_view regular_expression) noexcept {
  if (regular_expression == qwen2_regex) return split_pattern::qwen2;
  if (regular_expression == qwen3_5_regex) return split_pattern::qwen3_5;
  return std::nullopt;
}

std::size_t piece_end(std::string_view text, std::size_t at, split_pattern pattern) {
  const std::uint8_t word = pattern == split_pattern::qwen2 ? letter_class : letter_class | mark_class;
  const std::uint8_t not_symbol = word | number_class | space_class;
  if (text[at] == '\'') {
    if (const std::size_t n = contraction_bytes(text.substr(at))) return at + n;
  }
  cursor c(text, at);
  const char32_t first = c.value();
  const std::uint8_t first_classes = c.classes();
  c.next();

  // A word, with one character before it that is neither letter, number nor newline.
  const bool may_lead = !(first_classes & (letter_class | number_class)) && !is_newline(first);
  if ((first_classes & word) || (may_lead && (c.classes() & word))) {
    while (c.classes() & word) c.next();
    return c.at();
  }
  if (first_classes & number_class) return c.at();

  // Symbols, with one space before them and any newlines behind them.
  if (!(first_classes & not_symbol) || (first == ' ' && !c.done() && !(c.classes() & not_symbol))) {
    while (!c.done() && !(c.classes() & not_symbol)) c.next();
    while (!c.done() && is_newline(c.value())) c.next();
    return c.at();
  }

  // White space: up to its last newline, or else all but the last character when something follows.
  std::size_t behind_newline = is_newline(first) ? c.at() : 0, last = at;
  while (!c.done() && (c.classes() & space_class)) {
    last = c.at();
    const bool newline = is_newline(c.value());
    c.next();
    if (newline) behind_newline = c.at();
  }
  if (behind_newline) return behind_newline;
  return c.done() || last == at ? c.at() : last;
}

}  // namespace qwen3_moe
