// SPDX-License-Identifier: Apache-2.0
/// \file
/// The byte-level alphabet: how tokenizer.json writes the 256 bytes as printable characters.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "unicode.hpp"

namespace qwen3_moe {

/// Character that stands for each byte. Bytes that print in Latin-1 stand for themselves, the other 68 are
/// numbered from U+0100 on, in order.
inline constexpr std::array<char16_t, 256> byte_level_alphabet = [] {
  std::array<char16_t, 256> a{};
  char16_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool prints = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    a[static_cast<std::size_t>(b)] = prints ? static_cast<char16_t>(b) : next++;
  }
  return a;
}();

/// Byte that each character below U+0144 stands for, -1 for none.
inline constexpr std::array<std::int16_t, 0x144> byte_of_character = [] {
  std::array<std::int16_t, 0x144> a{};
  a.fill(-1);
  for (std::size_t b = 0; b < 256; ++b) a[byte_level_alphabet[b]] = static_cast<std::int16_t>(b);
  return a;
}();

/// The bytes a token stands for. A token with any character outside the alphabet stands for its own UTF-8,
/// which is what the reference's decoder does.
inline std::string byte_level_decode(std::string_view token) {
  std::string out;
  for (std::size_t at = 0; at < token.size();) {
    const decoded_character c = decode_utf8(token, at);
    if (c.value >= byte_of_character.size() || byte_of_character[c.value] < 0) return std::string(token);
    out.push_back(static_cast<char>(static_cast<std::uint8_t>(byte_of_character[c.value])));
    at += c.bytes;
  }
  return out;
}

}  // namespace qwen3_moe
