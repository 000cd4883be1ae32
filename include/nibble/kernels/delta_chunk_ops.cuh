// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the two kernels of the delta rule in chunks share: where chunks are, rows of f16 in shared memory,
/// and products of f16 pairs.
///
/// A number is carried as the nearest f16 and the f16 of what is left, 22 bits. A product of two such is
/// three matrix instructions; what is left of both is dropped.
#pragma once

#include <cuda_fp16.h>

#include "nibble/kernels/delta_params.cuh"
#include "nibble/kernels/load_matrices.cuh"
#include "nibble/kernels/rows_product.cuh"

namespace nibble::device {

/// The matrix instruction in f16, kept in the order of the source.
__device__ __forceinline__ void mma_f16_in_order(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                 std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// A barrier of `Threads` threads, one of several in a block. \param id 1…15
template <int Threads>
__device__ __forceinline__ void barrier_of(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

__device__ __forceinline__ std::uint32_t halves(float a, float b) {
  const __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
/// A pair of numbers as f16 and what is left of them as f16.
struct f16_parts {
  std::uint32_t first, rest;
};
__device__ __forceinline__ f16_parts split(float a, float b) {
  const __half2 v = __floats2half2_rn(a, b);
  const float2 back = __half22float2(v);
  return {*reinterpret_cast<const std::uint32_t*>(&v), halves(__fsub_rn(a, back.x), __fsub_rn(b, back.y))};
}

/// The left operand of 16 rows × 16 from results of two tiles of 8.
__device__ __forceinline__ void split_operand(std::uint32_t (&first)[4], std::uint32_t (&rest)[4],
                                              const float (&left)[4], const float (&right)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&from)[4] = i < 2 ? left : right;
    const f16_parts p = split(from[2 * (i % 2)], from[2 * (i % 2) + 1]);
    first[i] = p.first, rest[i] = p.rest;
  }
}
/// The same, each row times its scale.
__device__ __forceinline__ void split_operand(std::uint32_t (&first)[4], std::uint32_t (&rest)[4],
                                              const float (&left)[4], const float (&right)[4],
                                              const float (&scale)[2]) {
  float a[4], b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = __fmul_rn(left[i], scale[i / 2]), b[i] = __fmul_rn(right[i], scale[i / 2]);
  split_operand(first, rest, a, b);
}

/// A power of two and its inverse.
struct power_of_two {
  float scale, inverse;
};
/// What brings the largest size of a row into [2^Exponent, 2^(Exponent + 1)); sizes below 2^-90 stay below.
template <int Exponent>
__device__ __forceinline__ power_of_two scale_to(float largest) {
  const std::uint32_t exponent = max(__float_as_uint(largest) >> 23, 127u - 90u);
  return {__uint_as_float((254u + Exponent - exponent) << 23), __uint_as_float((exponent - Exponent) << 23)};
}
/// The largest over the four lanes that share a row of a result.
__device__ __forceinline__ float largest_of_row(float v) {
  v = fmaxf(v, __shfl_xor_sync(whole_warp, v, 1));
  return fmaxf(v, __shfl_xor_sync(whole_warp, v, 2));
}

/// Rows of KeyDim f16 in shared memory, their 16-byte pieces exchanged so that eight rows of any two
/// neighbouring pieces lie in different banks.
template <int KeyDim>
struct chunk_rows {
  static constexpr int pieces = KeyDim / 8, row_bytes = 2 * KeyDim, bytes = delta_chunk * row_bytes;
  __device__ __forceinline__ static std::uint32_t at(int row, int piece) {
    return static_cast<std::uint32_t>(row * row_bytes + ((piece ^ (row & 7)) << 4));
  }
  /// Asks for the 64 rows with Threads threads. \param stride bytes from row to row
  template <int Threads>
  __device__ __forceinline__ static void fetch(std::uint32_t to, const std::uint8_t* from, std::size_t stride,
                                               int t) {
    constexpr int together = Threads / pieces;
    static_assert(delta_chunk % together == 0);
    const std::uint8_t* source = from + static_cast<std::size_t>(t / pieces) * stride + 16 * (t % pieces);
#pragma unroll
    for (int row = 0; row < delta_chunk; row += together)
      copy_async_16(to + at(row + t / pieces, t % pieces), source + static_cast<std::size_t>(row) * stride);
  }
};

/// The chunk that begins in the rows 64 · slot … 64 · slot + 63 of the launch (there is one at most): its
/// first row from the launch's first row, -1 if there is none. To be called by whole warps.
__device__ __forceinline__ int find_chunk(const step_view& step, int slot) {
  const int lane = threadIdx.x & 31, from = delta_chunk * slot;
  const int base = load_int(step.first_row);
  for (int s0 = 0; s0 < step.sequences; s0 += 32) {
    const int s = s0 + lane;
    int row = -1;
    if (s < step.sequences) {
      const int begin = load_int(step.first_row + s) - base;
      const int rows = load_int(step.first_row + s + 1) - base - begin;
      const delta_chunks c = delta_chunks_of(load_int(step.position + s), rows);
      const int first = begin + c.first;
      const int skipped = max(0, (from - first + delta_chunk - 1) / delta_chunk);
      if (skipped < c.count && first + delta_chunk * skipped < from + delta_chunk)
        row = first + delta_chunk * skipped;
    }
    const unsigned found = __ballot_sync(whole_warp, row >= 0);
    if (found != 0) return __shfl_sync(whole_warp, row, __ffs(static_cast<int>(found)) - 1);
  }
  return -1;
}

}  // namespace nibble::device
