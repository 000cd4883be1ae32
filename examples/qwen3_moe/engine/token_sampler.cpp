// SPDX-License-Identifier: Apache-2.0
#include "token_sampler.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "nibble/core/error.hpp"

namespace qwen3_moe {
namespace {

[[noreturn]] void no_distribution() {
  throw nibble::error(
      "the model gave logits that are not numbers, so no token can be drawn; the checkpoint or its "
      "quantisation is damaged");
}

// An id named twice gets both, as one entry.
void merge_repeated(std::vector<nibble::host::token_bias>& biases) {
  std::stable_sort(biases.begin(), biases.end(),
                   [](const auto& a, const auto& b) { return a.token < b.token; });
  std::size_t kept = 0;
  for (const auto& item : biases) {
    if (kept > 0 && biases[kept - 1].token == item.token)
      biases[kept - 1].bias += item.bias;
    else
      biases[kept++] = item;
  }
  biases.resize(kept);
}

}  // namespace

std::string sampling_refusal(const sampling_options& options, int vocab_size) {
  const auto in = [](float value, float low, float high) {
    return value >= low && value <= high;
  };  // false for NaN
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
    return "temperature must be 0 or more";
  if (!in(options.top_p, 0, 1)) return "top_p must be between 0 and 1";
  if (!in(options.min_p, 0, 1)) return "min_p must be between 0 and 1";
  if (!(options.repetition_penalty > 0) || !std::isfinite(options.repetition_penalty))
    return "repetition_penalty must be above 0";
  if (!std::isfinite(options.presence_penalty) || !std::isfinite(options.frequency_penalty))
    return "penalties must be finite";
  for (const auto& [token, bias] : options.logit_bias) {
    if (token < 0 || token >= vocab_size)
      return "logit_bias names token " + std::to_string(token) + ", outside the vocabulary of " +
             std::to_string(vocab_size);
    if (!std::isfinite(bias)) return "logit_bias values must be finite";
  }
  if (options.allowed.empty()) return {};
  const auto words = (static_cast<std::size_t>(vocab_size) + 31) / 32;
  if (options.allowed.size() != words)
    return "the mask of allowed tokens has " + std::to_string(options.allowed.size()) + " words, " +
           std::to_string(words) + " are needed";
  const auto past = static_cast<unsigned>(words * 32 - static_cast<std::size_t>(vocab_size));
  if (std::all_of(options.allowed.begin(), options.allowed.end() - 1, [](auto word) { return word == 0; }) &&
      (options.allowed.back() << past) == 0)
    return "the mask of allowed tokens allows none";
  return {};
}

token_sampler::token_sampler(const sampling_options& options, std::span<const std::int32_t> prompt)
    : options_(options) {
  merge_repeated(options_.logit_bias);
  if (options_.penalised()) seen_.add_prompt(prompt);
}

sampled_token token_sampler::choose(std::span<float> logits) {
  // Sampling runs on the engine thread only, so one workspace a thread serves every request.
  thread_local nibble::host::sampling_workspace workspace;
  thread_local std::vector<float> raw;
  if (options_.logprobs) raw.assign(logits.begin(), logits.end());
  if (!options_.allowed.empty())
    for (std::size_t id = 0; id < logits.size(); ++id)
      if ((options_.allowed[id / 32] >> (id % 32) & 1u) == 0) logits[id] = -HUGE_VALF;
  if (options_.penalised())
    nibble::host::apply_penalties(logits, seen_.seen(),
                                  {.repetition = options_.repetition_penalty,
                                   .presence = options_.presence_penalty,
                                   .frequency = options_.frequency_penalty});
  if (!options_.logit_bias.empty()) nibble::host::apply_logit_bias(logits, options_.logit_bias);
  const auto drawn = nibble::host::sample(logits,
                                          {.temperature = options_.temperature,
                                           .top_k = options_.top_k,
                                           .top_p = options_.top_p,
                                           .min_p = options_.min_p,
                                           .seed = options_.seed},
                                          drawn_++, workspace);
  if (drawn.status != nibble::host::sample_status::ok) no_distribution();
  if (options_.penalised()) seen_.add_generated(drawn.token);
  sampled_token result{.id = drawn.token, .logprob = std::nullopt, .top = {}};
  if (options_.logprobs) {
    auto report = nibble::host::logprobs(raw, drawn.token, *options_.logprobs);
    if (report.status != nibble::host::sample_status::ok) no_distribution();
    result.logprob = report.chosen.logprob;
    result.top = std::move(report.top);
  }
  return result;
}

sampled_token token_sampler::accept(const nibble::sampled_row& row) {
  if (row.status != 0) no_distribution();
  ++drawn_;
  if (options_.penalised()) seen_.add_generated(row.token);
  sampled_token result{.id = row.token, .logprob = std::nullopt, .top = {}};
  if (!options_.logprobs) return result;
  result.logprob = row.logprob;
  const int count = std::clamp(row.top_count, 0, std::min(*options_.logprobs, nibble::max_top_logprobs));
  for (int i = 0; i < count; ++i) result.top.push_back({row.top_token[i], row.top_logprob[i]});
  return result;
}

}  // namespace qwen3_moe
