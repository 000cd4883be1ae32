// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/experts.hpp>
#include <nibble/ref/experts.hpp>
#include <numeric>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::weight_format;
using nibble::host::expert_weights;
using nibble::host::thread_pool;
using nibble::ref::widen;

namespace {

struct layer {
  std::vector<random_weight> memory;
  std::vector<expert_weights> views;
  std::vector<nibble::ref::expert> exact;
};

layer make_layer(random_source& random, int count, int hidden, int intermediate, weight_format gate,
                 weight_format up, weight_format down) {
  layer l;
  l.memory.reserve(static_cast<std::size_t>(3 * count));
  for (int e = 0; e < count; ++e) {
    l.memory.push_back(make_weight(random, gate, intermediate, hidden, 0.05f));
    l.memory.push_back(make_weight(random, up, intermediate, hidden, 0.05f));
    l.memory.push_back(make_weight(random, down, hidden, intermediate, 0.05f));
    const random_weight* w = &l.memory[l.memory.size() - 3];
    l.views.push_back({w[0].view, w[1].view, w[2].view});
    l.exact.push_back({w[0].exact, w[1].exact, w[2].exact});
  }
  return l;
}

}  // namespace

TEST_CASE(
    "experts: every format against fp64, and a token's bits do not depend on its batch or the threads") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool, one(1);
  const weight_format formats[][3] = {{weight_format::nvfp4, weight_format::nvfp4, weight_format::nvfp4},
                                      {weight_format::fp8, weight_format::fp8, weight_format::fp8},
                                      {weight_format::bf16, weight_format::bf16, weight_format::bf16},
                                      {weight_format::nvfp4, weight_format::bf16, weight_format::fp8}};
  on_every_target([&](const std::string&) {
    for (const auto& f : formats) {
      const int count = 6, hidden = 80, intermediate = 48, top_k = 3, m = 19, ldx = hidden + 1,
                ldy = hidden + 5;
      INFO(format_name(f[0]) << ", " << format_name(f[1]) << ", " << format_name(f[2]));
      const layer l = make_layer(random, count, hidden, intermediate, f[0], f[1], f[2]);
      const floats x = random.normals(static_cast<std::size_t>((m - 1) * ldx + hidden));
      std::vector<std::int32_t> ids;
      floats weights;
      for (int r = 0; r < m; ++r) {
        std::vector<std::int32_t> all(count);
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random.engine());
        for (int s = 0; s < top_k; ++s) {
          ids.push_back(r == 4 && s == 1 ? -1 : all[static_cast<std::size_t>(s)]);
          weights.push_back(std::abs(random.normal()));
        }
      }
      floats y(static_cast<std::size_t>((m - 1) * ldy + hidden), quiet_nan);
      routed_experts(pool, l.views, ids.data(), weights.data(), top_k, x.data(), ldx, m, y.data(), ldy);
      doubles dense;
      floats got;
      for (int r = 0; r < m; ++r) {
        dense.insert(dense.end(), x.begin() + r * ldx, x.begin() + r * ldx + hidden);
        got.insert(got.end(), y.begin() + r * ldy, y.begin() + r * ldy + hidden);
        if (r + 1 < m) CHECK(std::isnan(y[static_cast<std::size_t>(r * ldy + hidden)]));
      }
      const doubles expected = nibble::ref::routed_experts(l.exact, std::vector<int>(ids.begin(), ids.end()),
                                                           widen(weights), top_k, dense, m);
      CHECK(largest_row_error(got, expected, hidden) <= 5e-6);
      int different = 0;
      for (int r = 0; r < m; ++r) {
        floats alone(static_cast<std::size_t>(hidden), quiet_nan);
        routed_experts(one, l.views, ids.data() + r * top_k, weights.data() + r * top_k, top_k,
                       x.data() + r * ldx, ldx, 1, alone.data(), hidden);
        different += !same_bits(alone, std::span(got).subspan(static_cast<std::size_t>(r * hidden),
                                                              static_cast<std::size_t>(hidden)));
      }
      CHECK(different == 0);

      // The shared expert adds to what is there; with and without its gate.
      const random_weight gate_row = make_weight(random, weight_format::bf16, 1, hidden, 0.1f);
      floats sum = got;
      shared_expert(pool, l.views[0], gate_row.view, x.data(), ldx, m, sum.data(), hidden);
      doubles shared = nibble::ref::shared_expert(l.exact[0], gate_row.exact, dense, m);
      for (std::size_t i = 0; i < shared.size(); ++i) shared[i] += got[i];
      CHECK(largest_row_error(sum, shared, hidden) <= 5e-6);
      floats alone(got.begin() + 7 * hidden, got.begin() + 8 * hidden);
      shared_expert(one, l.views[0], gate_row.view, x.data() + 7 * ldx, ldx, 1, alone.data(), hidden);
      CHECK(same_bits(alone, std::span(sum).subspan(static_cast<std::size_t>(7 * hidden),
                                                    static_cast<std::size_t>(hidden))));
      floats plain(static_cast<std::size_t>(m * hidden), 0.0f);
      shared_expert(pool, l.views[0], {}, x.data(), ldx, m, plain.data(), hidden);
      CHECK(largest_row_error(plain, nibble::ref::swiglu(l.exact[0], dense, m), hidden) <= 5e-6);
    }
  });
}

TEST_CASE("experts: more tokens than one pass takes, and nobody chosen") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  const int count = 3, hidden = 16, m = 1100;
  const layer l =
      make_layer(random, count, hidden, 16, weight_format::nvfp4, weight_format::nvfp4, weight_format::nvfp4);
  const floats x = random.normals(static_cast<std::size_t>(m * hidden));
  std::vector<std::int32_t> ids(static_cast<std::size_t>(m));
  for (auto& id : ids) id = random.integer(0, count - 1);
  const floats weights(static_cast<std::size_t>(m), 1.0f);
  floats y(x.size(), quiet_nan);
  routed_experts(pool, l.views, ids.data(), weights.data(), 1, x.data(), hidden, m, y.data(), hidden);
  const doubles expected = nibble::ref::routed_experts(l.exact, std::vector<int>(ids.begin(), ids.end()),
                                                       widen(weights), 1, widen(x), m);
  CHECK(largest_row_error(y, expected, m * hidden) <= 5e-6);
  std::fill(ids.begin(), ids.end(), -1);
  std::fill(y.begin(), y.end(), quiet_nan);
  routed_experts(pool, l.views, ids.data(), weights.data(), 1, x.data(), hidden, m, y.data(), hidden);
  for (const float v : y)
    if (v != 0.0f) CHECK(v == 0.0f);
}

TEST_CASE("C002, C004: experts: gate and up keep their own scales and their order") {
  thread_pool pool;
  const floats x(16, 1.0f / 16);
  const auto rows = [](unsigned code) {
    return std::vector<std::uint8_t>(16 * 8, static_cast<std::uint8_t>(code * 17));
  };
  const std::vector<std::uint8_t> ones = rows(2), twos = rows(4), minus_ones = rows(10), scales(16, 0x38);
  const std::vector<std::uint8_t> pick{0x02, 0, 0, 0, 0, 0, 0, 0}, pick_scale{0x38};
  const auto run = [&](const std::vector<std::uint8_t>& gate, float gate_scale,
                       const std::vector<std::uint8_t>& up, float up_scale) {
    const expert_weights e{nibble::host::nvfp4_view{gate.data(), scales.data(), gate_scale, 16, 16},
                           nibble::host::nvfp4_view{up.data(), scales.data(), up_scale, 16, 16},
                           nibble::host::nvfp4_view{pick.data(), pick_scale.data(), 1.0f, 1, 16}};
    const std::int32_t id = 0;
    const float weight = 1;
    float y = quiet_nan;
    routed_experts(pool, std::span(&e, 1), &id, &weight, 1, x.data(), 16, 1, &y, 1);
    return y;
  };
  on_every_target([&](const std::string&) {
    CHECK(run(ones, 0.5f, ones, 1.0f) ==
          Approx(0.31123).epsilon(1e-4));  // 0.15561 if gate's scale served both
    CHECK(run(twos, 1.0f, minus_ones, 1.0f) ==
          Approx(-1.76159).epsilon(1e-4));  // -0.5379 if they were swapped
  });
}
