// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference sampling distribution, fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace nibble::ref {

/// Rows of the `k` largest logits, largest first, equal ones by the lower row; NaN before every number. Fewer
/// where there are fewer logits.
[[nodiscard]] inline std::vector<std::size_t> largest_logits(std::span<const float> logits, std::size_t k) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (std::isnan(logits[a]) || std::isnan(logits[b]))
      return std::isnan(logits[a]) && !std::isnan(logits[b]);
    return logits[a] > logits[b];
  });
  order.resize(std::min(k, order.size()));
  return order;
}

/// The probability of each token after temperature, top_k, top_p and min_p, in this order; 0 for one that was
/// dropped. Ties are ordered by the lower id, at least one token survives.
///     p = softmax(l / temperature); temperature up to 1e-5: all mass on the largest logit
///     top_k: the k largest (0 and less: all), then renormalised
///     top_p: the shortest prefix, likeliest first, whose mass reaches top_p (1 and more: all)
///     min_p: p >= min_p · max p
/// \param logits no NaN, no +inf, at least one above -inf
[[nodiscard]] inline std::vector<double> sampling_probabilities(std::span<const double> logits,
                                                                double temperature, int top_k, double top_p,
                                                                double min_p) {
  const std::size_t vocab = logits.size();
  std::vector<std::size_t> order(vocab);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(vocab, 0.0);
  if (temperature <= 1e-5) {
    p[order[0]] = 1.0;
    return p;
  }
  const double largest = logits[order[0]];
  std::size_t kept = top_k > 0 ? std::min(vocab, static_cast<std::size_t>(top_k)) : vocab;
  double mass = 0;
  for (std::size_t i = 0; i < kept; ++i)
    mass += p[order[i]] = std::exp((logits[order[i]] - largest) / temperature);
  if (top_p < 1.0) {
    double reached = 0;
    std::size_t i = 0;
    do reached += p[order[i++]] / mass;
    while (i < kept && reached < top_p);
    kept = i;
  }
  double left = 0;
  std::vector<double> out(vocab, 0.0);
  for (std::size_t i = 0; i < kept; ++i)
    if (i == 0 || p[order[i]] >= min_p * p[order[0]]) left += out[order[i]] = p[order[i]];
  for (double& value : out) value /= left;
  return out;
}

}  // namespace nibble::ref
