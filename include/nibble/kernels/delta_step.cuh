// SPDX-License-Identifier: Apache-2.0
/// \file
/// One token of the delta rule on 32 columns of a head, by 256 threads: decode and prefill share it, so that
/// a token's result is the same bits in both.
///
/// Thread t has the columns 2 (t / 16) and the next and, of every 64 rows, 4 l … 4 l + 3 with l = t % 16: two
/// warps a scheduler, so that one computes while the other sums over its lanes.
#pragma once

#include "nibble/kernels/delta_types.hpp"
#include "nibble/kernels/rows_math.cuh"

namespace nibble::device {

inline constexpr int delta_threads = 256;
inline constexpr float delta_l2_eps = 1e-6f;

template <int KeyDim>
struct delta_fragment {
  static constexpr int rows = KeyDim / 16;  ///< of a thread
  float4 s[rows / 2];                       ///< two rows × two columns each

  /// \param block this split's KeyDim · 32 floats (see state_index)  \param t 0…255
  __device__ __forceinline__ void load(const float* block, int t) {
#pragma unroll
    for (int j = 0; j < rows / 2; ++j) s[j] = load_float4(block + 1024 * j + 4 * t);
  }
  __device__ __forceinline__ void store(float* block, int t) const {
#pragma unroll
    for (int j = 0; j < rows / 2; ++j) *reinterpret_cast<float4*>(block + 1024 * j + 4 * t) = s[j];
  }
  /// This thread's part of Sᵀv: even and odd rows apart, then together.
  __device__ __forceinline__ float2 dot(const float (&v)[rows]) const {
    float2 even = make_float2(__fmul_rn(s[0].x, v[0]), __fmul_rn(s[0].y, v[0]));
    float2 odd = make_float2(__fmul_rn(s[0].z, v[1]), __fmul_rn(s[0].w, v[1]));
#pragma unroll
    for (int j = 1; j < rows / 2; ++j) {
      even.x = __fmaf_rn(s[j].x, v[2 * j], even.x), even.y = __fmaf_rn(s[j].y, v[2 * j], even.y);
      odd.x = __fmaf_rn(s[j].z, v[2 * j + 1], odd.x), odd.y = __fmaf_rn(s[j].w, v[2 * j + 1], odd.y);
    }
    return make_float2(__fadd_rn(even.x, odd.x), __fadd_rn(even.y, odd.y));
  }
  __device__ __forceinline__ void decay(float by) {
#pragma unroll
    for (int j = 0; j < rows / 2; ++j) {
      s[j].x = __fmul_rn(s[j].x, by), s[j].y = __fmul_rn(s[j].y, by);
      s[j].z = __fmul_rn(s[j].z, by), s[j].w = __fmul_rn(s[j].w, by);
    }
  }
  __device__ __forceinline__ void add(const float (&k)[rows], const float2& delta) {
#pragma unroll
    for (int j = 0; j < rows / 2; ++j) {
      s[j].x = __fmaf_rn(k[2 * j], delta.x, s[j].x), s[j].y = __fmaf_rn(k[2 * j], delta.y, s[j].y);
      s[j].z = __fmaf_rn(k[2 * j + 1], delta.x, s[j].z), s[j].w = __fmaf_rn(k[2 * j + 1], delta.y, s[j].w);
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

/// Sums of a pair's parts over its 16 lanes, in each of them.
__device__ __forceinline__ float2 sum_columns(float2 u) {
#pragma unroll
  for (int bit = 1; bit < 16; bit *= 2) {
    u.x = __fadd_rn(u.x, __shfl_xor_sync(whole_warp, u.x, bit));
    u.y = __fadd_rn(u.y, __shfl_xor_sync(whole_warp, u.y, bit));
  }
  return u;
}
/// The same sums, the first column's in even lanes and the second's in odd ones.
__device__ __forceinline__ float sum_own_column(const float2& u) {
  const bool odd = threadIdx.x & 1;
  float v = odd ? u.y : u.x;
  v = __fadd_rn(v, __shfl_xor_sync(whole_warp, odd ? u.x : u.y, 1));
#pragma unroll
  for (int bit = 2; bit < 16; bit *= 2) v = __fadd_rn(v, __shfl_xor_sync(whole_warp, v, bit));
  return v;
}

/// δ = β (v − e^g u)
__device__ __forceinline__ float2 delta_of(const float2& v, const float2& seen, float decay, float beta) {
  return make_float2(__fmul_rn(beta, __fmaf_rn(-decay, seen.x, v.x)),
                     __fmul_rn(beta, __fmaf_rn(-decay, seen.y, v.y)));
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
