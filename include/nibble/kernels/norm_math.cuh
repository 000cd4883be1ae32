// SPDX-License-Identifier: Apache-2.0
/// \file
/// RMSNorm by warps of 256 columns each: every kernel that normalises a row gets the same bits.
#pragma once

#include "nibble/kernels/rows_math.cuh"

namespace nibble::device {

/// Columns one warp has: eight per lane.
inline constexpr int norm_columns = 256;

/// The warp's part of Σ x², in every lane.
__device__ __forceinline__ float norm_squares(const uint4& x) {
  float v[8];
  unpack(v, x);
  float sum = __fmul_rn(v[0], v[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) sum = __fmaf_rn(v[i], v[i], sum);
  return sum_lanes(sum);
}
/// (mean x² + eps)^-1/2 from the parts of a row, added in their order.
template <int Parts>
__device__ __forceinline__ float norm_factor(const float* parts, float eps) {
  float sum = parts[0];
#pragma unroll
  for (int i = 1; i < Parts; ++i) sum = __fadd_rn(sum, parts[i]);
  return rsqrtf(__fmaf_rn(sum, 1.0f / static_cast<float>(Parts * norm_columns), eps));
}
/// Eight weights of a lane, 1 added where the norm is zero-centred.
struct norm_weights {
  float w[8];
  __device__ __forceinline__ void load(const float* weight, bool zero_centred) {
    const float4 a = load_float4(weight), b = load_float4(weight + 4);
    const float one = zero_centred ? 1.0f : 0.0f;
    w[0] = one + a.x, w[1] = one + a.y, w[2] = one + a.z, w[3] = one + a.w;
    w[4] = one + b.x, w[5] = one + b.y, w[6] = one + b.z, w[7] = one + b.w;
  }
  __device__ __forceinline__ uint4 apply(const uint4& x, float factor) const {
    float v[8];
    unpack(v, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], factor), w[i]);
    return pack(v);
  }
};

}  // namespace nibble::device
