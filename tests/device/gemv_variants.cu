// SPDX-License-Identifier: Apache-2.0
// Every variant on shapes small enough for a race checker, batch invariance between column classes and
// variants, and the launcher's refusals.
#include "gemv_check.cuh"

using namespace nibble;
using device_test::add;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8, b16 = weight_format::bf16;

constexpr gemv_policy of(gemv_variant variant, int columns, int warps, int grid, int depth = 1,
                         int stages = 0, int batch = 0, bool whole = true) {
  gemv_policy p;
  p.variant = variant, p.columns = columns, p.warps = warps, p.grid = grid;
  p.depth = depth, p.stages = stages, p.batch = batch, p.whole_rows = whole;
  return p;
}
constexpr gemv_policy in_turns(gemv_policy p) {
  p.x_in_turns = true;
  return p;
}
constexpr gemv_policy at_use(gemv_policy p) {
  p.x_at_use = true;
  return p;
}
constexpr gemv_policy rolled(gemv_policy p) {
  p.rolled = true;
  return p;
}
constexpr auto reg = gemv_variant::registers, shot = gemv_variant::one_shot, ring = gemv_variant::ring;

template <resident_layout Layout, gemv_policy Policy, class Epilogue = store<bf>>
bool variant(const char* name) {
  // What this build's devices cannot run is left out.
  if constexpr (default_device.has_bulk_copies() || Policy.variant == gemv_variant::registers)
    return add("variants", name, [] { device_test::check_policy<Layout, Policy, Epilogue>(77); });
  return false;
}
constexpr resident_layout small{matrix(176, 512, f4)}, deep{matrix(80, 1024, f4)},
    eight{matrix(112, 512, f8)}, six{matrix(192, 512, f8)}, wide{matrix(96, 512, b16)};

const bool registered[] = {
    variant<small, of(reg, 8, 4, 3, 3)>("registers, uneven shares"),
    variant<small, of(reg, 1, 2, 11, 2)>("registers, two K tiles a warp"),
    variant<deep, of(reg, 16, 2, 2, 2), store<float>>("registers, four K tiles a warp, 16 tokens"),
    variant<small, of(shot, 8, 4, 3), store<float>>("one shot, whole rows, uneven shares"),
    variant<small, of(shot, 2, 4, 11, 1, 0, 0, false)>("one shot, slices"),
    variant<small, of(shot, 16, 2, 4), add_residual>("one shot, 16 tokens"),
    variant<deep, of(shot, 4, 2, 5)>("one shot, four K tiles a warp"),
    variant<eight, of(shot, 8, 4, 3)>("one shot, fp8"),
    variant<small, of(ring, 8, 4, 2, 1, 2, 4), store_and_argmax>("ring, shorter than its batch pattern"),
    variant<small, of(ring, 1, 2, 2, 1, 4, 4), store<float>>("ring, one token"),
    variant<small, of(ring, 16, 4, 3, 1, 3, 1)>("ring, 16 tokens, single row tiles"),
    variant<eight, of(ring, 4, 2, 2, 1, 2, 2), add_residual>("ring, fp8"),
    variant<wide, of(ring, 8, 4, 2, 1, 2, 4)>("ring, bf16"),
    variant<wide, of(reg, 16, 4, 2, 2)>("registers, bf16"),
    variant<six, rolled(of(reg, 16, 4, 2, 3))>("registers, fp8, a loop over row tiles"),
    variant<six, in_turns(rolled(of(reg, 16, 4, 2, 2))), add_residual>("registers, a loop, x in turns"),
    variant<deep, in_turns(at_use(of(reg, 16, 8, 2, 2)))>("registers, x at use and in turns"),
    variant<small, in_turns(of(shot, 16, 2, 4)), store<float>>("one shot, x in turns"),
    variant<eight, at_use(of(shot, 16, 2, 7, 1, 0, 0, false))>("one shot, fp8, x at use"),
};

// Rows must not depend on variant, grid or column class as long as the K split is one.
template <gemv_policy Policy>
std::vector<float> rows_of(const std::uint8_t* tiles, const bf* x, int m) {
  const device_test::buffer<float> y(static_cast<std::size_t>(m) * small.shape.n);
  gemv_params<store<float>> p;
  p.tiles = tiles, p.x = x, p.ldx = small.shape.k, p.m = m, p.scale[0] = 0.5f,
  p.out = {y.data(), small.shape.n};
  NIBBLE_GOOD((prepare_gemv_with<small, Policy, store<float>>()));
  NIBBLE_GOOD(
      (launch_gemv_with<small, Policy>(p, launch_options{device_test::stream(), launch_chain::plain})));
  auto out = y.read();
  out.resize(static_cast<std::size_t>(small.shape.n));
  return out;
}
const bool invariant = add("variants", "one summation order for every variant and class", [] {
  const device_test::random_matrix w(small, 5);
  const device_test::buffer<std::uint8_t> tiles(w.tiles());
  const device_test::buffer<std::uint16_t> dx(device_test::random_activations(16 * 512, 6));
  const bf* x = reinterpret_cast<const bf*>(dx.data());
  const auto one = rows_of<of(reg, 1, 4, 11)>(tiles.data(), x, 1);
  NIBBLE_CHECK(one == (rows_of<of(reg, 16, 4, 3, 4)>(tiles.data(), x, 16)));
  NIBBLE_CHECK(one == (rows_of<in_turns(of(reg, 16, 4, 3, 4))>(tiles.data(), x, 9)));
  NIBBLE_CHECK(one == (rows_of<rolled(of(reg, 16, 4, 11, 1))>(tiles.data(), x, 16)));
  if constexpr (default_device.has_bulk_copies()) {
    NIBBLE_CHECK(one == (rows_of<of(shot, 8, 4, 3)>(tiles.data(), x, 7)));
    NIBBLE_CHECK(one == (rows_of<in_turns(of(shot, 16, 4, 3))>(tiles.data(), x, 16)));
    NIBBLE_CHECK(one == (rows_of<at_use(of(shot, 16, 4, 3))>(tiles.data(), x, 11)));
    NIBBLE_CHECK(one == (rows_of<of(shot, 2, 4, 11, 1, 0, 0, false)>(tiles.data(), x, 2)));
    NIBBLE_CHECK(one == (rows_of<of(ring, 4, 4, 2, 1, 3, 4)>(tiles.data(), x, 3)));
  }
});

const bool refusals = add("variants", "a launch that breaks the contract is refused with a sentence", [] {
  const device_test::buffer<std::uint8_t> tiles(small.bytes());
  const device_test::buffer<bf> x(2 * 512 + 8);
  const device_test::buffer<float> y(2 * 176);
  const auto code = [&](int shift_x, int ldx, int ldy, int m, int shift_w, bool default_stream, bool null_y) {
    gemv_params<store<float>> p;
    p.tiles = tiles.data() + shift_w, p.x = x.data() + shift_x, p.ldx = ldx, p.m = m,
    p.out = {null_y ? nullptr : y.data(), ldy};
    const status s = launch_gemv_with<small, of(reg, 2, 4, 3)>(
        p, launch_options{default_stream ? nullptr : device_test::stream()});
    NIBBLE_CHECK(s.ok() || std::strlen(s.text) > 20);
    return s.code;
  };
  NIBBLE_CHECK(code(0, 512, 176, 2, 0, false, false) == status_code::ok);
  NIBBLE_CHECK(code(1, 512, 176, 2, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 511, 176, 2, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 516, 176, 2, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 175, 2, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 177, 2, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 176, 3, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 176, 0, 0, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 176, 2, 16, false, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 176, 2, 0, true, false) == status_code::invalid_argument);
  NIBBLE_CHECK(code(0, 512, 176, 2, 0, false, true) == status_code::invalid_argument);
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
});

const bool tiny_scales = add("variants", "C005 C007: the smallest block scale under a tiny global scale", [] {
  constexpr resident_layout one{matrix(1, 16, f4)};
  const std::vector<std::uint8_t> codes(8, 0x77), scales(1, 0x01);  // sixteen times 6 · 2^-9
  std::vector<std::uint8_t> packed(one.bytes());
  nvfp4::pack(one, codes, scales, packed);
  const device_test::buffer<std::uint8_t> tiles(packed);
  const device_test::buffer<std::uint16_t> x(std::vector<std::uint16_t>(16, bf16::encode(1e4f)));
  const device_test::buffer<float> y(1);
  gemv_params<store<float>> p;
  p.tiles = tiles.data(), p.x = reinterpret_cast<const bf*>(x.data()), p.ldx = 16, p.m = 1,
  p.scale[0] = 1e-5f, p.out = {y.data(), 1};
  NIBBLE_GOOD((launch_gemv<one, store<float>>(p, 1, launch_options{device_test::stream()})));
  const double want = 6 * 0x1p-9 * static_cast<double>(1e-5f) * 16 * bf16::decode(bf16::encode(1e4f));
  NIBBLE_CHECK(std::fabs(y.read()[0] - want) < 1e-6 * want);
});

const bool outlier = add("variants", "C013: an outlier does not swallow the small activations beside it", [] {
  constexpr resident_layout one{matrix(1, 16, f4)};
  const std::vector<std::uint8_t> codes(8, 0x22), scales(1, 0x38);  // sixteen ones
  std::vector<std::uint8_t> packed(one.bytes());
  nvfp4::pack(one, codes, scales, packed);
  std::vector<std::uint16_t> values(16, bf16::encode(1e-2f));
  values[5] = bf16::encode(1e4f);
  const device_test::buffer<std::uint8_t> tiles(packed);
  const device_test::buffer<std::uint16_t> x(values);
  const device_test::buffer<float> y(1);
  gemv_params<store<float>> p;
  p.tiles = tiles.data(), p.x = reinterpret_cast<const bf*>(x.data()), p.ldx = 16, p.m = 1, p.scale[0] = 1,
  p.out = {y.data(), 1};
  NIBBLE_GOOD((launch_gemv<one, store<float>>(p, 1, launch_options{device_test::stream()})));
  double want = 0;
  for (const auto v : values) want += bf16::decode(v);
  NIBBLE_CHECK(std::fabs(y.read()[0] - want) < 1e-2);  // the small ones add up to 0.15
});
}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
