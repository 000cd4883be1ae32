// SPDX-License-Identifier: Apache-2.0
/// \file
/// Decode attention, one kernel: norm and rope of q and of the new key, the cache write, attention over the
/// context, and the gate.
///
/// A piece of work is one chunk of one sequence's context for one KV head with all its query heads. Blocks go
/// over the pieces; what there is to do they find in the step, so one grid serves every context. Each warp
/// takes every fourth 16-token tile of the chunk straight from memory into operands of the matrix instruction
/// and keeps a softmax of its own; no barrier until the chunk ends. The new token is one more partial result
/// of the last chunk. Chunks meet in the workspace; the block that arrives last adds them in their order, in
/// two levels where there are many.
///
/// The queries are used in two parts, rounded and rest, which fill the matrix instruction's 16 rows: scores
/// are as good as those of fp32 queries.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/kernels/attention_params.cuh"
#include "nibble/kernels/attention_sequences.cuh"
#include "nibble/kernels/kv_element.cuh"
#include "nibble/kernels/rope.cuh"

namespace nibble {

inline constexpr int attention_decode_threads = 128;

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

template <attention_shape S>
struct decode_shared {
  static constexpr int group = S.group(), tiles = (group + 7) / 8, steps = S.head_dim / 16;
  static constexpr int warps = attention_decode_threads / 32;
  static constexpr int row = S.head_dim + 4;
  uint4 q[tiles][steps][32];        ///< operand order: rounded heads in rows 0 … 7, their rests in 8 … 15
  float values[warps][group][row];  ///< of each warp, not divided by its sum
  float2 sums[warps][tiles * 8];    ///< largest score, sum
  float factor[flat_chunks][group];
  float2 total[group];
  float fresh_score[group];
  float fresh_value[S.head_dim];
  float norm[2][S.head_dim];
  float2 angle[2][S.rotary_dim / 2];  ///< (cos, sin) of the row's position, as `piece`
  sequence_table pieces;
  std::int32_t position[max_attention_sequences], row_of[max_attention_sequences];
  decode_piece piece[2];  ///< the one being finished and the next: registers are short
  int last;
};

template <attention_shape S, int MostChunks, int LeastChunkTokens>
struct attention_decoder {
  static constexpr kv_format format = S.format;
  static constexpr int dim = S.head_dim, group = S.group(), kv_heads = S.kv_heads;
  static constexpr int threads = attention_decode_threads, warps = threads / 32;
  static constexpr int head_tiles = (group + 7) / 8, steps = dim / 16;
  /// Sums of a score: two where registers allow, which halves its latency.
  static constexpr int chains = dim * head_tiles >= 256 && format == kv_format::bf16 ? 1 : 2;
  static constexpr int heads_per_warp = (group + warps - 1) / warps;
  using head = warp_head<dim, S.rotary_dim, S.zero_centred_norm>;
  using layout = page_layout<kv_heads, dim, S.page_tokens, format>;
  using math = kv_math<format>;
  using tile = kv_tile<format, dim>;
  using shared_t = decode_shared<S>;
  using accumulators = float[head_tiles][steps][4];

  const attention_params& p;
  shared_t& shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  [[nodiscard]] __device__ __forceinline__ decode_piece find(int number) const {
    decode_piece w{};
    w.number = number;
    w.sequence = sequence_of(shared.pieces, p.step.sequences, number);
    w.position = shared.position[w.sequence];
    const context_chunks c = chunks_of(w.position, MostChunks, LeastChunkTokens);
    const int in = number - shared.pieces.before[w.sequence];
    w.kv = in % kv_heads;
    w.chunk = in / kv_heads;
    w.chunks = c.count;
    w.begin = w.chunk * c.tokens;
    w.end = min(w.begin + c.tokens, w.position);
    return w;
  }
  /// The thread's number, read anew: what is computed from it is not kept in registers over the main loop.
  static __device__ __forceinline__ int thread_here() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  /// The first token of this warp's tile `i`.
  [[nodiscard]] __device__ __forceinline__ int tile_token(const decode_piece& w, int i) const {
    return w.begin + 16 * (warp + warps * i);
  }
  /// Pages of this warp's tiles first … first + 31, one a lane.
  [[nodiscard]] __device__ __forceinline__ int pages_from(const decode_piece& w, int first) const {
    const int token = tile_token(w, first + lane);
    return token < w.end
               ? p.step
                     .pages[static_cast<std::size_t>(w.sequence) * p.step.page_stride + token / S.page_tokens]
               : 0;
  }
  [[nodiscard]] __device__ __forceinline__ const std::byte* first_keys(const decode_piece& w,
                                                                       int pages) const {
    return layout::key(p.pool, __shfl_sync(0xFFFF'FFFFu, pages, 0), w.kv, tile_token(w, 0));
  }

  /// Finds a piece, leaves it and its angles to the block. \return the pages of this warp's tiles
  __device__ __forceinline__ int start(int number, int turn) {
    const decode_piece w = find(number);
    if (threadIdx.x == 0) shared.piece[turn] = w;
    for (int i = threadIdx.x; i < S.rotary_dim / 2; i += threads)
      shared.angle[turn][i] = cosine_sine(static_cast<float>(w.position) * p.inverse_frequencies[i]);
    return pages_from(w, 0);
  }
  /// Asks for this warp's first tile as far as the L2 cache, while the piece before is finished.
  __device__ __forceinline__ void bring_near(const decode_piece& w, int pages) const {
    const int lane = thread_here() & 31;
    const std::byte* keys = first_keys(w, pages);
    if (tile_token(w, 0) >= w.end) return;
#pragma unroll
    for (int i = 0; i < 16 * layout::row_bytes; i += 32 * 128) {
      if (i + lane * 128 >= 16 * layout::row_bytes) break;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + i + lane * 128));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + layout::values_offset + i + lane * 128));
    }
  }

  /// Queries of the piece as operands; with the last chunk also the new key and value.
  __device__ __forceinline__ void stage_queries(const decode_piece& w, const float2* angle) {
    const int thread = thread_here(), lane = thread & 31, warp = thread >> 5;
    const __nv_bfloat16* row = p.qkv + static_cast<std::size_t>(shared.row_of[w.sequence]) * p.ldqkv;
    constexpr int q_stride = S.gated ? 2 * dim : dim;
    typename head::bits q[heads_per_warp], k, v;
#pragma unroll
    for (int i = 0; i < heads_per_warp; ++i) {
      const int h = min(warp + warps * i, group - 1);
      head::load(q[i], row + static_cast<std::size_t>(w.kv * group + h) * q_stride, lane);
    }
    const bool fresh = w.last_chunk();
    typename head::values key;
    std::byte* place = nullptr;
    if (fresh) {
      head::load(k, row + S.q_width() + w.kv * dim, lane);
      head::load(v, row + S.q_width() + S.kv_width() + w.kv * dim, lane);
      const int page =
          p.step
              .pages[static_cast<std::size_t>(w.sequence) * p.step.page_stride + w.position / S.page_tokens];
      place = layout::key(p.pool, page, w.kv, w.position);
    }
    if (fresh) {
      head::unpack(key, k);
      head::normalise(key, shared.norm[1], p.eps, lane);
      head::rotate_by_table(key, angle, lane);
      store_in_cache<format>(place, lane, key, warp == 0);
      if (warp == warps - 1) {
        typename head::values value;
        head::unpack(value, v);
        store_in_cache<format>(place + layout::values_offset, lane, value, true);
#pragma unroll
        for (int j = 0; j < head::each; ++j) shared.fresh_value[lane * head::each + j] = value[j];
      }
    }
    const float scale = 1.44269504f / sqrtf(static_cast<float>(dim));  // scores are exponents of two
#pragma unroll
    for (int i = 0; i < heads_per_warp; ++i) {
      const int h = warp + warps * i;
      if (h >= group) break;
      typename head::values x;
      head::unpack(x, q[i]);
      head::normalise(x, shared.norm[0], p.eps, lane);
      head::rotate_by_table(x, angle, lane);
#pragma unroll
      for (int j = 0; j < head::each; ++j) x[j] *= scale;
      if (fresh) {
        float dot = 0;
#pragma unroll
        for (int j = 0; j < head::each; ++j) dot = fmaf(x[j], key[j], dot);
        dot = warp_sum(dot);
        if (lane == 0) shared.fresh_score[h] = dot;
      }
#pragma unroll
      for (int j = 0; j < head::each; j += 2) {
        const int d = lane * head::each + j;
        uint2 parts;
        split_pair<format>(x[j], x[j + 1], parts.x, parts.y);
        auto* operand =
            reinterpret_cast<uint2*>(&shared.q[h / 8][tile::step_of(d)][h % 8 * 4 + tile::quarter_of(d)]);
        operand[d % 4 / 2] = parts;
      }
    }
  }

  /// Scores of the tile's tokens 2t, 2t+1, 8+2t, 9+2t for head g of each head tile.
  __device__ __forceinline__ void score(const tile& kv, float (&s)[head_tiles][4]) const {
    const std::uint32_t queries = shared_address(&shared.q[0][0][lane]);
    float c[head_tiles][2][chains][4] = {};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      std::uint32_t b[2][2];
#pragma unroll
      for (int u = 0; u < 2; ++u) kv.key_operand(u, step, b[u][0], b[u][1]);
#pragma unroll
      for (int ht = 0; ht < head_tiles; ++ht) {
        const uint4 a4 = load_shared(queries + (ht * steps + step) * 512);
        const std::uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w};
#pragma unroll
        for (int u = 0; u < 2; ++u) math::multiply(c[ht][u][step % chains], a, b[u][0], b[u][1]);
      }
    }
#pragma unroll
    for (int ht = 0; ht < head_tiles; ++ht)
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float v = c[ht][u][0][j] + c[ht][u][0][2 + j];
          if constexpr (chains > 1) v += c[ht][u][chains - 1][j] + c[ht][u][chains - 1][2 + j];
          s[ht][2 * u + j] = v;
        }
  }

  /// Softmax of one tile onto the warp's own: rescales what was there, leaves the weights as operands.
  __device__ __forceinline__ void soften(float (&s)[4], float& largest, float& sum, float (&acc)[steps][4],
                                         std::uint32_t (&weights)[2]) const {
    float m = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
    m = fmaxf(m, __shfl_xor_sync(0xFFFF'FFFFu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xFFFF'FFFFu, m, 2));
    m = fmaxf(m, largest);
    if (__any_sync(0xFFFF'FFFFu, m > largest)) {
      const float factor = fast_exp2(largest - m);
      const float f0 = __shfl_sync(0xFFFF'FFFFu, factor, (lane & 3) * 8),
                  f1 = __shfl_sync(0xFFFF'FFFFu, factor, (lane & 3) * 8 + 4);
      sum *= factor;
      largest = m;
#pragma unroll
      for (int i = 0; i < steps; ++i) acc[i][0] *= f0, acc[i][1] *= f1, acc[i][2] *= f0, acc[i][3] *= f1;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) s[j] = fast_exp2(s[j] - m);
    sum += (s[0] + s[1]) + (s[2] + s[3]);
    weights[0] = math::pack(s[0], s[1]);
    weights[1] = math::pack(s[2], s[3]);
  }

  /// This warp's tiles of the piece. `kv` holds the first of them.
  __device__ __forceinline__ void attend(const decode_piece& w, int pages, tile& kv) {
    const int end = w.end, kv_head = w.kv;
    int token = tile_token(w, 0);
    accumulators acc = {};
    float largest[head_tiles], sum[head_tiles];
#pragma unroll
    for (int ht = 0; ht < head_tiles; ++ht) largest[ht] = no_score, sum[ht] = 0;
    for (int i = 0; token < end; ++i, token += 16 * warps) {
      const int valid = end - token;
      const bool more = token + 16 * warps < end;
      float s[head_tiles][4];
      score(kv, s);
      const std::byte* next = nullptr;
      if (more) {
        if ((i + 1) % 32 == 0) pages = pages_from(w, i + 1);
        next =
            layout::key(p.pool, __shfl_sync(0xFFFF'FFFFu, pages, (i + 1) & 31), kv_head, token + 16 * warps);
        kv.load_keys(next, lane);
      }
      if (valid < 16) {
        kv.clear_values(valid, lane);
#pragma unroll
        for (int ht = 0; ht < head_tiles; ++ht)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (2 * (lane & 3) + j % 2 + j / 2 * 8 >= valid) s[ht][j] = -INFINITY;
      }
      std::uint32_t weights[head_tiles][2];
#pragma unroll
      for (int ht = 0; ht < head_tiles; ++ht) soften(s[ht], largest[ht], sum[ht], acc[ht], weights[ht]);
#pragma unroll
      for (int row = 0; row < steps; ++row) {
        std::uint32_t a[4];
        kv.value_operand(row, a);
#pragma unroll
        for (int ht = 0; ht < head_tiles; ++ht)
          math::multiply(acc[ht][row], a, weights[ht][0], weights[ht][1]);
      }
      if (more) kv.load_values(next + layout::values_offset, lane);
    }
    leave(acc, largest, sum);
  }

  __device__ __forceinline__ void leave(const accumulators& acc, const float (&largest)[head_tiles],
                                        const float (&sum)[head_tiles]) {
    const int thread = thread_here(), lane = thread & 31, warp = thread >> 5;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int ht = 0; ht < head_tiles; ++ht) {
      float l = sum[ht];
      l += __shfl_xor_sync(0xFFFF'FFFFu, l, 1);
      l += __shfl_xor_sync(0xFFFF'FFFFu, l, 2);
      if (t == 0) shared.sums[warp][8 * ht + g] = make_float2(largest[ht], l);
#pragma unroll
      for (int i = 0; i < steps; i += 2) {
        const int d = tile::first_dimension(i, g), h = 8 * ht + 2 * t;
        if (h < group)
          *reinterpret_cast<float4*>(&shared.values[warp][h][d]) =
              make_float4(acc[ht][i][0], acc[ht][i][2], acc[ht][i + 1][0], acc[ht][i + 1][2]);
        if (h + 1 < group)
          *reinterpret_cast<float4*>(&shared.values[warp][h + 1][d]) =
              make_float4(acc[ht][i][1], acc[ht][i][3], acc[ht][i + 1][1], acc[ht][i + 1][3]);
      }
    }
  }

  static constexpr int quads = group * dim / 4;  ///< of outputs, `threads` apart for a thread
  static constexpr int quads_each = (quads + threads - 1) / threads;

  __device__ __forceinline__ float2* sums_at(int number) const {
    return reinterpret_cast<float2*>(p.workspace + p.layout.sums_offset) +
           static_cast<std::size_t>(number) * group;
  }
  __device__ __forceinline__ float4* values_at(int number) const {
    return reinterpret_cast<float4*>(p.workspace + p.layout.values_offset) +
           static_cast<std::size_t>(number) * quads;
  }

  /// The chunk's warps, in order, and the new token. \param total per quad: largest score and sum of its head
  __device__ __forceinline__ void merge_warps(const decode_piece& w, float4 (&out)[quads_each],
                                              float2 (&total)[quads_each]) const {
    const int thread = thread_here();
#pragma unroll
    for (int i = 0; i < quads_each; ++i) {
      const int quad = thread + threads * i, h = quad / (dim / 4), d = quad % (dim / 4) * 4;
      if (quad >= quads) break;
      float m = no_score;
#pragma unroll
      for (int k = 0; k < warps; ++k) m = fmaxf(m, shared.sums[k][h].x);
      const float fresh = w.last_chunk() ? shared.fresh_score[h] : no_score;
      m = fmaxf(m, fresh);
      float4 o = make_float4(0, 0, 0, 0);
      float l = 0;
#pragma unroll
      for (int k = 0; k < warps; ++k) {
        const float2 sum = shared.sums[k][h];
        const float factor = fast_exp2(sum.x - m);
        const float4 v = *reinterpret_cast<const float4*>(&shared.values[k][h][d]);
        o.x = fmaf(factor, v.x, o.x), o.y = fmaf(factor, v.y, o.y);
        o.z = fmaf(factor, v.z, o.z), o.w = fmaf(factor, v.w, o.w);
        l = fmaf(factor, sum.y, l);
      }
      if (w.last_chunk()) {
        const float factor = fast_exp2(fresh - m);
        const float4 v = *reinterpret_cast<const float4*>(&shared.fresh_value[d]);
        o.x = fmaf(factor, v.x, o.x), o.y = fmaf(factor, v.y, o.y);
        o.z = fmaf(factor, v.z, o.z), o.w = fmaf(factor, v.w, o.w);
        l += factor;
      }
      out[i] = o;
      total[i] = make_float2(m, l);
    }
  }

  /// Adds `count` partial results, `stride` pieces apart, in order. \param count at most flat_chunks
  __device__ __forceinline__ void add_partials(int first, int stride, int count, float4 (&out)[quads_each],
                                               float2 (&total)[quads_each]) {
    const int thread = thread_here();
    for (int base = 0; base < group * flat_chunks; base += threads) {
      const int index = base + thread, h = index / flat_chunks, c = index % flat_chunks;
      const bool used = h < group && c < count;
      const float2 sum = used ? __ldcg(sums_at(first + c * stride) + h) : make_float2(no_score, 0);
      float m = sum.x;
#pragma unroll
      for (int o = flat_chunks / 2; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(0xFFFF'FFFFu, m, o));
      const float factor = used ? fast_exp2(sum.x - m) : 0;
      float l = factor * sum.y;
#pragma unroll
      for (int o = flat_chunks / 2; o > 0; o /= 2) l += __shfl_xor_sync(0xFFFF'FFFFu, l, o);
      if (h < group) {
        shared.factor[c][h] = factor;
        if (c == 0) shared.total[h] = make_float2(m, l);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < quads_each; ++i) out[i] = make_float4(0, 0, 0, 0);
#pragma unroll 2
    for (int c = 0; c < count; ++c) {
      const float4* values = values_at(first + c * stride);
#pragma unroll
      for (int i = 0; i < quads_each; ++i) {
        const int quad = thread + threads * i;
        if (quad >= quads) break;
        const float factor = shared.factor[c][quad / (dim / 4)];
        const float4 v = __ldcg(values + quad);
        out[i].x = fmaf(factor, v.x, out[i].x), out[i].y = fmaf(factor, v.y, out[i].y);
        out[i].z = fmaf(factor, v.z, out[i].z), out[i].w = fmaf(factor, v.w, out[i].w);
      }
    }
#pragma unroll
    for (int i = 0; i < quads_each; ++i) {
      const int quad = thread + threads * i;
      if (quad >= quads) break;
      total[i] = shared.total[quad / (dim / 4)];
    }
  }

  __device__ __forceinline__ void write_partial(int number, const float4 (&out)[quads_each],
                                                const float2 (&total)[quads_each]) const {
    const int thread = thread_here();
#pragma unroll
    for (int i = 0; i < quads_each; ++i) {
      const int quad = thread + threads * i;
      if (quad >= quads) break;
      __stcg(values_at(number) + quad, out[i]);
      if (quad % (dim / 4) == 0) __stcg(sums_at(number) + quad / (dim / 4), total[i]);
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
      __threadfence();
      shared.last = atomicAdd(arrivals, 1u) == static_cast<unsigned>(count - 1);
      if (shared.last) *arrivals = 0;
      __threadfence();
    }
    __syncthreads();
    return shared.last != 0;
  }

  __device__ __forceinline__ void write_output(const decode_piece& w, const float4 (&out)[quads_each],
                                               const float2 (&total)[quads_each]) const {
    const int thread = thread_here();
    const auto row = static_cast<std::size_t>(shared.row_of[w.sequence]);
#pragma unroll
    for (int i = 0; i < quads_each; ++i) {
      const int quad = thread + threads * i, h = w.kv * group + quad / (dim / 4), d = quad % (dim / 4) * 4;
      if (quad >= quads) break;
      const float inverse = 1.0f / total[i].y;
      float4 o = make_float4(out[i].x * inverse, out[i].y * inverse, out[i].z * inverse, out[i].w * inverse);
      if constexpr (S.gated) {
        const uint2 bits = *reinterpret_cast<const uint2*>(p.qkv + row * p.ldqkv + (2 * h + 1) * dim + d);
        const auto gate = [](std::uint32_t half) { return 1.0f / (1.0f + __expf(-__uint_as_float(half))); };
        o.x *= gate(bits.x << 16), o.y *= gate(bits.x & 0xFFFF'0000u);
        o.z *= gate(bits.y << 16), o.w *= gate(bits.y & 0xFFFF'0000u);
      }
      const uint2 packed =
          make_uint2(kv_math<kv_format::bf16>::pack(o.x, o.y), kv_math<kv_format::bf16>::pack(o.z, o.w));
      *reinterpret_cast<uint2*>(p.out + row * p.ldo + h * dim + d) = packed;
    }
  }
  __device__ __forceinline__ void clear_output(const decode_piece& w) const {
    __nv_bfloat16* row =
        p.out + static_cast<std::size_t>(shared.row_of[w.sequence]) * p.ldo + w.kv * group * dim;
    for (int quad = threadIdx.x; quad < quads; quad += threads)
      *reinterpret_cast<uint2*>(row + 4 * quad) = make_uint2(0, 0);
  }

  /// What follows when every warp has left its part of the piece.
  __device__ __forceinline__ void finish(const decode_piece& w) {
    float4 out[quads_each];
    float2 total[quads_each];
    merge_warps(w, out, total);
    const int first = w.number - w.chunk * kv_heads;  // the sequence's chunk 0 of this head
    if (w.chunks > 1) {
      write_partial(w.number, out, total);
      if (w.chunks <= flat_chunks) {
        if (!arrive(w, counters_per_head - 1, w.chunks)) return;
        add_partials(first, kv_heads, w.chunks, out, total);
      } else {
        const int part = w.chunk / chunks_per_group, part_first = part * chunks_per_group;
        const int parts = (w.chunks + chunks_per_group - 1) / chunks_per_group;
        const int count = min(chunks_per_group, w.chunks - part_first);
        if (!arrive(w, part, count)) return;
        add_partials(first + part_first * kv_heads, kv_heads, count, out, total);
        write_partial(first + part_first * kv_heads, out, total);
        if (!arrive(w, counters_per_head - 1, parts)) return;
        add_partials(first, chunks_per_group * kv_heads, parts, out, total);
      }
    }
    write_output(w, out, total);
  }

  __device__ __forceinline__ void run() {
    for (int d = threadIdx.x; d < dim; d += threads)
      shared.norm[0][d] = p.q_norm[d], shared.norm[1][d] = p.k_norm[d];
    for (int i = threadIdx.x; i < head_tiles * steps * 32; i += threads)
      (&shared.q[0][0][0])[i] = make_uint4(0, 0, 0, 0);  // heads that do not exist
    for (int s = threadIdx.x; s < p.step.sequences; s += threads) shared.row_of[s] = p.step.first_row[s];
    fill_table(shared.pieces, p.step.sequences, [&](int s) {
      const int position = p.step.position[s];
      shared.position[s] = position;
      return kv_heads * chunks_of(position, MostChunks, LeastChunkTokens).count;
    });
    __syncthreads();
    const int pieces = shared.pieces.before[p.step.sequences];
    int number = blockIdx.x, pages = 0;
    if (number < pieces) pages = start(number, 0);
    __syncthreads();
    for (int turn = 0; number < pieces; turn ^= 1) {
      const decode_piece& w = shared.piece[turn];
      tile kv;
      const std::byte* keys = first_keys(w, pages);
      if (tile_token(w, 0) < w.end) {
        kv.load_keys(keys, lane);
        kv.load_values(keys + layout::values_offset, lane);
      }
      if (number == static_cast<int>(blockIdx.x)) {
        wait_for_previous_grid();
        let_next_grid_start();
      }
      if (!w.padding()) {
        stage_queries(w, shared.angle[turn]);
        __syncthreads();
        attend(w, pages, kv);
      }
      number += gridDim.x;
      if (number < pieces) pages = start(number, turn ^ 1);
      __syncthreads();
      if (number < pieces) bring_near(shared.piece[turn ^ 1], pages);
      if (w.padding())
        clear_output(w);
      else
        finish(w);
      __syncthreads();
    }
    if (static_cast<int>(blockIdx.x) >= pieces) {
      wait_for_previous_grid();
      let_next_grid_start();
    }
  }
};

}  // namespace device

// Kernels take the shape as integers; see gemv_types.hpp.
template <int Heads, int KvHeads, int Dim, int Rotary, int Gated, int Centred, int PageTokens, int Format,
          int MostChunks, int LeastChunkTokens>
__global__ __launch_bounds__(attention_decode_threads, 2) void attention_decode(const attention_params p) {
  constexpr attention_shape shape{Heads,      KvHeads,      Dim,        Rotary,
                                  Gated != 0, Centred != 0, PageTokens, kv_format(Format)};
  extern __shared__ __align__(16) std::byte attention_memory[];
  auto& shared = *reinterpret_cast<device::decode_shared<shape>*>(attention_memory);
  device::attention_decoder<shape, MostChunks, LeastChunkTokens>{p, shared}.run();
}

}  // namespace nibble
