// SPDX-License-Identifier: Apache-2.0
/// \file
/// Prompts of random tokens run on one slot, and what nibble::ref makes of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "engine/model_runner.hpp"
#include "model/checkpoint_names.hpp"
#include "nibble/op/load.hpp"
#include "reference_backend.hpp"

namespace qwen3_moe::test {

inline std::vector<std::int32_t> random_tokens(int count, int vocab_size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& t : tokens) t = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab_size));
  return tokens;
}

/// Pages of one sequence in an order that is not the natural one.
inline std::vector<std::int32_t> scattered_pages(const runner_limits& limits) {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(limits.pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::reverse(pages.begin(), pages.end());
  return pages;
}

/// All logits of a prompt, run in pieces of the given size on one slot.
inline std::vector<float> run(model_runner& runner, std::span<const std::int32_t> tokens, int piece,
                              int slot = 0) {
  const auto& limits = runner.limits();
  const auto vocab = static_cast<std::size_t>(limits.vocab_size);
  std::vector<float> logits(tokens.size() * vocab, std::nanf(""));
  const auto pages = scattered_pages(limits);
  runner.clear_slot(slot);
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(tokens.size() - done, static_cast<std::size_t>(piece));
    const step_sequence sequence{tokens.subspan(done, count), static_cast<int>(done), slot, pages,
                                 wanted_logits::all};
    runner.step({&sequence, 1}, std::span(logits).subspan(done * vocab, count * vocab));
    done += count;
  }
  return logits;
}

template <class Config>
std::vector<double> reference_logits(const std::filesystem::path& folder,
                                     std::span<const std::int32_t> tokens) {
  nibble::io::checkpoint source(folder);
  const auto parsed = read_config(folder);
  const checkpoint_names names(source, parsed.config.tied_embeddings);
  causal_lm<Config> lm;
  const auto weights = nibble::load_weights(lm, source, names.bind_options(parsed.rules));
  reference_backend backend(Config::value, tokens);
  forward(backend, lm);
  return backend.logits;
}

}  // namespace qwen3_moe::test
