// SPDX-License-Identifier: Apache-2.0
// Grouped experts against fp64: the shared expert, routing weights, residual, equal experts in a batch, ids
// that are -1, out of range or not resident, and rows that do not depend on their batch.
#include "device_test.cuh"
#include "nibble/moe/experts_launch.cuh"
#include "random_matrix.hpp"

using namespace nibble;
using device_test::buffer;
using device_test::random_matrix;
using moe::experts_shape;
using bf = __nv_bfloat16;

namespace {

constexpr int missing_id = 3;  // never resident

struct expert_matrices {
  random_matrix gate_up, down;
};

template <experts_shape S>
void check_experts(std::uint64_t seed) {
  kernel_info info[moe::experts_kernels];
  NIBBLE_GOOD(moe::prepare_experts<S>(info));
  for (const auto& i : info) NIBBLE_CHECK(i.local_bytes <= device_test::allowed_local_bytes);
  device_test::fast_random random{seed};
  const int distinct = std::min(S.experts, 12), groups = S.groups(), first = S.shared ? 1 : 0;
  constexpr int most = 16;
  std::vector<expert_matrices> weights;
  for (int e = 0; e <= distinct; ++e)
    weights.push_back(
        {random_matrix(S.gate_up(), seed + 10 * e), random_matrix(S.down(), seed + 10 * e + 5)});
  const int shared = distinct;
  // Resident experts lie in slots in reverse; slot `experts`-many are left out, the missing one has none.
  const int slot_count = distinct;
  std::vector<std::uint8_t> arena(S.slot_bytes() * static_cast<std::size_t>(slot_count), 0xFF);
  std::vector<std::int32_t> slot_of(static_cast<std::size_t>(S.experts), -1);
  std::vector<float> scales(3 * static_cast<std::size_t>(slot_count));
  const auto fill = [&](std::uint8_t* to, int e) {
    const auto up = weights[e].gate_up.tiles(), down = weights[e].down.tiles();
    std::copy(up.begin(), up.end(), to);
    std::copy(down.begin(), down.end(), to + up.size());
  };
  for (int e = 0; e < distinct; ++e) {
    weights[e].gate_up.scale[0] = 0.010f + 0.001f * static_cast<float>(e);
    weights[e].gate_up.scale[1] = 0.021f - 0.001f * static_cast<float>(e);
    weights[e].down.scale[0] = 0.004f + 0.0005f * static_cast<float>(e);
    const int slot = distinct - 1 - e;
    if (e != missing_id) slot_of[e] = slot;
    fill(arena.data() + S.slot_bytes() * static_cast<std::size_t>(slot), e);
    scales[3 * slot] = weights[e].gate_up.scale[0], scales[3 * slot + 1] = weights[e].gate_up.scale[1];
    scales[3 * slot + 2] = weights[e].down.scale[0];
  }
  std::vector<std::uint8_t> shared_slot(S.slot_bytes());
  fill(shared_slot.data(), shared);

  const auto x = device_test::random_activations(static_cast<std::size_t>(most) * S.hidden, seed + 1);
  const auto residual = device_test::random_activations(static_cast<std::size_t>(most) * S.hidden, seed + 2);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(most) * S.top_k);
  std::vector<float> route(ids.size()), gate(most);
  for (int t = 0; t < most; ++t) {
    std::vector<int> order(static_cast<std::size_t>(distinct));
    for (int e = 0; e < distinct; ++e) order[e] = e;
    for (int j = 0; j < S.top_k; ++j) {
      std::swap(order[j], order[j + static_cast<int>(random() % static_cast<std::uint64_t>(distinct - j))]);
      ids[t * S.top_k + j] = order[j];  // few experts: most are shared by several tokens
    }
    if (t == 2) ids[t * S.top_k] = -1;
    if (t == 4) ids[t * S.top_k + S.top_k - 1] = S.experts;  // out of range
    if (t == 5) ids[t * S.top_k] = -2147483647;
    if (t == 6) ids[t * S.top_k] = missing_id;
    gate[t] = 0.1f + 0.05f * static_cast<float>(t);
  }
  for (auto& v : route) v = 0.02f + static_cast<float>(random() % 1000) / 4000.0f;

  // fp64: h from x, y from the h the device made.
  const auto expert_of = [&](int t, int g) -> int {
    if (S.shared && g == 0) return shared;
    const int id = ids[t * S.top_k + g - first];
    return id < 0 || id >= S.experts || slot_of[id] < 0 ? -1 : id;
  };
  const buffer<std::uint8_t> d_arena(arena), d_shared(shared_slot);
  const buffer<std::int32_t> d_slot_of(slot_of);
  const buffer<float> d_scales(scales), d_gate(gate);
  std::vector<std::uint16_t> first_y;
  for (const int m : {1, 2, 3, 7, 8, 9, 16}) {
    const buffer<std::uint16_t> dx(std::vector<std::uint16_t>(x.begin(), x.begin() + m * S.hidden));
    const buffer<std::uint16_t> dr(
        std::vector<std::uint16_t>(residual.begin(), residual.begin() + m * S.hidden));
    const buffer<std::int32_t> d_ids(std::vector<std::int32_t>(ids.begin(), ids.begin() + m * S.top_k));
    const buffer<float> d_route(std::vector<float>(route.begin(), route.begin() + m * S.top_k));
    const buffer<std::uint16_t> h(static_cast<std::size_t>(m) * groups * S.inner),
        y(static_cast<std::size_t>(m) * S.hidden);
    const buffer<unsigned> report(std::vector<unsigned>(moe::report_words(S), 0u));
    moe::experts_params p;
    p.slots = d_arena.data(), p.slot_scales = d_scales.data(), p.slot_count = slot_count,
    p.slot_of = d_slot_of.data();
    p.shared_expert = d_shared.data();
    p.shared_scales[0] = weights[shared].gate_up.scale[0],
    p.shared_scales[1] = weights[shared].gate_up.scale[1];
    p.shared_scales[2] = weights[shared].down.scale[0];
    p.ids = d_ids.data(), p.weights = d_route.data(), p.shared_weights = d_gate.data();
    p.x = reinterpret_cast<const bf*>(dx.data()), p.ldx = S.hidden, p.h = reinterpret_cast<bf*>(h.data());
    p.y = reinterpret_cast<bf*>(y.data()), p.ldy = S.hidden,
    p.residual = reinterpret_cast<const bf*>(dr.data()), p.ldr = S.hidden;
    p.report = report.data(), p.m = m;
    const launch_options options{device_test::stream(), device_test::chained};
    NIBBLE_GOOD(moe::launch_gate_up<S>(p, options));
    NIBBLE_GOOD(moe::launch_down<S>(p, options));
    const auto got_h = h.read(), got_y = y.read();
    const auto flags = report.read();
    unsigned out_of_range = 0, missing = 0;
    for (int i = 0; i < m * S.top_k; ++i) {
      if (ids[i] >= S.experts || ids[i] < -1) ++out_of_range;
      if (ids[i] == missing_id) missing = 1u << missing_id;
    }
    NIBBLE_CHECK(flags[0] == out_of_range && flags[1] == missing);
    int wrong = 0;
    for (int t = 0; t < m; ++t) {
      const std::vector<std::uint16_t> xt(x.begin() + t * S.hidden, x.begin() + (t + 1) * S.hidden);
      std::vector<double> sum(S.hidden), magnitude(S.hidden);
      for (int g = 0; g < groups; ++g) {
        const int e = expert_of(t, g);
        const std::uint16_t* row = got_h.data() + (static_cast<std::size_t>(t) * groups + g) * S.inner;
        if (e < 0) {
          for (int i = 0; i < S.inner; ++i) wrong += row[i] == 0xFFFF ? 0 : 1;
          continue;
        }
        if (m == 16 || t == 0) {  // h of every token once, and of token 0 in every batch
          const auto want = weights[e].gate_up.multiply(xt, 1);
          for (int i = 0; i < S.inner; ++i) {
            const double a = want.y[i], b = want.y[i + S.inner], s = a / (1 + std::exp(-a));
            const double scale = 1.1 * std::fabs(b) * want.magnitude[i] +
                                 std::fabs(s) * want.magnitude[i + S.inner] + 8 * std::fabs(s * b);
            if (!device_test::close(bf16::decode(row[i]), s * b, scale, S.hidden, true) && ++wrong == 1)
              std::printf("  m=%d token %d group %d h[%d]: got %g, want %g\n", m, t, g, i,
                          bf16::decode(row[i]), s * b);
          }
        }
        const auto part = weights[e].down.multiply(std::vector<std::uint16_t>(row, row + S.inner), 1);
        const double w = S.shared && g == 0 ? gate[t] : route[t * S.top_k + g - first];
        for (int i = 0; i < S.hidden; ++i) {
          sum[i] += w * part.y[i];
          magnitude[i] += std::fabs(w) * part.magnitude[i];
        }
      }
      for (int i = 0; i < S.hidden; ++i) {
        const double want = sum[i] + bf16::decode(residual[static_cast<std::size_t>(t) * S.hidden + i]);
        const double got = bf16::decode(got_y[static_cast<std::size_t>(t) * S.hidden + i]);
        if (!device_test::close(got, want, 4 * magnitude[i], S.inner + 128, true) && ++wrong == 1)
          std::printf("  m=%d token %d y[%d]: got %g, want %g\n", m, t, i, got, want);
      }
    }
    if (first_y.size() < got_y.size()) {
      wrong += std::equal(first_y.begin(), first_y.end(), got_y.begin()) ? 0 : 1000;
      first_y = got_y;
    } else {
      wrong += std::equal(got_y.begin(), got_y.end(), first_y.begin()) ? 0 : 1000;
    }
    device_test::check(wrong == 0, m == 1 ? "m = 1" : "m > 1", __FILE__, __LINE__);
    if (wrong) std::printf("  m=%d: %d wrong\n", m, wrong);
  }
}

template <experts_shape S>
bool experts(const char* name) {
  return device_test::add("experts", name,
                          [] { check_experts<S>(static_cast<std::uint64_t>(S.hidden + S.inner)); });
}
const bool registered[] = {
    experts<experts_shape{2048, 512, 256, 8, true, weight_format::nvfp4}>("Qwen3.6-35B-A3B"),
    experts<experts_shape{2048, 768, 128, 8, false, weight_format::nvfp4}>("Qwen3-30B-A3B"),
    experts<experts_shape{128, 48, 16, 2, true, weight_format::nvfp4}>("small, ragged K"),
    experts<experts_shape{144, 176, 13, 3, false, weight_format::fp8}>("small, fp8"),
};

const bool refused = device_test::add("experts", "launches that break the contract are refused", [] {
  constexpr experts_shape s{128, 48, 16, 2, true, weight_format::nvfp4};
  moe::experts_params p;
  p.m = 17;
  NIBBLE_CHECK(moe::launch_gate_up<s>(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
  p.m = 1;
  NIBBLE_CHECK(moe::launch_gate_up<s>(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
  NIBBLE_CHECK(moe::launch_down<s>(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
});

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
