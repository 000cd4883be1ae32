// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a row of logits to a token: penalties, bias, temperature, top-k, top-p, min-p, and the draw.
///
/// Filters apply in this order: penalties and bias on the logits, temperature, top_k, top_p, min_p.
/// Ties are ordered by the lower id everywhere, and at least one token always survives.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace nibble::host {

/// How a token is drawn. Values outside the given ranges are the caller's to refuse.
struct sampling_params {
  float temperature = 1;   ///< at least 0; up to 1e-5 means greedy
  int top_k = 0;           ///< keeps the k likeliest; 0 and less: off
  float top_p = 1;         ///< keeps the smallest set that reaches this share; 0 keeps one token, 1: off
  float min_p = 0;         ///< drops tokens below min_p times the likeliest; 0: off
  std::uint64_t seed = 0;  ///< with `step`, decides the draw
};

enum class sample_status {
  ok,
  not_finite  ///< NaN or +inf among the logits, or all of them -inf: no distribution exists
};

struct sample_result {
  sample_status status = sample_status::ok;
  std::int32_t token = -1;  ///< -1 unless ok
};

/// A token that may be drawn.
struct candidate {
  std::int32_t token;
  float probability;  ///< the candidates' sum to 1
};

/// Memory that calls reuse; one for each thread that samples.
struct sampling_workspace {
  std::vector<std::int32_t> order;
  std::vector<float> weights;
  std::vector<candidate> candidates;
};

/// The index of the largest logit, the lowest one among equals. Same errors as sample().
[[nodiscard]] sample_result argmax(std::span<const float> logits);

/// The tokens that survive the filters, likeliest first (greedy: one token, probability 1), in
/// workspace.candidates. -inf marks a forbidden token.
[[nodiscard]] sample_status sampling_candidates(std::span<const float> logits, const sampling_params& params,
                                                sampling_workspace& workspace);

/// Draws one token. The draw is a pure function of logits, params and `step` (the number of tokens the
/// request has drawn before): batching, threads and other requests do not enter.
[[nodiscard]] sample_result sample(std::span<const float> logits, const sampling_params& params,
                                   std::uint64_t step, sampling_workspace& workspace);

/// A uniform number in [0, 1) from (seed, step); counter-based, so any step can be had at once.
[[nodiscard]] double uniform_draw(std::uint64_t seed, std::uint64_t step) noexcept;

/// Penalties on tokens seen before; the defaults change nothing.
struct penalties {
  float repetition = 1;  ///< > 0; prompt and output tokens: positive logits are divided, negative multiplied
  float presence = 0;    ///< subtracted once from each token of the output
  float frequency = 0;   ///< subtracted for each time a token occurs in the output
};

/// Which tokens a request has seen, and how often it wrote them.
class token_counter {
 public:
  struct seen_token {
    std::int32_t token;
    std::int32_t generated;  ///< times in the output; 0 for a token of the prompt only
  };
  void add_prompt(std::span<const std::int32_t> tokens);
  void add_generated(std::int32_t token);
  [[nodiscard]] std::span<const seen_token> seen() const noexcept { return seen_; }

 private:
  seen_token& find(std::int32_t token);
  std::unordered_map<std::int32_t, std::size_t> index_;
  std::vector<seen_token> seen_;
};

/// Applies `penalty` to the logits in place. Ids outside the row are ignored.
void apply_penalties(std::span<float> logits, std::span<const token_counter::seen_token> seen,
                     const penalties& penalty);

struct token_bias {
  std::int32_t token;
  float bias;
};

/// Adds each bias to its token's logit. Ids outside the row are ignored.
void apply_logit_bias(std::span<float> logits, std::span<const token_bias> biases);

struct token_logprob {
  std::int32_t token;
  float logprob;
};

/// log softmax of the row at `token` and at the `top` likeliest tokens, likeliest first. The row is taken as
/// it is, before temperature and filters.
struct logprobs_result {
  sample_status status = sample_status::ok;
  token_logprob chosen{-1, 0};
  std::vector<token_logprob> top;
};
[[nodiscard]] logprobs_result logprobs(std::span<const float> logits, std::int32_t token, int top);

}  // namespace nibble::host
