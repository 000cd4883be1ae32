// SPDX-License-Identifier: Apache-2.0
/// \file
/// From what the warps of a chunk have to the output of a sequence's heads: partial results in shared memory
/// and in the workspace, added in their order by whoever arrives last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/attention_decode_memory.cuh"

namespace nibble::device {

template <attention_shape S, int Warps>
struct decode_partials {
  static constexpr int dim = S.head_dim, group = S.group(), kv_heads = S.kv_heads;
  static constexpr int threads = 32 * Warps, warps = Warps;
  using shared_t = decode_shared<S, Warps>;

  const attention_params& p;
  shared_t& shared;

  static constexpr int quads = group * dim / 4;  ///< of outputs, `threads` apart for a thread

  __device__ __forceinline__ float2* sums_at(int number) const {
    return reinterpret_cast<float2*>(p.workspace + p.layout.sums_offset) +
           static_cast<std::size_t>(number) * group;
  }
  __device__ __forceinline__ float4* values_at(int number) const {
    return reinterpret_cast<float4*>(p.workspace + p.layout.values_offset) +
           static_cast<std::size_t>(number) * quads;
  }
  static __device__ __forceinline__ void add(float4& to, float factor, const float4& v) {
    to.x = fmaf(factor, v.x, to.x), to.y = fmaf(factor, v.y, to.y);
    to.z = fmaf(factor, v.z, to.z), to.w = fmaf(factor, v.w, to.w);
  }

  /// Weights of partial results c = 0 … flat_chunks - 1 of each head, and their total. The caller
  /// synchronises. \param sum_of(c, h): largest score and sum, (no_score, 0) where there is none
  template <class SumOf>
  __device__ __forceinline__ void weigh(SumOf sum_of) const {
#pragma unroll 1
    for (int index = thread_here(); index < (group * flat_chunks + 31) / 32 * 32; index += threads) {
      const int h = index / flat_chunks, c = index % flat_chunks;
      const float2 sum = h < group ? sum_of(c, h) : make_float2(no_score, 0);
      float m = sum.x;
#pragma unroll
      for (int o = flat_chunks / 2; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(0xFFFF'FFFFu, m, o));
      const float factor = fast_exp2(sum.x - m);
      float l = factor * sum.y;
#pragma unroll
      for (int o = flat_chunks / 2; o > 0; o /= 2) l += __shfl_xor_sync(0xFFFF'FFFFu, l, o);
      if (h < group) {
        shared.factor[c][h] = factor;
        if (c == 0) shared.total[h] = make_float2(m, l);
      }
    }
  }

  /// The chunk's warps, in order, and the new token.
  __device__ __forceinline__ void merge_warps(bool fresh) const {
    static_assert(warps < flat_chunks);
    weigh([&](int c, int h) {
      if (c < warps) return shared.sums[c][h];
      return fresh && c == warps ? make_float2(shared.fresh_score[h], 1.0f) : make_float2(no_score, 0.0f);
    });
    __syncthreads();
#pragma unroll 1
    for (int quad = thread_here(); quad < quads; quad += threads) {
      const int h = quad / (dim / 4), d = quad % (dim / 4) * 4;
      float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int k = 0; k < warps; ++k)
        add(o, shared.factor[k][h], *reinterpret_cast<const float4*>(&shared.values[k][h][d]));
      if (fresh) add(o, shared.factor[warps][h], *reinterpret_cast<const float4*>(&shared.fresh_value[d]));
      shared.result[quad] = o;
    }
  }

  __device__ __forceinline__ void write_partial(int number) const {
    float4* to = values_at(number);
#pragma unroll 1
    for (int quad = thread_here(); quad < quads; quad += threads) __stcg(to + quad, shared.result[quad]);
    const int h =
        thread_here();  // the thread that wrote total[h] need not be this one: the caller synchronises
    if (h < group) __stcg(sums_at(number) + h, shared.total[h]);
  }

  /// Adds `count` partial results, `stride` pieces apart, in order. \param count at most flat_chunks
  __device__ __forceinline__ void add_partials(int first, int stride, int count) {
    const int thread = thread_here();
#pragma unroll 1
    for (int c0 = 0; c0 < count; c0 += shared_t::partials_at_once) {
      const int here = min(shared_t::partials_at_once, count - c0);
      const std::uint32_t to = shared_address(shared.partials);
#pragma unroll 1
      for (int i = thread; i < here * quads; i += threads)
        copy_async(to + i * 16, values_at(first + (c0 + i / quads) * stride) + i % quads, true);
      commit_copies();
      if (c0 == 0)
        weigh([&](int c, int h) {
          return c < count ? __ldcg(sums_at(first + c * stride) + h) : make_float2(no_score, 0);
        });
      wait_for_copies<0>();
      __syncthreads();
#pragma unroll 1
      for (int quad = thread; quad < quads; quad += threads) {
        float4 o = c0 > 0 ? shared.result[quad] : make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int c = 0; c < here; ++c)
          add(o, shared.factor[c0 + c][quad / (dim / 4)], shared.partials[c][quad]);
        shared.result[quad] = o;
      }
      __syncthreads();
    }
  }

  /// Counts the block's arrival. \return whether it is the last of `count`; then it sees what all others
  /// wrote
  __device__ __forceinline__ bool arrive(const decode_piece& w, int counter, int count) {
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* arrivals = reinterpret_cast<unsigned*>(p.workspace) +
                           (static_cast<std::size_t>(w.sequence) * kv_heads + w.kv) * counters_per_head +
                           counter;
      // The barrier before and this make what the block wrote visible to whoever counts later.
      shared.last = count_arrival(arrivals) == static_cast<unsigned>(count - 1);
      if (shared.last) *arrivals = 0;
    }
    __syncthreads();
    return shared.last != 0;
  }

  __device__ __forceinline__ void write_output(const decode_piece& w) const {
    __nv_bfloat16* row =
        p.out + static_cast<std::size_t>(shared.row_of[w.sequence]) * p.ldo + w.kv * (group * dim);
#pragma unroll 1
    for (int quad = thread_here(); quad < quads; quad += threads) {
      const int h = quad / (dim / 4), d = quad % (dim / 4) * 4;
      const float inverse = __fdividef(1.0f, shared.total[h].y);
      float4 o = shared.result[quad];
      o.x *= inverse, o.y *= inverse, o.z *= inverse, o.w *= inverse;
      if constexpr (S.gated) {
        const uint2 bits = *reinterpret_cast<const uint2*>(shared.raw_q + (2 * h + 1) * dim + d);
        o.x *= sigmoid_of(bits.x << 16), o.y *= sigmoid_of(bits.x & 0xFFFF'0000u);
        o.z *= sigmoid_of(bits.y << 16), o.w *= sigmoid_of(bits.y & 0xFFFF'0000u);
      }
      using out = kv_math<kv_format::bf16>;
      *reinterpret_cast<uint2*>(row + 4 * quad) = make_uint2(out::pack(o.x, o.y), out::pack(o.z, o.w));
    }
  }
  __device__ __forceinline__ void clear_output(const decode_piece& w) const {
    __nv_bfloat16* row =
        p.out + static_cast<std::size_t>(shared.row_of[w.sequence]) * p.ldo + w.kv * (group * dim);
#pragma unroll 1
    for (int quad = thread_here(); quad < quads; quad += threads)
      *reinterpret_cast<uint2*>(row + 4 * quad) = make_uint2(0, 0);
  }

  /// What follows when every warp has left its part of the piece: no, one or two levels of partial results.
  __device__ __forceinline__ void finish(const decode_piece& w) {
    merge_warps(w.last_chunk());
    const int first = w.number - w.chunk * kv_heads;  // the sequence's chunk 0 of this head
    const int levels = w.chunks == 1 ? 0 : w.chunks <= flat_chunks ? 1 : 2;
    int mine = w.number;
#pragma unroll 1
    for (int level = 0; level < levels; ++level) {
      __syncthreads();
      write_partial(mine);
      const bool groups = level == 0 && levels == 2;
      const int part = groups ? w.chunk / chunks_per_group : 0;
      const int parts = (w.chunks + chunks_per_group - 1) / chunks_per_group;
      const int count = groups        ? min(chunks_per_group, w.chunks - part * chunks_per_group)
                        : levels == 2 ? parts
                                      : w.chunks;
      const int from = first + part * (chunks_per_group * kv_heads);
      if (!arrive(w, groups ? part : counters_per_head - 1, count)) return;
      add_partials(from, level == 1 ? chunks_per_group * kv_heads : kv_heads, count);
      mine = from;
    }
    __syncthreads();
    write_output(w);
  }
};

}  // namespace nibble::device
