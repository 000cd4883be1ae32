// SPDX-License-Identifier: Apache-2.0
#include "lexer.hpp"

#include <charconv>
#include <limits>

#include "../quote.hpp"
#include "../unicode.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
// What Python calls white space.
bool is_python_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }
constexpr bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

class lexer {
 public:
  explicit lexer(const template_source& source) : source_(source), s_(source.text()) {}

  std::vector<token> run() {
    while (at_ < s_.size()) {
      const std::size_t open = find_open(at_);
      if (open == s_.npos) {
        emit_data(s_.substr(at_));
        break;
      }
      lex_tag(open);
    }
    out_.push_back({token_kind::end, static_cast<position>(s_.size())});
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(std::size_t at, const std::string& reason) const {
    source_.fail(template_fault::syntax, static_cast<position>(at), reason);
  }

  char peek(std::size_t at) const { return at < s_.size() ? s_[at] : '\0'; }

  std::size_t find_open(std::size_t from) const {
    for (std::size_t i = s_.find('{', from); i != s_.npos; i = s_.find('{', i + 1)) {
      const char c = peek(i + 1);
      if (c == '{' || c == '%' || c == '#') return i;
    }
    return s_.npos;
  }

  void emit_data(std::string_view data) {
    if (!data.empty())
      out_.push_back({token_kind::data,
                      static_cast<position>(data.data() - s_.data()),
                      {},
                      text(std::string(data), true)});
  }

  // The data in front of a tag: `-` strips it, and a block or comment alone on its line takes the line's
  // indent.
  std::string_view strip_before(std::string_view data, char sign, bool may_lstrip) const {
    if (sign == '-') {
      while (!data.empty()) {
        std::size_t last = data.size() - 1;
        while (last > 0 && (static_cast<unsigned char>(data[last]) & 0xC0) == 0x80) --last;
        if (!is_python_space(decode_utf8(data, last).value)) break;
        data.remove_suffix(data.size() - last);
      }
    } else if (may_lstrip && sign != '+') {
      const std::size_t line = data.rfind('\n') + 1;  // npos + 1 is 0
      bool blank = line > 0 || line_starting_;
      for (std::size_t at = line; blank && at < data.size();) {
        const decoded_character c = decode_utf8(data, at);
        blank = is_python_space(c.value);
        at += c.bytes;
      }
      if (blank) data = data.substr(0, line);
    }
    return data;
  }

  void skip_blank() {
    while (at_ < s_.size()) {
      const decoded_character c = decode_utf8(s_, at_);
      if (!is_python_space(c.value)) break;
      at_ += c.bytes;
    }
  }

  // Behind a tag's end.
  void strip_after(char sign, bool may_trim) {
    const std::size_t from = at_;
    if (sign == '-')
      skip_blank();
    else if (may_trim && sign != '+' && peek(at_) == '\n')
      ++at_;
    line_starting_ = at_ > from && s_[at_ - 1] == '\n';
  }

  static char sign_of(char c) { return c == '-' || c == '+' ? c : '\0'; }

  void lex_tag(std::size_t open) {
    const std::string_view before = s_.substr(at_, open - at_);
    const char what = s_[open + 1], sign = sign_of(peek(open + 2));
    emit_data(strip_before(before, sign, what != '{'));
    at_ = open + 2 + (sign ? 1 : 0);
    if (what == '#') return lex_comment(open);
    if (what == '%' && lex_raw(open)) return;
    const bool print = what == '{';
    out_.push_back({print ? token_kind::print_begin : token_kind::block_begin, static_cast<position>(open)});
    brackets_.clear();
    while (!lex_close(print)) {
      if (at_ >= s_.size()) fail(open, print ? "\"{{\" has no \"}}\"" : "\"{%\" has no \"%}\"");
      lex_token();
    }
  }

  void lex_comment(std::size_t open) {
    const std::size_t end = s_.find("#}", at_);
    if (end == s_.npos) fail(open, "\"{#\" has no \"#}\"");
    const char sign = end > at_ ? sign_of(s_[end - 1]) : '\0';
    at_ = end + 2;
    strip_after(sign, true);
  }

  // At a word inside a tag: is it `word`, followed by the tag's end? Then sets `end` behind "%}".
  bool bare_tag(std::size_t at, std::string_view word, std::size_t& end, char& sign) const {
    while (is_blank(peek(at))) ++at;
    if (s_.substr(at, word.size()) != word) return false;
    at += word.size();
    while (is_blank(peek(at))) ++at;
    sign = sign_of(peek(at));
    if (sign) ++at;
    if (s_.substr(at, 2) != "%}") return false;
    end = at + 2;
    return true;
  }

  bool lex_raw(std::size_t open) {
    std::size_t end = 0;
    char sign = '\0';
    if (!bare_tag(at_, "raw", end, sign)) return false;
    at_ = end;
    strip_after(sign, false);
    for (std::size_t close = s_.find("{%", at_); close != s_.npos; close = s_.find("{%", close + 2)) {
      const char left = sign_of(peek(close + 2));
      if (!bare_tag(close + 2 + (left ? 1 : 0), "endraw", end, sign)) continue;
      emit_data(strip_before(s_.substr(at_, close - at_), left, true));
      at_ = end;
      strip_after(sign, true);
      return true;
    }
    fail(open, "\"raw\" has no \"endraw\"");
  }

  bool lex_close(bool print) {
    while (is_blank(peek(at_))) ++at_;
    if (!brackets_.empty()) return false;
    const std::string_view mark = print ? "}}" : "%}";
    const char sign = print && peek(at_) == '+' ? '\0' : sign_of(peek(at_));
    const std::size_t from = at_ + (sign ? 1 : 0);
    if (s_.substr(from, 2) != mark) return false;
    out_.push_back({print ? token_kind::print_end : token_kind::block_end, static_cast<position>(at_)});
    at_ = from + 2;
    strip_after(sign, !print);
    return true;
  }

  void lex_token() {
    const std::size_t start = at_;
    const char c = s_[at_];
    if (is_name_start(c)) {
      while (is_name_start(peek(at_)) || is_digit(peek(at_))) ++at_;
      out_.push_back({token_kind::name, static_cast<position>(start), s_.substr(start, at_ - start)});
    } else if (is_digit(c)) {
      lex_number();
    } else if (c == '"' || c == '\'') {
      lex_string(c);
    } else {
      lex_symbol();
    }
  }

  void lex_symbol() {
    static constexpr std::string_view two[] = {"==", "!=", "<=", ">=", "//", "**"};
    static constexpr std::string_view one = "+-*/%~<>=.,:|()[]{};";
    std::size_t n = 0;
    for (const std::string_view t : two)
      if (s_.substr(at_, 2) == t) n = 2;
    const char c = s_[at_];
    if (n == 0 && one.find(c) != one.npos) n = 1;
    if (n == 0) fail(at_, "unexpected character " + quote_text(s_.substr(at_, decode_utf8(s_, at_).bytes)));
    if (c == '(' || c == '[' || c == '{') brackets_.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (c == ')' || c == ']' || c == '}') {
      if (brackets_.empty() || brackets_.back() != c) fail(at_, std::string("unexpected \"") + c + '"');
      brackets_.pop_back();
    }
    out_.push_back({token_kind::symbol, static_cast<position>(at_), s_.substr(at_, n)});
    at_ += n;
  }

  void lex_number() {
    const std::size_t start = at_;
    const bool after_dot =
        !out_.empty() && out_.back().kind == token_kind::symbol && out_.back().symbol == ".";
    const auto digits = [&](std::size_t at) {
      while (is_digit(peek(at)) || (peek(at) == '_' && is_digit(peek(at + 1)))) ++at;
      return at;
    };
    std::size_t end = digits(at_);
    bool real = false;
    if (!after_dot) {
      if (peek(end) == '.' && is_digit(peek(end + 1))) real = true, end = digits(end + 1);
      if (peek(end) == 'e' || peek(end) == 'E') {
        const std::size_t sign = peek(end + 1) == '-' || peek(end + 1) == '+' ? 1 : 0;
        if (is_digit(peek(end + 1 + sign))) real = true, end = digits(end + 1 + sign);
      }
    }
    std::string plain;
    for (const char c : s_.substr(start, end - start))
      if (c != '_') plain += c;
    at_ = end;
    if (is_name_start(peek(end))) fail(start, "a number may not be followed by a letter");
    token t{real ? token_kind::real : token_kind::integer, static_cast<position>(start),
            s_.substr(start, end - start)};
    if (real) {
      double d = 0;
      if (std::from_chars(plain.data(), plain.data() + plain.size(), d).ec != std::errc())
        fail(start, "the number is out of range");
      t.number = value(d);
    } else {
      if (plain.size() > 1 && plain[0] == '0' && plain.find_first_not_of('0') != plain.npos)
        fail(start, "a number may not begin with 0");
      std::uint64_t i = 0;
      if (std::from_chars(plain.data(), plain.data() + plain.size(), i).ec != std::errc())
        fail(start, "the number is out of range");
      t.number = value(static_cast<wide_int>(i));
    }
    out_.push_back(std::move(t));
  }

  void lex_string(char quote) {
    const std::size_t start = at_++;
    std::string content;
    while (true) {
      if (at_ >= s_.size()) fail(start, "the string has no end");
      const char c = s_[at_++];
      if (c == quote) break;
      if (c == '\\' && at_ < s_.size())
        lex_escape(content);
      else
        content += c;
    }
    out_.push_back({token_kind::string, static_cast<position>(start), {}, text(std::move(content), true)});
  }

  // Python's escapes; an unknown one keeps its backslash.
  void lex_escape(std::string& content) {
    const std::size_t start = at_ - 1;
    const char c = s_[at_++];
    static constexpr std::string_view names = "\\'\"abfnrtv";
    static constexpr std::string_view means = "\\'\"\a\b\f\n\r\t\v";
    if (const std::size_t i = names.find(c); i != names.npos) {
      content += means[i];
    } else if (c == '\n') {
    } else if (c >= '0' && c <= '7') {
      char32_t code = static_cast<char32_t>(c - '0');
      for (int n = 1; n < 3 && peek(at_) >= '0' && peek(at_) <= '7'; ++n)
        code = code * 8 + static_cast<char32_t>(s_[at_++] - '0');
      append_utf8(content, code);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const std::size_t n = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      std::uint32_t code = 0;
      const auto r = std::from_chars(s_.data() + at_, s_.data() + std::min(s_.size(), at_ + n), code, 16);
      if (r.ec != std::errc() || r.ptr != s_.data() + at_ + n)
        fail(start, std::string("\"\\") + c + "\" needs " + std::to_string(n) + " hexadecimal digits");
      if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) fail(start, "the escape names no character");
      append_utf8(content, code);
      at_ += n;
    } else if (c == 'N') {
      fail(start, "\"\\N\" is not supported");
    } else {
      content += '\\';
      content += c;
    }
  }

  const template_source& source_;
  std::string_view s_;
  std::size_t at_ = 0;
  bool line_starting_ = true;
  std::vector<char> brackets_;  // the closing ones expected
  std::vector<token> out_;
};

}  // namespace

template_source::template_source(std::string_view text, std::string name, std::size_t most_bytes)
    : name_(std::move(name)) {
  if (text.size() > most_bytes || text.size() > std::numeric_limits<position>::max() / 2)
    fail(template_fault::syntax, 0,
         "the template has " + std::to_string(text.size()) + " bytes, more than the limit of " +
             std::to_string(most_bytes));
  if (!is_valid_utf8(text)) fail(template_fault::syntax, 0, "the template is not valid UTF-8");
  text_.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r') {
      text_ += text[i];
    } else {
      text_ += '\n';
      if (i + 1 < text.size() && text[i + 1] == '\n') ++i;
    }
  }
  if (!text_.empty() && text_.back() == '\n') text_.pop_back();
}

void template_source::fail(template_fault fault, position at, const std::string& reason) const {
  const std::string_view before = std::string_view(text_).substr(0, at);
  std::size_t line = 1;
  for (const char c : before) line += c == '\n';
  const std::size_t column = count_characters(before.substr(before.rfind('\n') + 1)) + 1;
  throw template_error(
      fault, name_ + ':' + std::to_string(line) + ':' + std::to_string(column) + ": " + reason, line, column);
}

std::vector<token> tokenize(const template_source& source) { return lexer(source).run(); }

}  // namespace qwen3_moe::jinja
