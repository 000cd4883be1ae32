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
#include "nibble/kernels/attention_partials.cuh"
#include "nibble/kernels/kv_element.cuh"
#include "nibble/kernels/rope.cuh"

namespace nibble {

namespace device {

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
  decode_partials<S, Warps> partials{p, shared};
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
          partials.clear_output(done);
        else
          partials.finish(done);
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
