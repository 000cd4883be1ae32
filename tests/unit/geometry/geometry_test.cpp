// SPDX-License-Identifier: Apache-2.0
#include "nibble/geometry/geometry.hpp"

#include "nibble/core/checked.hpp"
#include "nibble/geometry/geometry_set.hpp"
#include "support/catch.hpp"

using nibble::fused;
using nibble::geometry;
using nibble::geometry_set;
using nibble::matrix;
using nibble::weight_format;

TEST_CASE("bytes of the geometries of Qwen3.6-35B-A3B") {
  // research: 8192x2048 is 9,437,184 bytes of codes and scales, lm_head 286,064,640, an expert matrix
  // 589,824.
  CHECK(matrix(8192, 2048, weight_format::nvfp4).bytes() == 9'437'184 + 4);
  CHECK(matrix(248320, 2048, weight_format::nvfp4).bytes() == 286'064'640 + 4);
  CHECK(matrix(512, 2048, weight_format::nvfp4).code_bytes() == 524'288);
  CHECK(matrix(512, 2048, weight_format::nvfp4).block_scale_bytes() == 65'536);
  CHECK(matrix(2048, 4096, weight_format::fp8).bytes() == 8'388'608 + 4);
  CHECK(matrix(256, 2048, weight_format::bf16).bytes() == 1'048'576);
  CHECK(fused(2048, weight_format::fp8, 8192, 4096).bytes() == 25'165'824 + 8);
}

TEST_CASE("segments of a fused geometry") {
  constexpr geometry qkv = fused(2048, weight_format::fp8, 8192, 512, 512);
  static_assert(qkv.valid() && qkv.n == 9216 && qkv.segments() == 3);
  static_assert(qkv.rows_of(0) == 8192 && qkv.rows_of(2) == 512 && qkv.first_row_of(2) == 8704);
  static_assert(matrix(5, 7, weight_format::bf16).segments() == 1 &&
                matrix(5, 7, weight_format::bf16).rows_of(0) == 5);
  CHECK(qkv.name() == "fp8 9216x2048 (8192+512+512)");
  CHECK(matrix(1, 16, weight_format::nvfp4).name() == "nvfp4 1x16");
}

TEST_CASE("C009: K of an NVFP4 matrix is a multiple of 16, other formats take any") {
  for (const int k : {16, 32, 48, 464, 2880}) CHECK(matrix(3, k, weight_format::nvfp4).valid());
  for (const int k : {1, 8, 15, 17, 24}) CHECK_FALSE(matrix(3, k, weight_format::nvfp4).valid());
  CHECK(matrix(1, 15, weight_format::bf16).valid());
  CHECK(matrix(1, 15, weight_format::fp8).valid());
  CHECK_FALSE(matrix(0, 16, weight_format::bf16).valid());
  CHECK_FALSE(geometry{10, 16, weight_format::bf16, {4, 5}}.valid());
  CHECK_FALSE(geometry{4, 16, weight_format::bf16, {8, -4}}.valid());
}

TEST_CASE("C021, C022: distinct means field by field, nothing is rounded") {
  constexpr auto set = [] {
    geometry_set<8> s;
    s.insert(matrix(128, 128, weight_format::nvfp4));
    s.insert(matrix(128, 112, weight_format::nvfp4));
    s.insert(matrix(126, 128, weight_format::nvfp4));
    s.insert(matrix(128, 128, weight_format::fp8));
    s.insert(matrix(128, 128, weight_format::nvfp4));
    s.insert(fused(128, weight_format::nvfp4, 64, 64));
    return s;
  }();
  static_assert(set.size() == 5);
  CHECK(set.contains(matrix(128, 112, weight_format::nvfp4)));
  CHECK_FALSE(set.contains(matrix(112, 128, weight_format::nvfp4)));
  for (std::size_t i = 1; i < set.size(); ++i) CHECK(set[i - 1] < set[i]);
}

TEST_CASE("C023: the number of geometries does not grow with use") {
  geometry_set<4> set;
  for (int step = 0; step < 10'000; ++step) {
    set.insert(matrix(64, 32, weight_format::nvfp4));
    set.insert(matrix(32, 64, weight_format::fp8));
  }
  CHECK(set.size() == 2);
}

TEST_CASE("checked arithmetic") {
  CHECK(nibble::checked_multiply(1ull << 32, 1ull << 31) == 1ull << 63);
  CHECK_FALSE(nibble::checked_multiply(1ull << 32, 1ull << 32));
  CHECK(nibble::checked_multiply(0, UINT64_MAX) == 0u);
  CHECK(nibble::checked_add(UINT64_MAX, 0) == UINT64_MAX);
  CHECK_FALSE(nibble::checked_add(UINT64_MAX, 1));
  CHECK(nibble::divide_up(17, 16) == 2);
  CHECK(nibble::divide_up(UINT64_MAX, 2) == (UINT64_MAX / 2) + 1);
  CHECK(nibble::align_up(65, 64) == 128);
  CHECK(nibble::align_up(0, 64) == 0);
}
