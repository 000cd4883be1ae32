// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference top-k expert choice, fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace nibble::ref {

struct routing {
  std::vector<int> ids;         ///< [rows][top_k], likeliest first
  std::vector<double> weights;  ///< [rows][top_k]
};

/// p = softmax(logits) over all experts, the top_k largest with ties to the lower id, divided by their sum
/// when `renormalise`. Compares logits, which order like p. \param logits [rows][experts], no NaN
[[nodiscard]] inline routing route(std::span<const double> logits, int experts, int top_k, bool renormalise) {
  routing out;
  const auto count = static_cast<std::size_t>(experts);
  for (std::size_t row = 0; row * count < logits.size(); ++row) {
    const std::span<const double> l = logits.subspan(row * count, count);
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return l[static_cast<std::size_t>(a)] > l[static_cast<std::size_t>(b)];
    });
    const double largest = l[static_cast<std::size_t>(order[0])];
    double all = 0, chosen = 0;
    for (const double value : l) all += std::exp(value - largest);
    for (int s = 0; s < top_k; ++s)
      chosen += std::exp(l[static_cast<std::size_t>(order[static_cast<std::size_t>(s)])] - largest);
    for (int s = 0; s < top_k; ++s) {
      const int id = order[static_cast<std::size_t>(s)];
      out.ids.push_back(id);
      out.weights.push_back(std::exp(l[static_cast<std::size_t>(id)] - largest) /
                            (renormalise ? chosen : all));
    }
  }
  return out;
}

}  // namespace nibble::ref
