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
#include "nibble/kernels/load_matrices.cuh"
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

/// The logistic function of an fp32 number given as its bits.
__device__ __forceinline__ float sigmoid_of(std::uint32_t bits) {
  return __fdividef(1.0f, 1.0f + __expf(-__uint_as_float(bits)));
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

/// Where the 16-byte units of a token's row lie in its page: unit u of its key at u ^ key_swizzle, of its
/// value at u ^ value_swizzle. Tiles are then copied to shared memory as they lie, and 8 tokens' units of one
/// number are in different banks; keys also where lanes of two tokens read four units each, values where
/// lanes read every other token.
template <int RowBytes>
__device__ __forceinline__ int key_swizzle(int token) {
  return ((token & 1) << 2 | (token >> 1 & 3)) & (RowBytes / 16 - 1);
}
template <int RowBytes>
__device__ __forceinline__ int value_swizzle(int token) {
  return token & 7 & (RowBytes / 16 - 1);
}

/// Stores a lane's `Each` neighbouring values of a token's head in the cache, and gives them back as the
/// cache holds them. \param head the token's row in its page  \param swizzle of the token
template <kv_format Format, int Each>
__device__ __forceinline__ void store_in_cache(std::byte* head, int swizzle, int lane, float (&x)[Each],
                                               bool store) {
  constexpr int bytes = Each * (Format == kv_format::bf16 ? 2 : 1);
  std::byte* p = head + ((lane * bytes / 16 ^ swizzle) << 4) + lane * bytes % 16;
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
    if constexpr (Each == 8)
      *reinterpret_cast<uint2*>(p) = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    else if constexpr (Each == 4)
      *reinterpret_cast<std::uint32_t*>(p) = pair[0] | pair[1] << 16;
    else
      *reinterpret_cast<std::uint16_t*>(p) = static_cast<std::uint16_t>(pair[0]);
  }
}

/// Moves the address of unit 0 or 1 of a swizzled row by the even number `units`.
/// \param chosen (unit ^ swizzle) << 4
__device__ __forceinline__ std::uint32_t moved(std::uint32_t row_start, std::uint32_t chosen, int units) {
  return row_start + (chosen ^ static_cast<std::uint32_t>((units & 7) << 4)) + (units & ~7) * 16;
}

/// Sixteen tokens of one KV head in shared memory, as they lie in their page, as operands of the matrix
/// instruction.
///
/// Keys are its second operand of two 8-token tiles: lane (g, t) reads 16 bytes of tokens g and 8 + g. Which
/// dimension is which step of the instruction is chosen to suit that; queries are laid out accordingly.
template <kv_format Format, int Dim>
struct key_tile {
  static constexpr bool fp8 = Format == kv_format::fp8;
  static constexpr int row_bytes = Dim * (fp8 ? 1 : 2);
  static constexpr int unit_steps = fp8 ? 4 : 2;  ///< steps of the instruction that 16 bytes feed
  static constexpr int loads = row_bytes / 64;

  /// The step of 16 dimensions and the lane quarter in which the pair from dimension `d` on is multiplied.
  static __device__ __forceinline__ int step_of(int d) {
    return fp8 ? 4 * (d / 64) + d % 16 / 4 : 2 * (d / 32) + d % 8 / 4;
  }
  static __device__ __forceinline__ int quarter_of(int d) { return fp8 ? d % 64 / 16 : d % 32 / 8; }

  std::uint32_t row, flip;
  __device__ __forceinline__ key_tile(std::uint32_t tile, int lane) {
    const int swizzle = key_swizzle<row_bytes>(lane >> 2);
    row = tile + (lane >> 2) * row_bytes + (((lane & 3) ^ (swizzle & 3)) << 4);
    flip = (swizzle & 4) << 4;
  }
  /// The 16 bytes of token 8 u + g that feed the steps from unit_steps · i on.
  [[nodiscard]] __device__ __forceinline__ uint4 load(int u, int i) const {
    return load_shared(row + 8 * u * row_bytes + (static_cast<std::uint32_t>(64 * i) ^ flip));
  }
  static __device__ __forceinline__ void operand(const uint4& k, int step, std::uint32_t& b0,
                                                 std::uint32_t& b1) {
    if constexpr (fp8) {
      const std::uint32_t w = step % 4 == 0 ? k.x : step % 4 == 1 ? k.y : step % 4 == 2 ? k.z : k.w;
      b0 = halves_of_e4m3(w);
      b1 = halves_of_e4m3_high(w);
    } else {
      b0 = step % 2 ? k.z : k.x;
      b1 = step % 2 ? k.w : k.y;
    }
  }
};

/// Values as the transposed first operand: row tile i has 16 dimensions; lane group g has two of them.
template <kv_format Format, int Dim>
struct value_tile;

template <int Dim>
struct value_tile<kv_format::bf16, Dim> {
  static constexpr int row_bytes = 2 * Dim;
  std::uint32_t row, chosen;
  __device__ __forceinline__ value_tile(std::uint32_t tile, int lane) {
    const int token = (lane & 7) + (lane >> 4 << 3);
    row = tile + token * row_bytes;
    chosen = ((lane >> 3 & 1) ^ value_swizzle<row_bytes>(token)) << 4;
  }
  static __device__ __forceinline__ int first_dimension(int i, int g) { return 16 * i + g; }
  static __device__ __forceinline__ int second_dimension(int i, int g) { return 16 * i + 8 + g; }
  /// Calls use(row tile, operand) for each row tile.
  template <class Use>
  __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll
    for (int i = 0; i < Dim / 16; ++i) {
      std::uint32_t a[4];
      load_matrices_transposed(a, moved(row, chosen, 2 * i));
      use(i, a);
    }
  }
};

template <int Dim>
struct value_tile<kv_format::fp8, Dim> {
  static constexpr int row_bytes = Dim;
  static constexpr int run = Dim >= 128 ? 16 : 8;  ///< neighbouring dimensions of a lane
  static constexpr int tiles_per_run = run / 2;
  std::uint32_t tile;
  int lane;
  __device__ __forceinline__ value_tile(std::uint32_t tile_, int lane_) : tile(tile_), lane(lane_) {}
  static __device__ __forceinline__ int first_dimension(int i, int g) {
    return i / tiles_per_run * 8 * run + run * g + i % tiles_per_run * 2;
  }
  static __device__ __forceinline__ int second_dimension(int i, int g) { return first_dimension(i, g) + 1; }
  template <class Use>
  __device__ __forceinline__ void for_each(Use use) const {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < Dim / (8 * run); ++j) {
      std::uint32_t words[4][run / 4];  // tokens 2t, 2t+1, 8+2t, 9+2t
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int token = 2 * t + c % 2 + c / 2 * 8, byte = 8 * run * j + run * g;
        const std::uint32_t at =
            tile + token * row_bytes + ((byte / 16 ^ value_swizzle<row_bytes>(token)) << 4);
        if constexpr (run == 16) {
          const uint4 v = load_shared(at);
          words[c][0] = v.x, words[c][1] = v.y, words[c][2] = v.z, words[c][3] = v.w;
        } else {
          const uint2 v = load_shared_8(at + byte % 16);
          words[c][0] = v.x, words[c][1] = v.y;
        }
      }
#pragma unroll
      for (int k = 0; k < tiles_per_run; ++k) {
        const std::uint32_t order = k % 2 ? 0x7362 : 0x5140;
        const std::uint32_t early = __byte_perm(words[0][k / 2], words[1][k / 2], order),
                            late = __byte_perm(words[2][k / 2], words[3][k / 2], order);
        const std::uint32_t a[4] = {halves_of_e4m3(early), halves_of_e4m3_high(early), halves_of_e4m3(late),
                                    halves_of_e4m3_high(late)};
        use(j * tiles_per_run + k, a);
      }
    }
  }
};

}  // namespace nibble::device
