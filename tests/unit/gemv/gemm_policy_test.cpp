// SPDX-License-Identifier: Apache-2.0
#include "nibble/nvfp4/gemm_policy.hpp"

#include <algorithm>

#include "support/catch.hpp"

using namespace nibble;

namespace {
constexpr weight_format formats[] = {weight_format::nvfp4, weight_format::fp8, weight_format::bf16};

template <class Visit>
void for_each_cut(Visit visit) {
  for (const device_class& device : device_classes)
    for (const weight_format format : formats)
      for (const int n : {1, 16, 257, 1024, 2048, 9216, 12288, 151936})
        for (const int k : {16, 48, 128, 464, 512, 2048, 4096, 12288})
          for (const int tokens : {32, 64, 128}) visit(device, resident_layout{matrix(n, k, format)}, tokens);
}
}  // namespace

TEST_CASE("a block of every product for many tokens fits its device") {
  for_each_cut([](const device_class& device, const resident_layout& layout, int tokens) {
    const gemm_shape s = select_gemm(layout, tokens, device);
    const int most = device.dynamic_shared_bytes();
    const bool good = s.stages >= 2 && s.shared_bytes(layout.shape.format) * s.min_blocks <= most &&
                      s.threads() % 32 == 0 && s.threads() <= 1024 && s.tokens % 8 == 0 &&
                      s.tokens <= tokens && s.tiles * s.tokens <= 256 &&
                      s.k_warps <= std::max(1, layout.k_tiles());
    CAPTURE(device.architecture, layout.shape.name(), tokens, s.row_warps, s.k_warps, s.tiles, s.tokens,
            s.stages);
    if (!good) FAIL("a cut that cannot run");
  });
  SUCCEED();
}

TEST_CASE("few row tiles let warps share K, many do not need it") {
  CHECK(select_gemm({matrix(2048, 4096, weight_format::nvfp4)}, 32).k_warps == 8);
  CHECK(select_gemm({matrix(2048, 4096, weight_format::nvfp4)}, 128).k_warps == 1);
  CHECK(select_gemm({matrix(151936, 2048, weight_format::nvfp4)}, 32).row_tiles() >= 8);
}

TEST_CASE("token classes of the product for many tokens") {
  CHECK(gemm_token_class(1) == 32);
  CHECK(gemm_token_class(32) == 32);
  CHECK(gemm_token_class(33) == 64);
  CHECK(gemm_token_class(64) == 64);
  CHECK(gemm_token_class(65) == 128);
  CHECK(gemm_token_class(8192) == 128);
}

TEST_CASE("rows of a warpgroup unit: 128 where 256 would leave multiprocessors idle") {
  constexpr resident_layout wide{matrix(12288, 2048, weight_format::nvfp4)},
      narrow{matrix(2048, 4096, weight_format::fp8)};
  CHECK(wide_units(wide, 2, 4096) == 48 * 32);
  CHECK(wide_units(wide, 1, 129) == 96 * 2);
  CHECK(wide_row_blocks(wide, 128) == 1);
  CHECK(wide_row_blocks(wide, 4096) == 2);
  CHECK(wide_row_blocks(wide, 8192) == 2);
  CHECK(wide_row_blocks(narrow, 1024) == 1);
  CHECK(wide_row_blocks(narrow, 8192) == 2);
}
