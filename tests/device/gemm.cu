// SPDX-License-Identifier: Apache-2.0
// Many tokens: the tensor-core product against fp64, ragged in every direction.
#include "gemv_check.cuh"
#include "nibble/nvfp4/gemm.cuh"

using namespace nibble;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8, b16 = weight_format::bf16;

/// Token counts; a short run takes the last of each class, which has the most tiles.
std::vector<int> counts(std::vector<int> all) {
  if (device_test::quick()) all = {all.back()};
  return all;
}

template <resident_layout Layout, class Epilogue>
bool many(const char* name, const char* group = "gemm") {
  return device_test::add(group, name, [] {
    kernel_info info[4];
    NIBBLE_GOOD((prepare_gemm<Layout, Epilogue>(info)));
    for (const auto& i : info) NIBBLE_CHECK(i.local_bytes <= device_test::allowed_local_bytes);
    const auto launch = [](auto p, int m, const auto& o) { return launch_gemm<Layout, Epilogue>(p, m, o); };
    // One class of tokens after the other: rows are the same bits within a class.
    device_test::check_layout<Layout, Epilogue>(counts({1, 17, 32}), 0, launch, Layout.shape.k);
    device_test::check_layout<Layout, Epilogue>(counts({33, 64}), 0, launch, Layout.shape.k + 1);
    device_test::check_layout<Layout, Epilogue>(counts({65, 128, 129, 200}), 0, launch, Layout.shape.k + 2);
    if constexpr (has_wide_gemm(Layout)) {
      const auto wide = [](auto p, int m, const auto& o) { return launch_gemm_wide<Layout, 2>(p, m, o, 3); };
      const auto narrow = [](auto p, int m, const auto& o) {
        return launch_gemm_wide<Layout, 1>(p, m, o, 5);
      };
      device_test::check_layout<Layout, Epilogue>(counts({5, 128, 300}), 0, wide, Layout.shape.k + 3);
      device_test::check_layout<Layout, Epilogue>(counts({100, 257}), 0, narrow, Layout.shape.k + 4);
    }
  });
}
/// Persistent grids that leave multiprocessors to a kernel beside them, more than there are among the values:
/// the bits of a grid that leaves none.
template <resident_layout Layout, class Epilogue, int Tokens = 300>
bool leaving(const char* name) {
  static_assert(has_wide_gemm(Layout) || !has_wgmma || default_device.architecture != 90);
  return device_test::add("left", name, [] {
    if constexpr (has_wide_gemm(Layout)) {
      constexpr int all = default_device.multiprocessors;
      std::vector<int> left = {0, 1, 4, all - 20, all - 5, all - 1, all, 1000};
      if (device_test::quick()) left = {0, all - 5, 1000};
      NIBBLE_GOOD((prepare_gemm<Layout, Epilogue>()));
      const auto check = [&](const std::vector<int>& tokens, auto launch, std::uint64_t seed) {
        std::size_t at = 0;  // check_layout launches twice for each count and compares with the first
        const auto leaves = [&](auto p, int m, launch_options o) {
          o.left_multiprocessors = left[at++ / 2];
          return launch(p, m, o);
        };
        device_test::check_layout<Layout, Epilogue>(tokens, 0, leaves, seed);
        NIBBLE_CHECK(at == 2 * left.size());
      };
      const std::vector<int> wide(left.size(), Tokens), narrow(left.size(), 130);
      check(
          wide, [](auto p, int m, const auto& o) { return launch_gemm<Layout, Epilogue>(p, m, o); }, 71);
      check(
          narrow, [](auto p, int m, const auto& o) { return launch_gemm_wide<Layout, 1>(p, m, o); }, 72);
      check(
          wide, [](auto p, int m, const auto& o) { return launch_gemm_wide<Layout, 2>(p, m, o); }, 73);
    }
  });
}
const bool registered[] = {
    leaving<resident_layout{matrix(2048, 512, f4)}, store<bf>>("nvfp4"),
    leaving<resident_layout{fused(2048, f4, 512, 512), row_order::gate_up}, swiglu>("nvfp4, swiglu"),
    leaving<resident_layout{fused(2048, f8, 8192, 512, 512)}, store<bf>, 130>("fp8, many row tiles"),
    leaving<resident_layout{matrix(257, 1024, b16)}, store<float>>("bf16"),
    many<resident_layout{matrix(2048, 512, f4)}, store<bf>>("nvfp4"),
    many<resident_layout{fused(464, f4, 33, 50)}, store<float>>("nvfp4, ragged, two segments"),
    many<resident_layout{fused(2048, f4, 512, 512), row_order::gate_up}, swiglu>("nvfp4, swiglu"),
    many<resident_layout{fused(48, f4, 21, 21), row_order::gate_up}, swiglu>("nvfp4, ragged swiglu"),
    many<resident_layout{matrix(272, 2880, f8)}, add_residual>("fp8"),
    many<resident_layout{fused(256, f8, 1500, 612)}, add_scaled_residual>("fp8, a weight for each token"),
    many<resident_layout{matrix(257, 1024, b16)}, store<float>>("bf16"),
    many<resident_layout{fused(304, b16, 72, 72), row_order::gate_up}, swiglu>("bf16, swiglu"),
    many<resident_layout{fused(2048, f8, 8192, 512, 512)}, store<bf>>("fp8, many row tiles", "large"),
};
const bool chosen = device_test::add("gemm", "launch_linear takes either kernel", [] {
  constexpr resident_layout layout{matrix(256, 512, f4)};
  NIBBLE_GOOD((prepare_gemv<layout, store<bf>>()));
  NIBBLE_GOOD((prepare_gemm<layout, store<bf>>()));
  device_test::check_layout<layout, store<bf>>(
      {40}, 0, [](auto p, int m, const auto& o) { return launch_linear<layout, store<bf>>(p, m, o); }, 3);
  device_test::check_layout<layout, store<bf>>(
      {16}, 0, [](auto p, int m, const auto& o) { return launch_linear<layout, store<bf>>(p, m, o); }, 4);
});
}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
