// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a warp holds of a weight tile, and how it multiplies it, one specialisation per weight format.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/fp8/decode.hpp"
#include "nibble/geometry/tile.hpp"
#include "nibble/nvfp4/decode.hpp"

namespace nibble::device {

/// Accumulators of a row tile: two chains, which halves the latency of a tile, by 8-column token tiles.
template <int TokenTiles>
using accumulators = float[2][TokenTiles][4];

/// Activations of one K tile: 16 registers per token tile, step s has registers 2 s and 2 s + 1.
template <int TokenTiles>
using activations = std::uint32_t[TokenTiles][16];

/// A tile decoded: the matrix instruction's weight operand of each step.
using operands = std::uint32_t[8][4];

template <int TokenTiles>
__device__ __forceinline__ void multiply_step(accumulators<TokenTiles>& c, const std::uint32_t (&a)[4],
                                              const activations<TokenTiles>& x, int s) {
#pragma unroll
  for (int j = 0; j < TokenTiles; ++j) mma(c[s / 4][j], a, x[j][2 * s], x[j][2 * s + 1]);
}

/// Half `Half` of a pair in both halves. Written as a move so that it becomes an operand modifier.
template <int Half>
__device__ __forceinline__ std::uint32_t both_halves(std::uint32_t pair) {
  std::uint32_t d;
  if constexpr (Half == 0)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(pair));
  else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(pair));
  return d;
}

template <weight_format Format>
struct fragment;

template <>
struct fragment<weight_format::nvfp4> {
  static constexpr float unscale = nvfp4::unscale;
  uint4 codes[2];
  std::uint32_t scales;

  __device__ __forceinline__ void load(const std::uint8_t* tile, int lane) {
    codes[0] = load_weights(tile + lane * 16);
    codes[1] = load_weights(tile + 512 + lane * 16);
    scales = load_weights_4(tile + 1024 + lane * 4);
  }
  __device__ __forceinline__ void load(std::uint32_t shared_tile, int lane) {
    codes[0] = load_shared(shared_tile + lane * 16);
    codes[1] = load_shared(shared_tile + 512 + lane * 16);
    scales = load_shared_4(shared_tile + 1024 + lane * 4);
  }
  /// Calls use(step, operand) for each step in order.
  template <class Use>
  __device__ __forceinline__ void for_each_step(Use use) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 64 columns: one block per lane and row
      const std::uint32_t both = ((i ? scales >> 4 : scales << 4) & 0x0FF0'0FF0u) | nvfp4::scale_bits;
      const std::uint32_t low = both_halves<0>(both), high = both_halves<1>(both);
      const std::uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t a[4];
        nvfp4::decode_codes(words[j], a);
        a[0] = multiply_pairs(a[0], low);
        a[1] = multiply_pairs(a[1], high);
        a[2] = multiply_pairs(a[2], low);
        a[3] = multiply_pairs(a[3], high);
        use(4 * i + j, a);
      }
    }
  }
  template <int TokenTiles>
  __device__ __forceinline__ void multiply(accumulators<TokenTiles>& c,
                                           const activations<TokenTiles>& x) const {
    for_each_step([&](int s, const std::uint32_t(&a)[4]) { multiply_step<TokenTiles>(c, a, x, s); });
  }
  __device__ __forceinline__ void decode(operands& to) const {
    for_each_step([&](int s, const std::uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[s][i] = a[i];
    });
  }
};

template <>
struct fragment<weight_format::fp8> {
  static constexpr float unscale = 1.0f;
  uint4 weights[4];

  __device__ __forceinline__ void load(const std::uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = load_weights(tile + 512 * i + lane * 16);
  }
  __device__ __forceinline__ void load(std::uint32_t shared_tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = load_shared(shared_tile + 512 * i + lane * 16);
  }
  template <class Use>
  __device__ __forceinline__ void for_each_step(Use use) const {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const uint4& q = weights[s / 2];
      std::uint32_t p[2], r[2];
      fp8::decode_weights(s % 2 ? q.z : q.x, p);
      fp8::decode_weights(s % 2 ? q.w : q.y, r);
      const std::uint32_t a[4] = {
          multiply_pairs(p[0], fp8::weight_scale_bits), multiply_pairs(p[1], fp8::weight_scale_bits),
          multiply_pairs(r[0], fp8::weight_scale_bits), multiply_pairs(r[1], fp8::weight_scale_bits)};
      use(s, a);
    }
  }
  template <int TokenTiles>
  __device__ __forceinline__ void multiply(accumulators<TokenTiles>& c,
                                           const activations<TokenTiles>& x) const {
    for_each_step([&](int s, const std::uint32_t(&a)[4]) { multiply_step<TokenTiles>(c, a, x, s); });
  }
  __device__ __forceinline__ void decode(operands& to) const {
    for_each_step([&](int s, const std::uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[s][i] = a[i];
    });
  }
};

template <>
struct fragment<weight_format::bf16> {
  static constexpr float unscale = 1.0f;
  uint4 weights[8];

  __device__ __forceinline__ void load(const std::uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) weights[i] = load_weights(tile + 512 * i + lane * 16);
  }
  __device__ __forceinline__ void load(std::uint32_t shared_tile, int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) weights[i] = load_shared(shared_tile + 512 * i + lane * 16);
  }
  template <class Use>
  __device__ __forceinline__ void for_each_step(Use use) const {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const std::uint32_t a[4] = {weights[s].x, weights[s].y, weights[s].z, weights[s].w};
      use(s, a);
    }
  }
  template <int TokenTiles>
  __device__ __forceinline__ void multiply(accumulators<TokenTiles>& c,
                                           const activations<TokenTiles>& x) const {
    for_each_step([&](int s, const std::uint32_t(&a)[4]) { multiply_step<TokenTiles>(c, a, x, s); });
  }
  __device__ __forceinline__ void decode(operands& to) const {
    for_each_step([&](int s, const std::uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[s][i] = a[i];
    });
  }
};

}  // namespace nibble::device
