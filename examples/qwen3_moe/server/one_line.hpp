// SPDX-License-Identifier: Apache-2.0
/// \file
/// Text from files and clients on its way to a terminal or a log.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace qwen3_moe {

/// `text` as one line of at most `most_bytes` bytes, the cut marked by an ellipsis that comes on top. Line
/// ends and tabs become spaces and other control characters, those of Latin-1 in UTF-8 included, '?': they
/// could forge further lines or drive a terminal. Space at the end goes.
[[nodiscard]] inline std::string one_line(std::string_view text, std::size_t most_bytes = 2000) {
  bool cut = text.size() > most_bytes;
  if (cut) {
    while (most_bytes > 0 && (static_cast<unsigned char>(text[most_bytes]) & 0xC0) == 0x80) --most_bytes;
    text = text.substr(0, most_bytes);
  }
  std::string line;
  line.reserve(text.size() + 3);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0u;
    if (byte == '\n' || byte == '\r' || byte == '\t') {
      line += ' ';
    } else if (byte < 0x20 || byte == 0x7F) {
      line += '?';
    } else if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {
      line += '?';
      ++i;
    } else {
      line += text[i];
    }
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return cut ? line + "\xE2\x80\xA6" : line;
}

}  // namespace qwen3_moe
