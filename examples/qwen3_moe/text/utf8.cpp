// SPDX-License-Identifier: Apache-2.0
#include "unicode.hpp"

namespace qwen3_moe {
namespace {

struct lead_rule {
  std::uint8_t length;     // of a whole sequence, 0 for a byte that starts none
  std::uint8_t low, high;  // limits of the second byte (table 3-7 of the Unicode standard)
};

constexpr lead_rule rule_of(std::uint8_t lead) {
  if (lead < 0x80) return {1, 0, 0};
  if (lead < 0xC2) return {0, 0, 0};
  if (lead < 0xE0) return {2, 0x80, 0xBF};
  if (lead == 0xE0) return {3, 0xA0, 0xBF};
  if (lead == 0xED) return {3, 0x80, 0x9F};
  if (lead < 0xF0) return {3, 0x80, 0xBF};
  if (lead == 0xF0) return {4, 0x90, 0xBF};
  if (lead < 0xF4) return {4, 0x80, 0xBF};
  if (lead == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// True when `bytes` (1 … 3 of them) could still become a character.
bool is_unfinished(std::string_view bytes) {
  const lead_rule rule = rule_of(static_cast<std::uint8_t>(bytes[0]));
  return rule.length > bytes.size() && decode_utf8(bytes, 0).bytes == bytes.size();
}

}  // namespace

decoded_character decode_utf8(std::string_view text, std::size_t at) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[at + i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const lead_rule rule = rule_of(lead);
  if (rule.length == 0) return {replacement_character, 1, false};
  const std::size_t left = text.size() - at;
  if (left < 2 || byte(1) < rule.low || byte(1) > rule.high) return {replacement_character, 1, false};
  char32_t value = lead & (0x7Fu >> rule.length);
  value = value << 6 | (byte(1) & 0x3Fu);
  for (std::uint8_t i = 2; i < rule.length; ++i) {
    if (i >= left || (byte(i) & 0xC0) != 0x80) return {replacement_character, i, false};
    value = value << 6 | (byte(i) & 0x3Fu);
  }
  return {value, rule.length, true};
}

void append_utf8(std::string& out, char32_t value) {
  const auto put = [&](char32_t b) { out.push_back(static_cast<char>(static_cast<std::uint8_t>(b))); };
  if (value < 0x80) {
    put(value);
  } else if (value < 0x800) {
    put(0xC0 | value >> 6), put(0x80 | (value & 0x3F));
  } else if (value < 0x10000) {
    put(0xE0 | value >> 12), put(0x80 | (value >> 6 & 0x3F)), put(0x80 | (value & 0x3F));
  } else {
    put(0xF0 | value >> 18), put(0x80 | (value >> 12 & 0x3F)), put(0x80 | (value >> 6 & 0x3F)),
        put(0x80 | (value & 0x3F));
  }
}

bool is_valid_utf8(std::string_view text) noexcept {
  for (std::size_t at = 0; at < text.size();) {
    const decoded_character c = decode_utf8(text, at);
    if (!c.valid) return false;
    at += c.bytes;
  }
  return true;
}

std::string to_valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const decoded_character c = decode_utf8(text, at);
    if (c.valid) {
      out.append(text, at, c.bytes);
    } else {
      append_utf8(out, replacement_character);
    }
    at += c.bytes;
  }
  return out;
}

std::string utf8_stream::push(std::string_view bytes) {
  std::string joined;
  if (!held_.empty()) {
    joined = std::move(held_);
    held_.clear();
    joined.append(bytes);
    bytes = joined;
  }
  // A sequence that is cut off has its lead among the last three bytes.
  std::size_t end = bytes.size();
  for (std::size_t back = 1; back <= 3 && back <= bytes.size(); ++back) {
    const std::size_t start = bytes.size() - back;
    if ((static_cast<std::uint8_t>(bytes[start]) & 0xC0) == 0x80) continue;
    if (is_unfinished(bytes.substr(start))) end = start;
    break;
  }
  std::string out = to_valid_utf8(bytes.substr(0, end));
  held_.assign(bytes.substr(end));
  return out;
}

std::string utf8_stream::finish() {
  std::string out = to_valid_utf8(held_);
  held_.clear();
  return out;
}

}  // namespace qwen3_moe
