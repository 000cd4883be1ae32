// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "nibble/moe/experts_types.hpp"
#include "nibble/nvfp4/gemv_policy.hpp"
#include "support/catch.hpp"

using namespace nibble;

namespace {

constexpr weight_format formats[] = {weight_format::nvfp4, weight_format::fp8, weight_format::bf16};

template <class Visit>
void for_each_layout(Visit visit) {
  for (const weight_format format : formats)
    for (const int n : {1, 7, 16, 33, 256, 512, 1024, 2048, 9216, 12288, 20000, 65536, 151936, 248320})
      for (const int k : {16, 48, 128, 464, 512, 768, 1536, 2048, 2880, 4096, 5120, 12288})
        visit(resident_layout{matrix(n, k, format)});
}

}  // namespace

TEST_CASE("every layout has a compatible policy for every device and number of tokens") {
  for_each_layout([](const resident_layout& layout) {
    for (const device_class& device : device_classes)
      for (int m = 1; m <= max_gemv_tokens; ++m) {
        const gemv_policy p = select_gemv(layout, token_columns(m), device);
        const bool good = compatible(layout, p) && p.columns >= m && p.grid <= layout.row_tiles() &&
                          (device.has_bulk_copies() || p.variant == gemv_variant::registers) &&
                          plan_of(layout, p).shared_bytes <= device.dynamic_shared_bytes();
        CAPTURE(layout.shape.name(), device.architecture, m, static_cast<int>(p.variant), p.grid, p.warps);
        if (!good) FAIL("the selector gave a policy that cannot run");
      }
  });
  SUCCEED();
}

TEST_CASE("the split of K does not depend on tokens or device: one summation order") {
  for_each_layout([](const resident_layout& layout) {
    const int warps = k_split(layout);
    for (const device_class& device : device_classes)
      for (const int columns : {1, 2, 4, 8, 16})
        if (select_gemv(layout, columns, device).warps != warps)
          FAIL("K is split differently for " + layout.shape.name());
  });
  constexpr moe::experts_shape shape{2048, 512, 256, 8, true, weight_format::nvfp4};
  for (const int m : {1, 2, 4, 5, 8, 16}) {
    CHECK(moe::select_experts(shape, m).up_warps == moe::up_split(shape));
    CHECK(moe::select_experts(shape, m).down_warps == moe::down_split(shape));
  }
}

TEST_CASE("a policy survives its encoding as an integer") {
  for_each_layout([](const resident_layout& layout) {
    for (const device_class& device : device_classes)
      for (const int columns : {1, 2, 4, 8, 16}) {
        const gemv_policy p = select_gemv(layout, columns, device);
        if (!(decode_policy(encode(p)) == p))
          FAIL("a policy of " + layout.shape.name() + " is lost in its encoding");
      }
  });
  CHECK(encode(select_gemv({matrix(2048, 4096, weight_format::nvfp4)}, 1)) !=
        encode(select_gemv({matrix(2048, 4096, weight_format::nvfp4)}, 8)));
}

TEST_CASE("C022: policies of the geometries measured on the H200") {
  const auto variant = [](int n, int k, weight_format format, int columns) {
    return select_gemv({matrix(n, k, format)}, columns, h200).variant;
  };
  CHECK(variant(248320, 2048, weight_format::nvfp4, 1) == gemv_variant::ring);
  CHECK(variant(12288, 2048, weight_format::nvfp4, 8) == gemv_variant::one_shot);
  CHECK(variant(9216, 2048, weight_format::nvfp4, 1) == gemv_variant::one_shot);
  CHECK(variant(2048, 4096, weight_format::nvfp4, 8) == gemv_variant::one_shot);
  CHECK(variant(1024, 2048, weight_format::nvfp4, 1) == gemv_variant::one_shot);
  CHECK(variant(2048, 512, weight_format::nvfp4, 8) == gemv_variant::registers);
  CHECK(variant(12288, 2048, weight_format::fp8, 1) == gemv_variant::registers);
  for (const int columns : {1, 8, 16}) {
    const gemv_policy p = select_gemv({matrix(2048, 4096, weight_format::fp8)}, columns, h200);
    CHECK(p.variant == gemv_variant::one_shot);
    CHECK(p.min_blocks == 2);
    CHECK(p.whole_rows == (columns <= 8));
    CHECK(p.x_at_use == (columns == 16));
  }
  // What ends a block of a model leaves its multiprocessors' shared memory to what follows.
  const gemv_policy last = select_gemv({matrix(2048, 4096, weight_format::fp8)}, 1, h200, 0, true);
  CHECK(last.variant == gemv_variant::registers);
  CHECK(last.min_blocks == 2);
  CHECK(select_gemv({matrix(2048, 4096, weight_format::fp8)}, 8, h200, 0, true).variant ==
        gemv_variant::one_shot);
  // Sixteen tokens of several row tiles a block take x in turns, six of FP8 in a loop.
  CHECK(select_gemv({matrix(12288, 2048, weight_format::nvfp4)}, 16, h200).x_in_turns);
  CHECK_FALSE(select_gemv({matrix(12288, 2048, weight_format::nvfp4)}, 8, h200).x_in_turns);
  const gemv_policy loop = select_gemv({matrix(12288, 2048, weight_format::fp8)}, 16, h200);
  CHECK(loop.rolled);
  CHECK(loop.x_in_turns);
  CHECK(loop.grid == 128);
  CHECK_FALSE(select_gemv({matrix(12288, 2048, weight_format::fp8)}, 16, ada).rolled);
  CHECK(select_gemv({matrix(12288, 2048, weight_format::nvfp4)}, 1, h200).grid == 128);
  // Two row tiles a block where K is short and there are not many.
  for (const int columns : {1, 8}) {
    const gemv_policy p = select_gemv({matrix(2048, 512, weight_format::nvfp4)}, columns, h200);
    CHECK(p.grid == 64);
    CHECK(p.depth == 2);
  }
  CHECK(select_gemv({matrix(2048, 512, weight_format::nvfp4)}, 16, h200).grid == 128);
  CHECK(select_gemv({matrix(1024, 2048, weight_format::nvfp4)}, 1, h200).grid == 64);
  CHECK(select_gemv({matrix(256, 512, weight_format::nvfp4)}, 1, h200).grid == 16);
  CHECK(h200.measured);
  CHECK_FALSE(ada.measured);
}

TEST_CASE("token classes cover 1 to 16 tokens") {
  for (int m = 1; m <= 16; ++m) {
    CHECK(token_columns(m) >= m);
    CHECK((token_columns(m) == 1 || token_columns(m) < 2 * m));
  }
}

TEST_CASE("layouts and policies that cannot run are known") {
  const resident_layout layout{matrix(64, 512, weight_format::nvfp4)};
  gemv_policy p = select_gemv(layout, 8);
  CHECK(compatible(layout, p));
  p.columns = 3;
  CHECK_FALSE(compatible(layout, p));
  p = select_gemv(layout, 8);
  p.warps = 5;  // four K tiles
  CHECK_FALSE(compatible(layout, p));
  p = select_gemv(layout, 8);
  p.grid = 5;  // four row tiles
  CHECK_FALSE(compatible(layout, p));
  CHECK_FALSE(compatible({matrix(64, 24, weight_format::fp8)}, select_gemv(layout, 8)));
}

TEST_CASE("bytes of a slot of Qwen3.6-35B-A3B") {
  constexpr moe::experts_shape shape{2048, 512, 256, 8, true, weight_format::nvfp4};
  static_assert(shape.valid() && shape.groups() == 9);
  CHECK(shape.slot_bytes() == 1'769'472);
  CHECK(moe::report_words(shape) == 9);
  CHECK_FALSE(moe::experts_shape{2048, 510, 256, 8, true, weight_format::nvfp4}.valid());
  CHECK_FALSE(moe::experts_shape{2048, 512, 256, 16, true, weight_format::nvfp4}.valid());
}
