// SPDX-License-Identifier: Apache-2.0
/// \file
/// UTF-8, character classes and NFC, all as the reference tokenizer sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace qwen3_moe {

inline constexpr char32_t replacement_character = 0xFFFD;

/// One character read from UTF-8.
struct decoded_character {
  char32_t value;      ///< U+FFFD where the bytes are no character
  std::uint8_t bytes;  ///< 1 … 4: a character, or the longest start of one that went wrong
  bool valid;
};

/// Reads the character at `at` (< text.size()). What is no UTF-8 is cut as the Unicode standard recommends
/// (chapter 3, "maximal subparts"): each longest prefix of a well-formed sequence is one U+FFFD. Never
/// throws.
decoded_character decode_utf8(std::string_view text, std::size_t at) noexcept;

/// Appends a scalar value as UTF-8.
void append_utf8(std::string& out, char32_t value);

bool is_valid_utf8(std::string_view text) noexcept;

/// `text` with every ill-formed sequence replaced by U+FFFD.
std::string to_valid_utf8(std::string_view text);

/// Splits a stream of bytes into well-formed text: what push() returns is always complete characters, and all
/// pieces together with finish() are to_valid_utf8() of all bytes. Holds back at most three bytes.
class utf8_stream {
 public:
  std::string push(std::string_view bytes);
  /// What was held back, as one U+FFFD, or nothing. The stream can be used again.
  std::string finish();
  bool pending() const noexcept { return !held_.empty(); }

 private:
  std::string held_;
};

/// Character classes of the pre-tokenizer patterns: Unicode 16, as in the reference's regular expressions.
/// White space is the property, not the category.
bool is_letter(char32_t value);
bool is_mark(char32_t value);
bool is_number(char32_t value);
bool is_white_space(char32_t value);

/// The four classes in one look-up; bits as above.
enum character_class : std::uint8_t { letter_class = 1, mark_class = 2, number_class = 4, space_class = 8 };
std::uint8_t classes_of(char32_t value);

/// Canonical composition. The mappings are utf8proc's; only characters that Unicode 9 knew take part, because
/// the reference's tables stop there. Linear in the text up to a stable sort inside one run of combining
/// marks. `text` must be well-formed UTF-8.
std::string normalize_nfc(std::string_view text);

}  // namespace qwen3_moe
