// SPDX-License-Identifier: Apache-2.0
/// \file
/// One layout and epilogue through its kernels: against fp64, poisoned outputs, exact buffers, equal rows.
#pragma once

#include <type_traits>

#include "device_test.cuh"
#include "nibble/nvfp4/gemv_launch.cuh"
#include "random_matrix.hpp"

namespace device_test {

template <class Epilogue>
struct output_of {
  using type = float;
};
template <>
struct output_of<nibble::store<__nv_bfloat16>> {
  using type = __nv_bfloat16;
};
template <>
struct output_of<nibble::add_residual> {
  using type = __nv_bfloat16;
};
template <>
struct output_of<nibble::add_scaled_residual> {
  using type = __nv_bfloat16;
};
template <>
struct output_of<nibble::swiglu> {
  using type = __nv_bfloat16;
};

/// Norm weights of a test: bf16 or fp32, some of them negative.
template <class Weight>
std::vector<Weight> random_norm(int k, std::uint64_t seed) {
  std::vector<Weight> weights;
  fast_random random{seed};
  for (int i = 0; i < k; ++i) {
    const float v = static_cast<float>(random() >> 40) * 0x1p-24f * 2.5f - 0.5f;
    if constexpr (std::is_same_v<Weight, float>)
      weights.push_back(v);
    else
      weights.push_back(__float2bfloat16_rn(v));
  }
  return weights;
}

inline double value_of(float v) { return v; }
inline double value_of(__nv_bfloat16 v) { return __bfloat162float(v); }

/// A launcher under test: (params, m, options) → status.
template <nibble::resident_layout Layout, class Epilogue>
using launcher = nibble::status (*)(nibble::gemv_params<Epilogue>, int, const nibble::launch_options&);

/// Runs `launch` for each m of `counts`. Row t of every run must be the same bits.
///
/// With an RMSNorm in the input x · weight is rounded to bf16, a rounding a reference knows, and everything
/// else is fp64; that this is the norm followed by the product to bf16's accuracy is checked beside.
template <nibble::resident_layout Layout, class Epilogue, class Input = nibble::plain_input, class Launch>
void check_layout(const std::vector<int>& counts, int blocks, Launch launch, std::uint64_t seed) {
  using Out = typename output_of<Epilogue>::type;
  constexpr int rows = nibble::layout_constants<Layout>::rows, k = Layout.shape.k;
  constexpr bool scaled = std::is_same_v<Epilogue, nibble::add_scaled_residual>;
  constexpr bool residual = scaled || std::is_same_v<Epilogue, nibble::add_residual>;
  constexpr bool argmax = std::is_same_v<Epilogue, nibble::store_and_argmax>;
  constexpr bool gated = std::is_same_v<Epilogue, nibble::swiglu>;
  const random_matrix w(Layout, seed);
  int most = 0;
  for (const int m : counts) most = std::max(most, m);
  const auto x = random_activations(static_cast<std::size_t>(most) * k, seed + 1);
  const auto r = random_activations(static_cast<std::size_t>(most) * rows, seed + 2);
  auto product_x = x;
  std::vector<double> factor(static_cast<std::size_t>(most), 1.0);
  constexpr float eps = 1e-5f;
  using norm_weight = std::conditional_t<Input::norm_bytes == 4, float, __nv_bfloat16>;
  const auto norm = random_norm<norm_weight>(k, seed + 3);
  if constexpr (Input::normed)
    for (int t = 0; t < most; ++t) {
      double squares = 0;
      for (int i = 0; i < k; ++i) {
        auto& v = product_x[static_cast<std::size_t>(t) * k + i];
        const double value = nibble::bf16::decode(v);
        squares += value * value;
        v = nibble::bf16::encode(static_cast<float>(value) * static_cast<float>(value_of(norm[i])));
      }
      factor[static_cast<std::size_t>(t)] = 1 / std::sqrt(squares / k + static_cast<double>(eps));
    }
  auto want = w.multiply(product_x, most);
  for (std::size_t i = 0; i < want.y.size(); ++i) {
    want.y[i] *= factor[i / Layout.shape.n];
    want.magnitude[i] *= factor[i / Layout.shape.n];
  }
  std::vector<float> token_weight(static_cast<std::size_t>(most));
  for (int t = 0; t < most; ++t)
    token_weight[static_cast<std::size_t>(t)] = 0.75f - 0.1f * static_cast<float>(t % 9);
  const buffer<float> d_token_weight(token_weight);
  const buffer<norm_weight> d_norm(norm);
  const buffer<std::uint8_t> tiles(w.tiles());

  std::vector<Out> first_rows(static_cast<std::size_t>(most) * rows);
  std::vector<bool> have(static_cast<std::size_t>(most), false);
  for (const int m : counts) {
    // Rows with NaN between them, and no byte more than the last row needs.
    const int ldx = k + (seed % 2 ? 8 : 0), ldy = rows + (rows % 2 == 0 ? 2 : 3);
    std::vector<std::uint16_t> padded(static_cast<std::size_t>(m - 1) * ldx + k, 0xFFFF);
    std::vector<std::uint16_t> residuals(static_cast<std::size_t>(m - 1) * ldy + rows, 0xFFFF);
    for (int t = 0; t < m; ++t) {
      std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(t) * k, k,
                  padded.begin() + static_cast<std::ptrdiff_t>(t) * ldx);
      std::copy_n(r.begin() + static_cast<std::ptrdiff_t>(t) * rows, rows,
                  residuals.begin() + static_cast<std::ptrdiff_t>(t) * ldy);
    }
    const buffer<std::uint16_t> dx(padded), dr(residuals);
    const buffer<Out> y(static_cast<std::size_t>(m - 1) * ldy + rows);
    const buffer<unsigned long long> keys(static_cast<std::size_t>(m) * std::max(blocks, 1));
    nibble::gemv_params<Epilogue, Input> p;
    if constexpr (Input::normed) p.in = {d_norm.data(), eps};
    p.tiles = tiles.data();
    p.x = reinterpret_cast<const __nv_bfloat16*>(dx.data());
    p.ldx = ldx;
    p.m = m;
    for (int i = 0; i < nibble::max_segments; ++i) p.scale[i] = w.scale[i];
    p.out.y = y.data();
    p.out.ldy = ldy;
    if constexpr (residual) {
      p.out.residual = reinterpret_cast<const __nv_bfloat16*>(dr.data());
      p.out.ldr = ldy;
    }
    if constexpr (scaled) p.out.weight = m % 2 != 0 ? nullptr : d_token_weight.data();
    if constexpr (argmax) {
      p.out.keys = keys.data();
      p.out.blocks = blocks;
    }
    for (int repeat = 0; repeat < 2; ++repeat)  // the second call finds what the first left behind
      NIBBLE_GOOD(launch(p, m, nibble::launch_options{stream(), chained}));
    const std::vector<Out> got = y.read();
    int wrong = 0, outside = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const int t = static_cast<int>(i) / ldy, row = static_cast<int>(i) % ldy;
      if (row >= rows) {
        outside += untouched(got[i]) ? 0 : 1;
        continue;
      }
      const auto at = [&](int n_row) { return static_cast<std::size_t>(t) * Layout.shape.n + n_row; };
      double expected = want.y[at(row)], magnitude = want.magnitude[at(row)];
      if constexpr (gated) {
        const double gate = want.y[at(row)], up = want.y[at(row + rows)], s = gate / (1 + std::exp(-gate));
        // |d silu| ≤ 1.1 |d gate|; __expf and the division add a few units of 2^-22 of the value.
        expected = s * up;
        magnitude = 1.1 * std::fabs(up) * want.magnitude[at(row)] +
                    std::fabs(s) * want.magnitude[at(row + rows)] + 8 * std::fabs(expected);
      }
      if constexpr (scaled) {
        const double f = m % 2 != 0 ? 1.0 : static_cast<double>(token_weight[static_cast<std::size_t>(t)]);
        expected *= f, magnitude *= std::fabs(f);
      }
      if constexpr (residual) expected += nibble::bf16::decode(r[static_cast<std::size_t>(t) * rows + row]);
      if (!close(value_of(got[i]), expected, magnitude, k, !std::is_same_v<Out, float>)) {
        if (++wrong == 1)
          std::printf("  %s m=%d token %d row %d: got %g, want %g\n", Layout.shape.name().c_str(), m, t, row,
                      value_of(got[i]), expected);
      }
      auto& before = first_rows[static_cast<std::size_t>(t) * rows + row];
      if (scaled)
        continue;  // other weights in other batches
      else if (!have[static_cast<std::size_t>(t)])
        before = got[i];
      else if (std::memcmp(&before, &got[i], sizeof(Out)) != 0 && ++wrong == 1)
        std::printf("  %s m=%d token %d row %d: differs from a smaller batch\n", Layout.shape.name().c_str(),
                    m, t, row);
    }
    for (int t = 0; t < m; ++t) have[static_cast<std::size_t>(t)] = true;
    check(wrong == 0 && outside == 0, Layout.shape.name().c_str(), __FILE__, __LINE__);
    if constexpr (argmax) {
      const auto found = keys.read();
      for (int t = 0; t < m; ++t) {
        unsigned long long best = 0;
        for (int b = 0; b < blocks; ++b)
          best = std::max(best, found[static_cast<std::size_t>(t) * blocks + b]);
        const float* row = reinterpret_cast<const float*>(got.data()) + static_cast<std::size_t>(t) * ldy;
        NIBBLE_CHECK(nibble::largest_key_row(best) ==
                     static_cast<int>(std::max_element(row, row + rows) - row));
      }
    }
  }
}

/// All five kernels of a layout, as select_gemv chooses them; m = 16 + 5 takes two launches.
template <nibble::resident_layout Layout, class Epilogue, class Input = nibble::plain_input>
void check_selected(std::uint64_t seed) {
  nibble::kernel_info info[5];
  NIBBLE_GOOD((nibble::prepare_gemv<Layout, Epilogue, nibble::default_device, Input>(info)));
  for (const auto& i : info) NIBBLE_CHECK(i.local_bytes == 0);
  constexpr int blocks = nibble::select_gemv(Layout, 1, nibble::default_device, Input::norm_bytes).grid;
  check_layout<Layout, Epilogue, Input>(
      std::is_same_v<Epilogue, nibble::store_and_argmax> ? std::vector<int>{1, 2, 8, 16}
      : quick()                                          ? std::vector<int>{1, 2, 4, 8, 16}
                                                         : std::vector<int>{1, 2, 3, 7, 8, 9, 16, 21},
      blocks,
      [](auto p, int m, const auto& o) {
        return nibble::launch_gemv<Layout, Epilogue, nibble::default_device>(p, m, o);
      },
      seed);
}

/// One kernel with a policy of the test's choosing.
template <nibble::resident_layout Layout, nibble::gemv_policy Policy, class Epilogue>
void check_policy(std::uint64_t seed) {
  nibble::kernel_info info;
  NIBBLE_GOOD((nibble::prepare_gemv_with<Layout, Policy, Epilogue>(&info)));
  NIBBLE_CHECK(info.local_bytes == 0);
  const int c = Policy.columns;
  check_layout<Layout, Epilogue>(
      c == 1 ? std::vector<int>{1} : std::vector<int>{c / 2, c - 1, c}, Policy.grid,
      [](auto p, int, const auto& o) { return nibble::launch_gemv_with<Layout, Policy, Epilogue>(p, o); },
      seed);
}

}  // namespace device_test
