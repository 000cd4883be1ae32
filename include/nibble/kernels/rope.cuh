// SPDX-License-Identifier: Apache-2.0
/// \file
/// One attention head in the registers of a warp: loading, RMSNorm, rotary embedding.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace nibble::device {

/// (cos, sin) of an angle in radians, within 2 units in the last place of fp32 where |angle| < 2^22: a
/// position below four million. π/2 is taken off in three parts; the first product is exact, since it and the
/// angle are multiples of 2^-23 that nearly cancel. No local memory, unlike sincosf for large angles.
__device__ __forceinline__ float2 cosine_sine(float angle) {
  const float turns = rintf(angle * 0x1.45f306p-1f);
  float r = fmaf(turns, -0x1.921fb6p+0f, angle);
  r = fmaf(turns, 0x1.777a5cp-25f, r);
  r = fmaf(turns, 0x1.ee59dap-50f, r);
  const float z = r * r;
  // Taylor series on |r| <= π/4: what is left off is below 2^-29.
  float s = fmaf(z, fmaf(z, fmaf(z, 1.0f / 362880, -1.0f / 5040), 1.0f / 120), -1.0f / 6);
  s = fmaf(z * r, s, r);
  float c = fmaf(z, fmaf(z, fmaf(z, -1.0f / 3628800, 1.0f / 40320), -1.0f / 720), 1.0f / 24);
  c = fmaf(z, fmaf(z, c, -0.5f), 1.0f);
  const int quadrant = static_cast<int>(turns) & 3;
  const float x = quadrant & 1 ? s : c, y = quadrant & 1 ? c : s;
  return make_float2(quadrant == 1 || quadrant == 2 ? -x : x, quadrant & 2 ? -y : y);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFF'FFFFu, v, offset);
  return v;
}

/// A head of Dim values: lane l owns the Dim / 32 from l · Dim / 32 on.
template <int Dim, int Rotary, bool ZeroCentred>
struct warp_head {
  static constexpr int each = Dim / 32;
  static constexpr int half = Rotary / 2;
  static_assert(half >= each, "a lane's values lie in one half of the rotation");
  using values = float[each];
  using bits = std::uint32_t[each / 2];

  static __device__ __forceinline__ void load(bits& to, const __nv_bfloat16* head, int lane) {
    const __nv_bfloat16* p = head + lane * each;
    if constexpr (each == 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (each == 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      to[0] = v.x, to[1] = v.y;
    } else {
      to[0] = *reinterpret_cast<const std::uint32_t*>(p);
    }
  }
  static __device__ __forceinline__ void store(__nv_bfloat16* at, const bits& from) {
    if constexpr (each == 8)
      *reinterpret_cast<uint4*>(at) = make_uint4(from[0], from[1], from[2], from[3]);
    else if constexpr (each == 4)
      *reinterpret_cast<uint2*>(at) = make_uint2(from[0], from[1]);
    else
      *reinterpret_cast<std::uint32_t*>(at) = from[0];
  }
  static __device__ __forceinline__ void unpack(values& to, const bits& from) {
#pragma unroll
    for (int i = 0; i < each / 2; ++i) {
      to[2 * i] = __uint_as_float(from[i] << 16);
      to[2 * i + 1] = __uint_as_float(from[i] & 0xFFFF'0000u);
    }
  }
  /// x · (mean x² + eps)^-1/2 · w. \param weight [Dim]
  static __device__ __forceinline__ void normalise(values& x, const float* weight, float eps, int lane) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < each; ++j) squares = fmaf(x[j], x[j], squares);
    const float factor = rsqrtf(warp_sum(squares) * (1.0f / Dim) + eps);
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const float w = weight[lane * each + j];
      x[j] *= factor * (ZeroCentred ? 1.0f + w : w);
    }
  }
  /// The warp fills `table` [half] with (cos, sin) of a position's angles. It must synchronise before use.
  static __device__ __forceinline__ void fill_angles(float2* table, int position, const float* frequencies,
                                                     int lane) {
#pragma unroll 1
    for (int i = lane; i < half; i += 32)
      table[i] = cosine_sine(static_cast<float>(position) * frequencies[i]);
  }
  /// Rotate-half of the first Rotary values. \param table [half], (cos, sin) of each frequency
  static __device__ __forceinline__ void rotate(values& x, const float2* table, int lane) {
    const float sign = lane < half / each ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const float other = __shfl_xor_sync(0xFFFF'FFFFu, x[j], half / each);
      if (lane < Rotary / each) {
        const float2 a = table[(lane * each + j) & (half - 1)];
        x[j] = fmaf(x[j], a.x, sign * other * a.y);
      }
    }
  }
};

}  // namespace nibble::device
