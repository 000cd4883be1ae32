// SPDX-License-Identifier: Apache-2.0
// Python's string functions.
#include <utf8proc.h>

#include <charconv>
#include <cmath>

#include "../unicode.hpp"
#include "interpreter.hpp"

namespace qwen3_moe::jinja {
namespace {

template <class Change>
std::string map_characters(std::string_view s, Change change) {
  std::string out;
  out.reserve(s.size());
  for (std::size_t at = 0; at < s.size();) {
    const decoded_character c = decode_utf8(s, at);
    change(out, c.value);
    at += c.bytes;
  }
  return out;
}

// Simple case mapping, and the one full mapping that is common.
void append_upper(std::string& out, char32_t c) {
  if (c == 0xDF)
    out += "SS";
  else
    append_utf8(out, static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))));
}

void append_title(std::string& out, char32_t c) {
  if (c == 0xDF)
    out += "Ss";
  else
    append_utf8(out, static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
}

void append_lower(std::string& out, char32_t c) {
  append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
}

bool is_cased(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
      return true;
    default:
      return false;
  }
}

// The number's own characters: no outer space, no _ but between digits. Nothing when it cannot be a number.
std::optional<std::string> plain_number(std::string_view s) {
  const auto [begin, end] = stripped_range(s, std::nullopt, 3);
  s = s.substr(begin, end - begin);
  std::string out;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (s[i] != '_') {
      out += s[i];
    } else if (i == 0 || i + 1 == s.size() || !digit(s[i - 1]) || !digit(s[i + 1])) {
      return std::nullopt;
    }
  }
  if (!out.empty() && out[0] == '+') {
    out.erase(0, 1);
    if (!out.empty() && out[0] == '-') return std::nullopt;
  }
  if (out.empty()) return std::nullopt;
  return out;
}

}  // namespace

bool is_python_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

std::pair<std::size_t, std::size_t> stripped_range(std::string_view s, std::optional<std::string_view> chars,
                                                   int sides) {
  const auto strips = [&](std::size_t at, std::size_t bytes) {
    if (!chars) return is_python_space(decode_utf8(s, at).value);
    for (std::size_t i = 0; i < chars->size(); i += decode_utf8(*chars, i).bytes)
      if (chars->substr(i, decode_utf8(*chars, i).bytes) == s.substr(at, bytes)) return true;
    return false;
  };
  std::size_t begin = 0, end = s.size();
  while ((sides & 1) && begin < end) {
    const std::size_t n = decode_utf8(s, begin).bytes;
    if (!strips(begin, n)) break;
    begin += n;
  }
  while ((sides & 2) && end > begin) {
    std::size_t last = end - 1;
    while (last > begin && (static_cast<unsigned char>(s[last]) & 0xC0) == 0x80) --last;
    if (!strips(last, end - last)) break;
    end = last;
  }
  return {begin, end};
}

text replaced(interpreter& run, position at, const text& in, const text& old, const text& by,
              std::int64_t count) {
  text out;
  std::size_t from = 0;
  const auto add = [&](const text& t, std::size_t begin, std::size_t end) {
    run.charge_string(at, end - begin);
    out.append(t, begin, end);
  };
  if (old.empty()) {  // between all characters, before the first and behind the last
    for (; count != 0; --count) {
      run.step(at);
      add(by, 0, by.size());
      if (from == in.size()) return out;
      const std::size_t n = decode_utf8(in.view(), from).bytes;
      add(in, from, from + n);
      from += n;
    }
  }
  for (; count != 0; --count) {
    const std::size_t hit = in.view().find(old.view(), from);
    if (hit == std::string_view::npos) break;
    run.step(at);
    add(in, from, hit);
    add(by, 0, by.size());
    from = hit + old.size();
  }
  add(in, from, in.size());
  return out;
}

std::string upper(std::string_view s) { return map_characters(s, append_upper); }
std::string lower(std::string_view s) { return map_characters(s, append_lower); }

std::string capitalized(std::string_view s) {
  bool first = true;
  return map_characters(s, [&](std::string& out, char32_t c) {
    first ? append_title(out, c) : append_lower(out, c);
    first = false;
  });
}

std::string title(std::string_view s, bool python) {
  bool starts = true;
  return map_characters(s, [&](std::string& out, char32_t c) {
    starts ? append_title(out, c) : append_lower(out, c);
    starts = python ? !is_cased(c)
                    : is_python_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  });
}

std::optional<double> parse_float(std::string_view s) {
  const auto plain = plain_number(s);
  if (!plain) return std::nullopt;
  double d = 0;
  const auto r = std::from_chars(plain->data(), plain->data() + plain->size(), d);
  if (r.ptr != plain->data() + plain->size()) return std::nullopt;
  if (r.ec == std::errc::result_out_of_range) {
    // Too large is infinite, too small is zero; from_chars does not say which.
    const std::size_t e = plain->find_first_of("eE");
    const bool small = e != plain->npos && e + 1 < plain->size() && (*plain)[e + 1] == '-';
    const double magnitude = small ? 0 : HUGE_VAL;
    return plain->front() == '-' ? -magnitude : magnitude;
  }
  if (r.ec != std::errc()) return std::nullopt;
  return d;
}

std::optional<wide_int> parse_integer(std::string_view s, int base) {
  auto plain = plain_number(s);
  if (!plain) return std::nullopt;
  bool minus = false;
  if (plain->front() == '-') minus = true, plain->erase(0, 1);
  std::string_view digits = *plain;
  if (digits.size() > 2 && digits[0] == '0') {
    const char letter = static_cast<char>(digits[1] | 32);
    if ((base == 16 && letter == 'x') || (base == 8 && letter == 'o') || (base == 2 && letter == 'b'))
      digits.remove_prefix(2);
  }
  std::uint64_t magnitude = 0;
  const auto r = std::from_chars(digits.data(), digits.data() + digits.size(), magnitude, base);
  if (digits.empty() || r.ec != std::errc() || r.ptr != digits.data() + digits.size()) return std::nullopt;
  const auto wide = static_cast<wide_int>(magnitude);
  if (minus && magnitude > std::uint64_t{1} << 63) return std::nullopt;
  return minus ? -wide : wide;
}

}  // namespace qwen3_moe::jinja
