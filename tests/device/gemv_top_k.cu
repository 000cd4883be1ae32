// SPDX-License-Identifier: Apache-2.0
// The K largest logits of every token and block, against the logits themselves: every variant, shares of
// uneven length and shorter than K, ties, NaN, and turns of more than 16 tokens.
#include <algorithm>
#include <cmath>

#include "gemv_check.cuh"
#include "nibble/nvfp4/linear_family.cuh"
#include "nibble/ref/sampling.hpp"

using namespace nibble;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8, b16 = weight_format::bf16;
enum class input { random, zeros, with_nan };

/// Keys of one block of one token, or of all its blocks, against the reference over its logits.
bool same_keys(const std::vector<unsigned long long>& keys, const std::vector<float>& logits, int first_row) {
  const auto want = ref::largest_logits(logits, keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i >= want.size()) {
      if (keys[i] != 0) return false;
      continue;
    }
    const float value = logits[want[i]];
    if (keys[i] == 0 || key_row(keys[i]) != first_row + static_cast<int>(want[i])) return false;
    if (key_is_nan(keys[i]) != std::isnan(value) || keys[i] != logit_key(value, key_row(keys[i])))
      return false;
    if (!std::isnan(value) && key_value(keys[i]) != value) return false;
  }
  return true;
}

/// `grid(m)`: blocks of the launch that serves token t of m tokens; `spare`: blocks of the buffer beyond it.
template <resident_layout Layout, int K, class Launch, class Grid>
void check(int m, int blocks, Launch launch, Grid grid_of_token, input kind) {
  constexpr int rows = Layout.shape.n, k = Layout.shape.k, ldy = rows + (rows % 2 == 0 ? 2 : 1);
  const device_test::random_matrix w(Layout, static_cast<std::uint64_t>(rows + K));
  const device_test::buffer<std::uint8_t> tiles(w.tiles());
  auto x = device_test::random_activations(static_cast<std::size_t>(m) * k, 11);
  if (kind == input::zeros) std::fill(x.begin(), x.end(), std::uint16_t{0});
  if (kind == input::with_nan) x[static_cast<std::size_t>(m - 1) * k + 3] = 0x7FC0;
  const device_test::buffer<std::uint16_t> dx(x);
  const device_test::buffer<float> y(static_cast<std::size_t>(m - 1) * ldy + rows);
  const device_test::buffer<unsigned long long> keys(static_cast<std::size_t>(m) * blocks * K);
  gemv_params<store_and_top_k<K>> p;
  p.tiles = tiles.data(), p.x = reinterpret_cast<const bf*>(dx.data()), p.ldx = k, p.m = m;
  for (int i = 0; i < max_segments; ++i) p.scale[i] = w.scale[i];
  p.out.y = y.data(), p.out.ldy = ldy, p.out.keys = keys.data(), p.out.blocks = blocks;
  for (int call = 0; call < 2; ++call)  // the second call finds the keys of the first
    NIBBLE_GOOD(launch(p, launch_options{device_test::stream(), device_test::chained}));
  const auto logits = y.read();
  const auto got = keys.read();
  if (kind == input::random) {
    const auto want = w.multiply(x, m);
    int wrong = 0;
    for (int t = 0; t < m; ++t)
      for (int row = 0; row < rows; ++row) {
        const auto at = static_cast<std::size_t>(t) * rows + row;
        wrong += device_test::close(logits[static_cast<std::size_t>(t) * ldy + row], want.y[at],
                                    want.magnitude[at], k, false)
                     ? 0
                     : 1;
      }
    NIBBLE_CHECK(wrong == 0);
  }
  int wrong_blocks = 0, wrong_tokens = 0;
  for (int t = 0; t < m; ++t) {
    const float* token = logits.data() + static_cast<std::ptrdiff_t>(t) * ldy;
    const unsigned long long* of_token = got.data() + static_cast<std::ptrdiff_t>(t) * blocks * K;
    const int grid = grid_of_token(t);
    for (int b = 0; b < blocks; ++b) {
      // As the kernels share row tiles out; blocks beyond the grid have none.
      const auto edge = [&](int at) {
        const auto tile = static_cast<std::int64_t>(std::min(at, grid)) * Layout.row_tiles() / grid;
        return std::min(rows, static_cast<int>(tile) * tile_rows);
      };
      const int first = edge(b), last = edge(b + 1);
      const std::vector<unsigned long long> mine(of_token + b * K, of_token + (b + 1) * K);
      wrong_blocks += same_keys(mine, std::vector<float>(token + first, token + last), first) ? 0 : 1;
    }
    std::vector<unsigned long long> all(of_token, of_token + static_cast<std::ptrdiff_t>(blocks) * K);
    std::sort(all.begin(), all.end(), std::greater<>());
    all.resize(K);
    wrong_tokens += same_keys(all, std::vector<float>(token, token + rows), 0) ? 0 : 1;
  }
  if (wrong_blocks != 0 || wrong_tokens != 0)
    std::printf("  %s m = %d, K = %d: keys of %d blocks and %d tokens are wrong\n",
                Layout.shape.name().c_str(), m, K, wrong_blocks, wrong_tokens);
  NIBBLE_CHECK(wrong_blocks == 0 && wrong_tokens == 0);
}

constexpr gemv_policy of(gemv_variant variant, int columns, int warps, int grid, int depth, int stages,
                         int batch) {
  gemv_policy p;
  p.variant = variant, p.columns = columns, p.warps = warps, p.grid = grid;
  p.depth = depth, p.stages = stages, p.batch = batch, p.whole_rows = true;
  return p;
}

template <resident_layout Layout, gemv_policy Policy, int K>
void with() {
  if constexpr (default_device.has_bulk_copies() || Policy.variant == gemv_variant::registers) {
    kernel_info info;
    NIBBLE_GOOD((prepare_gemv_with<Layout, Policy, store_and_top_k<K>>(&info)));
    NIBBLE_CHECK(info.local_bytes <= device_test::allowed_local_bytes);
    const auto launch = [](const auto& p, const launch_options& o) {
      return launch_gemv_with<Layout, Policy>(p, o);
    };
    const auto grid = [](int) { return Policy.grid; };
    for (const input kind : {input::random, input::zeros, input::with_nan}) {
      check<Layout, K>(Policy.columns, Policy.grid, launch, grid, kind);
      check<Layout, K>(Policy.columns == 1 ? 1 : Policy.columns - 1, Policy.grid + 3, launch, grid, kind);
    }
  }
}

/// As a family, from the table of its kernels to turns of 16 tokens.
template <resident_layout Layout, int K>
void as_family(const std::vector<int>& tokens) {
  using family = linear_family<Layout, store_and_top_k<K>>;
  int kernels = 0;
  NIBBLE_GOOD(family::for_each_kernel([&](auto kernel, int threads, std::size_t bytes, const char* name) {
    ++kernels;
    kernel_info info;
    const status s = prepare(kernel, threads, bytes, name, &info);
    NIBBLE_CHECK(info.local_bytes <= device_test::allowed_local_bytes);
    return s;
  }));
  NIBBLE_CHECK(kernels == 4 || kernels == 5);
  static_assert(!family::has_gemm);
  for (const int m : tokens) {
    NIBBLE_CHECK(family::key_bytes(m) == sizeof(unsigned long long) * K * static_cast<std::size_t>(m) *
                                             static_cast<std::size_t>(family::most_blocks()));
    check<Layout, K>(
        m, family::most_blocks(), [](const auto& p, const launch_options& o) { return family::launch(p, o); },
        [m](int t) { return family::blocks(std::min(16, m - t / 16 * 16)); }, input::random);
  }
}

constexpr resident_layout small{matrix(176, 512, f4)}, odd{matrix(77, 512, f4)}, few{matrix(5, 256, f4)},
    eight{matrix(112, 512, f8)}, wide{matrix(96, 512, b16)};
constexpr auto reg = gemv_variant::registers, shot = gemv_variant::one_shot, ring = gemv_variant::ring;

const bool registered[] = {
    device_test::add("small", "registers",
                     [] {
                       with<small, of(reg, 8, 4, 3, 3, 0, 0), 8>();
                       with<small, of(reg, 1, 4, 11, 1, 0, 0), 16>();
                       with<wide, of(reg, 16, 4, 2, 2, 0, 0), 8>();
                     }),
    device_test::add("small", "one shot",
                     [] {
                       with<small, of(shot, 8, 4, 3, 1, 0, 0), 16>();
                       with<eight, of(shot, 8, 4, 3, 1, 0, 0), 1>();
                     }),
    device_test::add("small", "ring",
                     [] {
                       with<small, of(ring, 8, 4, 2, 1, 2, 4), 8>();
                       with<small, of(ring, 1, 2, 2, 1, 4, 4), 8>();
                       with<eight, of(ring, 4, 2, 2, 1, 2, 2), 16>();
                       with<small, of(ring, 16, 4, 3, 1, 3, 1), 8>();
                     }),
    device_test::add("small", "odd N, and fewer rows than K",
                     [] {
                       with<odd, of(reg, 8, 4, 2, 1, 0, 0), 8>();
                       with<odd, of(ring, 8, 4, 2, 1, 2, 4), 16>();
                       with<few, of(reg, 4, 2, 1, 1, 0, 0), 8>();
                     }),
    device_test::add("small", "a family, turns of 16 tokens",
                     [] {
                       as_family<small, 8>({1, 2, 9, 16, 21});
                     }),
    device_test::add("lm_head", "248320 rows",
                     [] {
                       as_family<resident_layout{matrix(248320, 2048, f4)}, 8>(
                           device_test::quick() ? std::vector<int>{1} : std::vector<int>{1, 8, 16});
                     }),
};

const bool refused = device_test::add("small", "fewer blocks than the grid are refused", [] {
  using family = linear_family<small, store_and_top_k<8>>;
  const device_test::buffer<std::uint8_t> tiles(small.bytes());
  const device_test::buffer<bf> x(512);
  const device_test::buffer<float> y(176);
  const device_test::buffer<unsigned long long> keys(8);
  family::params p;
  p.tiles = tiles.data(), p.x = x.data(), p.ldx = 512, p.m = 1;
  p.out.y = y.data(), p.out.ldy = 176, p.out.keys = keys.data(), p.out.blocks = family::blocks(1) - 1;
  NIBBLE_CHECK(family::launch(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
  p.out.blocks = family::blocks(1), p.out.keys = nullptr;
  NIBBLE_CHECK(family::launch(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
});
}  // namespace

int main(int argc, char** argv) { return registered[0] && refused ? device_test::run(argc, argv) : 1; }
