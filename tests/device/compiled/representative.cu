// SPDX-License-Identifier: Apache-2.0
// The kernels of a decode step of Qwen3.6-35B-A3B, for the checks of compiled code. With SMALL, one instance
// per variant and format, for the architectures nobody here has.
#include "nibble/moe/experts_family.cuh"
#include "nibble/nvfp4/linear_family.cuh"

using namespace nibble;
using bf = __nv_bfloat16;

namespace {
constexpr auto f4 = weight_format::nvfp4, f8 = weight_format::fp8, b16 = weight_format::bf16;
#ifndef NIBBLE_TEST_DEVICE
#define NIBBLE_TEST_DEVICE h200
#endif

template <resident_layout Layout, class Epilogue, class Input = plain_input>
bool all() {
#ifdef SMALL
  return prepare_gemv_with<Layout, select_gemv(Layout, 8, NIBBLE_TEST_DEVICE, Input::norm_bytes), Epilogue,
                           Input>()
      .ok();
#else
  return prepare_gemv<Layout, Epilogue, NIBBLE_TEST_DEVICE, Input>().ok();
#endif
}
}  // namespace

bool prepare_everything();
bool prepare_everything() {
  bool good = all<resident_layout{matrix(2048, 4096, f4)}, add_residual>();
  good &= all<resident_layout{matrix(248320, 2048, f4)}, store_and_argmax>();
  good &= all<resident_layout{fused(2048, f8, 8192, 4096)}, store<bf>>();
  good &= all<resident_layout{matrix(256, 2048, b16)}, store<float>>();
  good &= all<resident_layout{fused(2048, f8, 8192, 512, 512)}, store<bf>, rms_normed<bf>>();
  good &= prepare_gemm<resident_layout{matrix(2048, 4096, f8)}, add_residual, NIBBLE_TEST_DEVICE>().ok();
  good &= moe::prepare_experts<moe::experts_shape{2048, 512, 256, 8, true, f4}>().ok();
  good &=
      moe::prepare_experts_many<moe::experts_shape{2048, 512, 256, 8, true, f4}, NIBBLE_TEST_DEVICE>().ok();
  good &= all<resident_layout{matrix(248320, 2048, f4)}, store_and_top_k<8>>();
#ifndef SMALL
  good &= prepare_gemm<resident_layout{fused(2048, f4, 8192, 4096)}, store<bf>>().ok();
  good &= prepare_gemm<resident_layout{matrix(256, 2048, b16)}, store<float>>().ok();
  good &= all<resident_layout{fused(2048, f8, 8192, 4096)}, store<bf>, rms_normed<bf>>();
  good &= all<resident_layout{fused(2048, f4, 8192, 4096)}, store<bf>, rms_normed<float>>();
  good &= all<resident_layout{fused(2048, f4, 8192, 4096)}, store<bf>>();
  good &= all<resident_layout{fused(2048, f4, 8192, 512, 512)}, store<bf>>();
  good &= all<resident_layout{fused(2048, f4, 512, 512), row_order::gate_up}, swiglu>();
  good &= all<resident_layout{matrix(2048, 512, f4)}, add_residual>();
  good &= all<resident_layout{fused(2048, f8, 8192, 512, 512)}, store<bf>>();
  good &= all<resident_layout{matrix(2048, 4096, f8)}, add_residual>();
  good &= moe::prepare_experts<moe::experts_shape{2048, 768, 128, 8, false, f4}>().ok();
#endif
  return good;
}
