// SPDX-License-Identifier: Apache-2.0
// Experts computed from the device's tiles: against fp64 on every instruction set, whoever shares the batch.
#include <nibble/geometry/tile.hpp>
#include <nibble/host/resident_experts.hpp>
#include <nibble/nvfp4/layout.hpp>
#include <nibble/ref/experts.hpp>
#include <numeric>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::resident_layout;
using nibble::row_order;
using nibble::weight_format;
using nibble::host::resident_experts;
using nibble::host::thread_pool;
using nibble::ref::widen;

namespace {

struct slots {
  std::vector<std::uint8_t> bytes;
  std::vector<std::array<float, 3>> scales;
  std::vector<nibble::ref::expert> exact;
  resident_experts view;
};

slots make_slots(random_source& random, int count, int hidden, int inner, int top_k) {
  slots s;
  const resident_layout up{nibble::fused(hidden, weight_format::nvfp4, inner, inner), row_order::gate_up};
  const resident_layout down{nibble::matrix(hidden, inner, weight_format::nvfp4), row_order::adjacent};
  const std::size_t slot_bytes = up.bytes() + down.bytes();
  s.bytes.resize(static_cast<std::size_t>(count) * slot_bytes);
  for (int e = 0; e < count; ++e) {
    const auto gate = make_weight(random, weight_format::nvfp4, inner, hidden, 0.05f),
               value = make_weight(random, weight_format::nvfp4, inner, hidden, 0.05f),
               back = make_weight(random, weight_format::nvfp4, hidden, inner, 0.05f);
    std::vector<std::uint8_t> codes = gate.data, block_scales = gate.scales;
    codes.insert(codes.end(), value.data.begin(), value.data.end());
    block_scales.insert(block_scales.end(), value.scales.begin(), value.scales.end());
    const auto slot = std::span(s.bytes).subspan(static_cast<std::size_t>(e) * slot_bytes, slot_bytes);
    nibble::nvfp4::pack(up, codes, block_scales, slot.first(up.bytes()), 1);
    nibble::nvfp4::pack(down, back.data, back.scales, slot.subspan(up.bytes()), 1);
    s.scales.push_back({gate.view.scale, value.view.scale, back.view.scale});
    s.exact.push_back({gate.exact, value.exact, back.exact});
  }
  s.view = {hidden,     inner,          top_k, reinterpret_cast<const std::byte*>(s.bytes.data()),
            slot_bytes, s.scales.data()};
  return s;
}

}  // namespace

TEST_CASE("resident experts: the tiles of the device against fp64, and bits that no company changes") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool, one(1);
  struct shape {
    int hidden, inner;
  };
  on_every_target([&](const std::string&) {
    for (const shape s : {shape{256, 128}, shape{80, 48}, shape{272, 16}, shape{128, 400}}) {
      const int count = 6, top_k = 3, m = 19;
      const slots experts = make_slots(random, count, s.hidden, s.inner, top_k);
      const auto width = static_cast<std::size_t>(s.hidden);
      const floats x = random.normals(static_cast<std::size_t>(m) * width);
      std::vector<std::int32_t> ids;
      floats weights;
      for (int r = 0; r < m; ++r) {
        std::vector<std::int32_t> all(count);
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random.engine());
        for (int k = 0; k < top_k; ++k) {
          ids.push_back(r == 5 || random.integer(0, 3) == 0 ? -1 : all[static_cast<std::size_t>(k)]);
          weights.push_back(std::abs(random.normal()));
        }
      }
      floats y(x.size(), quiet_nan);
      routed_experts(pool, experts.view, ids.data(), weights.data(), x.data(), m, y.data());
      const doubles expected = nibble::ref::routed_experts(
          experts.exact, std::vector<int>(ids.begin(), ids.end()), widen(weights), top_k, widen(x), m);
      CHECK(largest_row_error(y, expected, s.hidden) <= 5e-6);
      int different = 0;
      for (int r = 0; r < m; ++r) {
        floats alone(width, quiet_nan);
        routed_experts(one, experts.view, ids.data() + r * top_k, weights.data() + r * top_k,
                       x.data() + r * s.hidden, 1, alone.data());
        different += !same_bits(alone, std::span(y).subspan(static_cast<std::size_t>(r) * width, width));
      }
      CHECK(different == 0);
      for (std::size_t i = 0; i < width; ++i) CHECK(y[5 * width + i] == 0.0f);  // nobody was chosen
    }
  });
}

TEST_CASE("resident experts: an expert that rows name several times has the sum of its weights") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool(2);
  constexpr int top_k = 3, m = 16;  // a whole pass
  const slots experts = make_slots(random, 2, 256, 128, top_k);
  const floats x = random.normals(static_cast<std::size_t>(m) * 256);
  std::vector<std::int32_t> twice, once;
  floats weights, sums;
  for (int r = 0; r < m; ++r) {
    twice.insert(twice.end(), {1, 1, 1}), weights.insert(weights.end(), {0.25f, 0.5f, 0.125f});
    once.insert(once.end(), {-1, 1, -1}), sums.insert(sums.end(), {9.0f, 0.875f, 9.0f});
  }
  floats y(x.size(), quiet_nan), expected(x.size(), quiet_nan);
  routed_experts(pool, experts.view, twice.data(), weights.data(), x.data(), m, y.data());
  routed_experts(pool, experts.view, once.data(), sums.data(), x.data(), m, expected.data());
  CHECK(same_bits(y, expected));
}
