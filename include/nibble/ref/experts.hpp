// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference mixture of experts, fp64.
#pragma once

#include <cstddef>
#include <nibble/ref/activation.hpp>
#include <nibble/ref/matrix.hpp>
#include <span>
#include <vector>

namespace nibble::ref {

/// down( silu(gate(x)) ⊙ up(x) )
struct expert {
  matrix gate;  ///< [intermediate][hidden]
  matrix up;    ///< [intermediate][hidden]
  matrix down;  ///< [hidden][intermediate]
};

/// One expert on x [m][hidden].
[[nodiscard]] inline std::vector<double> swiglu(const expert& e, std::span<const double> x, int m) {
  std::vector<double> h = linear(e.gate, x, m);
  const std::vector<double> up = linear(e.up, x, m);
  for (std::size_t i = 0; i < h.size(); ++i) h[i] = silu(h[i]) * up[i];
  return linear(e.down, h, m);
}

/// y[r] = Σ_s weights[r][s] · expert_{ids[r][s]}(x[r]). \param ids,weights [m][top_k]; id -1 adds nothing
[[nodiscard]] inline std::vector<double> routed_experts(std::span<const expert> experts,
                                                        std::span<const int> ids,
                                                        std::span<const double> weights, int top_k,
                                                        std::span<const double> x, int m) {
  const std::size_t hidden = x.size() / static_cast<std::size_t>(m);
  std::vector<double> y(x.size(), 0.0);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) continue;
    const std::size_t row = i / static_cast<std::size_t>(top_k);
    const std::vector<double> part =
        swiglu(experts[static_cast<std::size_t>(ids[i])], x.subspan(row * hidden, hidden), 1);
    for (std::size_t d = 0; d < hidden; ++d) y[row * hidden + d] += weights[i] * part[d];
  }
  return y;
}

/// y[r] = sigmoid(x[r] · gate_row) · expert(x[r]). \param gate_row [1][hidden]
[[nodiscard]] inline std::vector<double> shared_expert(const expert& e, const matrix& gate_row,
                                                       std::span<const double> x, int m) {
  std::vector<double> y = swiglu(e, x, m);
  const std::vector<double> gate = linear(gate_row, x, m);
  const std::size_t hidden = y.size() / static_cast<std::size_t>(m);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= sigmoid(gate[i / hidden]);
  return y;
}

}  // namespace nibble::ref
