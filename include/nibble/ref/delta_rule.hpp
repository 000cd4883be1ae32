// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference gated delta rule, token by token, fp64.
#pragma once

#include <cmath>
#include <cstddef>
#include <nibble/ref/activation.hpp>
#include <span>
#include <vector>

namespace nibble::ref {

struct delta_rule_shape {
  int k_heads = 0;
  int v_heads = 0;  ///< value head h reads key head h / (v_heads / k_heads)
  int k_dim = 0;
  int v_dim = 0;
};

/// g = -exp(a_log) · softplus(a + dt_bias). \param a [rows][heads]  \param a_log,dt_bias [heads]
[[nodiscard]] inline std::vector<double> delta_rule_log_decay(std::span<const double> a,
                                                              std::span<const double> a_log,
                                                              std::span<const double> dt_bias) {
  std::vector<double> g(a.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    g[i] = -std::exp(a_log[i % a_log.size()]) * softplus(a[i] + dt_bias[i % a_log.size()]);
  return g;
}

/// Per token and value head:  S ← e^g S;  δ = β (v − Sᵀk);  S ← S + k δᵀ;  o = Sᵀq  (the updated S).
/// \param q,k [rows][k_heads][k_dim], already normalised and q scaled  \param v [rows][v_heads][v_dim]
/// \param log_decay,beta [rows][v_heads]  \param state [v_heads][k_dim][v_dim], updated
/// \return [rows][v_heads][v_dim]
[[nodiscard]] inline std::vector<double> delta_rule(std::span<const double> q, std::span<const double> k,
                                                    std::span<const double> v,
                                                    std::span<const double> log_decay,
                                                    std::span<const double> beta,
                                                    const delta_rule_shape& shape, std::span<double> state) {
  const auto k_heads = static_cast<std::size_t>(shape.k_heads),
             v_heads = static_cast<std::size_t>(shape.v_heads);
  const auto k_dim = static_cast<std::size_t>(shape.k_dim), v_dim = static_cast<std::size_t>(shape.v_dim);
  std::vector<double> out(v.size(), 0.0);
  for (std::size_t row = 0; row * v_heads < beta.size(); ++row)
    for (std::size_t head = 0; head < v_heads; ++head) {
      const double* key = k.data() + (row * k_heads + head / (v_heads / k_heads)) * k_dim;
      const double* query = q.data() + (row * k_heads + head / (v_heads / k_heads)) * k_dim;
      double* s = state.data() + head * k_dim * v_dim;
      const double decay = std::exp(log_decay[row * v_heads + head]);
      for (std::size_t d = 0; d < v_dim; ++d) {
        double seen = 0;
        for (std::size_t i = 0; i < k_dim; ++i) seen += (s[i * v_dim + d] *= decay) * key[i];
        const double delta = beta[row * v_heads + head] * (v[(row * v_heads + head) * v_dim + d] - seen);
        double o = 0;
        for (std::size_t i = 0; i < k_dim; ++i) o += (s[i * v_dim + d] += key[i] * delta) * query[i];
        out[(row * v_heads + head) * v_dim + d] = o;
      }
    }
  return out;
}

}  // namespace nibble::ref
