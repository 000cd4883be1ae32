// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a KV cache is made of: storing a head, and the arithmetic its elements are multiplied in.
///
/// bf16 caches multiply in bf16, E4M3 caches in f16, where every E4M3 number is exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/fp8/e4m3.hpp"
#include "nibble/kernels/step.hpp"

namespace nibble::device {

/// c += a · b of m16n8k16 in f16 with fp32 sums.
__device__ __forceinline__ void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                        std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// 2^x; below 2^-126 it is 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Two E4M3 bytes to two f16, the lower byte to the lower half.
__device__ __forceinline__ std::uint32_t halves_of_e4m3(std::uint32_t bytes) {
  std::uint32_t pair;
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
      : "=r"(pair)
      : "r"(bytes));
#else
  const std::uint32_t spread = __byte_perm(bytes, 0, 0x4140);
  pair = (spread & 0x007F'007Fu) << 7 | (spread & 0x0080'0080u) << 8;  // value · 2^-8
  asm("mul.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x5C00'5C00u));
  pair |= __vcmpeq2(spread & 0x007F'007Fu, 0x007F'007Fu);  // the two NaNs
#endif
  return pair;
}
/// The upper two bytes of a word.
__device__ __forceinline__ std::uint32_t halves_of_e4m3_high(std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
  std::uint32_t pair;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
#else
  return halves_of_e4m3(bytes >> 16);
#endif
}
/// Two numbers to two E4M3 bytes, `low` in the lower one, as e4m3::encode rounds and saturates.
__device__ __forceinline__ std::uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3::encode(low) | static_cast<std::uint32_t>(e4m3::encode(high)) << 8;
#endif
}

template <kv_format Format>
struct kv_math;

template <>
struct kv_math<kv_format::bf16> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
  static __device__ __forceinline__ float2 unpack(std::uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF'0000u));
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4],
                                                  std::uint32_t b0, std::uint32_t b1) {
    mma(c, a, b0, b1);
  }
};

template <>
struct kv_math<kv_format::fp8> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
  static __device__ __forceinline__ float2 unpack(std::uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4],
                                                  std::uint32_t b0, std::uint32_t b1) {
    mma_f16(c, a, b0, b1);
  }
};

/// A pair of numbers and what its rounding lost, in the arithmetic of the cache.
template <kv_format Format>
__device__ __forceinline__ void split_pair(float low, float high, std::uint32_t& rounded,
                                           std::uint32_t& rest) {
  rounded = kv_math<Format>::pack(low, high);
  const float2 r = kv_math<Format>::unpack(rounded);
  rest = kv_math<Format>::pack(low - r.x, high - r.y);
}

/// Stores a lane's `Each` neighbouring values of a token's head in the cache, and gives them back as the
/// cache holds them. \param head the token's head in its page
template <kv_format Format, int Each>
__device__ __forceinline__ void store_in_cache(std::byte* head, int lane, float (&x)[Each], bool store) {
  if constexpr (Format == kv_format::bf16) {
    constexpr int words = Each / 2;
    std::uint32_t w[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      w[i] = kv_math<Format>::pack(x[2 * i], x[2 * i + 1]);
      const float2 r = kv_math<Format>::unpack(w[i]);
      x[2 * i] = r.x, x[2 * i + 1] = r.y;
    }
    if (!store) return;
    std::byte* p = head + lane * (Each * 2);
    if constexpr (words == 4)
      *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
    else if constexpr (words == 2)
      *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
    else
      *reinterpret_cast<std::uint32_t*>(p) = w[0];
  } else {
    std::uint32_t pair[Each / 2];
#pragma unroll
    for (int i = 0; i < Each / 2; ++i) {
      pair[i] = e4m3_pair(x[2 * i], x[2 * i + 1]);
      const float2 r = kv_math<Format>::unpack(halves_of_e4m3(pair[i]));
      x[2 * i] = r.x, x[2 * i + 1] = r.y;
    }
    if (!store) return;
    std::byte* p = head + lane * Each;
    if constexpr (Each == 8)
      *reinterpret_cast<uint2*>(p) = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    else if constexpr (Each == 4)
      *reinterpret_cast<std::uint32_t*>(p) = pair[0] | pair[1] << 16;
    else
      *reinterpret_cast<std::uint16_t*>(p) = static_cast<std::uint16_t>(pair[0]);
  }
}

/// Sixteen tokens of one KV head in the registers of a warp, as operands of the matrix instruction.
///
/// Keys are its second operand of two 8-token tiles: lane (g, t) holds runs of tokens g and 8 + g. Values are
/// its transposed first operand: the lane holds runs of tokens 2t, 2t+1, 8+2t, 9+2t. Which dimension is which
/// step or row of the instruction is chosen so that every load is 16 neighbouring bytes (8 for FP8 values of
/// 64 dimensions).
template <kv_format Format, int Dim>
struct kv_tile;

template <int Dim>
struct kv_tile<kv_format::bf16, Dim> {
  static constexpr int row_bytes = 2 * Dim;
  static constexpr int value_run = 8;  ///< neighbouring dimensions of a lane
  static constexpr int key_loads = Dim / 32, value_loads = Dim / 64;
  uint4 keys[2][key_loads];
  uint4 values[4][value_loads];

  /// The step of 16 dimensions and the lane quarter in which the pair from dimension `d` on is multiplied.
  static __device__ __forceinline__ int step_of(int d) { return 2 * (d / 32) + d % 8 / 4; }
  static __device__ __forceinline__ int quarter_of(int d) { return d % 32 / 8; }

  __device__ __forceinline__ void load_keys(const std::byte* tile, int lane) {
    const std::byte* p = tile + (lane >> 2) * row_bytes + (lane & 3) * 16;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < key_loads; ++i) keys[u][i] = load_weights(p + 8 * u * row_bytes + 64 * i);
  }
  __device__ __forceinline__ void load_values(const std::byte* tile, int lane) {
    const std::byte* p = tile + 2 * (lane & 3) * row_bytes + (lane >> 2) * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int j = 0; j < value_loads; ++j)
        values[c][j] = load_weights(p + (c % 2 + c / 2 * 8) * row_bytes + 128 * j);
  }
  /// Values of tokens from `valid` on become 0: what unused places of a page hold must not be multiplied.
  __device__ __forceinline__ void clear_values(int valid, int lane) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int j = 0; j < value_loads; ++j)
        if (2 * (lane & 3) + c % 2 + c / 2 * 8 >= valid) values[c][j] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void key_operand(int u, int s, std::uint32_t& b0, std::uint32_t& b1) const {
    const uint4& k = keys[u][s / 2];
    b0 = s % 2 ? k.z : k.x;
    b1 = s % 2 ? k.w : k.y;
  }
  /// Rows of row tile `i`: lane group g has dimensions first_dimension(i, g) and the next.
  static __device__ __forceinline__ int first_dimension(int i, int g) {
    return i / 4 * 64 + 8 * g + i % 4 * 2;
  }
  __device__ __forceinline__ void value_operand(int i, std::uint32_t (&a)[4]) const {
    const auto word = [&](int c) {
      const uint4& v = values[c][i / 4];
      return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
    };
    a[0] = __byte_perm(word(0), word(1), 0x5410);
    a[1] = __byte_perm(word(0), word(1), 0x7632);
    a[2] = __byte_perm(word(2), word(3), 0x5410);
    a[3] = __byte_perm(word(2), word(3), 0x7632);
  }
};

template <int Dim>
struct kv_tile<kv_format::fp8, Dim> {
  static constexpr int row_bytes = Dim;
  static constexpr int value_run = Dim >= 128 ? 16 : 8;
  static constexpr int key_loads = Dim / 64, value_loads = Dim / (8 * value_run);
  uint4 keys[2][key_loads];
  std::uint32_t values[4][value_loads][value_run / 4];

  static __device__ __forceinline__ int step_of(int d) { return 4 * (d / 64) + d % 16 / 4; }
  static __device__ __forceinline__ int quarter_of(int d) { return d % 64 / 16; }

  __device__ __forceinline__ void load_keys(const std::byte* tile, int lane) {
    const std::byte* p = tile + (lane >> 2) * row_bytes + (lane & 3) * 16;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int i = 0; i < key_loads; ++i) keys[u][i] = load_weights(p + 8 * u * row_bytes + 64 * i);
  }
  __device__ __forceinline__ void load_values(const std::byte* tile, int lane) {
    const std::byte* p = tile + 2 * (lane & 3) * row_bytes + (lane >> 2) * value_run;
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int j = 0; j < value_loads; ++j) {
        const std::byte* from = p + (c % 2 + c / 2 * 8) * row_bytes + 8 * value_run * j;
        auto& to = values[c][j];
        if constexpr (value_run == 16) {
          const uint4 v = load_weights(from);
          to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        } else {
          const uint2 v = load_weights_8(from);
          to[0] = v.x, to[1] = v.y;
        }
      }
  }
  __device__ __forceinline__ void clear_values(int valid, int lane) {
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int j = 0; j < value_loads; ++j)
#pragma unroll
        for (int w = 0; w < value_run / 4; ++w)
          if (2 * (lane & 3) + c % 2 + c / 2 * 8 >= valid) values[c][j][w] = 0;
  }
  __device__ __forceinline__ void key_operand(int u, int s, std::uint32_t& b0, std::uint32_t& b1) const {
    const uint4& k = keys[u][s / 4];
    const std::uint32_t w = s % 4 == 0 ? k.x : s % 4 == 1 ? k.y : s % 4 == 2 ? k.z : k.w;
    b0 = halves_of_e4m3(w);
    b1 = halves_of_e4m3_high(w);
  }
  static constexpr int tiles_per_load = value_run / 2;
  static __device__ __forceinline__ int first_dimension(int i, int g) {
    return i / tiles_per_load * 8 * value_run + value_run * g + i % tiles_per_load * 2;
  }
  __device__ __forceinline__ void value_operand(int i, std::uint32_t (&a)[4]) const {
    const auto word = [&](int c) { return values[c][i / tiles_per_load][i % tiles_per_load / 2]; };
    const std::uint32_t order = i % 2 ? 0x7362 : 0x5140;
    const std::uint32_t early = __byte_perm(word(0), word(1), order),
                        late = __byte_perm(word(2), word(3), order);
    a[0] = halves_of_e4m3(early);
    a[1] = halves_of_e4m3_high(early);
    a[2] = halves_of_e4m3(late);
    a[3] = halves_of_e4m3_high(late);
  }
};

}  // namespace nibble::device
