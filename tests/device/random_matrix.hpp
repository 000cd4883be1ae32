// SPDX-License-Identifier: Apache-2.0
/// \file
/// Random weights with every kind of block scale, and products of them in fp64.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "nibble/core/bf16.hpp"
#include "nibble/core/parallel.hpp"
#include "nibble/fp8/layout.hpp"
#include "nibble/kernels/bf16_layout.hpp"
#include "nibble/nvfp4/layout.hpp"
#include "nibble/ref/matrix.hpp"

namespace device_test {

/// splitmix64: a seed for each row, so that rows can be made in parallel.
struct fast_random {
  std::uint64_t state;
  std::uint64_t operator()() {
    std::uint64_t z = (state += 0x9E37'79B9'7F4A'7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBull;
    return z ^ (z >> 31);
  }
};

struct random_matrix {
  nibble::resident_layout layout;
  std::vector<std::uint8_t> codes, block_scales;
  std::vector<std::uint16_t> words;
  float scale[nibble::max_segments] = {};

  random_matrix(const nibble::resident_layout& of, std::uint64_t seed) : layout(of) {
    const auto& g = layout.shape;
    const auto rows = static_cast<std::size_t>(g.n), k = static_cast<std::size_t>(g.k);
    if (g.format == nibble::weight_format::bf16)
      words.resize(rows * k);
    else
      codes.resize(g.code_bytes());
    block_scales.resize(g.block_scale_bytes());
    nibble::parallel_ranges(g.n, g.code_bytes() > 100000 ? 0 : 1, [this, seed, k](int begin, int end) {
      for (int row = begin; row < end; ++row) {
        fast_random random{seed * 1'000'003u + static_cast<std::uint64_t>(row)};
        fill_row(static_cast<std::size_t>(row), k, random);
      }
    });
    for (int i = 0; i < g.segments(); ++i) scale[i] = 0.011f * static_cast<float>(i + 1) + 0.003f;
  }

  [[nodiscard]] std::vector<std::uint8_t> tiles() const {
    std::vector<std::uint8_t> out(layout.bytes(), 0xFF);
    const int workers = out.size() > 200000 ? 0 : 1;
    switch (layout.shape.format) {
      case nibble::weight_format::nvfp4:
        nibble::nvfp4::pack(layout, codes, block_scales, out, workers);
        break;
      case nibble::weight_format::fp8:
        nibble::fp8::pack(layout, codes, out, workers);
        break;
      case nibble::weight_format::bf16:
        nibble::bf16_weights::pack(layout, words, out, workers);
        break;
    }
    return out;
  }

  /// Row `row` in fp64, the segment's scale included.
  [[nodiscard]] std::vector<double> row(int row) const {
    const auto& g = layout.shape;
    const auto r = static_cast<std::size_t>(row), k = static_cast<std::size_t>(g.k);
    int segment = 0;
    while (segment + 1 < g.segments() && row >= g.first_row_of(segment + 1)) ++segment;
    std::vector<double> values;
    if (g.format == nibble::weight_format::nvfp4)
      values = nibble::ref::decode_nvfp4({codes.data() + r * k / 2, k / 2},
                                         {block_scales.data() + r * k / 16, k / 16}, 1.0f, 1, g.k)
                   .values;
    else if (g.format == nibble::weight_format::fp8)
      values = nibble::ref::decode_fp8({codes.data() + r * k, k}, 1.0f, 1, g.k).values;
    else
      values = nibble::ref::decode_bf16({words.data() + r * k, k}, 1, g.k).values;
    for (double& v : values) v *= static_cast<double>(scale[segment]);
    return values;
  }

  struct product {
    std::vector<double> y;          ///< [m][n]
    std::vector<double> magnitude;  ///< Σ |w x|, the yardstick of rounding errors
  };
  /// x [m][k] dense.
  [[nodiscard]] product multiply(const std::vector<std::uint16_t>& x, int m) const {
    const auto n = static_cast<std::size_t>(layout.shape.n), k = static_cast<std::size_t>(layout.shape.k);
    product p{std::vector<double>(static_cast<std::size_t>(m) * n),
              std::vector<double>(static_cast<std::size_t>(m) * n)};
    std::vector<double> wide(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) wide[i] = nibble::bf16::decode(x[i]);
    nibble::parallel_ranges(layout.shape.n, n * k > 200000 ? 0 : 1, [&, this](int begin, int end) {
      for (int r = begin; r < end; ++r) {
        const std::vector<double> w = row(r);
        for (int t = 0; t < m; ++t) {
          double sum = 0, magnitude = 0;
          const double* xt = wide.data() + static_cast<std::size_t>(t) * k;
          for (std::size_t c = 0; c < k; ++c) {
            sum += w[c] * xt[c];
            magnitude += std::fabs(w[c] * xt[c]);
          }
          p.y[static_cast<std::size_t>(t) * n + static_cast<std::size_t>(r)] = sum;
          p.magnitude[static_cast<std::size_t>(t) * n + static_cast<std::size_t>(r)] = magnitude;
        }
      }
    });
    return p;
  }

 private:
  void fill_row(std::size_t row, std::size_t k, fast_random& random) {
    switch (layout.shape.format) {
      case nibble::weight_format::nvfp4:
        for (std::size_t i = 0; i < k / 2; ++i) codes[row * k / 2 + i] = static_cast<std::uint8_t>(random());
        for (std::size_t b = 0; b < k / 16; ++b) {
          // Ordinary scales mostly; every sixteenth block any finite byte: zero, subnormal, negative, huge.
          const std::uint64_t v = random();
          std::uint8_t s = static_cast<std::uint8_t>(40 + (v >> 8) % 24);
          if ((v & 15) == 0) s = static_cast<std::uint8_t>((v >> 8) % 72);
          if ((v & 255) == 16) s = static_cast<std::uint8_t>((v >> 8) % 127);
          if ((v & 31) == 1) s |= 0x80;
          block_scales[row * k / 16 + b] = s;
        }
        break;
      case nibble::weight_format::fp8:
        for (std::size_t i = 0; i < k; ++i) {
          const std::uint64_t v = random();
          std::uint8_t b = static_cast<std::uint8_t>(v);
          if ((v >> 8) % 8 != 0) b &= 0xBF;  // magnitudes below 2
          if ((b & 0x7F) == 0x7F) b = 0;
          codes[row * k + i] = b;
        }
        break;
      case nibble::weight_format::bf16:
        for (std::size_t i = 0; i < k; ++i)
          words[row * k + i] =
              nibble::bf16::encode(static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-53 - 0.5));
        break;
    }
  }
};

/// Roughly normal bf16 activations, some exact zeros, some tiny.
inline std::vector<std::uint16_t> random_activations(std::size_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> x(count);
  fast_random random{seed};
  for (auto& v : x) {
    double s = 0;
    for (int i = 0; i < 4; ++i) s += static_cast<double>(random() >> 40) * 0x1p-24 - 0.5;
    const std::uint64_t kind = random() % 64;
    v = nibble::bf16::encode(static_cast<float>(kind == 0 ? 0.0 : kind == 1 ? s * 1e-30 : s * 2));
  }
  return x;
}

/// Whether `got` may come from rounding the exact `want`: half a unit of the output's last place (2^-8 of the
/// value at most for bf16, 2^-24 for fp32) and the fp32 sums' own error.
inline bool close(double got, double want, double magnitude, int k, bool bf16_output) {
  const double sum_error = (8 + k / 8) * 0x1p-24 * magnitude;
  return std::fabs(got - want) <=
         (bf16_output ? 0x1.01p-8 : 0x1p-23) * std::fabs(want) + 1.01 * sum_error + 1e-38;
}

}  // namespace device_test
