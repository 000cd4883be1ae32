// SPDX-License-Identifier: Apache-2.0
#include "nibble/core/device_class.hpp"

#include <initializer_list>
#include <span>
#include <vector>

#include "nibble/kernels/attention_types.hpp"
#include "nibble/moe/experts_types.hpp"
#include "support/catch.hpp"

using namespace nibble;

namespace {

struct build {
  device_class device;
};
/// The architecture that is chosen from those of a build; 0: none.
int chosen(std::initializer_list<int> architectures, int compute_capability) {
  std::vector<build> builds;
  for (const int a : architectures) builds.push_back({device_class_of(a)});
  const build* best = best_build(std::span<const build>(builds), compute_capability);
  return best == nullptr ? 0 : best->device.architecture;
}

}  // namespace

TEST_CASE("C019: a device gets the code of its architecture, or none") {
  for (const int a : {80, 86, 89, 90, 100, 120}) {
    CHECK(chosen({80, 86, 89, 90, 100, 120}, a) == a);
    CHECK(chosen({a}, a) == a);
  }
  // Too old, and not known yet: refused by the number, not tried.
  for (const int unknown : {75, 121, 130}) CHECK(chosen({80, 86, 89, 90, 100, 120}, unknown) == 0);
}

TEST_CASE("code runs on later devices of its major version, before 9.0") {
  CHECK(chosen({80}, 86) == 80);
  CHECK(chosen({80}, 89) == 80);
  CHECK(chosen({80, 86}, 89) == 86);
  CHECK(chosen({86, 80}, 87) == 86);
  CHECK(chosen({86}, 80) == 0);
  CHECK(chosen({89}, 86) == 0);
}

TEST_CASE("C020: no code for a device is no build, never one of another generation") {
  CHECK(chosen({80, 86, 89}, 90) == 0);
  CHECK(chosen({90}, 89) == 0);
  CHECK(chosen({90}, 100) == 0);
  CHECK(chosen({100}, 103) == 0);
  CHECK(chosen({120}, 121) == 0);
  CHECK(chosen({89}, 120) == 0);
  CHECK(chosen({80, 86, 89, 90, 100, 120}, 75) == 0);
  CHECK(chosen({}, 90) == 0);
}

TEST_CASE("classes are known by their architecture, and only one is measured") {
  for (const device_class& one : device_classes) {
    CHECK(device_class_of(one.architecture) == one);
    CHECK(one.measured == (one.architecture == 90));
    CHECK(one.has_bulk_copies() == (one.architecture >= 90));
    CHECK(one.dynamic_shared_bytes() < one.shared_bytes());
  }
  CHECK(device_class_of(75).architecture == 0);
  CHECK(ada.shared_bytes() == 99 * 1024);
  CHECK(ampere_consumer.shared_bytes() == 99 * 1024);
  CHECK(blackwell_consumer.shared_bytes() == 99 * 1024);
  CHECK(ampere.shared_bytes() == 163 * 1024);
  CHECK(h200.shared_bytes() == 227 * 1024);
}

TEST_CASE("attention takes little shared memory where there is little") {
  attention_shape wide;
  wide.heads = 16, wide.kv_heads = 2, wide.head_dim = 256, wide.rotary_dim = 64;
  for (const device_class& one : device_classes) {
    const attention_policy p = select_attention(wide, one);
    CHECK(p.prefill_rows == (one.shared_bytes() < 130 * 1024 ? 64 : 128));
    CHECK(p.decode_warps == (one.shared_bytes() < 160 * 1024 ? 4 : 8));
    CHECK(p.decode_blocks == one.multiprocessors * 8 / p.decode_warps);
    CHECK(p.most_chunks <= flat_chunks * chunks_per_group);
  }
}

TEST_CASE("expert kernels' blocks follow the device, their sums do not") {
  constexpr moe::experts_shape shape{2048, 768, 128, 8, false, weight_format::nvfp4};
  for (const device_class& one : device_classes)
    for (const int m : {1, 4, 8}) {
      const auto p = moe::select_experts(shape, m, one), q = moe::select_experts(shape, m, h200);
      CHECK(p.multiprocessors == one.multiprocessors);
      CHECK(p.up_warps == q.up_warps);
      CHECK(p.down_warps == q.down_warps);
    }
}
