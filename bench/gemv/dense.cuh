// SPDX-License-Identifier: Apache-2.0
/// \file
/// The dense suite: one layout, every m, plain and chained.
#pragma once

#include <cstring>
#include <random>

#include "harness.cuh"
#include "nibble/nvfp4/gemm.cuh"

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
inline std::string name_of(const nibble::gemm_shape& s) {
  return "gemm " + std::to_string(16 * s.row_tiles()) + "x" + std::to_string(s.tokens) + " k" +
         std::to_string(s.k_warps) + " s" + std::to_string(s.stages);
}
inline std::string name_of(const nibble::gemv_policy& p) {
  return std::string(name_of(p.variant)) + " " + std::to_string(p.grid) + "x" + std::to_string(p.warps) +
         " d" + std::to_string(p.variant == nibble::gemv_variant::ring ? p.stages : p.depth) + " c" +
         std::to_string(p.columns);
}

struct dense_options {
  std::vector<int> tokens = {1, 2, 4, 8, 9, 12, 16};
  std::vector<int> many = {32, 64, 128, 512, 4096};  ///< more than 16: the tensor-core product
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
  int outputs, count, most = 16;
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
    if (Layout.shape.n < 65536)  // the vocabulary is multiplied by few tokens
      for (const int m : options.many) most = std::max(most, m);
    std::vector<__nv_bfloat16> hx(static_cast<std::size_t>(most) * Layout.shape.k);
    for (auto& v : hx) v = __float2bfloat16(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
    x = upload(hx);
    outputs = options.rotate_outputs ? 16 : 1;
    y = allocate<float>(static_cast<std::size_t>(most) * static_cast<std::size_t>(Layout.shape.n) * outputs);
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
    p.out.y = reinterpret_cast<decltype(p.out.y)>(
        y + static_cast<std::size_t>(most) * static_cast<std::size_t>(Layout.shape.n) * (i % outputs));
    p.out.ldy = nibble::layout_constants<Layout>::rows;
    if constexpr (requires { p.out.residual; }) p.out.residual = p.out.y, p.out.ldr = p.out.ldy;
    if constexpr (requires { p.out.keys; }) p.out.keys = keys, p.out.blocks = 264;
    return p;
  }
  template <class Launch>
  double time(int m, nibble::launch_chain chain, Launch launch) const {
    return graph_time(m <= 16 ? count : std::min(count, m <= 512 ? 40 : 8), [&](int i) {
      good(launch(params(i, m), m, nibble::launch_options{stream(), chain}));
    });
  }
};

/// The tensor-core kernel that serves `m` tokens.
template <nibble::resident_layout Layout>
std::string many_name(int m) {
  const int tokens = nibble::gemm_token_class(m);
  if (tokens > 64 && nibble::has_wide_gemm(Layout))
    return "wgmma " + std::to_string(128 * nibble::wide_row_blocks(Layout, m)) + "x128";
  return name_of(nibble::select_gemm(Layout, tokens));
}

/// Measures the kernels select_gemv and select_gemm choose.
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
  // Many tokens. The floor is the reading alone: from some hundred tokens on arithmetic is the limit.
  if constexpr (!Epilogue::finishes && Layout.shape.n < 65536) {
    if (!options.many.empty()) good(nibble::prepare_gemm<Layout, Epilogue>());
    for (const int m : options.many) {
      row r{"dense", g.name(), g.n, g.k, m, format, "", "pdl", 0, c.floor_pdl, c.bytes};
      r.kernel = many_name<Layout>(m);
      r.us = c.time(m, nibble::launch_chain::pdl, [](const auto& p, int tokens, const auto& o) {
        return nibble::launch_linear<Layout, Epilogue>(p, tokens, o);
      });
      out.add(r);
    }
  }
  if (options.cublas && cublas.available()) {
    // The same matrix in bf16: as many copies of 2 bytes an element as fit the rotation.
    const std::size_t bytes = 2 * static_cast<std::size_t>(g.n) * g.k;
    const auto n = static_cast<std::size_t>(std::max<std::size_t>(2, rotation_bytes() / bytes + 1));
    auto* w = allocate<std::uint8_t>(bytes * n);
    BENCH_CHECK(cudaMemset(w, 0x3C, bytes * n));
    std::vector<const std::uint8_t*> copies;
    for (std::size_t i = 0; i < n; ++i) copies.push_back(w + i * bytes);
    std::vector<int> tokens = {1, 8};
    if (g.n < 65536) tokens.insert(tokens.end(), options.many.begin(), options.many.end());
    for (const int m : tokens) {
      row r{"dense", g.name(), g.n, g.k, m, "bf16", "cublasLt", "plain", 0, c.floor_plain, bytes};
      r.us = cublas.time(g.n, g.k, m, copies, c.x, reinterpret_cast<__nv_bfloat16*>(c.y),
                         m > 512 ? 8 : std::max(8, c.count / 4));
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
