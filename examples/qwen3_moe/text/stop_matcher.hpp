// SPDX-License-Identifier: Apache-2.0
/// \file
/// Stop strings in a stream of text.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qwen3_moe {

/// Ends a stream before the first stop string. What comes out is the same for every way of cutting the input:
/// all text in front of the stop string that is complete first; of several complete at once, in front of the
/// longest. Held back is only what may still become a stop string: the longest end of the text that begins
/// one. Complete characters in, complete characters out. Costs one step per byte and stop string.
class stop_matcher {
 public:
  /// Empty stop strings are ignored.
  explicit stop_matcher(std::vector<std::string> stops);

  /// Text that is certain to precede any stop string. Nothing once stopped.
  std::string push(std::string_view text);
  /// What was held back; nothing when stopped.
  std::string finish();

  bool stopped() const noexcept { return found_.has_value(); }
  /// The stop string found.
  const std::optional<std::string>& found() const noexcept { return found_; }
  std::size_t held_bytes() const noexcept { return held_.size(); }

 private:
  // Knuth, Morris and Pratt: `matched` bytes of `stop` end the text; `border[i]` is the longest proper prefix
  // of stop[0, i] that also ends it.
  struct pattern {
    std::string stop;
    std::vector<std::size_t> border;
    std::size_t matched = 0;
  };

  std::vector<pattern> patterns_;
  std::string held_;
  std::optional<std::string> found_;
};

}  // namespace qwen3_moe
