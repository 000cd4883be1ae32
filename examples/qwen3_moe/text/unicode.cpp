// SPDX-License-Identifier: Apache-2.0
#include "unicode.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "unicode_tables.hpp"

namespace qwen3_moe {
namespace {

constexpr std::uint8_t decomposes_bit = 16, second_bit = 32;

struct character_facts {
  std::uint8_t flags = 0;
  std::uint8_t combining_class = 0;
  bool operator==(const character_facts&) const = default;
};

// Pages of 256 characters; equal pages are stored once. About 70 KiB, built on first use.
class character_table {
 public:
  character_table() {
    std::vector<character_facts> all(0x110000);
    for (const auto& r : detail::unicode_flags)
      for (std::uint32_t c = r.first; c <= r.last; ++c) all[c].flags = r.value;
    for (const auto& r : detail::unicode_classes)
      for (std::uint32_t c = r.first; c <= r.last; ++c) all[c].combining_class = r.value;
    std::map<std::vector<std::uint16_t>, std::uint16_t> seen;
    for (std::size_t page = 0; page < page_of_.size(); ++page) {
      std::vector<std::uint16_t> key(256);
      for (std::size_t i = 0; i < 256; ++i) {
        const character_facts f = all[page * 256 + i];
        key[i] = static_cast<std::uint16_t>(f.flags | f.combining_class << 8);
      }
      const auto [at, added] = seen.emplace(key, static_cast<std::uint16_t>(pages_.size() / 256));
      if (added) pages_.insert(pages_.end(), all.begin() + page * 256, all.begin() + (page + 1) * 256);
      page_of_[page] = at->second;
    }
    pages_.shrink_to_fit();
  }

  character_facts operator[](char32_t c) const noexcept {
    return c < 0x110000 ? pages_[page_of_[c >> 8] * std::size_t{256} + (c & 0xFF)] : character_facts{};
  }

 private:
  std::array<std::uint16_t, 0x1100> page_of_{};
  std::vector<character_facts> pages_;
};

const character_table& table() {
  static const character_table t;
  return t;
}

// Hangul syllables are made by arithmetic (Unicode standard, 3.12).
constexpr char32_t s_base = 0xAC00, l_base = 0x1100, v_base = 0x1161, t_base = 0x11A7;
constexpr char32_t l_count = 19, v_count = 21, t_count = 28, s_count = l_count * v_count * t_count;

struct ordered_character {
  char32_t value;
  std::uint8_t combining_class;
};

void decompose(char32_t c, std::vector<ordered_character>& out) {
  const character_facts f = table()[c];
  if (c >= s_base && c < s_base + s_count) {
    const char32_t s = c - s_base;
    out.push_back({l_base + s / (v_count * t_count), 0});
    out.push_back({v_base + s % (v_count * t_count) / t_count, 0});
    if (s % t_count) out.push_back({t_base + s % t_count, 0});
  } else if (f.flags & decomposes_bit) {
    std::array<utf8proc_int32_t, 8> to{};  // the longest canonical decomposition has 4 characters
    int boundary = 0;
    const auto n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), to.data(), to.size(),
                                           UTF8PROC_DECOMPOSE, &boundary);
    for (utf8proc_ssize_t i = 0; i < n && i < static_cast<utf8proc_ssize_t>(to.size()); ++i) {
      const auto d = static_cast<char32_t>(to[static_cast<std::size_t>(i)]);
      out.push_back({d, table()[d].combining_class});
    }
  } else {
    out.push_back({c, f.combining_class});
  }
}

// The canonical composition of two characters, or 0.
char32_t compose(char32_t a, char32_t b) {
  if (a >= l_base && a < l_base + l_count && b >= v_base && b < v_base + v_count)
    return s_base + ((a - l_base) * v_count + (b - v_base)) * t_count;
  if (a >= s_base && a < s_base + s_count && (a - s_base) % t_count == 0 && b > t_base &&
      b < t_base + t_count)
    return a + (b - t_base);
  if (!(table()[b].flags & second_bit)) return 0;
  std::array<utf8proc_int32_t, 3> pair{static_cast<utf8proc_int32_t>(a), static_cast<utf8proc_int32_t>(b), 0};
  const auto n = utf8proc_normalize_utf32(pair.data(), 2,
                                          static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  const auto c = static_cast<char32_t>(pair[0]);
  return n == 1 && (table()[c].flags & decomposes_bit) ? c : 0;
}

// Composes one segment, which begins with a character below U+0300 or at the start of the text.
void compose_segment(std::vector<ordered_character>& s, std::string& out) {
  for (std::size_t i = 0; i < s.size();) {  // canonical order
    if (s[i].combining_class == 0) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < s.size() && s[end].combining_class != 0) ++end;
    std::stable_sort(s.begin() + i, s.begin() + end,
                     [](const auto& a, const auto& b) { return a.combining_class < b.combining_class; });
    i = end;
  }
  std::size_t kept = 0, starter = s.size();
  int last_class = -1;  // of the last character kept behind the starter; -1 when there is none
  for (std::size_t i = 0; i < s.size(); ++i) {
    const ordered_character c = s[i];
    if (starter != s.size() && last_class < int{c.combining_class}) {
      if (const char32_t joined = compose(s[starter].value, c.value)) {
        s[starter].value = joined;
        continue;
      }
    }
    if (c.combining_class == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = c.combining_class;
    }
    s[kept++] = c;
  }
  for (std::size_t i = 0; i < kept; ++i) append_utf8(out, s[i].value);
}

}  // namespace

std::uint8_t classes_of(char32_t value) { return table()[value].flags & 15; }
bool is_letter(char32_t value) { return table()[value].flags & letter_class; }
bool is_mark(char32_t value) { return table()[value].flags & mark_class; }
bool is_number(char32_t value) { return table()[value].flags & number_class; }
bool is_white_space(char32_t value) { return table()[value].flags & space_class; }

std::string normalize_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::vector<ordered_character> segment;
  for (std::size_t at = 0; at < text.size();) {
    // Characters below U+0300 are starters that never compose with what is before them. A run of them is
    // copied, all but the last, with which a later character may compose.
    std::size_t end = at, last = at;
    while (end < text.size() && static_cast<std::uint8_t>(text[end]) < 0xCC) {
      last = end;
      end += static_cast<std::uint8_t>(text[end]) < 0x80 ? 1 : 2;
    }
    if (end == text.size()) last = end;
    out.append(text, at, last - at);
    at = last;
    if (at == text.size()) break;
    segment.clear();
    do {
      const decoded_character c = decode_utf8(text, at);
      decompose(c.value, segment);
      at += c.bytes;
    } while (at < text.size() && static_cast<std::uint8_t>(text[at]) >= 0xCC);
    compose_segment(segment, out);
  }
  return out;
}

}  // namespace qwen3_moe
