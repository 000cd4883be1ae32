// SPDX-License-Identifier: Apache-2.0
// What follows from the types of the full-size models, against figures worked out by hand.
#include "compiled/qwen3_30b_a3b.hpp"
#include "compiled/qwen3_6_35b_a3b.hpp"
#include "model/model.hpp"
#include "nibble/op/type_visitors.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using nibble::fused;
using nibble::matrix;

TEST_CASE("Qwen3.6-35B-A3B, mixed precision") {
  using lm = causal_lm<compiled::qwen3_6_35b_a3b>;
  constexpr auto geometries = nibble::distinct_geometries<lm>();
  // Attention qkv and out, delta qkvz and out, b|a, router, expert gate|up and down, shared gate, lm_head;
  // the shared expert's two are the routed experts', the attention's out is the delta's.
  CHECK(geometries.size() == 9);
  CHECK(geometries.contains(fused(2048, weight_format::fp8, 8192, 512, 512)));
  CHECK(geometries.contains(fused(2048, weight_format::fp8, 8192, 4096)));
  CHECK(geometries.contains(matrix(2048, 4096, weight_format::fp8)));
  CHECK(geometries.contains(fused(2048, weight_format::bf16, 32, 32)));
  CHECK(geometries.contains(matrix(256, 2048, weight_format::bf16)));
  CHECK(geometries.contains(fused(2048, weight_format::nvfp4, 512, 512)));
  CHECK(geometries.contains(matrix(2048, 512, weight_format::nvfp4)));
  CHECK(geometries.contains(matrix(1, 2048, weight_format::bf16)));
  CHECK(geometries.contains(matrix(248320, 2048, weight_format::nvfp4)));
  // 10,241 experts a layer would be a mistake in counting: 40 × (256 + 1) SwiGLU experts of 1,769,472 bytes
  // and 3 scales.
  const std::uint64_t experts = std::uint64_t{40} * 257u * (1'769'472u + 12u);
  const std::uint64_t delta =
      30u * (std::uint64_t{33'554'432} + 3 * 4 + 2u * 64u * 2048u + 4u * (8192u * 4u + 32u + 32u + 128u));
  const std::uint64_t attention = 10u * (std::uint64_t{27'262'976} + 4 * 4 + 4u * 512u);
  const std::uint64_t routers = 40u * 2u * 257u * 2048u;
  const std::uint64_t norms = 4u * (2u * 40u + 1u) * 2048u;
  const std::uint64_t head = 286'064'640u + 4u;
  const std::uint64_t table = 2u * std::uint64_t{248'320} * 2048u;
  CHECK(nibble::weight_bytes<lm>() == experts + delta + attention + routers + norms + head + table);
}

TEST_CASE("Qwen3-30B-A3B, NVFP4 experts") {
  using lm = causal_lm<compiled::qwen3_30b_a3b>;
  constexpr auto geometries = nibble::distinct_geometries<lm>();
  CHECK(geometries.size() == 6);
  CHECK(geometries.contains(fused(2048, weight_format::bf16, 4096, 512, 512)));
  CHECK(geometries.contains(matrix(2048, 4096, weight_format::bf16)));
  CHECK(geometries.contains(fused(2048, weight_format::nvfp4, 768, 768)));
  CHECK(geometries.contains(matrix(2048, 768, weight_format::nvfp4)));
  CHECK(geometries.contains(matrix(128, 2048, weight_format::bf16)));
  CHECK(geometries.contains(matrix(151936, 2048, weight_format::bf16)));
  static_assert(compiled::qwen3_30b_a3b::value.delta_layers() == 0);
  static_assert(compiled::qwen3_30b_a3b::value.rotary_dim == 128);
}
