// SPDX-License-Identifier: Apache-2.0
/// \file
/// The dense suite: one layout, every m, plain and chained.
#pragma once

#include <cstring>
#include <random>

#include "harness.cuh"
#include "nibble/nvfp4/gemv_launch.cuh"

namespace bench {

inline const char* name_of(nibble::gemv_variant v) {
  switch (v) {
    case nibble::gemv_variant::registers:
      return "registers";
    case nibble::gemv_variant::one_shot:
      return "one_shot";
    case nibble::gemv_variant::ring:
      return "ring";
  }
  return "?";
}
inline std::string name_of(const nibble::gemv_policy& p) {
  return std::string(name_of(p.variant)) + " " + std::to_string(p.grid) + "x" + std::to_string(p.warps) +
         " d" + std::to_string(p.variant == nibble::gemv_variant::ring ? p.stages : p.depth) + " c" +
         std::to_string(p.columns);
}

struct dense_options {
  std::vector<int> tokens = {1, 2, 4, 8, 16};
  bool rotate_outputs = false;
  bool plain = true;
  bool cublas = true;
};

/// Weights of a layout in rotating copies, activations, outputs, and the floors of this run.
template <nibble::resident_layout Layout, class Epilogue>
struct dense_case {
  static constexpr std::size_t bytes = Layout.bytes();
  std::vector<const std::uint8_t*> copies;
  std::uint8_t* weights;
  __nv_bfloat16* x;
  float* y;
  unsigned long long* keys;
  int outputs, count;
  double floor_plain = 0, floor_pdl = 0;

  explicit dense_case(const dense_options& options) {
    const auto n = static_cast<std::size_t>(std::max<std::size_t>(2, rotation_bytes() / bytes + 1));
    std::mt19937_64 random(7);
    // Random bits: finite in every format but a few fp8 and bf16 values; times do not depend on them.
    std::vector<std::uint8_t> host(bytes);
    for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
      const std::uint64_t v = random() & 0xB7B7'B7B7'B7B7'B7B7ull;
      std::memcpy(host.data() + i, &v, 8);
    }
    weights = allocate<std::uint8_t>(bytes * n);
    BENCH_CHECK(cudaMemcpy(weights, host.data(), bytes, cudaMemcpyHostToDevice));
    for (std::size_t i = 1; i < n; ++i)
      BENCH_CHECK(cudaMemcpy(weights + i * bytes, weights, bytes, cudaMemcpyDeviceToDevice));
    for (std::size_t i = 0; i < n; ++i) copies.push_back(weights + i * bytes);
    std::vector<__nv_bfloat16> hx(16 * static_cast<std::size_t>(Layout.shape.k));
    for (auto& v : hx) v = __float2bfloat16(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
    x = upload(hx);
    outputs = options.rotate_outputs ? 16 : 1;
    y = allocate<float>(16 * static_cast<std::size_t>(Layout.shape.n) * outputs);
    keys = allocate<unsigned long long>(16 * 4096);
    count = std::max(8, std::min(400, static_cast<int>(1.2e9 / static_cast<double>(bytes))));
    floor_plain = options.plain ? read_floor(copies, bytes, count, nibble::launch_chain::plain) : 0;
    floor_pdl = read_floor(copies, bytes, count, nibble::launch_chain::pdl);
  }
  ~dense_case() {
    cudaFree(weights);
    cudaFree(x);
    cudaFree(y);
    cudaFree(keys);
  }
  nibble::gemv_params<Epilogue> params(int i, int m) const {
    nibble::gemv_params<Epilogue> p;
    p.tiles = copies[static_cast<std::size_t>(i) % copies.size()];
    p.x = x, p.ldx = Layout.shape.k, p.m = m;
    for (float& s : p.scale) s = 0.0625f;
    p.out.y = reinterpret_cast<decltype(p.out.y)>(y + 16 * static_cast<std::size_t>(Layout.shape.n) *
                                                          (i % outputs));
    p.out.ldy = nibble::layout_constants<Layout>::rows;
    if constexpr (requires { p.out.residual; }) p.out.residual = p.out.y, p.out.ldr = p.out.ldy;
    if constexpr (requires { p.out.keys; }) p.out.keys = keys, p.out.blocks = 264;
    return p;
  }
  template <class Launch>
  double time(int m, nibble::launch_chain chain, Launch launch) const {
    return graph_time(count, [&](int i) {
      good(launch(params(i, m), m, nibble::launch_options{stream(), chain}));
    });
  }
};

/// Measures the kernels select_gemv chooses.
template <nibble::resident_layout Layout, class Epilogue>
void dense(report& out, const dense_options& options, cublas_lt& cublas) {
  good(nibble::prepare_gemv<Layout, Epilogue>());
  dense_case<Layout, Epilogue> c(options);
  const auto& g = Layout.shape;
  const std::string format(nibble::name_of(g.format));
  const auto launch = [](const auto& p, int m, const auto& o) {
    return nibble::launch_gemv<Layout, Epilogue>(p, m, o);
  };
  constexpr nibble::gemv_policy policies[5] = {nibble::select_gemv(Layout, 1), nibble::select_gemv(Layout, 2),
                                               nibble::select_gemv(Layout, 4), nibble::select_gemv(Layout, 8),
                                               nibble::select_gemv(Layout, 16)};
  for (const int m : options.tokens) {
    int i = 0;
    while (i < 4 && (1 << i) < m) ++i;
    row r{"dense", g.name(), g.n, g.k, m, format, name_of(policies[i]), "plain", 0, c.floor_plain, c.bytes};
    if (options.plain) {
      r.us = c.time(m, nibble::launch_chain::plain, launch);
      out.add(r);
    }
    r.chain = "pdl", r.floor_us = c.floor_pdl;
    r.us = c.time(m, nibble::launch_chain::pdl, launch);
    out.add(r);
  }
  if (options.cublas && cublas.available()) {
    // The same matrix in bf16: as many copies of 2 bytes an element as fit the rotation.
    const std::size_t bytes = 2 * static_cast<std::size_t>(g.n) * g.k;
    const auto n = static_cast<std::size_t>(std::max<std::size_t>(2, rotation_bytes() / bytes + 1));
    auto* w = allocate<std::uint8_t>(bytes * n);
    BENCH_CHECK(cudaMemset(w, 0x3C, bytes * n));
    std::vector<const std::uint8_t*> copies;
    for (std::size_t i = 0; i < n; ++i) copies.push_back(w + i * bytes);
    for (const int m : {1, 8}) {
      row r{"dense", g.name(), g.n, g.k, m, "bf16", "cublasLt", "plain", 0, c.floor_plain, bytes};
      r.us = cublas.time(g.n, g.k, m, copies, c.x, reinterpret_cast<__nv_bfloat16*>(c.y),
                         std::max(8, c.count / 4));
      if (r.us > 0) out.add(r);
    }
    BENCH_CHECK(cudaFree(w));
  }
}

/// Measures one policy, for tuning.
template <nibble::resident_layout Layout, nibble::gemv_policy Policy, class Epilogue, int... Tokens>
void one_policy(const dense_case<Layout, Epilogue>& c, const char* note = "") {
  nibble::kernel_info info;
  good(nibble::prepare_gemv_with<Layout, Policy, Epilogue>(&info));
  const auto launch = [](const auto& p, int, const auto& o) {
    return nibble::launch_gemv_with<Layout, Policy, Epilogue>(p, o);
  };
  for (const int m : {Tokens...})
    std::printf("%-28s m=%-2d %-26s b%d %-8s plain %7.2f pdl %7.2f (floors %.2f %.2f) regs %d local %d\n",
                Layout.shape.name().c_str(), m, name_of(Policy).c_str(), Policy.min_blocks, note,
                c.time(m, nibble::launch_chain::plain, launch), c.time(m, nibble::launch_chain::pdl, launch),
                c.floor_plain, c.floor_pdl, info.registers, info.local_bytes);
  std::fflush(stdout);
}

}  // namespace bench
