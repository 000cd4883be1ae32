// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference rotary position embedding. The model defines frequencies and angles in fp32, so they are here
/// too.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace nibble::ref {

/// Rotate-half on the first `rotary_dim` dimensions of each head, with h = rotary_dim/2 and i < h:
///     angle = position · theta^(-2i/rotary_dim)                     (both fp32)
///     (x_i, x_{i+h}) → (x_i cos - x_{i+h} sin, x_{i+h} cos + x_i sin)
/// \param x [rows][heads][head_dim]  \param positions [rows]
[[nodiscard]] inline std::vector<double> rope(std::span<const double> x, std::span<const int> positions,
                                              int heads, int head_dim, int rotary_dim, double theta) {
  std::vector<double> y(x.begin(), x.end());
  const int half = rotary_dim / 2;
  for (std::size_t row = 0; row < positions.size(); ++row)
    for (int head = 0; head < heads; ++head) {
      double* v = y.data() + (row * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)) *
                                 static_cast<std::size_t>(head_dim);
      for (int i = 0; i < half; ++i) {
        const auto frequency = static_cast<float>(std::pow(theta, -2.0 * i / rotary_dim));
        const float angle = static_cast<float>(positions[row]) * frequency;
        const double c = std::cos(static_cast<double>(angle)), s = std::sin(static_cast<double>(angle));
        const double a = v[i], b = v[i + half];
        v[i] = a * c - b * s;
        v[i + half] = b * c + a * s;
      }
    }
  return y;
}

}  // namespace nibble::ref
