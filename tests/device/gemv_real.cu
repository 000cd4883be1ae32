// SPDX-License-Identifier: Apache-2.0
// The geometries of Qwen3.6-35B-A3B and the other models, through the kernels their policies choose.
#include "gemv_check.cuh"

using namespace nibble;
using device_test::add;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8, b16 = weight_format::bf16;

template <resident_layout Layout, class Epilogue>
bool real(const char* group) {
  return add(group, Layout.shape.name(),
             [] { device_test::check_selected<Layout, Epilogue>(Layout.shape.n + Layout.shape.k); });
}

const bool registered[] = {
    real<resident_layout{fused(2048, f4, 8192, 4096)}, store<bf>>("nvfp4"),
    real<resident_layout{fused(2048, f4, 8192, 512, 512)}, store<bf>>("nvfp4"),
    real<resident_layout{matrix(2048, 4096, f4)}, add_residual>("nvfp4"),
    real<resident_layout{matrix(2048, 4096, f4)}, store<float>>("nvfp4"),
    real<resident_layout{fused(2048, f4, 512, 512), row_order::gate_up}, swiglu>("nvfp4"),
    real<resident_layout{matrix(2048, 512, f4)}, add_residual>("nvfp4"),
    real<resident_layout{matrix(4096, 2048, f4)}, store<bf>>("nvfp4"),
    real<resident_layout{matrix(151936, 2048, f4)}, store<bf>>("lm_head"),
    real<resident_layout{matrix(248320, 2048, f4)}, store_and_argmax>("lm_head"),
    real<resident_layout{fused(2048, f8, 8192, 4096)}, store<bf>>("fp8"),
    real<resident_layout{fused(2048, f8, 8192, 512, 512)}, store<bf>>("fp8"),
    real<resident_layout{matrix(2048, 4096, f8)}, add_residual>("fp8"),
    real<resident_layout{matrix(257, 2048, b16)}, store<float>>("bf16"),
    real<resident_layout{matrix(64, 2048, b16)}, store<bf>>("bf16"),
    real<resident_layout{matrix(2048, 4096, b16)}, add_residual>("bf16"),
};
}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
