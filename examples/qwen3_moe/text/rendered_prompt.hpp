// SPDX-License-Identifier: Apache-2.0
/// \file
/// A prompt that knows which of its bytes the template wrote and which came in with the request.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace qwen3_moe {

/// Bytes [begin, end) of a prompt, all of one origin.
struct prompt_segment {
  std::size_t begin, end;
  bool trusted;  ///< written by the template itself, not taken from messages, tools or template arguments
  bool operator==(const prompt_segment&) const = default;
};

/// What a chat template renders. The segments are in order, without gaps, and cover the text.
struct rendered_prompt {
  std::string text;
  std::vector<prompt_segment> segments;
};

}  // namespace qwen3_moe
