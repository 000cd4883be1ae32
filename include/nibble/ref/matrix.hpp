// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference matrix products over exactly decoded weights, in fp64.
///
/// The references of this folder are slow and obvious on purpose: they are the oracle of every kernel. All
/// arrays are dense and row-major, all numbers fp64, shapes are run-time values and not checked against the
/// spans beyond what the standard library does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nibble/core/bf16.hpp>
#include <nibble/fp8/e4m3.hpp>
#include <nibble/nvfp4/e2m1.hpp>
#include <span>
#include <vector>

namespace nibble::ref {

/// A float array as fp64.
[[nodiscard]] inline std::vector<double> widen(std::span<const float> values) {
  return std::vector<double>(values.begin(), values.end());
}

/// W [n][k], decoded.
struct matrix {
  int n = 0;
  int k = 0;
  std::vector<double> values;

  [[nodiscard]] double at(int row, int column) const {
    return values[static_cast<std::size_t>(row) * static_cast<std::size_t>(k) +
                  static_cast<std::size_t>(column)];
  }
};

/// w = e2m1(code) · e4m3(block scale) · global. \param codes [n][k/2], low nibble even  \param block_scales
/// [n][k/16]
[[nodiscard]] inline matrix decode_nvfp4(std::span<const std::uint8_t> codes,
                                         std::span<const std::uint8_t> block_scales, float global_scale,
                                         int n, int k) {
  matrix out{n, k, std::vector<double>(static_cast<std::size_t>(n) * static_cast<std::size_t>(k))};
  for (std::size_t i = 0; i < out.values.size(); ++i) {
    const std::uint8_t byte = codes[i / 2];
    const unsigned code = i % 2 == 0 ? e2m1::unpack_even(byte) : e2m1::unpack_odd(byte);
    out.values[i] =
        static_cast<double>(e2m1::decode(code)) * e4m3::decode(block_scales[i / 16]) * global_scale;
  }
  return out;
}

/// w = e4m3(byte) · scale. \param weight [n][k]
[[nodiscard]] inline matrix decode_fp8(std::span<const std::uint8_t> weight, float scale, int n, int k) {
  matrix out{n, k, std::vector<double>(static_cast<std::size_t>(n) * static_cast<std::size_t>(k))};
  for (std::size_t i = 0; i < out.values.size(); ++i)
    out.values[i] = static_cast<double>(e4m3::decode(weight[i])) * scale;
  return out;
}

/// w = bf16(bits). \param weight [n][k]
[[nodiscard]] inline matrix decode_bf16(std::span<const std::uint16_t> weight, int n, int k) {
  matrix out{n, k, std::vector<double>(static_cast<std::size_t>(n) * static_cast<std::size_t>(k))};
  for (std::size_t i = 0; i < out.values.size(); ++i) out.values[i] = bf16::decode(weight[i]);
  return out;
}

/// y[m][n] = x[m][k] · Wᵀ.
[[nodiscard]] inline std::vector<double> linear(const matrix& weight, std::span<const double> x, int m) {
  std::vector<double> y(static_cast<std::size_t>(m) * static_cast<std::size_t>(weight.n));
  for (int row = 0; row < m; ++row)
    for (int i = 0; i < weight.n; ++i) {
      double sum = 0;
      for (int j = 0; j < weight.k; ++j)
        sum += x[static_cast<std::size_t>(row) * weight.k + j] * weight.at(i, j);
      y[static_cast<std::size_t>(row) * weight.n + i] = sum;
    }
  return y;
}

/// The logits of hidden states that went through the final norm: no bias, no cap, no scale.
[[nodiscard]] inline std::vector<double> lm_head(const matrix& weight, std::span<const double> normed,
                                                 int m) {
  return linear(weight, normed, m);
}

}  // namespace nibble::ref
