// SPDX-License-Identifier: Apache-2.0
#include "quote.hpp"

#include "unicode.hpp"

namespace qwen3_moe {

std::string quote_text(std::string_view text) {
  constexpr std::size_t most_bytes = 60;
  constexpr char hex[] = "0123456789abcdef";
  std::string out = "\"";
  for (std::size_t at = 0; at < text.size();) {
    if (at >= most_bytes) {
      out += "…";
      break;
    }
    const decoded_character c = decode_utf8(text, at);
    if (c.value == '"' || c.value == '\\') {
      out += '\\';
      out += text[at];
    } else if (!c.valid || c.value < 0x20 || c.value == 0x7F) {
      for (std::size_t i = at; i < at + c.bytes; ++i) {
        const auto b = static_cast<unsigned char>(text[i]);
        out += "\\x";
        out += hex[b >> 4];
        out += hex[b & 15];
      }
    } else {
      out.append(text, at, c.bytes);
    }
    at += c.bytes;
  }
  return out + '"';
}

}  // namespace qwen3_moe
