// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference normalisations, fp64.
#pragma once

#include <cmath>
#include <cstddef>
#include <nibble/ref/activation.hpp>
#include <span>
#include <vector>

namespace nibble::ref {

/// y = x · (mean(x²) + eps)^-1/2 ⊙ w, with 1 + w for w when `zero_centred`.
/// \param x [rows][dim]; heads count as rows  \param weight [dim]
[[nodiscard]] inline std::vector<double> rms_norm(std::span<const double> x, std::span<const double> weight,
                                                  bool zero_centred, double eps) {
  const std::size_t dim = weight.size();
  std::vector<double> y(x.size());
  for (std::size_t row = 0; row * dim < x.size(); ++row) {
    double squares = 0;
    for (std::size_t i = 0; i < dim; ++i) squares += x[row * dim + i] * x[row * dim + i];
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(dim) + eps);
    for (std::size_t i = 0; i < dim; ++i)
      y[row * dim + i] = x[row * dim + i] * factor * (zero_centred ? 1.0 + weight[i] : weight[i]);
  }
  return y;
}

/// y = rms_norm(x, plain w) ⊙ silu(z). \param x,z [rows][dim]
[[nodiscard]] inline std::vector<double> gated_rms_norm(std::span<const double> x, std::span<const double> z,
                                                        std::span<const double> weight, double eps) {
  std::vector<double> y = rms_norm(x, weight, false, eps);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= silu(z[i]);
  return y;
}

/// y = x · (Σx² + eps)^-1/2 · scale over each run of `dim` values.
[[nodiscard]] inline std::vector<double> l2_norm(std::span<const double> x, int dim, double eps,
                                                 double scale) {
  std::vector<double> y(x.size());
  const auto width = static_cast<std::size_t>(dim);
  for (std::size_t row = 0; row * width < x.size(); ++row) {
    double squares = 0;
    for (std::size_t i = 0; i < width; ++i) squares += x[row * width + i] * x[row * width + i];
    const double factor = scale / std::sqrt(squares + eps);
    for (std::size_t i = 0; i < width; ++i) y[row * width + i] = x[row * width + i] * factor;
  }
  return y;
}

}  // namespace nibble::ref
