// SPDX-License-Identifier: Apache-2.0
/// \file
/// Arithmetic that the kernels between the matrices share. What two kernels must round alike is written here
/// once, with the rounding of every step spelt out.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "nibble/core/device_ops.cuh"

namespace nibble::device {

inline constexpr unsigned whole_warp = 0xFFFF'FFFFu;

/// The two floats of a bf16 pair, the lower address in x.
__device__ __forceinline__ float2 unpack(std::uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF'0000u));
}
__device__ __forceinline__ void unpack(float (&to)[8], const uint4& v) {
  const float2 a = unpack(v.x), b = unpack(v.y), c = unpack(v.z), d = unpack(v.w);
  to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y, to[4] = c.x, to[5] = c.y, to[6] = d.x, to[7] = d.y;
}
__device__ __forceinline__ std::uint32_t pack(float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// Loads of activations and states: plain, in program order with the wait for the previous grid.
__device__ __forceinline__ uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ float4 load_float4(const void* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ float load_float(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::int32_t load_int(const std::int32_t* p) {
  std::int32_t v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_bf16(const __nv_bfloat16* p) {
  std::uint16_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return __uint_as_float(static_cast<std::uint32_t>(v) << 16);
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
/// log(1 + e^x); x itself above 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/// Sums over lanes whose numbers differ in the bits below `Lanes`, in every one of them: a balanced tree, the
/// nearest lanes first.
template <int Lanes = 32>
__device__ __forceinline__ float sum_lanes(float v) {
#pragma unroll
  for (int bit = 1; bit < Lanes; bit *= 2) v = __fadd_rn(v, __shfl_xor_sync(whole_warp, v, bit));
  return v;
}

template <int Count>
__device__ __forceinline__ float sum_in_order(const float* of) {
  float sum = of[0];
#pragma unroll
  for (int i = 1; i < Count; ++i) sum = __fadd_rn(sum, of[i]);
  return sum;
}

/// One sequence's run of rows that a block works on.
struct row_tile {
  int sequence = -1;  ///< -1: none, the grid was larger than the step
  int first_row = 0;  ///< absolute
  int rows = 0;       ///< of the tile
  int index = 0;      ///< of the tile within its sequence
  int begin = 0;      ///< absolute, the sequence's first row
  int end = 0;        ///< absolute, one past its last
};

/// Tile `block` of all sequences' rows cut into tiles of TileRows. To be called by whole warps.
template <int TileRows>
__device__ __forceinline__ row_tile find_tile(const std::int32_t* first_row, int sequences, int block) {
  const int lane = threadIdx.x & 31;
  row_tile t;
  int before = 0;
  for (int s0 = 0; s0 < sequences; s0 += 32) {
    const int s = s0 + lane;
    const int begin = s < sequences ? first_row[s] : 0, end = s < sequences ? first_row[s + 1] : 0;
    const int tiles = (end - begin + TileRows - 1) / TileRows;
    int upto = tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(whole_warp, upto, d);
      if (lane >= d) upto += below;
    }
    const bool mine = block >= before + upto - tiles && block < before + upto;
    const unsigned found = __ballot_sync(whole_warp, mine);
    if (found != 0) {
      const int from = __ffs(static_cast<int>(found)) - 1;
      t.sequence = s0 + from;
      t.index = block - before - __shfl_sync(whole_warp, upto - tiles, from);
      t.begin = __shfl_sync(whole_warp, begin, from);
      t.end = __shfl_sync(whole_warp, end, from);
      t.first_row = t.begin + t.index * TileRows;
      t.rows = min(TileRows, t.end - t.first_row);
      return t;
    }
    before += __shfl_sync(whole_warp, upto, 31);
  }
  return t;
}

}  // namespace nibble::device
