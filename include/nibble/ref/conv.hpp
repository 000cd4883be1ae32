// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference causal depthwise convolution with SiLU, fp64.
#pragma once

#include <cstddef>
#include <nibble/ref/activation.hpp>
#include <span>
#include <vector>

namespace nibble::ref {

/// y_t[c] = silu( Σ_{j < width} weight[c][j] · x_{t - (width-1) + j}[c] ); inputs before the first row come
/// from `state`, which takes the last width-1 inputs. \param x [rows][channels]  \param weight
/// [channels][width]  \param state [width-1][channels], oldest first
[[nodiscard]] inline std::vector<double> causal_conv_silu(std::span<const double> x,
                                                          std::span<const double> weight, int width,
                                                          int channels, std::span<double> state) {
  const auto columns = static_cast<std::size_t>(channels), taps = static_cast<std::size_t>(width);
  std::vector<double> history(state.begin(), state.end());
  history.insert(history.end(), x.begin(), x.end());
  std::vector<double> y(x.size());
  for (std::size_t t = 0; t * columns < x.size(); ++t)
    for (std::size_t c = 0; c < columns; ++c) {
      double sum = 0;
      for (std::size_t j = 0; j < taps; ++j) sum += weight[c * taps + j] * history[(t + j) * columns + c];
      y[t * columns + c] = silu(sum);
    }
  for (std::size_t i = 0; i < state.size(); ++i) state[i] = history[x.size() + i];
  return y;
}

}  // namespace nibble::ref
