// SPDX-License-Identifier: Apache-2.0
// Values as text: Python's repr() and json.dumps().
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "../quote.hpp"
#include "../unicode.hpp"
#include "interpreter.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr char hex_digits[] = "0123456789abcdef";

void append_hex(std::string& out, char32_t c, int digits) {
  for (int i = digits - 1; i >= 0; --i) out += hex_digits[c >> (4 * i) & 15];
}

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

std::string string_repr(std::string_view s) {
  const char quote = s.find('\'') != s.npos && s.find('"') == s.npos ? '"' : '\'';
  std::string out(1, quote);
  for (std::size_t at = 0; at < s.size();) {
    const decoded_character d = decode_utf8(s, at);
    const char32_t c = d.value;
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c)) {
      append_utf8(out, c);
    } else if (c < 0x100) {
      out += "\\x", append_hex(out, c, 2);
    } else if (c < 0x10000) {
      out += "\\u", append_hex(out, c, 4);
    } else {
      out += "\\U", append_hex(out, c, 8);
    }
    at += d.bytes;
  }
  return out + quote;
}

void append_json_string(std::string& out, std::string_view s, bool ascii) {
  out += '"';
  for (std::size_t at = 0; at < s.size();) {
    const decoded_character d = decode_utf8(s, at);
    const char32_t c = d.value;
    static constexpr std::string_view plain = "\"\\\b\f\n\r\t", letters = "\"\\bfnrt";
    if (const std::size_t i = c < 0x80 ? plain.find(static_cast<char>(c)) : plain.npos; i != plain.npos) {
      out += '\\';
      out += letters[i];
    } else if (c < 0x20 || (ascii && c >= 0x7F && c < 0x10000)) {
      out += "\\u", append_hex(out, c, 4);
    } else if (ascii && c >= 0x10000) {
      out += "\\u", append_hex(out, 0xD800 + ((c - 0x10000) >> 10), 4);
      out += "\\u", append_hex(out, 0xDC00 + ((c - 0x10000) & 0x3FF), 4);
    } else {
      append_utf8(out, c);
    }
    at += d.bytes;
  }
  out += '"';
}

class json_writer {
 public:
  json_writer(interpreter& run, position at, const json_format& format) : run_(run), at_(at), f_(format) {}

  // Recursion is as deep as the value, at most deepest_value.
  void write(const value& v, std::size_t level) {
    run_.step(at_);
    const std::size_t before = out_.size();
    if (v.is_none()) {
      out_ += "null";
    } else if (v.is_bool()) {
      out_ += v.as_bool() ? "true" : "false";
    } else if (v.is_integer()) {
      out_ += to_string(v.as_integer());
    } else if (v.is_real()) {
      out_ += number(v.as_real());
    } else if (v.is_string()) {
      append_json_string(out_, v.as_view(), f_.ascii);
    } else if (v.is_sequence() && v.as_sequence().kind != sequence_kind::generator) {
      const auto& items = v.as_sequence().items;
      return group('[', ']', items.size(), level, [&](std::size_t i) { write(items[i], level + 1); });
    } else if (v.is_mapping()) {
      auto entries = sorted(v.as_mapping());
      return group('{', '}', entries.size(), level, [&](std::size_t i) {
        append_json_string(out_, key(entries[i]->first), f_.ascii);
        out_ += f_.key_separator;
        write(entries[i]->second, level + 1);
      });
    } else {
      run_.fail(at_, "a value of type " + type_name(v) + " cannot be written as JSON");
    }
    run_.charge_string(at_, out_.size() - before);
  }

  std::string take() { return std::move(out_); }

 private:
  using entry = std::pair<value, value>;

  static std::string number(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
    return python_float(d);
  }

  std::string key(const value& k) const {
    if (k.is_string()) return std::string(k.as_view());
    if (k.is_none()) return "null";
    if (k.is_bool()) return k.as_bool() ? "true" : "false";
    return k.is_real() ? number(k.as_real()) : to_string(k.as_integer());
  }

  std::vector<const entry*> sorted(const mapping& m) {
    run_.step(at_, m.entries.size());
    std::vector<const entry*> out;
    for (const entry& e : m.entries) out.push_back(&e);
    if (f_.sort_keys)
      std::stable_sort(out.begin(), out.end(),
                       [&](const entry* a, const entry* b) { return run_.less(at_, a->first, b->first); });
    return out;
  }

  template <class Element>
  void group(char open, char close, std::size_t n, std::size_t level, Element element) {
    out_ += open;
    for (std::size_t i = 0; i < n; ++i) {
      if (i) out_ += f_.item_separator;
      new_line(level + 1);
      element(i);
    }
    if (n) new_line(level);
    out_ += close;
  }

  void new_line(std::size_t level) {
    if (!f_.indent) return;
    run_.charge_string(at_, 1 + level * f_.indent->size());
    out_ += '\n';
    for (std::size_t i = 0; i < level; ++i) out_ += *f_.indent;
  }

  interpreter& run_;
  position at_;
  const json_format& f_;
  std::string out_;
};

void append_repr(interpreter& run, position at, const value& v, std::string& out) {
  run.step(at);
  const std::size_t before = out.size();
  if (v.is_none()) {
    out += "None";
  } else if (v.is_bool()) {
    out += v.as_bool() ? "True" : "False";
  } else if (v.is_integer()) {
    out += to_string(v.as_integer());
  } else if (v.is_real()) {
    out += python_float(v.as_real());
  } else if (v.is_string()) {
    out += string_repr(v.as_view());
  } else if (v.is_undefined()) {
    out += "Undefined";
  } else if (v.is_sequence() && v.as_sequence().kind != sequence_kind::generator) {
    const sequence& s = v.as_sequence();
    const bool tuple = s.kind == sequence_kind::tuple;
    out += tuple ? '(' : '[';
    for (std::size_t i = 0; i < s.items.size(); ++i) {
      if (i) out += ", ";
      append_repr(run, at, s.items[i], out);
    }
    if (tuple && s.items.size() == 1) out += ',';
    out += tuple ? ')' : ']';
    return;
  } else if (v.is_mapping()) {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : v.as_mapping().entries) {
      if (!first) out += ", ";
      first = false;
      append_repr(run, at, key, out);
      out += ": ";
      append_repr(run, at, item, out);
    }
    out += '}';
    return;
  } else {
    run.fail(at, "a value of type " + type_name(v) + " cannot be written out");
  }
  run.charge_string(at, out.size() - before);
}

}  // namespace

std::string python_repr(interpreter& run, position at, const value& v) {
  std::string out;
  append_repr(run, at, v, out);
  return out;
}

std::string to_json(interpreter& run, position at, const value& v, const json_format& format) {
  json_writer w(run, at, format);
  w.write(v, 0);
  return w.take();
}

std::string to_string(wide_int i) {
  // The values kept are within int64 and uint64.
  return i < 0 ? std::to_string(static_cast<std::int64_t>(i)) : std::to_string(static_cast<std::uint64_t>(i));
}

std::string python_float(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
  char buffer[64];
  // The shortest digits that read back the same, as d.ddde±xx.
  const auto r = std::to_chars(buffer, buffer + sizeof buffer, d, std::chars_format::scientific);
  std::string_view s(buffer, static_cast<std::size_t>(r.ptr - buffer));
  std::string out;
  if (s[0] == '-') out += '-', s.remove_prefix(1);
  const std::size_t e = s.find('e');
  int exponent = 0;
  std::from_chars(s.data() + e + (s[e + 1] == '+' ? 2 : 1), s.data() + s.size(), exponent);
  std::string digits(1, s[0]);
  if (e > 2) digits += s.substr(2, e - 2);
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (digits.size() > 1) out += '.', out += digits.substr(1);
    out += exponent < 0 ? "e-" : "e+";
    const int magnitude = exponent < 0 ? -exponent : exponent;
    if (magnitude < 10) out += '0';
    return out + std::to_string(magnitude);
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<std::size_t>(exponent) + 1;
  if (digits.size() < whole) digits.append(whole - digits.size(), '0');
  return out + digits.substr(0, whole) + '.' + (digits.size() > whole ? digits.substr(whole) : "0");
}

}  // namespace qwen3_moe::jinja
