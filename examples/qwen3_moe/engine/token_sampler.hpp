// SPDX-License-Identifier: Apache-2.0
/// \file
/// One request's way from logits to tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "nibble/host/sampling.hpp"
#include "nibble/kernels/sampling_types.hpp"
#include "sampling_options.hpp"

namespace qwen3_moe {

using nibble::host::token_logprob;

struct sampled_token {
  std::int32_t id = -1;
  std::optional<float> logprob;  ///< of the model's own distribution, before penalties, bias and temperature
  std::vector<token_logprob> top;  ///< likeliest first
};

/// Holds what a draw depends on besides the logits: the options, the tokens seen and their number. So a
/// request draws the same tokens whoever shares its batch, wherever they are drawn, and after it was computed
/// again.
class token_sampler {
 public:
  token_sampler(const sampling_options& options, std::span<const std::int32_t> prompt);

  /// Draws from a row of logits, which it changes. Throws nibble::error when the row holds NaN, +inf or
  /// nothing but -inf.
  sampled_token choose(std::span<float> logits);

  /// Takes a token that a runner drew with these options and `drawn()`, `seen()`. Throws as choose() does.
  sampled_token accept(const nibble::sampled_row& row);

  [[nodiscard]] const sampling_options& options() const { return options_; }
  /// Tokens drawn so far.
  [[nodiscard]] std::uint64_t drawn() const { return drawn_; }
  /// Empty without penalties. Holds until the next draw.
  [[nodiscard]] std::span<const nibble::host::token_counter::seen_token> seen() const { return seen_.seen(); }

 private:
  sampling_options options_;
  nibble::host::token_counter seen_;
  std::uint64_t drawn_ = 0;
};

}  // namespace qwen3_moe
