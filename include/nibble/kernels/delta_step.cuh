// SPDX-License-Identifier: Apache-2.0
/// \file
/// One token of the delta rule on 32 columns of a head, by 128 threads: decode and prefill share it, so that
/// a token's result is the same bits in both.
///
/// Thread t has the columns 4 (t / 16) … + 3 and, of every 64 rows, 4 l … 4 l + 3 with l = t % 16.
#pragma once

#include "nibble/kernels/delta_types.hpp"
#include "nibble/kernels/rows_math.cuh"

namespace nibble::device {

inline constexpr int delta_threads = 128;
inline constexpr float delta_l2_eps = 1e-6f;

template <int KeyDim>
struct delta_fragment {
  static constexpr int rows = KeyDim / 16;
  float4 s[rows];

  /// \param block this split's KeyDim · 32 floats (see state_index)  \param t 0…127
  __device__ __forceinline__ void load(const float* block, int t) {
#pragma unroll
    for (int j = 0; j < rows; ++j) s[j] = load_float4(block + 512 * j + 4 * t);
  }
  __device__ __forceinline__ void store(float* block, int t) const {
#pragma unroll
    for (int j = 0; j < rows; ++j) *reinterpret_cast<float4*>(block + 512 * j + 4 * t) = s[j];
  }
  /// This thread's part of Sᵀv.
  __device__ __forceinline__ float4 dot(const float (&v)[rows]) const {
    float4 u;
    u.x = __fmul_rn(s[0].x, v[0]), u.y = __fmul_rn(s[0].y, v[0]);
    u.z = __fmul_rn(s[0].z, v[0]), u.w = __fmul_rn(s[0].w, v[0]);
#pragma unroll
    for (int j = 1; j < rows; ++j) {
      u.x = __fmaf_rn(s[j].x, v[j], u.x), u.y = __fmaf_rn(s[j].y, v[j], u.y);
      u.z = __fmaf_rn(s[j].z, v[j], u.z), u.w = __fmaf_rn(s[j].w, v[j], u.w);
    }
    return u;
  }
  __device__ __forceinline__ void decay(float by) {
#pragma unroll
    for (int j = 0; j < rows; ++j) {
      s[j].x = __fmul_rn(s[j].x, by), s[j].y = __fmul_rn(s[j].y, by);
      s[j].z = __fmul_rn(s[j].z, by), s[j].w = __fmul_rn(s[j].w, by);
    }
  }
  __device__ __forceinline__ void add(const float (&k)[rows], const float4& delta) {
#pragma unroll
    for (int j = 0; j < rows; ++j) {
      s[j].x = __fmaf_rn(k[j], delta.x, s[j].x), s[j].y = __fmaf_rn(k[j], delta.y, s[j].y);
      s[j].z = __fmaf_rn(k[j], delta.z, s[j].z), s[j].w = __fmaf_rn(k[j], delta.w, s[j].w);
    }
  }
};

/// This thread's rows of a vector of KeyDim floats in shared memory.
template <int KeyDim>
__device__ __forceinline__ void load_key(float (&to)[KeyDim / 16], const float* shared, int t) {
#pragma unroll
  for (int j = 0; j < KeyDim / 64; ++j) {
    const float4 v = *reinterpret_cast<const float4*>(shared + 64 * j + 4 * (t & 15));
    to[4 * j] = v.x, to[4 * j + 1] = v.y, to[4 * j + 2] = v.z, to[4 * j + 3] = v.w;
  }
}

/// Of the 4 columns of a 16-lane group, the one whose sum this lane receives.
__device__ __forceinline__ int owned_column(int t) { return 2 * (t & 1) + ((t >> 1) & 1); }

/// Sums of a group's parts over its 16 lanes: each lane gets its owned column's.
__device__ __forceinline__ float sum_columns(const float4& u) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  float a = odd ? u.z : u.x, b = odd ? u.w : u.y;
  a = __fadd_rn(a, __shfl_xor_sync(whole_warp, odd ? u.x : u.z, 1));
  b = __fadd_rn(b, __shfl_xor_sync(whole_warp, odd ? u.y : u.w, 1));
  float c = __fadd_rn(upper ? b : a, __shfl_xor_sync(whole_warp, upper ? a : b, 2));
  c = __fadd_rn(c, __shfl_xor_sync(whole_warp, c, 4));
  return __fadd_rn(c, __shfl_xor_sync(whole_warp, c, 8));
}
/// The four columns' values from the lanes that own them.
__device__ __forceinline__ float4 gather_columns(float v) {
  return make_float4(__shfl_sync(whole_warp, v, 0, 16), __shfl_sync(whole_warp, v, 2, 16),
                     __shfl_sync(whole_warp, v, 1, 16), __shfl_sync(whole_warp, v, 3, 16));
}

/// δ = β (v − e^g u)
__device__ __forceinline__ float delta_of(float v, float seen, float decay, float beta) {
  return __fmul_rn(beta, __fmaf_rn(-decay, seen, v));
}

/// silu of the four taps, the oldest first.
__device__ __forceinline__ float conv_tap(const float4& weight, float x0, float x1, float x2, float x3) {
  return silu(
      __fmaf_rn(x3, weight.w, __fmaf_rn(x2, weight.z, __fmaf_rn(x1, weight.y, __fmul_rn(x0, weight.x)))));
}

/// The factor of an l2 norm.
__device__ __forceinline__ float l2_factor(float squares, float scale) {
  return __fmul_rn(rsqrtf(__fadd_rn(squares, delta_l2_eps)), scale);
}
template <int KeyDim>
inline constexpr float query_scale = KeyDim == 64 ? 0.125f : 0.08838834764831845f;

struct delta_gates {
  float decay, beta;
};
/// \param rate exp(a_log)
__device__ __forceinline__ delta_gates gates_of(float b, float a, float rate, float dt_bias) {
  return {expf(__fmul_rn(-rate, softplus(__fadd_rn(a, dt_bias)))), 1.0f / (1.0f + expf(-b))};
}

/// The factor of the gated norm from the squares of each split, which are added in their order.
template <int Splits>
__device__ __forceinline__ float gated_norm_factor(const float (&squares)[Splits], float eps) {
  float sum = squares[0];
#pragma unroll
  for (int i = 1; i < Splits; ++i) sum = __fadd_rn(sum, squares[i]);
  return rsqrtf(__fmaf_rn(sum, 1.0f / static_cast<float>(Splits * delta_columns), eps));
}
__device__ __forceinline__ float gated(float o, float factor, float norm, float z) {
  return __fmul_rn(__fmul_rn(__fmul_rn(o, factor), norm), silu(z));
}

}  // namespace nibble::device
