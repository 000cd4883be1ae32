// SPDX-License-Identifier: Apache-2.0
// C024: every variant of the matrix-vector kernels writes every row of its output in the first call and in
// the second, whatever the number of rows: grids follow from the tile that was chosen.
#include <algorithm>
#include <cmath>

#include "gemv_check.cuh"

using namespace nibble;
using bf = __nv_bfloat16;

namespace {

constexpr auto f4 = weight_format::nvfp4;
constexpr int k = 256;

constexpr gemv_policy of(gemv_variant variant, int columns, int warps, int grid, int depth, int stages,
                         int batch) {
  gemv_policy p;
  p.variant = variant, p.columns = columns, p.warps = warps, p.grid = grid;
  p.depth = depth, p.stages = stages, p.batch = batch, p.whole_rows = true;
  return p;
}

template <resident_layout Layout, gemv_policy Policy>
void twice(int m) {
  const device_test::random_matrix w(Layout, static_cast<std::uint64_t>(Layout.shape.n));
  const device_test::buffer<std::uint8_t> tiles(w.tiles());
  const auto x = device_test::random_activations(static_cast<std::size_t>(m) * k, 3);
  const device_test::buffer<std::uint16_t> dx(x);
  device_test::buffer<float> y(static_cast<std::size_t>(m) * Layout.shape.n);
  const auto want = w.multiply(x, m);
  NIBBLE_GOOD((prepare_gemv_with<Layout, Policy, store<float>>()));
  gemv_params<store<float>> p;
  p.tiles = tiles.data(), p.x = reinterpret_cast<const bf*>(dx.data()), p.ldx = k, p.m = m;
  for (int i = 0; i < max_segments; ++i) p.scale[i] = w.scale[i];
  p.out = {y.data(), Layout.shape.n};
  for (int call = 0; call < 2; ++call) {
    y.poison();  // NaN in every element
    NIBBLE_GOOD(
        (launch_gemv_with<Layout, Policy>(p, launch_options{device_test::stream(), device_test::chained})));
    int unwritten = 0, wrong = 0;
    const auto got = y.read();
    for (std::size_t i = 0; i < got.size(); ++i) {
      unwritten += std::isnan(got[i]) ? 1 : 0;
      wrong += device_test::close(got[i], want.y[i], want.magnitude[i], k, false) ? 0 : 1;
    }
    if (unwritten != 0 || wrong != 0)
      std::printf("  %s, m = %d, call %d: %d unwritten, %d wrong\n", Layout.shape.name().c_str(), m, call,
                  unwritten, wrong);
    NIBBLE_CHECK(unwritten == 0 && wrong == 0);
  }
}

template <int N>
void all_variants() {
  constexpr resident_layout layout{matrix(N, k, f4)};
  constexpr int few = std::min(3, layout.row_tiles());
  twice<layout, select_gemv(layout, 1)>(1);
  twice<layout, select_gemv(layout, 8)>(5);
  twice<layout, select_gemv(layout, 16)>(16);
  twice<layout, of(gemv_variant::registers, 8, 2, few, 1, 0, 0)>(8);
  if constexpr (default_device.has_bulk_copies()) {
    twice<layout, of(gemv_variant::one_shot, 8, 2, few, 1, 0, 0)>(8);
    twice<layout, of(gemv_variant::ring, 8, 2, few, 1, 2, 2)>(8);
    twice<layout, of(gemv_variant::ring, 16, 2, 1, 1, 3, 1)>(9);
  }
}

const bool registered = device_test::add("twice", "C024: rows of every variant in two calls", [] {
  all_variants<1>();
  all_variants<15>();
  all_variants<16>();
  all_variants<17>();
  all_variants<257>();
});

}  // namespace

int main(int argc, char** argv) { return registered ? device_test::run(argc, argv) : 1; }
