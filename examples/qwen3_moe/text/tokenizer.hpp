// SPDX-License-Identifier: Apache-2.0
/// \file
/// Byte-level BPE from a Hugging Face tokenizer.json.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "added_tokens.hpp"
#include "bpe.hpp"
#include "pre_tokenizer.hpp"
#include "rendered_prompt.hpp"

namespace qwen3_moe {

/// What a tokenizer.json may cost. Past a limit, loading ends in nibble::format_error.
struct tokenizer_limits {
  std::size_t file_bytes = std::size_t{64} << 20;
  std::size_t tokens = std::size_t{1} << 20;  ///< base vocabulary and added tokens, each; also the highest id
  std::size_t token_bytes = 4096;             ///< of one token, as the file spells it
};

/// A tokenizer of the Qwen2, Qwen3 and Qwen3.5 families: optional NFC, one of two split patterns, byte-level
/// BPE. Ids equal those of the tokenizers package. All const members may be called from several threads at
/// once.
class tokenizer {
 public:
  /// Throws nibble::format_error for a file that breaks a rule or asks for a normaliser, pre-tokenizer,
  /// model, post-processor or decoder other than these; the message names it.
  static tokenizer from_file(const std::filesystem::path& path, const tokenizer_limits& limits = {});
  /// `name` is what messages call the file.
  static tokenizer from_json(std::string_view json, std::string_view name = "tokenizer.json",
                             const tokenizer_limits& limits = {});

  /// Ids of `text`. Ill-formed UTF-8 counts as U+FFFD, one for each maximal subpart. O(n log n), no
  /// recursion. With added_tokens_mode::all this is the reference's encode(text, add_special_tokens=False).
  /// Throws nibble::error for a text of 4 GiB and more.
  std::vector<std::int32_t> encode(std::string_view text,
                                   added_tokens_mode mode = added_tokens_mode::all) const;
  /// Ids of a rendered prompt: special tokens (<|im_start|>, <|im_end|>, …) are recognised only where the
  /// template wrote them; added tokens that are not special (<think>, <tool_call>, …) are recognised
  /// everywhere, as the reference does, since histories carry them in assistant content. A prompt whose data
  /// holds no special token's text gets the same ids as its plain text.
  std::vector<std::int32_t> encode(const rendered_prompt& prompt) const;

  /// Text of `ids`; unknown ids are passed over, ill-formed UTF-8 becomes U+FFFD. Equals the reference's
  /// decode().
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = false) const;
  /// The bytes that a token adds to the text, perhaps not whole characters; empty for an unknown id.
  std::string_view token_bytes(std::int32_t id) const noexcept;
  /// The id of a token as tokenizer.json spells it ("Ġthe", "<|im_end|>").
  std::optional<std::int32_t> token_to_id(std::string_view token) const;
  /// Highest id + 1. A checkpoint's embedding may have more rows; they are padding.
  std::int32_t vocab_size() const noexcept { return static_cast<std::int32_t>(tokens_.size()); }
  /// True for an id that a token has.
  bool contains(std::int32_t id) const noexcept;
  /// True for an added token with special = true: control tokens that are no text for a reader.
  bool is_special(std::int32_t id) const noexcept;

 private:
  friend class tokenizer_loader;
  struct entry {
    std::string bytes;
    bool known = false;
    bool special = false;
  };
  struct work_space;

  tokenizer() = default;
  void encode_text(std::string_view text, added_tokens_mode mode, work_space& work) const;
  void encode_normalized(std::string_view text, work_space& work) const;
  void encode_piece(std::string_view piece, work_space& work) const;
  std::vector<std::int32_t> encode_all(std::string_view text, added_tokens_mode mode,
                                       std::span<const prompt_segment> segments) const;

  std::vector<entry> tokens_;
  std::unordered_map<std::string, std::int32_t> id_of_;        // as the file spells them
  std::unordered_map<std::string, std::int32_t> id_of_bytes_;  // filled only where merges are ignored
  std::array<std::int32_t, 256> byte_tokens_{};
  merge_table merges_;
  added_token_matcher raw_added_, normalized_added_;
  split_pattern pattern_ = split_pattern::qwen2;
  bool nfc_ = false;
  bool ignore_merges_ = false;
};

}  // namespace qwen3_moe
