// SPDX-License-Identifier: Apache-2.0
/// \file
/// What happens to activations on their way into the matrix-vector kernels: nothing, or an RMSNorm.
///
///     x'[k] = x[k] · w[k] / sqrt(mean of x² + eps)
///
/// The factor of a row is one number, so it is applied to the finished sums: x · w is rounded to bf16 and
/// multiplied at once, and the sum of squares grows beside the product. Every warp adds the squares of its
/// share of K, the warps' sums are added in their order: the same bits whoever shares the batch.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/status.hpp"
#include "nibble/geometry/tile.hpp"

namespace nibble {

/// x enters the product as it is.
struct plain_input {
  static constexpr bool normed = false;
  static constexpr int norm_bytes = 0;
  struct params {};
  static status check(const params&, const char*) { return status::success(); }

  template <int Warps, int PerWarp, int Columns, int K, bool Staged>
  struct state {
    struct shared {};
    __device__ __forceinline__ state(const params&, shared&, int) {}
    __device__ __forceinline__ void ask() const {}
    __device__ __forceinline__ void arrived() const {}
    template <class X>
    __device__ __forceinline__ void apply(X&, int, bool) const {}
    __device__ __forceinline__ void leave() const {}
    static __device__ __forceinline__ float factor(const params&, const shared&, int) { return 1.0f; }
  };
};

/// x is the row before its RMSNorm. Weight is __nv_bfloat16 or float.
template <class Weight>
struct rms_normed {
  static_assert(std::is_same_v<Weight, __nv_bfloat16> || std::is_same_v<Weight, float>,
                "the weights of an RMSNorm are bf16 or fp32");
  static constexpr bool normed = true;
  static constexpr int norm_bytes = sizeof(Weight);
  struct params {
    const Weight* weight = nullptr;  ///< [k], 16-byte aligned, a constant: it is read before the wait. Norms
                                     ///< whose weight counts from one carry the one in it.
    float eps = 1e-6f;
  };
  static status check(const params& p, const char* where) {
    if (p.weight == nullptr || reinterpret_cast<std::uintptr_t>(p.weight) % 16 != 0)
      return status::invalid(where, "the weights of the norm need an address that is a multiple of 16");
    return status::success();
  }

  /// One warp's part. Staged: its weights wait in shared memory, else they are read with x.
  template <int Warps, int PerWarp, int Columns, int K, bool Staged>
  struct state {
    static constexpr int token_tiles = Columns == 16 ? 2 : 1;
    static constexpr int tile_bytes = tile_columns * static_cast<int>(sizeof(Weight));
    static constexpr int warp_bytes = PerWarp * tile_bytes;
    struct shared {
      alignas(16) float squares[Columns][Warps];
      alignas(16) std::uint8_t weights[Staged ? Warps * warp_bytes : 16];
    };
    const std::uint8_t* weight;  // of the warp's share of K
    shared& to;
    int warp, have_bytes;
    float sum[token_tiles][4] = {};

    __device__ __forceinline__ state(const params& p, shared& s, int warp_index)
        : weight(reinterpret_cast<const std::uint8_t*>(p.weight) + warp_index * warp_bytes),
          to(s),
          warp(warp_index),
          have_bytes(K * static_cast<int>(sizeof(Weight)) - warp_index * warp_bytes) {}

    /// Before the wait.
    __device__ __forceinline__ void ask() const {
      if constexpr (Staged) {
        const std::uint32_t at = device::shared_address(to.weights) + warp * warp_bytes;
#pragma unroll
        for (int i = 0; i < (warp_bytes + 511) / 512; ++i) {
          const int b = 512 * i + 16 * static_cast<int>(threadIdx.x & 31);
          const bool live = b < have_bytes;
          if (b < warp_bytes)
            device::copy_async(at + b, live ? weight + b : weight - warp * warp_bytes, live);
        }
        device::commit_copies();
      }
    }
    /// After it.
    __device__ __forceinline__ void arrived() const {
      if constexpr (Staged) {
        device::wait_for_copies<0>();
        __syncwarp();
      }
    }
    /// x of the warp's K tile `k`, raw, becomes x · w. Its squares are counted when `count`.
    template <class X>
    __device__ __forceinline__ void apply(X& x, int k, bool count) {
      const int t = threadIdx.x & 3;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (count) square(x, i);
        const int at = k * tile_bytes + run_column(i, t) * static_cast<int>(sizeof(Weight));
        if constexpr (std::is_same_v<Weight, __nv_bfloat16>) {
          const uint4 w = read(at);
#pragma unroll
          for (int j = 0; j < token_tiles; ++j) {
            x[j][4 * i] = device::multiply_pairs(x[j][4 * i], w.x);
            x[j][4 * i + 1] = device::multiply_pairs(x[j][4 * i + 1], w.y);
            x[j][4 * i + 2] = device::multiply_pairs(x[j][4 * i + 2], w.z);
            x[j][4 * i + 3] = device::multiply_pairs(x[j][4 * i + 3], w.w);
          }
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4 w = read(at + 16 * h);
#pragma unroll
            for (int j = 0; j < token_tiles; ++j) {
              x[j][4 * i + 2 * h] = multiply(x[j][4 * i + 2 * h], w.x, w.y);
              x[j][4 * i + 2 * h + 1] = multiply(x[j][4 * i + 2 * h + 1], w.z, w.w);
            }
          }
        }
      }
    }
    /// Leaves the warp's sums of squares. A barrier of the block's warps must follow.
    __device__ __forceinline__ void leave() const {
      const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
      if (g / 2 == t && g < Columns)
#pragma unroll
        for (int j = 0; j < token_tiles; ++j)
          to.squares[g + 8 * j][warp] = g % 2 != 0 ? sum[j][1] : sum[j][0];
    }
    /// 1 / sqrt(mean + eps) of a token's row.
    static __device__ __forceinline__ float factor(const params& p, const shared& s, int token) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < Warps; ++w) total += s.squares[token][w];
      return rsqrtf(total * (1.0f / K) + p.eps);
    }

   private:
    /// The squares of run `i`, on the matrix unit: a product of rows with themselves has them on its
    /// diagonal.
    template <class X>
    __device__ __forceinline__ void square(const X& x, int i) {
#pragma unroll
      for (int j = 0; j < token_tiles; ++j)
#pragma unroll
        for (int s = 4 * i; s < 4 * i + 4; s += 2) {
          const std::uint32_t a[4] = {x[j][s], 0, x[j][s + 1], 0};
          device::mma(sum[j], a, x[j][s], x[j][s + 1]);
        }
    }
    __device__ __forceinline__ uint4 read(int at) const {
      if constexpr (Staged)
        return device::load_shared(device::shared_address(to.weights) + warp * warp_bytes + at);
      if (K % tile_columns != 0 && at >= have_bytes) return make_uint4(0, 0, 0, 0);
      return *reinterpret_cast<const uint4*>(weight + at);
    }
    static __device__ __forceinline__ std::uint32_t multiply(std::uint32_t x, std::uint32_t w0,
                                                             std::uint32_t w1) {
      const __nv_bfloat162 v = __floats2bfloat162_rn(__uint_as_float(x << 16) * __uint_as_float(w0),
                                                     __uint_as_float(x & 0xFFFF'0000u) * __uint_as_float(w1));
      return *reinterpret_cast<const std::uint32_t*>(&v);
    }
  };
};

}  // namespace nibble
