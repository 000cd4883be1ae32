// SPDX-License-Identifier: Apache-2.0
/// \file
/// Decode attention, one kernel: norm and rope of q and of the new key, the cache write, attention over the
/// context, and the gate.
///
/// A piece of work is one chunk of one sequence's context for one KV head with all its query heads. Blocks go
/// over the pieces; what there is to do they find in the step, so one grid serves every context. Each warp
/// takes every eighth 16-token tile of the chunk by bulk copies of its own, keys and values in turn, and
/// keeps a softmax of its own; no barrier until the chunk ends. The new token is one more partial result of
/// the last chunk. Chunks meet in the workspace; the block that arrives last adds them in their order, in two
/// levels where there are many.
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

template <attention_shape S, int Warps, int MostChunks, int LeastChunkTokens, int WideChunkTokens>
struct attention_decoder {
  static constexpr kv_format format = S.format;
  static constexpr int dim = S.head_dim, group = S.group(), kv_heads = S.kv_heads;
  static constexpr int threads = 32 * Warps, warps = Warps;
  static constexpr int head_tiles = (group + 7) / 8, steps = dim / 16;
  static constexpr int chains = 2;  ///< sums of a score, which halves its latency
  using head = warp_head<dim, S.rotary_dim, S.zero_centred_norm>;
  using layout = page_layout<kv_heads, dim, S.page_tokens, format>;
  using math = kv_math<format>;
  using keys = key_tile<format, dim>;
  using values = value_tile<format, dim>;
  using shared_t = decode_shared<S, Warps>;
  static constexpr bool bulk = device::chains;  ///< sm_90: bulk copies
  using accumulators = float[head_tiles][steps][4];

  const attention_params& p;
  shared_t& shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint32_t phase = 0;  ///< bit 0 of the key barrier, bit 1 of the value barrier

  [[nodiscard]] __device__ __forceinline__ decode_piece find(int number) const {
    decode_piece w{};
    w.number = number;
    w.sequence = sequence_of(shared.pieces, p.step.sequences, number);
    w.position = shared.position[w.sequence];
    const context_chunks c = chunks_of(w.position, MostChunks, LeastChunkTokens, WideChunkTokens);
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
#pragma unroll 1
    for (int i = threadIdx.x; i < S.rotary_dim / 2; i += threads)
      shared.angle[turn][i] = cosine_sine(static_cast<float>(w.position) * shared.frequency[i]);
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

  /// Queries of the piece as operands; with the last chunk also the new key and value. Loops stay loops here
  /// and in what follows a chunk: instructions that run once cost more to fetch than to execute.
  __device__ __forceinline__ void stage_queries(const decode_piece& w, const float2* angle) {
    const int thread = thread_here(), lane = thread & 31, warp = thread >> 5;
    const __nv_bfloat16* row = p.qkv + static_cast<std::size_t>(shared.row_of[w.sequence]) * p.ldqkv;
    constexpr int q_stride = S.gated ? 2 * dim : dim, q_units = group * q_stride / 8, kv_units = dim / 8;
    const std::uint32_t raw_q = shared_address(shared.raw_q), raw_kv = shared_address(shared.raw_kv);
    const bool fresh = w.last_chunk();
#pragma unroll 1
    for (int unit = thread; unit < q_units; unit += threads)
      copy_async(raw_q + unit * 16, row + w.kv * (group * q_stride) + unit * 8, true);
    if (fresh && thread < 2 * kv_units)
      copy_async(raw_kv + thread * 16,
                 row + S.q_width() + (thread / kv_units) * S.kv_width() + w.kv * dim + thread % kv_units * 8,
                 true);
    commit_copies();
    std::byte* place = nullptr;
    if (fresh) {
      const int page =
          p.step
              .pages[static_cast<std::size_t>(w.sequence) * p.step.page_stride + w.position / S.page_tokens];
      place = layout::key(p.pool, page, w.kv, w.position);
    }
    wait_for_copies<0>();
    __syncthreads();
    constexpr float scale = 1.44269504f * (dim == 256 ? 0.0625f : dim == 128 ? 0.0883883476f : 0.125f);
    // A warp makes the new key beside each of its queries: the two are independent and share their latencies.
    // Without a new key it makes the query twice, which costs nothing either.
#pragma unroll 1
    for (int h = warp; h < group; h += warps) {
      const __nv_bfloat16* raw = shared.raw_q + h * q_stride;
      typename head::bits bits, key_bits;
      typename head::values x, key;
      head::load(bits, raw, lane);
      head::load(key_bits, fresh ? shared.raw_kv[0] : raw, lane);
      head::unpack(x, bits);
      head::unpack(key, key_bits);
      head::normalise(x, shared.norm[0], p.eps, lane);
      head::normalise(key, shared.norm[1], p.eps, lane);
      head::rotate(x, angle, lane);
      head::rotate(key, angle, lane);
#pragma unroll
      for (int j = 0; j < head::each; ++j) x[j] *= scale;  // scores are exponents of two
      if (fresh) {
        // The score uses the key as the cache holds it.
        store_in_cache<format>(place, key_swizzle<layout::row_bytes>(w.position), lane, key, h == 0);
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
            reinterpret_cast<uint2*>(&shared.q[h / 8][keys::step_of(d)][h % 8 * 4 + keys::quarter_of(d)]);
        operand[d % 4 / 2] = parts;
      }
    }
    if (fresh && warp == warps - 1) {
      typename head::bits bits;
      typename head::values value;
      head::load(bits, shared.raw_kv[1], lane);
      head::unpack(value, bits);
      store_in_cache<format>(place + layout::values_offset, value_swizzle<layout::row_bytes>(w.position),
                             lane, value, true);
#pragma unroll
      for (int j = 0; j < head::each; ++j) shared.fresh_value[lane * head::each + j] = value[j];
    }
  }

  /// Asks for a tile of keys (which = 0) or values (1) of this warp. All lanes are done with the one before.
  __device__ __forceinline__ void ask(int which, const std::byte* from) {
    const std::uint32_t to = shared_address(shared.kv[warp][which]);
    if constexpr (bulk) {
      if (lane == 0) {
        const std::uint32_t barrier = shared_address(&shared.arrived[warp][which]);
        barrier_expect(barrier, shared_t::tile_bytes);
        bulk_copy(to, from, shared_t::tile_bytes, barrier, evict_first_policy());
      }
    } else {
#pragma unroll 8
      for (int i = lane * 16; i < shared_t::tile_bytes; i += 32 * 16) copy_async(to + i, from + i, true);
      commit_copies();
    }
  }
  /// Nothing more of this kind is to come: copies are waited for by their number.
  __device__ __forceinline__ void ask_nothing() const {
    if constexpr (!bulk) commit_copies();
  }
  __device__ __forceinline__ void wait_for(int which) {
    if constexpr (bulk) {
      barrier_wait(shared_address(&shared.arrived[warp][which]), phase >> which & 1);
      phase ^= 1u << which;
    } else {
      wait_for_copies<1>();
      __syncwarp();
    }
  }

  /// Scores of the tile's tokens 2t, 2t+1, 8+2t, 9+2t for head g of each head tile.
  __device__ __forceinline__ void score(float (&s)[head_tiles][4]) const {
    const std::uint32_t queries = shared_address(&shared.q[0][0][lane]);
    const keys k(shared_address(shared.kv[warp][0]), lane);
    float c[head_tiles][2][chains][4] = {};
#pragma unroll
    for (int i = 0; i < keys::loads; ++i) {
      const uint4 b[2] = {k.load(0, i), k.load(1, i)};
#pragma unroll
      for (int j = 0; j < keys::unit_steps; ++j) {
        const int step = keys::unit_steps * i + j;
        std::uint32_t operand[2][2];
#pragma unroll
        for (int u = 0; u < 2; ++u) keys::operand(b[u], step, operand[u][0], operand[u][1]);
#pragma unroll
        for (int ht = 0; ht < head_tiles; ++ht) {
          const uint4 a4 = load_shared(queries + (ht * steps + step) * 512);
          const std::uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w};
#pragma unroll
          for (int u = 0; u < 2; ++u)
            math::multiply(c[ht][u][step % chains], a, operand[u][0], operand[u][1]);
        }
      }
    }
#pragma unroll
    for (int ht = 0; ht < head_tiles; ++ht)
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          s[ht][2 * u + j] = (c[ht][u][0][j] + c[ht][u][1][j]) + (c[ht][u][0][2 + j] + c[ht][u][1][2 + j]);
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

  /// This warp's tiles of the piece. The first has been asked for.
  __device__ __forceinline__ void attend(const decode_piece& w, int pages) {
    const int end = w.end, kv_head = w.kv;
    int token = tile_token(w, 0);
    accumulators acc = {};
    float largest[head_tiles], sum[head_tiles];
#pragma unroll
    for (int ht = 0; ht < head_tiles; ++ht) largest[ht] = no_score, sum[ht] = 0;
#pragma unroll 1
    for (int i = 0; token < end; ++i, token += 16 * warps) {
      const int valid = end - token;
      const bool more = token + 16 * warps < end;
      const std::byte* next = nullptr;
      if (more) {
        if ((i + 1) % 32 == 0) pages = pages_from(w, i + 1);
        next =
            layout::key(p.pool, __shfl_sync(0xFFFF'FFFFu, pages, (i + 1) & 31), kv_head, token + 16 * warps);
      }
      float s[head_tiles][4];
      wait_for(0);
      score(s);
      __syncwarp();
      if (more)
        ask(0, next);
      else
        ask_nothing();
      if (valid < 16) {
#pragma unroll
        for (int ht = 0; ht < head_tiles; ++ht)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (2 * (lane & 3) + j % 2 + j / 2 * 8 >= valid) s[ht][j] = -INFINITY;
      }
      std::uint32_t weights[head_tiles][2];
#pragma unroll
      for (int ht = 0; ht < head_tiles; ++ht) soften(s[ht], largest[ht], sum[ht], acc[ht], weights[ht]);
      wait_for(1);
      if (valid < 16) {  // what unused places of a page hold must not be multiplied
        for (int at = valid * layout::row_bytes + lane * 16; at < shared_t::tile_bytes; at += 32 * 16)
          *reinterpret_cast<uint4*>(shared.kv[warp][1] + at) = make_uint4(0, 0, 0, 0);
        __syncwarp();
      }
      values(shared_address(shared.kv[warp][1]), lane).for_each([&](int row, const std::uint32_t(&a)[4]) {
#pragma unroll
        for (int ht = 0; ht < head_tiles; ++ht)
          math::multiply(acc[ht][row], a, weights[ht][0], weights[ht][1]);
      });
      __syncwarp();
      if (more)
        ask(1, next + layout::values_offset);
      else
        ask_nothing();
    }
    __syncthreads();  // what the warps leave lies where their tiles were
    leave(acc, largest, sum);
  }

  __device__ __forceinline__ void leave(const accumulators& acc, const float (&largest)[head_tiles],
                                        const float (&sum)[head_tiles]) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int ht = 0; ht < head_tiles; ++ht) {
      float l = sum[ht];
      l += __shfl_xor_sync(0xFFFF'FFFFu, l, 1);
      l += __shfl_xor_sync(0xFFFF'FFFFu, l, 2);
      if (t == 0) shared.sums[warp][8 * ht + g] = make_float2(largest[ht], l);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int h = 8 * ht + 2 * t + j;
        if (h >= group) continue;
        float* to = shared.values[warp][h];
#pragma unroll
        for (int i = 0; i < steps; ++i) {
          to[values::first_dimension(i, g)] = acc[ht][i][j];
          to[values::second_dimension(i, g)] = acc[ht][i][2 + j];
        }
      }
    }
  }

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

  /// What does not depend on the kernel before. The warps share it out, so that its latencies overlap.
  __device__ __forceinline__ void prepare_block() {
    if (warp == 0) {
      fill_table(shared.pieces, p.step.sequences, [&](int s) {
        const int position = p.step.position[s];
        shared.position[s] = position;
        return kv_heads * chunks_of(position, MostChunks, LeastChunkTokens, WideChunkTokens).count;
      });
    } else if (warp == 1) {
#pragma unroll 1
      for (int s = lane; s < p.step.sequences; s += 32) shared.row_of[s] = p.step.first_row[s];
#pragma unroll 1
      for (int i = lane; i < S.rotary_dim / 2; i += 32) shared.frequency[i] = p.inverse_frequencies[i];
    } else {
      static_assert(warps >= 4 && dim % 4 == 0);
      if (warp < 4) {
        const float* from = warp == 2 ? p.q_norm : p.k_norm;
#pragma unroll
        for (int d = lane; d < dim; d += 32) shared.norm[warp - 2][d] = from[d];
      }
    }
    if constexpr (group % 8 != 0) {  // heads that do not exist
#pragma unroll 1
      for (int i = threadIdx.x; i < head_tiles * steps * 32; i += threads)
        (&shared.q[0][0][0])[i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == threads - 1) {
#pragma unroll 1
      for (int i = 0; i < 2 * warps; ++i) barrier_init(shared_address(&shared.arrived[0][0] + i), 1);
      barrier_init_fence();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    prepare_block();
    // One way through the loop per piece, and one to start the first: the next piece's first tile is on its
    // way while a piece is finished.
    bool first = true;
    int number = blockIdx.x, turn = 0;
#pragma unroll 1
    for (;;) {
      const bool more = number < shared.pieces.before[p.step.sequences];
      int pages = 0;
      if (more) pages = start(number, turn);
      __syncthreads();
      if (!first) {
        if (more) bring_near(shared.piece[turn], pages);
        const decode_piece& done = shared.piece[turn ^ 1];
        if (done.padding())
          clear_output(done);
        else
          finish(done);
        if constexpr (bulk) make_visible_to_copies();
        __syncthreads();
      }
      const decode_piece& w = shared.piece[turn];
      if (more) {
        const std::byte* from = first_keys(w, pages);
        if (tile_token(w, 0) < w.end) {
          ask(0, from);
          ask(1, from + layout::values_offset);
        }
      }
      if (first) {
        wait_for_previous_grid();
        let_next_grid_start();
        first = false;
      }
      if (!more) return;
      if (!w.padding()) {
        stage_queries(w, shared.angle[turn]);
        __syncthreads();
        attend(w, pages);
      }
      number += gridDim.x;
      turn ^= 1;
    }
  }
};

}  // namespace device

// Kernels take the shape as integers; see gemv_types.hpp.
template <int Warps, int MostChunks, int LeastChunkTokens, int WideChunkTokens, int Heads, int KvHeads,
          int Dim, int Rotary, int Gated, int Centred, int PageTokens, int Format>
__global__ __launch_bounds__(32 * Warps, 8 / Warps) void attention_decode(const attention_params p) {
  constexpr attention_shape shape{Heads,      KvHeads,      Dim,        Rotary,
                                  Gated != 0, Centred != 0, PageTokens, kv_format(Format)};
  extern __shared__ __align__(16) std::byte attention_memory[];
  auto& shared = *reinterpret_cast<device::decode_shared<shape, Warps>*>(attention_memory);
  device::attention_decoder<shape, Warps, MostChunks, LeastChunkTokens, WideChunkTokens>{p, shared}.run();
}

}  // namespace nibble
