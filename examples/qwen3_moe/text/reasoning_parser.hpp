// SPDX-License-Identifier: Apache-2.0
/// \file
/// Splits an answer into what the model thought and what it says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

namespace qwen3_moe {

inline constexpr std::string_view think_open = "<think>", think_close = "</think>";

/// True when `prompt` ends inside an open think block, so that the answer starts with reasoning: its last
/// characters but white space are "<think>". What users wrote further up does not matter.
bool ends_inside_reasoning(std::string_view prompt) noexcept;

/// Text that has become certain.
struct reasoning_delta {
  std::string reasoning, content;
  bool operator==(const reasoning_delta&) const = default;
};

/// Reasoning is what stands between <think> and the first </think>; the opening tag counts only at the very
/// start of an answer, and is absent where the prompt has opened the block already. White space at both ends
/// of the reasoning and line ends behind </think> are dropped. Everything else is content, unchanged. The
/// result does not depend on how the answer is cut into pieces; held back is a possible start of a tag and
/// the white space in front of it. Linear time.
class reasoning_parser {
 public:
  /// `by_token`: a tag counts only where announce_tag() said that its token stands, so that a tag spelled
  /// with other tokens is text. Without, every tag in the text counts.
  explicit reasoning_parser(bool starts_inside, bool by_token = false)
      : state_(starts_inside ? state::reasoning_start : state::start), by_token_(by_token) {}

  /// The tag token's text begins at byte `at` of all text pushed. To be called before that text is pushed, in
  /// order.
  void announce_tag(std::uint64_t at) { announced_.push_back(at); }

  reasoning_delta push(std::string_view text);
  /// Releases what was held back.
  reasoning_delta finish();

  /// True until </think> came, where there is reasoning at all.
  bool inside() const noexcept { return state_ == state::reasoning_start || state_ == state::reasoning; }

 private:
  enum class state { start, reasoning_start, reasoning, content_start, content };

  bool run(reasoning_delta& out, bool last);
  bool is_tag_at(std::size_t offset);
  void consume(std::size_t bytes);

  state state_;
  bool by_token_;
  std::string held_;
  std::size_t scanned_ = 0;     // bytes of held_ that were looked at already
  std::uint64_t consumed_ = 0;  // bytes of the answer in front of held_
  std::deque<std::uint64_t> announced_;
};

}  // namespace qwen3_moe
