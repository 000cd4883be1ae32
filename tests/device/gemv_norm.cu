// SPDX-License-Identifier: Apache-2.0
// RMSNorm in the input of the matrix-vector kernels, and the epilogue with a weight for each token.
#include "gemv_check.cuh"
#include "nibble/nvfp4/linear_family.cuh"

using namespace nibble;
using device_test::add;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8, b16 = weight_format::bf16;

template <resident_layout Layout, class Epilogue, class Input>
bool normed(const char* group) {
  return add(group, Layout.shape.name() + (Input::norm_bytes == 4 ? ", fp32 norm" : ""),
             [] { device_test::check_selected<Layout, Epilogue, Input>(Layout.shape.n + Layout.shape.k); });
}
using bf_norm = rms_normed<bf>;
using float_norm = rms_normed<float>;

const bool registered[] = {
    normed<resident_layout{fused(256, f4, 33, 50)}, store<bf>, bf_norm>("tiny"),
    normed<resident_layout{matrix(48, 256, f8)}, store<float>, float_norm>("tiny"),
    normed<resident_layout{matrix(31, 256, b16)}, add_residual, bf_norm>("tiny"),
    normed<resident_layout{matrix(64, 272, f4)}, store<float>, float_norm>("tiny"),
    normed<resident_layout{matrix(80, 1024, b16)}, store<bf>, float_norm>("tiny"),
    normed<resident_layout{fused(1024, b16, 40, 40), row_order::gate_up}, swiglu, bf_norm>("tiny"),
    normed<resident_layout{matrix(4000, 48, f8)}, store<bf>, bf_norm>("tiny"),
    normed<resident_layout{matrix(48, 256, f8)}, add_scaled_residual, plain_input>("tiny"),
    normed<resident_layout{matrix(257, 512, b16)}, add_scaled_residual, plain_input>("tiny"),
    normed<resident_layout{fused(512, b16, 136, 136), row_order::gate_up}, swiglu, plain_input>("tiny"),
    normed<resident_layout{fused(2048, f4, 8192, 4096)}, store<bf>, bf_norm>("real"),
    normed<resident_layout{fused(2048, f4, 8192, 4096)}, store<bf>, float_norm>("real"),
    normed<resident_layout{fused(2048, f4, 8192, 512, 512)}, store<bf>, bf_norm>("real"),
    normed<resident_layout{fused(2048, f8, 8192, 4096)}, store<bf>, bf_norm>("real"),
    normed<resident_layout{fused(2048, f8, 8192, 512, 512)}, store<bf>, float_norm>("real"),
    normed<resident_layout{matrix(257, 2048, b16)}, store<float>, bf_norm>("real"),
    normed<resident_layout{matrix(2048, 4096, f8)}, add_residual, bf_norm>("real"),
    normed<resident_layout{matrix(2048, 4096, f4)}, add_residual, bf_norm>("real"),
    normed<resident_layout{matrix(65536, 2048, f4)}, store_and_argmax, bf_norm>("real"),
};

// The rounding of x · weight to bf16 is the only step besides fp64's: against the norm in fp64, then the
// product.
const bool exact = add("tiny", "a norm, then a product, to the accuracy of bf16", [] {
  constexpr resident_layout layout{matrix(64, 512, b16)};
  constexpr int n = 64, k = 512;
  const device_test::random_matrix w(layout, 9);
  const auto x = device_test::random_activations(k, 10);
  const auto norm = device_test::random_norm<float>(k, 11);
  const device_test::buffer<std::uint8_t> tiles(w.tiles());
  const device_test::buffer<std::uint16_t> dx(x);
  const device_test::buffer<float> d_norm(norm), y(n);
  gemv_params<store<float>, float_norm> p;
  p.tiles = tiles.data(), p.x = reinterpret_cast<const bf*>(dx.data()), p.ldx = k, p.m = 1,
  p.scale[0] = w.scale[0];
  p.out = {y.data(), n}, p.in = {d_norm.data(), 1e-6f};
  using family = linear_family<layout, store<float>, float_norm>;
  NIBBLE_GOOD(family::for_each_kernel([](auto kernel, int threads, std::size_t bytes, const char* name) {
    return prepare(kernel, threads, bytes, name);
  }));
  NIBBLE_GOOD(family::launch(p, launch_options{device_test::stream()}));
  const auto got = y.read();
  double squares = 0;
  for (const auto v : x) squares += static_cast<double>(bf16::decode(v)) * bf16::decode(v);
  const double factor = 1 / std::sqrt(squares / k + 1e-6);
  for (int row = 0; row < n; ++row) {
    const auto values = w.row(row);
    double want = 0, power = 0;
    for (int i = 0; i < k; ++i) {
      const double part = values[i] * bf16::decode(x[i]) * static_cast<double>(norm[i]) * factor;
      want += part, power += part * part;
    }
    // 512 roundings of at most 2^-9 each, independent of one another: six standard deviations.
    NIBBLE_CHECK(std::fabs(got[row] - want) < 6 * 0x1p-9 * std::sqrt(power / 3));
  }
  p.m = 17;
  NIBBLE_CHECK(family::launch(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
  p.m = 1, p.in.weight = nullptr;
  NIBBLE_CHECK(family::launch(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
});
}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
