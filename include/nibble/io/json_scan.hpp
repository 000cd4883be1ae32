// SPDX-License-Identifier: Apache-2.0
/// \file
/// A strict pull reader for the JSON of safetensors headers and shard indices (RFC 8259).
///
/// One pass, no recursion, no tree: memory is the caller's. Numbers are read as exact unsigned integers,
/// strings must be UTF-8 with paired surrogates. Every error is a format_error with the byte offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "nibble/core/error.hpp"

namespace nibble::io {

/// The length in bytes of the UTF-8 character at `text[i]`, or 0 when the bytes there are not valid UTF-8.
[[nodiscard]] constexpr std::size_t utf8_character_bytes(std::string_view text, std::size_t i) {
  const auto at = [&](std::size_t j) { return j < text.size() ? static_cast<unsigned char>(text[j]) : 0u; };
  const auto continues = [&](std::size_t j) { return (at(j) & 0xC0u) == 0x80u; };
  const unsigned lead = at(i);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(i + 1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (!continues(i + 1) || !continues(i + 2)) return 0;
    if (lead == 0xE0 && at(i + 1) < 0xA0) return 0;  // overlong
    if (lead == 0xED && at(i + 1) > 0x9F) return 0;  // surrogate
    return 3;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (!continues(i + 1) || !continues(i + 2) || !continues(i + 3)) return 0;
    if (lead == 0xF0 && at(i + 1) < 0x90) return 0;  // overlong
    if (lead == 0xF4 && at(i + 1) > 0x8F) return 0;  // past U+10FFFF
    return 4;
  }
  return 0;
}

/// Reads one JSON document front to back. Usage: enter an object, loop on next_key, read or skip each value.
class json_reader {
 public:
  /// `text` must outlive the reader; `what` names the document in errors.
  json_reader(std::string_view text, std::string_view what) : text_(text), what_(what) {}

  /// The first character of the next value: one of {["tfn-0…9, or 0 at the end.
  [[nodiscard]] char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void enter_object() { expect('{', "an object"), first_ = true; }
  void enter_array() { expect('[', "an array"), first_ = true; }

  /// Moves to the next member of the object entered last; false once its end is consumed.
  [[nodiscard]] bool next_key(std::string& key) {
    if (!next_item('}')) return false;
    if (peek() != '"') fail("expected a key in quotes");
    read_string(key);
    skip_space();
    expect(':', "':' after the key");
    return true;
  }

  /// Moves to the next element of the array entered last; false once its end is consumed.
  [[nodiscard]] bool next_element() { return next_item(']'); }

  void read_string(std::string& out) {
    skip_space();
    expect('"', "a string");
    out.clear();
    for (;;) {
      if (at_ >= text_.size()) fail("unterminated string");
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return;
      }
      if (static_cast<unsigned char>(c) < 0x20) fail("control character in a string");
      if (c == '\\') {
        read_escape(out);
        continue;
      }
      const std::size_t bytes = utf8_character_bytes(text_, at_);
      if (bytes == 0) fail("invalid UTF-8");
      out.append(text_.substr(at_, bytes));
      at_ += bytes;
    }
  }

  /// An integer in [0, 2^64), written without sign, fraction or exponent.
  [[nodiscard]] std::uint64_t read_uint() {
    skip_space();
    const std::size_t begin = at_;
    std::uint64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
      if (value > (UINT64_MAX - digit) / 10) fail("integer over 64 bits");
      value = value * 10 + digit;
      ++at_;
    }
    if (at_ == begin) fail("expected a non-negative integer");
    if (text_[begin] == '0' && at_ - begin > 1) fail("integer with a leading zero");
    if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E'))
      fail("expected an integer, found a fraction or exponent");
    return value;
  }

  /// Steps over one value of any kind, nested at most `depth_limit` deep.
  void skip_value(int depth_limit = 64) {
    std::string scratch;
    std::string nesting;  // the closing brackets still owed
    for (;;) {
      const char c = peek();
      if (c == '{' || c == '[') {
        if (nesting.size() >= static_cast<std::size_t>(depth_limit)) fail("nesting over the limit");
        ++at_;
        first_ = true;
        nesting.push_back(c == '{' ? '}' : ']');
      } else if (c == '"') {
        read_string(scratch);
      } else {
        skip_scalar();
      }
      for (;;) {  // to the next value, closing what ends here
        if (nesting.empty()) return;
        if (nesting.back() == '}' ? next_key(scratch) : next_element()) break;
        nesting.pop_back();
      }
    }
  }

  /// Only white space may follow.
  void finish() {
    if (peek() != '\0' || at_ < text_.size()) fail("text after the end of the document");
  }

  [[noreturn]] void fail(std::string_view why) const {
    throw format_error(std::string(what_) + ": not valid JSON at byte " + std::to_string(at_) + ": " +
                       std::string(why));
  }

 private:
  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }

  void expect(char c, std::string_view name) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) fail("expected " + std::string(name));
    ++at_;
  }

  bool next_item(char close) {
    const bool first = first_;
    first_ = false;
    const char c = peek();
    if (c == close) {
      ++at_;
      return false;
    }
    if (!first) {
      if (c != ',') fail("expected ',' or the closing bracket");
      ++at_;
      if (peek() == close) fail("comma before the closing bracket");
    }
    return true;
  }

  void skip_scalar() {
    for (const std::string_view word : {"true", "false", "null"})
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return;
      }
    const auto digits = [&] {
      const std::size_t begin = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
      if (at_ == begin) fail("expected a value");
    };
    if (at_ < text_.size() && text_[at_] == '-') ++at_;
    if (at_ < text_.size() && text_[at_] == '0')
      ++at_;
    else
      digits();
    if (at_ < text_.size() && text_[at_] == '.') ++at_, digits();
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      digits();
    }
  }

  [[nodiscard]] unsigned read_hex4() {
    unsigned value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      if (at_ >= text_.size()) fail("unterminated \\u escape");
      const char c = text_[at_];
      const unsigned digit = c >= '0' && c <= '9'   ? static_cast<unsigned>(c - '0')
                             : c >= 'a' && c <= 'f' ? static_cast<unsigned>(c - 'a' + 10)
                             : c >= 'A' && c <= 'F' ? static_cast<unsigned>(c - 'A' + 10)
                                                    : 16u;
      if (digit == 16) fail("\\u escape without four hexadecimal digits");
      value = value * 16 + digit;
    }
    return value;
  }

  void read_escape(std::string& out) {
    ++at_;
    if (at_ >= text_.size()) fail("unterminated string");
    const char c = text_[at_++];
    constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    if (const auto i = from.find(c); i != std::string_view::npos) {
      out.push_back(to[i]);
      return;
    }
    if (c != 'u') fail("unknown escape");
    unsigned code = read_hex4();
    if (code >= 0xDC00 && code <= 0xDFFF) fail("lone surrogate");
    if (code >= 0xD800 && code <= 0xDBFF) {
      if (text_.substr(at_, 2) != "\\u") fail("lone surrogate");
      at_ += 2;
      const unsigned low = read_hex4();
      if (low < 0xDC00 || low > 0xDFFF) fail("lone surrogate");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, code);
  }

  static void append_utf8(std::string& out, unsigned code) {
    const auto put = [&](unsigned byte) {
      out.push_back(static_cast<char>(static_cast<unsigned char>(byte)));
    };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      put(0xE0 | code >> 12), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
    } else {
      put(0xF0 | code >> 18), put(0x80 | (code >> 12 & 0x3F)), put(0x80 | (code >> 6 & 0x3F)),
          put(0x80 | (code & 0x3F));
    }
  }

  std::string_view text_;
  std::string_view what_;
  std::size_t at_ = 0;
  bool first_ = true;
};

}  // namespace nibble::io
