// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a row's logits to experts and weights, by one warp.
#pragma once

#include <cmath>
#include <cstdint>

#include "nibble/kernels/rows_math.cuh"

namespace nibble::device {

/// A number that orders like the float; equal zeros are equal. 0 is below every float.
__device__ __forceinline__ std::uint32_t ordered_bits(float v) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(v, 0.0f));
  return bits & 0x8000'0000u ? ~bits : bits | 0x8000'0000u;
}
__device__ __forceinline__ float from_ordered_bits(std::uint32_t v) {
  return __uint_as_float(v & 0x8000'0000u ? v & 0x7FFF'FFFFu : ~v);
}
/// The largest over the warp.
__device__ __forceinline__ std::uint32_t largest_of_warp(std::uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(whole_warp, v);
#else
  return v;
#endif
}

/// \param logits [Experts], 16-byte aligned, shared or global. Lane l has the experts from l · ⌈Experts / 32⌉
/// on, so the lowest lane among equals has the lowest id.
template <int Experts, int TopK, bool Normalise>
__device__ __forceinline__ void choose_experts(const float* logits, std::int32_t* ids, float* weights) {
  constexpr int each = (Experts + 31) / 32;
  const int lane = threadIdx.x & 31;
  float value[each];
  if constexpr (each % 4 == 0 && Experts % 32 == 0) {
#pragma unroll
    for (int j = 0; j < each; j += 4) {
      const float4 v = *reinterpret_cast<const float4*>(logits + lane * each + j);
      value[j] = v.x, value[j + 1] = v.y, value[j + 2] = v.z, value[j + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < each; ++j)
      value[j] = Experts % 32 == 0 || lane * each + j < Experts ? logits[lane * each + j] : 0.0f;
  }
  std::uint32_t key[each];
  bool nan = false;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const bool bad = isnan(value[j]);
    nan = nan || bad;
    key[j] = ordered_bits(bad ? -INFINITY : value[j]);
    if (Experts % 32 != 0 && lane * each + j >= Experts) key[j] = 0;
  }
  nan = __any_sync(whole_warp, nan);
  float mine = 0, largest = 0;
  int id = 0;
  // A round: the largest key, the lowest lane that has it, and there the lowest expert. Only what leads to
  // the next round's largest key is on the chain.
#pragma unroll
  for (int s = 0; s < TopK; ++s) {
    std::uint32_t best = key[0];
#pragma unroll
    for (int j = 1; j < each; ++j) best = max(best, key[j]);
    const std::uint32_t most = largest_of_warp(best);
    const int from = __ffs(static_cast<int>(__ballot_sync(whole_warp, best == most))) - 1;
    int at = each - 1;
#pragma unroll
    for (int j = each - 2; j >= 0; --j)
      if (key[j] == most) at = j;
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (lane == from && at == j) key[j] = 0;
    const int chosen = from * each + __shfl_sync(whole_warp, at, from);
    const float v = from_ordered_bits(most);
    if (s == 0) largest = v;
    if (lane == s) mine = v, id = chosen;
  }
  const float e = lane < TopK ? expf(mine - largest) : 0.0f;
  float sum;
  if constexpr (Normalise) {
    sum = sum_lanes(e);
  } else {
    float part = 0;
#pragma unroll
    for (int j = 0; j < each; ++j)
      if (Experts % 32 == 0 || lane * each + j < Experts) part += expf(value[j] - largest);
    sum = sum_lanes(part);
  }
  if (lane < TopK) {
    ids[lane] = id;
    weights[lane] = nan ? __uint_as_float(0x7FC0'0000u) : e / sum;
  }
}

}  // namespace nibble::device
