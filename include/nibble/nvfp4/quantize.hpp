// SPDX-License-Identifier: Apache-2.0
/// \file
/// NVFP4 quantisation of a matrix: value = e2m1(code) · e4m3(block scale) · global scale, 16 values a block.
///
/// Formulas (all in binary32, round to nearest even, in this order):
///     global = max(max|W| / 2688, 1e-12)                                2688 = 6 · 448
///     scale  = e4m3(clamp(max|block| / 6 / global, 2^-9, 448))
///     code   = e2m1(w / (decode(scale) · global))
/// Elements are rounded against the scale as stored, not against the scale before rounding. An all-zero
/// block gets the smallest scale and codes 0; an all-zero matrix the global scale 1e-12.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nibble/core/bit_cast.hpp>
#include <nibble/core/config.hpp>
#include <nibble/core/error.hpp>
#include <nibble/fp8/e4m3.hpp>
#include <nibble/nvfp4/e2m1.hpp>
#include <span>
#include <string>
#include <vector>

namespace nibble::nvfp4 {

/// Values that share one block scale.
inline constexpr int block_size = 16;

/// The global scale of a matrix whose largest magnitude is `largest` (finite, not negative).
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr float global_scale_of(float largest) noexcept {
  const float scale = largest / 2688.0f;
  return scale > 1e-12f ? scale : 1e-12f;
}

/// The stored scale of a block whose largest magnitude is `largest`.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t block_scale_of(float largest,
                                                                       float global_scale) noexcept {
  const float scale = largest / 6.0f / global_scale;
  return e4m3::encode(scale < e4m3::min_subnormal ? e4m3::min_subnormal
                                                  : (scale > e4m3::max_finite ? e4m3::max_finite : scale));
}

/// The code of one element under a stored block scale.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint8_t code_of(float value, std::uint8_t block_scale,
                                                                float global_scale) noexcept {
  return e2m1::encode(value / (e4m3::decode(block_scale) * global_scale));
}

/// The value of one element: (e2m1 · e4m3) is exact in binary32, the global scale rounds once.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr float value_of(unsigned code, std::uint8_t block_scale,
                                                          float global_scale) noexcept {
  return e2m1::decode(code) * e4m3::decode(block_scale) * global_scale;
}

/// A quantised matrix of `n` rows and `k` columns, all row-major.
struct quantized_matrix {
  int n = 0;
  int k = 0;
  std::vector<std::uint8_t> codes;         ///< [n][k/2], the even column in the low nibble
  std::vector<std::uint8_t> block_scales;  ///< [n][k/16], E4M3
  float global_scale = 0;                  ///< multiplies
};

/// Quantises `weights` [n][k] with one global scale.
/// \throws nibble::error when k is not a multiple of 16, when the span is not n·k long, or when a value is
///         not finite (the text names its row and column).
[[nodiscard]] inline quantized_matrix quantize(std::span<const float> weights, int n, int k) {
  if (n < 0 || k < 0 || k % block_size != 0)
    throw error("NVFP4 quantisation of a " + std::to_string(n) + " x " + std::to_string(k) +
                " matrix: the columns must be a multiple of 16; pad the matrix");
  const auto rows = static_cast<std::size_t>(n), columns = static_cast<std::size_t>(k);
  if (weights.size() != rows * columns)
    throw error("NVFP4 quantisation of a " + std::to_string(n) + " x " + std::to_string(k) + " matrix: got " +
                std::to_string(weights.size()) + " values, expected " + std::to_string(rows * columns));
  float largest = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]))
      throw error("NVFP4 quantisation: the value at row " + std::to_string(i / columns) + ", column " +
                  std::to_string(i % columns) + " is not finite; only finite weights can be quantised");
    largest = std::max(largest, std::fabs(weights[i]));
  }
  quantized_matrix out;
  out.n = n;
  out.k = k;
  out.codes.resize(rows * columns / 2);
  out.block_scales.resize(rows * columns / block_size);
  out.global_scale = global_scale_of(largest);
  for (std::size_t b = 0; b < out.block_scales.size(); ++b) {
    const float* block = weights.data() + b * block_size;
    float block_largest = 0;
    for (int i = 0; i < block_size; ++i) block_largest = std::max(block_largest, std::fabs(block[i]));
    const std::uint8_t scale = block_scale_of(block_largest, out.global_scale);
    out.block_scales[b] = scale;
    for (int i = 0; i < block_size; i += 2)
      out.codes[b * 8 + static_cast<std::size_t>(i / 2)] = e2m1::pack(
          code_of(block[i], scale, out.global_scale), code_of(block[i + 1], scale, out.global_scale));
  }
  return out;
}

/// The values of a quantised matrix, [n][k].
/// \param codes [n][k/2]  \param block_scales [n][k/16]  \param global_scale multiplies
/// \throws nibble::error when the spans do not fit n and k.
[[nodiscard]] inline std::vector<float> dequantize(std::span<const std::uint8_t> codes,
                                                   std::span<const std::uint8_t> block_scales,
                                                   float global_scale, int n, int k) {
  const auto rows = static_cast<std::size_t>(std::max(n, 0)),
             columns = static_cast<std::size_t>(std::max(k, 0));
  if (n < 0 || k < 0 || k % block_size != 0 || codes.size() != rows * columns / 2 ||
      block_scales.size() != rows * columns / block_size)
    throw error("NVFP4 dequantisation of a " + std::to_string(n) + " x " + std::to_string(k) +
                " matrix: got " + std::to_string(codes.size()) + " code bytes and " +
                std::to_string(block_scales.size()) +
                " block scales; expected n*k/2 and n*k/16 with k a multiple of 16");
  std::vector<float> out(rows * columns);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint8_t byte = codes[i / 2];
    const unsigned code = i % 2 == 0 ? e2m1::unpack_even(byte) : e2m1::unpack_odd(byte);
    out[i] = value_of(code, block_scales[i / block_size], global_scale);
  }
  return out;
}

/// The values of a quantised matrix, [n][k].
[[nodiscard]] inline std::vector<float> dequantize(const quantized_matrix& matrix) {
  return dequantize(matrix.codes, matrix.block_scales, matrix.global_scale, matrix.n, matrix.k);
}

}  // namespace nibble::nvfp4
