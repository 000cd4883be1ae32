// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the tokens of one request are drawn. Read by the host's sampler and by runners that draw themselves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nibble/host/sampling.hpp"

namespace qwen3_moe {

/// Applied in this order: allowed, penalties, logit_bias, temperature, top_k, top_p, min_p, the draw.
struct sampling_options {
  float temperature = 1;         ///< 0 and up; 0 takes the likeliest token
  int top_k = 0;                 ///< 0 and less: off
  float top_p = 1;               ///< in [0, 1]; 0 keeps one token
  float min_p = 0;               ///< in [0, 1]
  float repetition_penalty = 1;  ///< above 0; prompt and answer
  float presence_penalty = 0;    ///< answer
  float frequency_penalty = 0;   ///< answer
  std::uint64_t seed = 0;        ///< with the number of tokens drawn so far, decides each draw
  std::vector<nibble::host::token_bias> logit_bias;  ///< runners see each id at most once
  std::optional<int>
      logprobs;  ///< how many alternatives to report beside the token's own; none: report nothing
  /// Empty: every id may be drawn. Otherwise ⌈vocab_size / 32⌉ words: bit t % 32 of word t / 32 is set where
  /// id t may be drawn.
  std::vector<std::uint32_t> allowed;

  [[nodiscard]] bool penalised() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
};

/// Why these options cannot be used with this vocabulary, or an empty text.
std::string sampling_refusal(const sampling_options& options, int vocab_size);

}  // namespace qwen3_moe
