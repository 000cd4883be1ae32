// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a block of decode attention keeps in shared memory, and a piece of its work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/kernels/attention_params.cuh"
#include "nibble/kernels/attention_sequences.cuh"
#include "nibble/kernels/kv_element.cuh"

namespace nibble {

namespace device {

/// Below every score; finite, so that differences of two such are 0 and not NaN.
inline constexpr float no_score = -1e30f;

/// A piece of decode work: a chunk of a sequence's context for one KV head.
struct decode_piece {
  int number, sequence, position, kv, chunk, chunks, begin, end;
  [[nodiscard]] __device__ __forceinline__ bool padding() const { return position < 0; }
  /// Whether the new token belongs to it.
  [[nodiscard]] __device__ __forceinline__ bool last_chunk() const { return chunk == chunks - 1; }
};

template <attention_shape S, int Warps>
struct decode_shared {
  static constexpr int group = S.group(), tiles = (group + 7) / 8, steps = S.head_dim / 16;
  static constexpr int warps = Warps;
  static constexpr int row = S.head_dim + 4, quads = group * S.head_dim / 4;
  static constexpr int tile_bytes = 16 * S.head_dim * (S.format == kv_format::bf16 ? 2 : 1);
  static constexpr int partials_at_once = 8;
  union {
    alignas(128) std::byte kv[warps][2][tile_bytes];  ///< each warp's tile of keys and of values
    float values[warps][group][row];                  ///< of each warp, not divided by its sum
    float4 partials[partials_at_once][quads];         ///< of several chunks
  };
  uint4 q[tiles][steps][32];  ///< operand order: rounded heads in rows 0 … 7, their rests in 8 … 15
  __nv_bfloat16 raw_q[group * (S.gated ? 2 : 1) * S.head_dim];  ///< as they come, gates between them
  __nv_bfloat16 raw_kv[2][S.head_dim];
  float4 result[quads];
  alignas(16) float fresh_value[S.head_dim];
  float norm[2][S.head_dim];
  std::uint64_t arrived[warps][2];  ///< barriers of the copies
  float2 sums[warps][tiles * 8];    ///< largest score, sum
  float2 total[group];              ///< of the result
  float factor[flat_chunks][group];
  float fresh_score[group];
  float frequency[S.rotary_dim / 2];
  float2 angle[2][S.rotary_dim / 2];  ///< (cos, sin) of the row's position, as `piece`
  decode_piece piece[2];              ///< the one being worked on and the next
  sequence_table pieces;
  std::int32_t position[max_attention_sequences], row_of[max_attention_sequences];
  int last;
};

/// The thread's number, read anew: what is computed from it is not kept in registers over the main loop.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// What the thread stored to shared memory comes before bulk copies to the same place.
__device__ __forceinline__ void make_visible_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Adds one to a counter, releasing what was written before and acquiring what the others released.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace device

}  // namespace nibble
