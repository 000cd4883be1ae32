// SPDX-License-Identifier: Apache-2.0
// Grouped experts for many tokens, step by step against fp64: the order of the sort, SwiGLU of each
// assignment, down of the rows the device made, and the sum of the parts the device made. Ids that are -1,
// out of range or not resident.
#include "device_test.cuh"
#include "nibble/moe/experts_family.cuh"
#include "random_matrix.hpp"

using namespace nibble;
using device_test::buffer;
using device_test::random_matrix;
using moe::experts_shape;
using bf = __nv_bfloat16;

namespace {

constexpr int missing_id = 3;  // never resident

template <experts_shape S>
struct model {
  int distinct = std::min(S.experts, 12);
  std::vector<random_matrix> up, down;  // the shared expert's last
  std::vector<std::int32_t> slot_of = std::vector<std::int32_t>(static_cast<std::size_t>(S.experts), -1);
  buffer<std::uint8_t> arena{S.slot_bytes() * static_cast<std::size_t>(std::min(S.experts, 12))};
  buffer<std::uint8_t> shared{S.slot_bytes()};
  buffer<float> scales{3 * static_cast<std::size_t>(std::min(S.experts, 12))};
  buffer<std::int32_t> d_slot_of{static_cast<std::size_t>(S.experts)};

  explicit model(std::uint64_t seed) {
    std::vector<float> host_scales(scales.size());
    for (int e = 0; e <= distinct; ++e) {
      up.emplace_back(S.gate_up(), seed + 10 * e);
      down.emplace_back(S.down(), seed + 10 * e + 5);
      up[e].scale[0] = 0.010f + 0.001f * static_cast<float>(e);
      up[e].scale[1] = 0.021f - 0.001f * static_cast<float>(e);
      down[e].scale[0] = 0.004f + 0.0005f * static_cast<float>(e);
      const int slot = distinct - 1 - e;
      std::uint8_t* to =
          e == distinct ? shared.data() : arena.data() + S.slot_bytes() * static_cast<std::size_t>(slot);
      const auto a = up[e].tiles(), b = down[e].tiles();
      NIBBLE_CUDA_CHECK(
          cudaMemcpyAsync(to, a.data(), a.size(), cudaMemcpyHostToDevice, device_test::stream()));
      NIBBLE_CUDA_CHECK(
          cudaMemcpyAsync(to + a.size(), b.data(), b.size(), cudaMemcpyHostToDevice, device_test::stream()));
      if (e == distinct) continue;
      if (e != missing_id) slot_of[e] = slot;
      host_scales[3 * slot] = up[e].scale[0], host_scales[3 * slot + 1] = up[e].scale[1];
      host_scales[3 * slot + 2] = down[e].scale[0];
    }
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(scales.data(), host_scales.data(), scales.bytes(),
                                      cudaMemcpyHostToDevice, device_test::stream()));
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(d_slot_of.data(), slot_of.data(), d_slot_of.bytes(),
                                      cudaMemcpyHostToDevice, device_test::stream()));
  }
};

std::vector<std::uint16_t> rows_of(const std::vector<std::uint16_t>& x, int width,
                                   const std::vector<int>& rows) {
  std::vector<std::uint16_t> out;
  for (const int r : rows)
    out.insert(out.end(), x.begin() + static_cast<std::ptrdiff_t>(r) * width,
               x.begin() + static_cast<std::ptrdiff_t>(r + 1) * width);
  return out;
}

template <experts_shape S>
void check_many(const model<S>& model, int m,
                const std::function<status(const moe::experts_params&, const launch_options&)>& launch,
                bool one_expert = false) {
  device_test::fast_random random{static_cast<std::uint64_t>(m + S.inner)};
  constexpr int first = S.shared ? 1 : 0;
  const int distinct = model.distinct, assignments = m * S.top_k;
  const auto x = device_test::random_activations(static_cast<std::size_t>(m) * S.hidden, m + 1);
  const auto residual = device_test::random_activations(static_cast<std::size_t>(m) * S.hidden, m + 2);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(assignments));
  std::vector<float> route(ids.size()), gate(static_cast<std::size_t>(m));
  for (int t = 0; t < m; ++t) {
    std::vector<int> order(static_cast<std::size_t>(distinct));
    for (int e = 0; e < distinct; ++e) order[e] = e;
    for (int j = 0; j < S.top_k; ++j) {
      std::swap(order[j], order[j + static_cast<int>(random() % static_cast<std::uint64_t>(distinct - j))]);
      ids[t * S.top_k + j] = order[j];
    }
    if (one_expert) ids[t * S.top_k] = 1;
    if (t == 2) ids[t * S.top_k] = -1;
    if (t == 4) ids[t * S.top_k + S.top_k - 1] = S.experts;  // out of range
    if (t == 5) ids[t * S.top_k] = -2147483647;
    gate[t] = 0.1f + 0.01f * static_cast<float>(t % 50);
  }
  for (auto& v : route) v = 0.02f + static_cast<float>(random() % 1000) / 4000.0f;

  const auto live = [&](int a) { return ids[a] >= 0 && ids[a] < S.experts && model.slot_of[ids[a]] >= 0; };
  std::vector<int> order, position(static_cast<std::size_t>(assignments), -1);
  for (int e = 0; e < S.experts; ++e)
    for (int a = 0; a < assignments; ++a)
      if (live(a) && ids[a] == e) position[a] = static_cast<int>(order.size()), order.push_back(a);
  unsigned out_of_range = 0, missing = 0;
  for (int a = 0; a < assignments; ++a) {
    if (ids[a] >= S.experts || ids[a] < -1) ++out_of_range;
    if (ids[a] == missing_id) missing = 1u << missing_id;
  }

  const buffer<std::uint16_t> dx(x), dr(residual);
  const buffer<std::int32_t> d_ids(ids);
  const buffer<float> d_route(route), d_gate(gate);
  const buffer<std::uint16_t> h(static_cast<std::size_t>(m) * S.groups() * S.inner);
  buffer<std::uint16_t> y(static_cast<std::size_t>(m) * S.hidden);
  const buffer<unsigned> report(std::vector<unsigned>(moe::report_words(S), 0u));
  const moe::experts_workspace w = moe::workspace_of(S, m);
  const buffer<std::uint8_t> workspace(w.bytes);
  moe::experts_params p;
  p.slots = model.arena.data(), p.slot_scales = model.scales.data(), p.slot_count = distinct;
  p.slot_of = model.d_slot_of.data(), p.shared_expert = model.shared.data();
  p.shared_scales[0] = model.up[distinct].scale[0], p.shared_scales[1] = model.up[distinct].scale[1];
  p.shared_scales[2] = model.down[distinct].scale[0];
  p.ids = d_ids.data(), p.weights = d_route.data(), p.shared_weights = d_gate.data();
  p.x = reinterpret_cast<const bf*>(dx.data()), p.ldx = S.hidden, p.h = reinterpret_cast<bf*>(h.data());
  p.y = reinterpret_cast<bf*>(y.data()), p.ldy = S.hidden;
  p.residual = reinterpret_cast<const bf*>(dr.data()), p.ldr = S.hidden;
  p.report = report.data(), p.m = m;
  p.workspace = reinterpret_cast<std::byte*>(workspace.data()), p.workspace_bytes = w.bytes;
  const launch_options options{device_test::stream(), device_test::chained};
  NIBBLE_GOOD(launch(p, options));
  const auto first_y = y.read();
  y.poison();
  NIBBLE_GOOD(launch(p, options));
  const auto got_h = h.read(), got_y = y.read();
  const auto flags = report.read();
  const auto space = workspace.read();
  NIBBLE_CHECK(first_y == got_y);
  NIBBLE_CHECK(flags[0] == 2 * out_of_range && flags[1] == missing);

  const auto* got_order = reinterpret_cast<const std::int32_t*>(space.data() + w.order);
  const auto* got_position = reinterpret_cast<const std::int32_t*>(space.data() + w.position);
  NIBBLE_CHECK(std::equal(order.begin(), order.end(), got_order));
  NIBBLE_CHECK(std::equal(position.begin(), position.end(), got_position));
  const auto* parts = reinterpret_cast<const std::uint16_t*>(space.data() + w.parts);

  int wrong = 0;
  const auto complain = [&](const char* what, int row, int i, double got, double want) {
    if (++wrong == 1) std::printf("  m=%d %s row %d [%d]: got %g, want %g\n", m, what, row, i, got, want);
  };
  for (int e = 0; e <= distinct; ++e) {
    std::vector<int> rows, tokens;  // of h and parts, of x
    if (e == distinct) {
      for (int t = 0; t < m && S.shared; ++t) rows.push_back(assignments + t), tokens.push_back(t);
    } else {
      for (std::size_t at = 0; at < order.size(); ++at)
        if (ids[order[at]] == e) rows.push_back(static_cast<int>(at)), tokens.push_back(order[at] / S.top_k);
    }
    if (rows.empty()) continue;
    const int count = static_cast<int>(rows.size());
    const auto gate_up = model.up[e].multiply(rows_of(x, S.hidden, tokens), count);
    const auto h_rows = rows_of(got_h, S.inner, rows);
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < S.inner; ++i) {
        const std::size_t at = static_cast<std::size_t>(r) * 2 * S.inner + i;
        const double a = gate_up.y[at], b = gate_up.y[at + S.inner], s = a / (1 + std::exp(-a));
        const double scale = 1.1 * std::fabs(b) * gate_up.magnitude[at] +
                             std::fabs(s) * gate_up.magnitude[at + S.inner] + 8 * std::fabs(s * b);
        const double got = bf16::decode(h_rows[static_cast<std::size_t>(r) * S.inner + i]);
        if (!device_test::close(got, s * b, scale, S.hidden, true)) complain("h", rows[r], i, got, s * b);
      }
    const auto down = model.down[e].multiply(h_rows, count);
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < S.hidden; ++i) {
        const std::size_t at = static_cast<std::size_t>(r) * S.hidden + i;
        const double got = bf16::decode(parts[static_cast<std::size_t>(rows[r]) * S.hidden + i]);
        if (!device_test::close(got, down.y[at], down.magnitude[at], S.inner, true))
          complain("part", rows[r], i, got, down.y[at]);
      }
  }
  for (int t = 0; t < m; ++t)
    for (int i = 0; i < S.hidden; ++i) {
      double want = bf16::decode(residual[static_cast<std::size_t>(t) * S.hidden + i]),
             magnitude = std::fabs(want);
      for (int g = 0; g < S.groups(); ++g) {
        const bool shared = S.shared && g == 0;
        const int row = shared ? assignments + t : position[t * S.top_k + g - first];
        if (row < 0) continue;
        const double weight = shared ? gate[t] : route[t * S.top_k + g - first];
        const double part = weight * bf16::decode(parts[static_cast<std::size_t>(row) * S.hidden + i]);
        want += part, magnitude += std::fabs(part);
      }
      const double got = bf16::decode(got_y[static_cast<std::size_t>(t) * S.hidden + i]);
      if (!device_test::close(got, want, magnitude, 16, true)) complain("y", t, i, got, want);
    }
  if (wrong != 0) std::printf("  m=%d: %d wrong\n", m, wrong);
  NIBBLE_CHECK(wrong == 0);
}

/// `launch`, which leaves `left` multiprocessors every second time. check_many launches twice and compares.
template <class Launch>
auto leaving(int left, Launch launch) {
  return [=, second = false](const moe::experts_params& p, launch_options o) mutable {
    o.left_multiprocessors = second ? left : 0;
    second = !second;
    return launch(p, o);
  };
}

template <experts_shape S>
void all_widths(const std::vector<int>& counts) {
  NIBBLE_GOOD((moe::visit_experts_many<S>([](auto kernel, int threads, std::size_t bytes, const char* name) {
    kernel_info info;
    const status s = prepare(kernel, threads, bytes, name, &info);
    NIBBLE_CHECK(info.local_bytes <= device_test::allowed_local_bytes);
    return s;
  })));
  const model<S> model(static_cast<std::uint64_t>(S.hidden + S.inner));
  for (const int m : counts) {
    check_many<S>(model, m,
                  [](const auto& p, const auto& o) { return moe::launch_experts_many_with<S, 16>(p, o); });
    check_many<S>(model, m,
                  [](const auto& p, const auto& o) { return moe::launch_experts_many_with<S, 32>(p, o); });
    if constexpr (moe::has_wide_experts(S)) {
      // Grids of one block a multiprocessor, of which the second launch leaves some, or more than there are.
      check_many<S>(model, m, leaving(4, [](const auto& p, const auto& o) {
                      return moe::launch_experts_wide<S, 64>(p, o);
                    }));
      check_many<S>(model, m, leaving(default_device.multiprocessors - 7, [](const auto& p, const auto& o) {
                      return moe::launch_experts_wide<S, 96>(p, o);
                    }));
      check_many<S>(model, m, leaving(1000, [](const auto& p, const auto& o) {
                      return moe::launch_experts_wide<S, 128>(p, o);
                    }));
    } else {
      check_many<S>(model, m,
                    [](const auto& p, const auto& o) { return moe::launch_experts_many_with<S, 64>(p, o); });
      check_many<S>(model, m,
                    [](const auto& p, const auto& o) { return moe::launch_experts_many_with<S, 128>(p, o); });
    }
  }
  check_many<S>(
      model, counts.back(), [](const auto& p, const auto& o) { return moe::experts_family<S>::launch(p, o); },
      true);
}

template <experts_shape S>
bool many(const char* group, const char* name, const std::vector<int>& counts) {
  return device_test::add(group, name, [counts] { all_widths<S>(counts); });
}
const bool registered[] = {
    many<experts_shape{128, 48, 16, 2, true, weight_format::nvfp4}>("small", "ragged K", {1, 17, 33, 150}),
    many<experts_shape{144, 176, 13, 3, false, weight_format::fp8}>("small", "fp8", {19, 300}),
    many<experts_shape{64, 32, 600, 4, true, weight_format::nvfp4}>("small", "600 experts", {100}),
    many<experts_shape{256, 128, 16, 3, true, weight_format::nvfp4}>("small", "whole tiles", {18, 170}),
    many<experts_shape{128, 384, 20, 2, false, weight_format::fp8}>("small", "whole tiles, fp8", {129}),
    many<experts_shape{2048, 512, 256, 8, true, weight_format::nvfp4}>("real", "Qwen3.6-35B-A3B", {40, 150}),
    many<experts_shape{2048, 768, 128, 8, false, weight_format::nvfp4}>("real", "Qwen3-30B-A3B", {100}),
};

const bool left = device_test::add("small", "the same bits whatever is left to kernels beside", [] {
  constexpr experts_shape s{256, 128, 16, 3, true, weight_format::nvfp4};
  if constexpr (moe::has_wide_experts(s)) {
    NIBBLE_GOOD((moe::prepare_experts_many<s>()));
    const model<s> model(5);
    constexpr int all = default_device.multiprocessors;
    for (const int few : {1, 4, all / 2, all - 20, all - 1, all, 1000})
      check_many<s>(model, 170, leaving(few, [](const auto& p, const auto& o) {
                      return moe::launch_experts_wide<s, 64>(p, o);
                    }));
  }
});

const bool refused = device_test::add("small", "launches that break the contract are refused", [] {
  constexpr experts_shape s{128, 48, 16, 2, true, weight_format::nvfp4};
  static_assert(moe::experts_family<s>::workspace_bytes(16) == 0 &&
                moe::experts_family<s>::workspace_bytes(17) > 0);
  moe::experts_params p;
  p.m = 17;
  NIBBLE_CHECK(moe::experts_family<s>::launch(p, launch_options{device_test::stream()}).code ==
               status_code::invalid_argument);
});

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
