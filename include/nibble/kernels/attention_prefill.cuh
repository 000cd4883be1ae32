// SPDX-License-Identifier: Apache-2.0
/// \file
/// Attention of many rows over the paged cache, on tensor cores with an online softmax.
///
/// A block takes `Rows` neighbouring (token, query head) pairs of one sequence and one KV head: the heads
/// that share keys lie side by side, so short prompts fill a block too, and a tile of keys serves all of
/// them. The queries are normalised and rotated on their way to shared memory. Keys and values come in tiles
/// of 64 tokens, values while the scores are multiplied, the next keys while the values are. FP8 caches
/// become f16 on the way. The longest blocks start first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/kernels/attention_params.cuh"
#include "nibble/kernels/attention_sequences.cuh"
#include "nibble/kernels/kv_element.cuh"
#include "nibble/kernels/load_matrices.cuh"
#include "nibble/kernels/rope.cuh"

namespace nibble {
namespace device {

/// Tokens of a tile of keys or values.
inline constexpr int prefill_tile_tokens = 64;

template <attention_shape S, int Rows>
struct prefill_shared {
  std::uint16_t q[Rows * S.head_dim];  ///< rows of 16-byte units, unit u of row r at u ^ (r % 8)
  std::uint16_t keys[prefill_tile_tokens * S.head_dim];
  union {
    std::uint16_t values[prefill_tile_tokens * S.head_dim];
    struct {  // until the queries are staged
      float norm[S.head_dim];
      float2 angle[Rows / 16][S.rotary_dim / 2];
    } staging;
  };
  sequence_table blocks;
};

/// Byte offset of 16-byte unit `unit` of a row of `Dim` 16-bit elements.
template <int Dim>
__device__ __forceinline__ int swizzled(int row, int unit) {
  return row * (2 * Dim) + ((unit ^ (row & 7)) << 4);
}
/// Brings tiles from the pages: bf16 by asynchronous copies, FP8 through registers.
template <attention_shape S, int Threads>
struct tile_loader {
  static constexpr int dim = S.head_dim;
  static constexpr bool through_registers = S.format == kv_format::fp8;
  static constexpr int row_units = dim * bytes_of(S.format) / 16;
  static constexpr int loads = prefill_tile_tokens * row_units / Threads;
  static_assert(loads * Threads == prefill_tile_tokens * row_units);
  using layout = page_layout<S.kv_heads, dim, S.page_tokens, S.format>;

  const kv_pool& pool;
  const std::int32_t* pages;  ///< of the sequence
  int kv, end;                ///< tokens from `end` on are zeros
  uint4 held[through_registers ? loads : 1];

  /// The pages of a tile's four runs of 16 tokens, in lanes 0 … 3.
  [[nodiscard]] __device__ __forceinline__ int pages_of(int tile) const {
    const int token = tile * prefill_tile_tokens + 16 * (threadIdx.x & 3);
    return pages[min(token, end - 1) / S.page_tokens];
  }
  __device__ __forceinline__ void ask(int tile, int page_ids, std::uint32_t to, std::size_t offset) {
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      const int index = threadIdx.x + Threads * i, row = index / row_units, unit = index % row_units;
      const int token = tile * prefill_tile_tokens + row;
      const std::byte* from =
          layout::key(pool, __shfl_sync(0xFFFF'FFFFu, page_ids, row / 16), kv, token) + offset + unit * 16;
      if constexpr (through_registers)
        held[i] = token < end ? load_weights(from) : make_uint4(0, 0, 0, 0);
      else
        copy_async(to + row * (2 * dim) + unit * 16, from, token < end);  // swizzled as it lies
    }
    if constexpr (!through_registers) commit_copies();
  }
  /// What was asked for is in shared memory once the block has synchronised.
  __device__ __forceinline__ void land(std::uint16_t* to, bool value) const {
    if constexpr (through_registers) {
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const int index = threadIdx.x + Threads * i, row = index / row_units;
        const int unit = index % row_units ^ (value ? value_swizzle<layout::row_bytes>(row)
                                                    : key_swizzle<layout::row_bytes>(row));
        const uint4& v = held[i];
        auto* bytes = reinterpret_cast<std::byte*>(to);
        *reinterpret_cast<uint4*>(bytes + swizzled<dim>(row, 2 * unit)) = make_uint4(
            halves_of_e4m3(v.x), halves_of_e4m3_high(v.x), halves_of_e4m3(v.y), halves_of_e4m3_high(v.y));
        *reinterpret_cast<uint4*>(bytes + swizzled<dim>(row, 2 * unit + 1)) = make_uint4(
            halves_of_e4m3(v.z), halves_of_e4m3_high(v.z), halves_of_e4m3(v.w), halves_of_e4m3_high(v.w));
      }
    } else {
      wait_for_copies<0>();
    }
  }
};

template <attention_shape S, int Rows>
struct attention_prefiller {
  static constexpr int dim = S.head_dim, group = S.group(), kv_heads = S.kv_heads;
  static constexpr int threads = 2 * Rows, warps = threads / 32, steps = dim / 16;
  static constexpr int tokens = prefill_tile_tokens;
  using head = warp_head<dim, S.rotary_dim, S.zero_centred_norm>;
  using math = kv_math<S.format>;
  using shared_t = prefill_shared<S, Rows>;

  const attention_params& p;
  shared_t& shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int row_begin = 0;   ///< of the sequence in the step
  int pairs = 0;       ///< (token, head) pairs of the sequence
  int first_pair = 0;  ///< of this block
  int position = 0;    ///< of the sequence's first row
  int kv = 0;

  /// Of a token's key in shared memory: bf16 keys lie there as in their page.
  static __device__ __forceinline__ int key_row_swizzle(int token) {
    return S.format == kv_format::bf16 ? key_swizzle<2 * dim>(token) : token & 7;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* query(int pair) const {
    return p.qkv + static_cast<std::size_t>(row_begin + pair / group) * p.ldqkv +
           (kv * group + pair % group) * (S.gated ? 2 * dim : dim);
  }

  /// Asks for the warp's 16 rows of queries as they are.
  __device__ __forceinline__ void ask_queries(std::uint32_t q) const {
#pragma unroll 4
    for (int i = lane; i < 16 * (dim / 8); i += 32) {
      const int row = 16 * warp + i / (dim / 8), unit = i % (dim / 8);
      copy_async(q + swizzled<dim>(row, unit), query(min(first_pair + row, pairs - 1)) + unit * 8, true);
    }
    commit_copies();
  }
  /// Normalises and rotates them in place, scaled so that scores are exponents of two. A loop that stays one:
  /// instructions that run once cost more to fetch than to execute.
  __device__ __forceinline__ void stage_queries() {
    constexpr float scale = 1.44269504f * (dim == 256 ? 0.0625f : dim == 128 ? 0.0883883476f : 0.125f);
    int angles_of = -1;
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = 16 * warp + i, token = min(first_pair + row, pairs - 1) / group;
      if (token != angles_of) {
        __syncwarp();
        head::fill_angles(shared.staging.angle[warp], position + token, p.inverse_frequencies, lane);
        __syncwarp();
        angles_of = token;
      }
      std::byte* at = reinterpret_cast<std::byte*>(shared.q) + swizzled<dim>(row, lane * head::each / 8) +
                      lane * head::each % 8 * 2;
      typename head::bits bits;
      typename head::values x;
      head::load(bits, reinterpret_cast<const __nv_bfloat16*>(at), 0);
      head::unpack(x, bits);
      head::normalise(x, shared.staging.norm, p.eps, lane);
      head::rotate(x, shared.staging.angle[warp], lane);
#pragma unroll
      for (int j = 0; j < head::each / 2; ++j) bits[j] = math::pack(x[2 * j] * scale, x[2 * j + 1] * scale);
      head::store(reinterpret_cast<__nv_bfloat16*>(at), bits);
    }
    __syncwarp();
  }

  /// Scores of the warp's 16 rows with the tile's 64 tokens.
  __device__ __forceinline__ void score(float (&s)[8][4], std::uint32_t q, std::uint32_t keys) const {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] = 0;
    const std::uint32_t q_row = q + (16 * warp + (lane & 15)) * (2 * dim), q_unit = ((lane >> 4) ^ (lane & 7))
                                                                                    << 4;
    const std::uint32_t k_row = keys + ((lane & 7) + (lane >> 4 << 3)) * (2 * dim),
                        k_unit = ((lane >> 3 & 1) ^ key_row_swizzle(lane & 7)) << 4;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      std::uint32_t a[4];
      load_matrices(a, moved(q_row, q_unit, 2 * step));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        std::uint32_t b[4];
        load_matrices(b, moved(k_row + 16 * n * (2 * dim), k_unit, 2 * step));
        math::multiply(s[2 * n], a, b[0], b[1]);
        math::multiply(s[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  /// Online softmax of rows g (i = 0) and g + 8 (i = 1); scores become weights.
  __device__ __forceinline__ void soften(float (&s)[8][4], float (&largest)[2], float (&sum)[2],
                                         float (&acc)[dim / 8][4]) const {
    float factor[2];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = largest[i];
#pragma unroll
      for (int n = 0; n < 8; ++n) m = fmaxf(m, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xFFFF'FFFFu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFF'FFFFu, m, 2));
      moved = moved || m > largest[i];
      factor[i] = fast_exp2(largest[i] - m);
      largest[i] = m;
      float added = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        s[n][2 * i] = fast_exp2(s[n][2 * i] - m);
        s[n][2 * i + 1] = fast_exp2(s[n][2 * i + 1] - m);
        added += s[n][2 * i] + s[n][2 * i + 1];
      }
      sum[i] = fmaf(sum[i], factor[i], added);
    }
    if (__any_sync(0xFFFF'FFFFu, moved)) {
#pragma unroll
      for (int n = 0; n < dim / 8; ++n)
        acc[n][0] *= factor[0], acc[n][1] *= factor[0], acc[n][2] *= factor[1], acc[n][3] *= factor[1];
    }
  }

  __device__ __forceinline__ void add_values(const float (&s)[8][4], float (&acc)[dim / 8][4],
                                             std::uint32_t values) const {
    const std::uint32_t row = values + (lane & 15) * (2 * dim), unit = ((lane >> 4) ^ (lane & 7)) << 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t a[4] = {math::pack(s[2 * k][0], s[2 * k][1]), math::pack(s[2 * k][2], s[2 * k][3]),
                                  math::pack(s[2 * k + 1][0], s[2 * k + 1][1]),
                                  math::pack(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < dim / 16; ++n) {
        std::uint32_t b[4];
        load_matrices_transposed(b, moved(row + 16 * k * (2 * dim), unit, 2 * n));
        math::multiply(acc[2 * n], a, b[0], b[1]);
        math::multiply(acc[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  /// Divides, goes through shared memory to whole lines, gates, stores. All warps are done with the tiles.
  __device__ __forceinline__ void write_output(float (&acc)[dim / 8][4], const float (&sum)[2]) {
    auto* rows = reinterpret_cast<float*>(&shared) + warp * 16 * dim;
    const auto place = [](int row, int quad) { return row * dim + ((quad ^ (row & 7)) << 2); };
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float l = sum[i];
      l += __shfl_xor_sync(0xFFFF'FFFFu, l, 1);
      l += __shfl_xor_sync(0xFFFF'FFFFu, l, 2);
      const float inverse = __fdividef(1.0f, l);
#pragma unroll
      for (int n = 0; n < dim / 8; ++n)
        *reinterpret_cast<float2*>(rows + place(g + 8 * i, 2 * n + t / 2) + t % 2 * 2) =
            make_float2(acc[n][2 * i] * inverse, acc[n][2 * i + 1] * inverse);
    }
    __syncwarp();
    // Rows beyond the sequence repeat its last one and are not stored: loads of gates need no branch.
    constexpr int batch = dim >= 128 ? 4 : dim / 32;
#pragma unroll 1
    for (int first = lane; first < 16 * (dim / 8); first += 32 * batch) {
      uint4 gates[batch];
      if constexpr (S.gated) {
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int index = first + 32 * i, row = index / (dim / 8), unit = index % (dim / 8);
          gates[i] = *reinterpret_cast<const uint4*>(query(min(first_pair + 16 * warp + row, pairs - 1)) +
                                                     dim + 8 * unit);
        }
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int index = first + 32 * i, row = index / (dim / 8), unit = index % (dim / 8);
        const int pair = first_pair + 16 * warp + row;
        float o[8];
        *reinterpret_cast<float4*>(o) = *reinterpret_cast<const float4*>(rows + place(row, 2 * unit));
        *reinterpret_cast<float4*>(o + 4) = *reinterpret_cast<const float4*>(rows + place(row, 2 * unit + 1));
        if constexpr (S.gated) {
          const std::uint32_t words[4] = {gates[i].x, gates[i].y, gates[i].z, gates[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j)
            o[2 * j] *= sigmoid_of(words[j] << 16), o[2 * j + 1] *= sigmoid_of(words[j] & 0xFFFF'0000u);
        }
        using out = kv_math<kv_format::bf16>;
        if (pair < pairs)
          *reinterpret_cast<uint4*>(p.out + static_cast<std::size_t>(row_begin + pair / group) * p.ldo +
                                    (kv * group + pair % group) * dim + 8 * unit) =
              make_uint4(out::pack(o[0], o[1]), out::pack(o[2], o[3]), out::pack(o[4], o[5]),
                         out::pack(o[6], o[7]));
      }
    }
  }

  __device__ __forceinline__ void run() {
    fill_table(shared.blocks, p.step.sequences, [&](int s) {
      if (p.step.position[s] < 0) return 0;
      return ((p.step.first_row[s + 1] - p.step.first_row[s]) * group + Rows - 1) / Rows;
    });
    for (int d = threadIdx.x; d < dim; d += threads) shared.staging.norm[d] = p.q_norm[d];
    __syncthreads();
    const int blocks = shared.blocks.before[p.step.sequences];
    const int block = blocks - 1 - static_cast<int>(blockIdx.x) / kv_heads;
    wait_for_previous_grid();
    let_next_grid_start();
    if (block < 0) return;
    const int s = sequence_of(shared.blocks, p.step.sequences, block);
    kv = static_cast<int>(blockIdx.x) % kv_heads;
    row_begin = p.step.first_row[s];
    pairs = (p.step.first_row[s + 1] - row_begin) * group;
    first_pair = (block - shared.blocks.before[s]) * Rows;
    position = p.step.position[s];
    const int end = position + min(first_pair + Rows - 1, pairs - 1) / group + 1;
    const int tiles = (end + tokens - 1) / tokens, first_position = position + first_pair / group;

    tile_loader<S, threads> loader{p.pool, p.step.pages + static_cast<std::size_t>(s) * p.step.page_stride,
                                   kv, end};
    const std::uint32_t q = shared_address(shared.q), keys = shared_address(shared.keys),
                        values = shared_address(shared.values);
    constexpr std::size_t values_offset = tile_loader<S, threads>::layout::values_offset;
    int page_ids = loader.pages_of(0);
    loader.ask(0, page_ids, keys, 0);
    ask_queries(q);
    stage_queries();

    float acc[dim / 8][4] = {};
    float largest[2] = {no_weight, no_weight}, sum[2] = {0, 0};
    int limit[2];  // positions of rows g and g + 8
#pragma unroll
    for (int i = 0; i < 2; ++i)
      limit[i] = position + min(first_pair + 16 * warp + (lane >> 2) + 8 * i, pairs - 1) / group;
    for (int tile = 0; tile < tiles; ++tile) {
      loader.land(shared.keys, false);
      __syncthreads();
      loader.ask(tile, page_ids, values, values_offset);
      const bool more = tile + 1 < tiles;
      if (more) page_ids = loader.pages_of(tile + 1);
      float scores[8][4];
      score(scores, q, keys);
      if (tile * tokens + tokens - 1 > first_position) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (tile * tokens + 8 * n + 2 * (lane & 3) + j % 2 > limit[j / 2]) scores[n][j] = -INFINITY;
      }
      loader.land(shared.values, true);
      __syncthreads();
      if (more) loader.ask(tile + 1, page_ids, keys, 0);
      soften(scores, largest, sum, acc);
      add_values(scores, acc, values);
    }
    __syncthreads();
    write_output(acc, sum);
  }

 private:
  static constexpr float no_weight = -1e30f;  // finite: differences of two such are 0 and not NaN
};

}  // namespace device

template <int Rows, int Heads, int KvHeads, int Dim, int Rotary, int Gated, int Centred, int PageTokens,
          int Format>
__global__ __launch_bounds__(2 * Rows, 1) void attention_prefill(const attention_params p) {
  constexpr attention_shape shape{Heads,      KvHeads,      Dim,        Rotary,
                                  Gated != 0, Centred != 0, PageTokens, kv_format(Format)};
  extern __shared__ __align__(16) std::byte attention_memory[];
  auto& shared = *reinterpret_cast<device::prefill_shared<shape, Rows>*>(attention_memory);
  device::attention_prefiller<shape, Rows>{p, shared}.run();
}

}  // namespace nibble
