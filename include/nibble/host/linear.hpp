// SPDX-License-Identifier: Apache-2.0
/// \file
/// y[m][n] = x[m][k] · W[n][k]ᵀ for weights that rest in NVFP4, FP8 or bfloat16; activations are fp32.
///
/// Weights are read as a checkpoint stores them, in place: pointers need no alignment and may lie in a
/// mapped file. They are decoded exactly and products are summed in fp32. The order of that sum depends on
/// k and the instruction set alone: a row's result is the same bits for every m and any number of threads.
/// Cost: the weights are read from memory once for each call (from cache again for each 4 rows of x).
#pragma once

#include <cstddef>
#include <cstdint>
#include <nibble/geometry/geometry.hpp>
#include <nibble/host/thread_pool.hpp>

namespace nibble::host {

/// NVFP4: value = e2m1(code) · e4m3(block scale) · global scale. k is a multiple of 16.
struct nvfp4_view {
  const std::uint8_t* codes = nullptr;         ///< [n][k/2], the even column in the low nibble
  const std::uint8_t* block_scales = nullptr;  ///< [n][k/16], E4M3 without NaN (the loader refuses those)
  float global_scale = 1;                      ///< multiplies; invert the one of compressed-tensors first
  int n = 0;
  int k = 0;
};

/// FP8: value = e4m3(byte) · scale, without NaN. Any k.
struct fp8_view {
  const std::uint8_t* weight = nullptr;  ///< [n][k]
  float scale = 1;                       ///< multiplies
  int n = 0;
  int k = 0;
};

/// bfloat16. Any k.
struct bf16_view {
  const std::uint16_t* weight = nullptr;  ///< [n][k]; need not even be 2-byte aligned
  int n = 0;
  int k = 0;
};

/// Any of the three. A default-made one is empty (n = k = 0).
struct weight_view {
  weight_format format = weight_format::bf16;
  const void* data = nullptr;                  ///< codes or weights
  const std::uint8_t* block_scales = nullptr;  ///< NVFP4 only
  float scale = 1;                             ///< global scale or FP8 scale; 1 for bfloat16
  int n = 0;
  int k = 0;

  weight_view() = default;
  weight_view(const nvfp4_view& v)
      : format(weight_format::nvfp4),
        data(v.codes),
        block_scales(v.block_scales),
        scale(v.global_scale),
        n(v.n),
        k(v.k) {}
  weight_view(const fp8_view& v)
      : format(weight_format::fp8), data(v.weight), scale(v.scale), n(v.n), k(v.k) {}
  weight_view(const bf16_view& v) : data(v.weight), n(v.n), k(v.k) {}

  /// Bytes that hold the weights.
  [[nodiscard]] std::size_t bytes() const noexcept {
    const std::size_t values = static_cast<std::size_t>(n) * static_cast<std::size_t>(k);
    if (format == weight_format::nvfp4) return values / 2 + values / 16;
    return format == weight_format::fp8 ? values : values * 2;
  }
};

/// y[r][i] = Σ_j x[r][j] · W[i][j] for r < m.
/// \param x [m][k], rows `ldx` floats apart  \param y [m][n], rows `ldy` floats apart; must not overlap x
/// \param m at least 0
void linear(thread_pool& pool, const weight_view& weight, const float* x, std::ptrdiff_t ldx, int m, float* y,
            std::ptrdiff_t ldy);

/// The same over dense rows: ldx = k, ldy = n.
inline void linear(thread_pool& pool, const weight_view& weight, const float* x, int m, float* y) {
  linear(pool, weight, x, weight.k, m, y, weight.n);
}

/// Row `row` of the matrix as fp32: an embedding look-up. `out` takes k floats. 0 <= row < n.
void dequantize_row(const weight_view& weight, std::int64_t row, float* out);

}  // namespace nibble::host
