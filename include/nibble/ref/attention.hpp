// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference causal grouped-query attention with a sigmoid output gate, fp64, over contiguous history.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <nibble/ref/activation.hpp>
#include <span>
#include <vector>

namespace nibble::ref {

struct attention_shape {
  int heads = 0;
  int kv_heads = 0;  ///< divides heads; head h reads KV head h / (heads / kv_heads)
  int head_dim = 0;
};

/// o = softmax_{j <= p}(scale · q·k_j) · v_j  ⊙ sigmoid(gate), where row r of q stands at p = history - rows
/// + r. \param q [rows][heads][head_dim]  \param gate the same shape, or empty for no gate \param k,v
/// [history][kv_heads][head_dim], all tokens up to and with the last row of q
[[nodiscard]] inline std::vector<double> attention(std::span<const double> q, std::span<const double> gate,
                                                   std::span<const double> k, std::span<const double> v,
                                                   const attention_shape& shape, double scale) {
  const auto heads = static_cast<std::size_t>(shape.heads),
             kv_heads = static_cast<std::size_t>(shape.kv_heads);
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  const std::size_t rows = q.size() / (heads * dim), history = k.size() / (kv_heads * dim);
  std::vector<double> out(q.size(), 0.0);
  std::vector<double> score(history);
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t head = 0; head < heads; ++head) {
      const std::size_t visible = history - rows + row + 1, kv = head / (heads / kv_heads);
      const std::size_t at = (row * heads + head) * dim;
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::size_t j = 0; j < visible; ++j) {
        double dot = 0;
        for (std::size_t d = 0; d < dim; ++d) dot += q[at + d] * k[(j * kv_heads + kv) * dim + d];
        score[j] = dot * scale;
        largest = std::max(largest, score[j]);
      }
      for (std::size_t j = 0; j < visible; ++j) sum += score[j] = std::exp(score[j] - largest);
      for (std::size_t j = 0; j < visible; ++j)
        for (std::size_t d = 0; d < dim; ++d)
          out[at + d] += score[j] / sum * v[(j * kv_heads + kv) * dim + d];
      if (!gate.empty())
        for (std::size_t d = 0; d < dim; ++d) out[at + d] *= sigmoid(gate[at + d]);
    }
  return out;
}

}  // namespace nibble::ref
