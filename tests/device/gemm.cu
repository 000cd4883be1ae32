// SPDX-License-Identifier: Apache-2.0
// Many tokens: the tensor-core product against fp64, ragged in every direction.
#include "gemv_check.cuh"
#include "nibble/nvfp4/gemm.cuh"

using namespace nibble;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8;

template <resident_layout Layout, class Epilogue>
bool many(const char* name) {
  return device_test::add("gemm", name, [] {
    kernel_info info;
    NIBBLE_GOOD((prepare_gemm<Layout, Epilogue>(&info)));
    NIBBLE_CHECK(info.local_bytes == 0);
    device_test::check_layout<Layout, Epilogue>(
        {1, 17, 64, 128, 129, 200}, 0,
        [](auto p, int m, const auto& o) { return launch_gemm<Layout, Epilogue>(p, m, o); }, Layout.shape.k);
  });
}
const bool registered[] = {
    many<resident_layout{matrix(2048, 512, f4)}, store<bf>>("nvfp4"),
    many<resident_layout{fused(464, f4, 33, 50)}, store<float>>("nvfp4, ragged, two segments"),
    many<resident_layout{fused(2048, f4, 512, 512), row_order::gate_up}, swiglu>("nvfp4, swiglu"),
    many<resident_layout{fused(48, f4, 21, 21), row_order::gate_up}, swiglu>("nvfp4, ragged swiglu"),
    many<resident_layout{matrix(272, 2880, f8)}, add_residual>("fp8"),
};
const bool chosen = device_test::add("gemm", "launch_linear takes either kernel", [] {
  constexpr resident_layout layout{matrix(256, 512, f4)};
  static_assert(gemm_pays(layout, 200) && !gemm_pays(layout, 20));
  static_assert(gemm_pays({matrix(12288, 2048, f4)}, 256) && !gemm_pays({matrix(2048, 4096, f4)}, 128));
  NIBBLE_GOOD((prepare_gemv<layout, store<bf>>()));
  NIBBLE_GOOD((prepare_gemm<layout, store<bf>>()));
  device_test::check_layout<layout, store<bf>>(
      {40}, 0, [](auto p, int m, const auto& o) { return launch_linear<layout, store<bf>>(p, m, o); }, 3);
  device_test::check_layout<layout, store<bf>>(
      {20}, 0, [](auto p, int m, const auto& o) { return launch_linear<layout, store<bf>>(p, m, o); }, 4);
});
}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
