// SPDX-License-Identifier: Apache-2.0
#include "tokenizer.hpp"

#include <limits>

#include "nibble/core/error.hpp"
#include "unicode.hpp"

namespace qwen3_moe {

struct tokenizer::work_space {
  std::vector<std::int32_t> ids;
  merge_scratch merges;
};

void tokenizer::encode_piece(std::string_view piece, work_space& work) const {
  if (ignore_merges_) {
    const auto whole = id_of_bytes_.find(std::string(piece));
    if (whole != id_of_bytes_.end()) {
      work.ids.push_back(whole->second);
      return;
    }
  }
  const std::size_t start = work.ids.size();
  for (const char c : piece) work.ids.push_back(byte_tokens_[static_cast<std::uint8_t>(c)]);
  const std::size_t kept = apply_merges(std::span(work.ids).subspan(start), merges_, work.merges);
  work.ids.resize(start + kept);
}

void tokenizer::encode_normalized(std::string_view text, work_space& work) const {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = piece_end(text, at, pattern_);
    encode_piece(text.substr(at, end - at), work);
    at = end;
  }
}

// Text between added tokens that are matched raw.
void tokenizer::encode_text(std::string_view text, added_tokens_mode mode, work_space& work) const {
  if (text.empty()) return;
  std::string valid, normalized;
  if (!is_valid_utf8(text)) text = valid = to_valid_utf8(text);
  if (nfc_) text = normalized = normalize_nfc(text);
  if (normalized_added_.empty()) return encode_normalized(text, work);
  for (std::size_t at = 0; at < text.size();) {
    const added_token_match m = normalized_added_.find(text, at, mode);
    encode_normalized(text.substr(at, m.begin - at), work);
    if (m.id >= 0) work.ids.push_back(m.id);
    at = m.end;
  }
}

std::vector<std::int32_t> tokenizer::encode_all(std::string_view text, added_tokens_mode mode,
                                                std::span<const prompt_segment> segments) const {
  if (text.size() >= std::numeric_limits<std::uint32_t>::max())
    throw nibble::error("the text to tokenize has " + std::to_string(text.size()) +
                        " bytes; the most is 4294967294");
  work_space work;
  work.ids.reserve(text.size() / 4 + 1);
  for (std::size_t at = 0; at < text.size();) {
    const added_token_match m = raw_added_.find(text, at, mode, segments);
    encode_text(text.substr(at, m.begin - at), mode, work);
    if (m.id >= 0) work.ids.push_back(m.id);
    at = m.end;
  }
  return std::move(work.ids);
}

std::vector<std::int32_t> tokenizer::encode(std::string_view text, added_tokens_mode mode) const {
  return encode_all(text, mode, {});
}

std::vector<std::int32_t> tokenizer::encode(const rendered_prompt& prompt) const {
  return encode_all(prompt.text, added_tokens_mode::all, prompt.segments);
}

bool tokenizer::contains(std::int32_t id) const noexcept {
  return id >= 0 && static_cast<std::size_t>(id) < tokens_.size() &&
         tokens_[static_cast<std::size_t>(id)].known;
}

bool tokenizer::is_special(std::int32_t id) const noexcept {
  return contains(id) && tokens_[static_cast<std::size_t>(id)].special;
}

std::string_view tokenizer::token_bytes(std::int32_t id) const noexcept {
  return contains(id) ? std::string_view(tokens_[static_cast<std::size_t>(id)].bytes) : std::string_view();
}

std::optional<std::int32_t> tokenizer::token_to_id(std::string_view token) const {
  const auto at = id_of_.find(std::string(token));
  if (at == id_of_.end()) return std::nullopt;
  return at->second;
}

std::string tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const std::int32_t id : ids)
    if (!skip_special || !is_special(id)) bytes += token_bytes(id);
  return to_valid_utf8(bytes);
}

}  // namespace qwen3_moe
