// SPDX-License-Identifier: Apache-2.0
/// \file
/// One request's way from logits to tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nibble/host/sampling.hpp"

namespace qwen3_moe {

struct sampling_options {
  float temperature = 1;         ///< 0 and up; 0 takes the likeliest token
  int top_k = 0;                 ///< 0 and less: off
  float top_p = 1;               ///< in [0, 1]; 0 keeps one token
  float min_p = 0;               ///< in [0, 1]
  float repetition_penalty = 1;  ///< above 0; prompt and answer
  float presence_penalty = 0;    ///< answer
  float frequency_penalty = 0;   ///< answer
  std::uint64_t seed = 0;        ///< with the number of tokens drawn so far, decides each draw
  std::vector<nibble::host::token_bias> logit_bias;
  std::optional<int>
      logprobs;  ///< how many alternatives to report beside the token's own; none: report nothing
};

using nibble::host::token_logprob;

struct sampled_token {
  std::int32_t id = -1;
  std::optional<float> logprob;  ///< of the model's own distribution, before penalties, bias and temperature
  std::vector<token_logprob> top;  ///< likeliest first
};

/// Why these options cannot be used with this vocabulary, or an empty text.
std::string sampling_refusal(const sampling_options& options, int vocab_size);

/// Holds what a draw depends on besides the logits: the options, the tokens seen and their number. So a
/// request draws the same tokens whoever shares its batch, and after it was computed again.
class token_sampler {
 public:
  token_sampler(const sampling_options& options, std::span<const std::int32_t> prompt);

  /// Draws from a row of logits, which it changes. Throws nibble::error when the row holds NaN, +inf or
  /// nothing but -inf.
  sampled_token choose(std::span<float> logits);

 private:
  bool penalised() const;

  sampling_options options_;
  nibble::host::token_counter seen_;
  std::uint64_t drawn_ = 0;
};

}  // namespace qwen3_moe
