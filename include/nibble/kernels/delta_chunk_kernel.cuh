// SPDX-License-Identifier: Apache-2.0
/// \file
/// The delta rule in chunks of 64 tokens, from state to state. With what delta_solve_kernel prepared and S
/// the state before the chunk:
///
///     R_i = v_i − γ_i Sᵀk̂_i;   Δ = T R;   o_i = γ_i Sᵀq̂_i + Σ_j A_ij Δ_j
///     S ← γ_last S + Σ_j (γ_last / γ_j) k̂_j Δ_jᵀ
///
/// All of it transposed, columns of the state as the rows of the matrix instruction: a result then is the
/// left operand of the next product as it lies in registers. Two warps have 16 columns, each half of the key
/// dimensions; they exchange their parts of Sᵀk̂ and Sᵀq̂ once a chunk and both compute Δ.
///
/// The state is fp32 in registers. Everything is multiplied as pairs of f16, rows of the left operands scaled
/// by powers of two.
#pragma once

#include "nibble/kernels/delta_chunk_ops.cuh"
#include "nibble/kernels/delta_prefill_kernel.cuh"

namespace nibble {

/// A stage of shared memory holds a chunk: k̂, q̂, the record, 32 columns of v. Where two do not fit, there is
/// one, in which k̂ takes the place of q̂: slow.
template <int KeyDim, int SharedBytes>
struct delta_chunk_plan {
  static constexpr int threads = 160;  ///< two pairs of warps that compute, and one warp that fetches
  static constexpr int pairs_bytes = 2 * device::chunk_rows<KeyDim>::bytes;
  static constexpr int ldv = delta_columns + 4;  ///< floats from token to token: no two of a load in a bank
  static constexpr int rest_bytes = delta_chunk_record::bytes + 4 * delta_chunk * ldv;
  static constexpr int exchange_bytes = 512 * 12;  ///< of a warp: 8 tiles of Sᵀk̂, 4 of Sᵀq̂
  static constexpr int stages =
      2 * (2 * pairs_bytes + rest_bytes) + 4 * exchange_bytes <= SharedBytes ? 2 : 1;
  static constexpr int q_at = stages == 2 ? pairs_bytes : 0;
  static constexpr int record_at = q_at + pairs_bytes;
  static constexpr int v_at = record_at + delta_chunk_record::bytes;
  static constexpr int stage_bytes = record_at + rest_bytes;
  static constexpr int exchange_at = stages * stage_bytes;
  static constexpr int shared_bytes = exchange_at + 4 * exchange_bytes;
  static_assert(shared_bytes <= SharedBytes,
                "a block of this architecture has too little shared memory for a chunk");
};

namespace device {

/// Sᵀ: 16 columns of a head's state × KeyDim / 2 rows, in the order of the matrix instruction's results.
template <int KeyDim>
struct turned_state {
  static constexpr int tiles = KeyDim / 16;
  float s[tiles][4];

  /// visit(element, its place in the split's block of the state): see state_index
  template <class Visit>
  __device__ __forceinline__ void each(int half, int column_tile, Visit&& visit) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t2 = 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = half * (KeyDim / 2) + 8 * n + t2 + (i & 1),
                  column = 16 * column_tile + g + 8 * (i >> 1);
        const int j = row / 64 * 2 + row % 4 / 2;
        visit(s[n][i], 1024 * j + 4 * (16 * (column / 2) + row % 64 / 4) + 2 * (row % 2) + column % 2);
      }
  }
};

__device__ __forceinline__ float4 load_shared_float4(std::uint32_t address) {
  const uint4 v = load_shared(address);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ float2 load_shared_float2(std::uint32_t address) {
  const uint2 v = load_shared_8(address);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
__device__ __forceinline__ void store_shared(std::uint32_t address, const float (&v)[4]) {
  store_shared(address, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                   __float_as_uint(v[3])));
}

/// The largest sizes of a warp's two rows a lane, over Tiles tiles.
template <int Tiles>
__device__ __forceinline__ void largest_of(float (&to)[2], const float (&c)[Tiles][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float v = fmaxf(fabsf(c[0][2 * h]), fabsf(c[0][2 * h + 1]));
#pragma unroll
    for (int n = 1; n < Tiles; ++n) v = fmaxf(v, fmaxf(fabsf(c[n][2 * h]), fabsf(c[n][2 * h + 1])));
    to[h] = largest_of_row(v);
  }
}

/// A chunk, by a warp.
template <int KeyDim, int SharedBytes>
struct chunk_step {
  using plan = delta_chunk_plan<KeyDim, SharedBytes>;
  using rows = chunk_rows<KeyDim>;
  using record = delta_chunk_record;
  static constexpr int steps = KeyDim / 32;  ///< of 16, of this warp's half of the key dimensions

  int lane, half;            ///< half of the key dimensions
  std::uint32_t tokens_at;   ///< this lane's row of k̂ and q̂, tokens as columns of the right operand
  std::uint32_t keys_at;     ///< the same, key dimensions as columns
  std::uint32_t own, other;  ///< places for exchange
  int pair_barrier;

  __device__ __forceinline__ chunk_step(int warp, std::uint32_t exchange)
      : lane(static_cast<int>(threadIdx.x) & 31), half(warp & 1), pair_barrier(1 + (warp >> 1)) {
    const int row = lane & 7, low = lane >> 3 & 1, high = lane >> 4;
    tokens_at = rows::at(row + 8 * high, low + half * (KeyDim / 16));
    keys_at = rows::at(row + 8 * low, high + half * (KeyDim / 16));
    own = exchange + warp * plan::exchange_bytes + 16 * lane;
    other = exchange + (warp ^ 1) * plan::exchange_bytes + 16 * lane;
  }

  /// c[tile of 8 tokens] = operand · rowsᵀ over this half of the key dimensions.
  __device__ __forceinline__ void times_rows(float (&c)[8][4], const std::uint32_t (&first)[steps][4],
                                             const std::uint32_t (&rest)[steps][4], std::uint32_t at) const {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][i] = 0;
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      const std::uint32_t from = (at + tokens_at) ^ (k << 5);
      std::uint32_t b[4][4], left[4][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_matrices(b[n], from + 16 * n * rows::row_bytes);
        load_matrices(left[n], from + 16 * n * rows::row_bytes + rows::bytes);
      }
      multiply(c, rest[k], b), multiply(c, first[k], left), multiply(c, first[k], b);
    }
  }
  /// c[tile] += a · b[tile / 2]
  template <int Pairs>
  __device__ __forceinline__ static void multiply(float (&c)[2 * Pairs][4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t (&b)[Pairs][4]) {
#pragma unroll
    for (int n = 0; n < Pairs; ++n) {
      mma_f16_in_order(c[2 * n], a, b[n][0], b[n][1]);
      mma_f16_in_order(c[2 * n + 1], a, b[n][2], b[n][3]);
    }
  }

  /// \param stage shared address  \param v this warp's columns of v there, this lane's first
  /// \param out o of this lane's first column and token  \param channels floats from token to token
  /// \param after_queries called once q̂ is used
  template <class AfterQueries>
  __device__ __forceinline__ void run(turned_state<KeyDim>& state, std::uint32_t stage, std::uint32_t v,
                                      float* out, int channels, AfterQueries&& after_queries) const {
    const int t2 = 2 * (lane & 3);
    const std::uint32_t factors = stage + plan::record_at + record::factors_at + 4 * t2;
    float outputs[4][4];  // own tiles: 2 m + half
    float seen[8][4];
    {
      float largest[2];
      largest_of(largest, state.s);
      const power_of_two upper = scale_to<13>(largest[0]), lower = scale_to<13>(largest[1]);
      const float scale[2] = {upper.scale, lower.scale};
      std::uint32_t first[steps][4], rest[steps][4];
#pragma unroll
      for (int k = 0; k < steps; ++k)
        split_operand(first[k], rest[k], state.s[2 * k], state.s[2 * k + 1], scale);
      times_rows(seen, first, rest, stage + plan::q_at);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float given[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float by = (i < 2 ? upper.inverse : lower.inverse) * (1 / delta_query_factor);
          outputs[m][i] = __fmul_rn(half != 0 ? seen[2 * m + 1][i] : seen[2 * m][i], by);
          given[i] = __fmul_rn(half != 0 ? seen[2 * m][i] : seen[2 * m + 1][i], by);
        }
        store_shared(own + 512 * (8 + m), given);
      }
      after_queries();
      times_rows(seen, first, rest, stage);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) seen[n][i] = __fmul_rn(seen[n][i], i < 2 ? upper.inverse : lower.inverse);
        store_shared(own + 512 * n, seen[n]);
      }
    }
    barrier_of<64>(pair_barrier);
    // R in place of what the state gives.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 more = load_shared_float4(other + 512 * n);
      const float2 gamma = load_shared_float2(factors + 32 * n);
      const std::uint32_t at = v + 4 * 8 * n * plan::ldv;
      const float values[4] = {
          __uint_as_float(load_shared_4(at)), __uint_as_float(load_shared_4(at + 4 * plan::ldv)),
          __uint_as_float(load_shared_4(at + 32)), __uint_as_float(load_shared_4(at + 4 * plan::ldv + 32))};
      const float parts[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        seen[n][i] = __fmaf_rn(-(i % 2 != 0 ? gamma.y : gamma.x), __fadd_rn(seen[n][i], parts[i]), values[i]);
    }
    float largest[2];
    largest_of(largest, seen);
    // |T| <= 1, so Δ is at most 64 times as large: below 2^15.
    const power_of_two upper = scale_to<8>(largest[0]), lower = scale_to<8>(largest[1]);
    const float scale[2] = {upper.scale, lower.scale};
    float delta[8][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t first[4], rest[4];
      split_operand(first, rest, seen[2 * k], seen[2 * k + 1], scale);
      uint4 b[8];
#pragma unroll
      for (int n = 2 * k; n < 8; ++n)
        b[n] = load_shared(stage + plan::record_at + 16 * lane + record::at(n, k));
#pragma unroll
      for (int n = 2 * k; n < 8; ++n) mma_f16_in_order(delta[n], rest, b[n].x, b[n].y);
#pragma unroll
      for (int n = 2 * k; n < 8; ++n) mma_f16_in_order(delta[n], first, b[n].z, b[n].w);
#pragma unroll
      for (int n = 2 * k; n < 8; ++n) mma_f16_in_order(delta[n], first, b[n].x, b[n].y);
    }
    {
      float inner[4][4] = {};
      const std::uint32_t matrix =
          stage + plan::record_at + record::matrix_bytes + 16 * lane + half * record::at(1, 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        std::uint32_t first[4], rest[4];
        split_operand(first, rest, delta[2 * k], delta[2 * k + 1]);
        uint4 b[4];
#pragma unroll
        for (int m = k; m < 4; ++m) b[m] = load_shared(matrix + record::at(2 * m, k));
#pragma unroll
        for (int m = k; m < 4; ++m) mma_f16_in_order(inner[m], rest, b[m].x, b[m].y);
#pragma unroll
        for (int m = k; m < 4; ++m) mma_f16_in_order(inner[m], first, b[m].z, b[m].w);
#pragma unroll
        for (int m = k; m < 4; ++m) mma_f16_in_order(inner[m], first, b[m].x, b[m].y);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float4 more = load_shared_float4(other + 512 * (8 + m));
        const float parts[4] = {more.x, more.y, more.z, more.w};
        const float2 gamma = load_shared_float2(factors + 32 * (2 * m + half));
        float* to = out + static_cast<std::size_t>(8 * (2 * m + half)) * channels;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[i % 2 * channels + i / 2 * 8] = __fmaf_rn(
              i % 2 != 0 ? gamma.y : gamma.x, __fadd_rn(outputs[m][i], parts[i]),
              __fmul_rn(inner[m][i], (i < 2 ? upper.inverse : lower.inverse) * (1 / delta_query_factor)));
      }
    }
    // The new state: Δ decays to the chunk's end.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 left = load_shared_float2(factors + 4 * delta_chunk + 32 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) delta[n][i] = __fmul_rn(delta[n][i], i % 2 != 0 ? left.y : left.x);
    }
    float more[2 * steps][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t first[4], rest[4];
      split_operand(first, rest, delta[2 * k], delta[2 * k + 1]);
      std::uint32_t b[steps][4], low[steps][4];
#pragma unroll
      for (int n = 0; n < steps; ++n) {
        const std::uint32_t from = ((stage + keys_at) ^ (n << 5)) + 16 * k * rows::row_bytes;
        load_matrices_transposed(b[n], from);
        load_matrices_transposed(low[n], from + rows::bytes);
      }
      multiply(more, rest, b), multiply(more, first, low), multiply(more, first, b);
    }
    const float decay =
        __uint_as_float(load_shared_4(stage + plan::record_at + record::factors_at + 4 * (delta_chunk - 1)));
#pragma unroll
    for (int n = 0; n < 2 * steps; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state.s[n][i] =
            __fmaf_rn(more[n][i], i < 2 ? upper.inverse : lower.inverse, __fmul_rn(state.s[n][i], decay));
  }
};

}  // namespace device

namespace device {

/// What a warp copies to shared memory for a block: a sequence's chunks of one value head and 32 columns.
template <int KeyHeads, int ValueHeads, int KeyDim, int ValueDim, class Plan>
struct chunk_source {
  static constexpr delta_shape shape{256, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  static constexpr int row_bytes = 4 * shape.channels();
  using rows = chunk_rows<KeyDim>;
  using record = delta_chunk_record;
  const std::uint8_t *q, *v, *records;  ///< of the first chunk
  std::uint32_t shared;

  __device__ __forceinline__ void fetch_pairs(std::uint32_t to, const std::uint8_t* from) const {
    const int lane = threadIdx.x & 31;
    rows::template fetch<32>(to, from, row_bytes, lane);
    rows::template fetch<32>(to + rows::bytes, from + 2 * KeyDim, row_bytes, lane);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t stage(int chunk) const {
    return shared + chunk % Plan::stages * Plan::stage_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ static std::size_t rows_of(int chunk) {
    return static_cast<std::size_t>(chunk) * (delta_chunk * row_bytes);
  }
  __device__ __forceinline__ void fetch_keys(int chunk) const {
    fetch_pairs(stage(chunk), q + rows_of(chunk) + 4 * shape.key_width());
  }
  /// Everything that the stage holds at first.
  __device__ __forceinline__ void fetch(int chunk) const {
    const int lane = threadIdx.x & 31;
    const std::uint32_t to = stage(chunk);
    fetch_pairs(to + Plan::q_at, q + rows_of(chunk));
    if constexpr (Plan::stages == 2) fetch_keys(chunk);
    static_assert(record::bytes % 512 == 0);
    const std::uint8_t* part =
        records + static_cast<std::size_t>(chunk) * (ValueHeads * record::bytes) + 16 * lane;
#pragma unroll
    for (int at = 0; at < record::bytes; at += 512)
      copy_async_16(to + Plan::record_at + at + 16 * lane, part + at);
    const std::uint8_t* values = v + rows_of(chunk) + (lane / 8) * row_bytes + 16 * (lane % 8);
#pragma unroll
    for (int i = 0; i < delta_chunk; i += 4)
      copy_async_16(to + Plan::v_at + 4 * Plan::ldv * (i + lane / 8) + 16 * (lane % 8),
                    values + i * row_bytes);
  }
  /// All chunks, in step with the warps that compute: a block barrier where a chunk begins, and two more
  /// where there is one stage, before and after k̂ takes the place of q̂.
  __device__ __forceinline__ void run(int count) const {
    if constexpr (Plan::stages == 2) {
      fetch(0);
      copy_async_commit();
#pragma unroll 1
      for (int chunk = 0; chunk < count; ++chunk) {
        copy_async_wait<0>();
        __syncthreads();
        if (chunk + 1 < count) fetch(chunk + 1);
        copy_async_commit();
      }
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < count; ++chunk) {
        if (chunk > 0) __syncthreads();
        fetch(chunk);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        __syncthreads();
        fetch_keys(chunk);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
      }
    }
    copy_async_wait<0>();
  }
};

}  // namespace device

/// A block per (32 columns, value head, sequence).
template <int SharedBytes, int KeyHeads, int ValueHeads, int KeyDim, int ValueDim>
__global__ __launch_bounds__((delta_chunk_plan<KeyDim, SharedBytes>::threads),
                             1) void delta_chunk_kernel(const __grid_constant__ delta_rule_params p) {
  using namespace device;
  using plan = delta_chunk_plan<KeyDim, SharedBytes>;
  using source = chunk_source<KeyHeads, ValueHeads, KeyDim, ValueDim, plan>;
  constexpr delta_shape shape = source::shape;
  constexpr int channels = shape.channels(), splits = shape.splits();
  extern __shared__ __align__(256) std::uint8_t chunk_shared[];
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = threadIdx.x & 31;
  const int split = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const int key_head = head / (ValueHeads / KeyHeads);
  const int begin = load_int(p.step.first_row + sequence) - load_int(p.step.first_row);
  const int rows = load_int(p.step.first_row + sequence + 1) - load_int(p.step.first_row + sequence);
  const int position = load_int(p.step.position + sequence), slot = load_int(p.step.slot + sequence);
  const delta_chunks chunks = delta_chunks_of(position, rows);
  wait_for_previous_grid();
  if (chunks.count == 0) return;
  const delta_workspace<channels, ValueHeads> work(p);
  const int first = begin + chunks.first;
  float* const row = work.rows + static_cast<std::size_t>(first) * channels;
  float* const v = row + 2 * shape.key_width() + head * ValueDim + split * delta_columns;
  const std::uint32_t base = shared_address(chunk_shared);
  if (warp == 4) {
    const std::byte* const records =
        work.records(p) +
        (static_cast<std::size_t>(first / delta_chunk) * ValueHeads + head) * delta_chunk_record::bytes;
    const auto bytes = [](const auto* from) { return reinterpret_cast<const std::uint8_t*>(from); };
    source{bytes(row + key_head * KeyDim), bytes(v), bytes(records), base}.run(chunks.count);
    return;
  }
  const int column_tile = warp >> 1;
  const chunk_step<KeyDim, SharedBytes> step(warp, base + plan::exchange_at);
  turned_state<KeyDim> state;
  float* const block = reinterpret_cast<float*>(p.pool.slot(slot)) +
                       static_cast<std::size_t>(head * splits + split) * (KeyDim * delta_columns);
  state.each(step.half, column_tile, [&](float& element, int at) { element = load_float(block + at); });
  const int g = lane >> 2, t2 = 2 * (lane & 3);
  const std::uint32_t v_at = plan::v_at + 4 * (t2 * plan::ldv + 16 * column_tile + g);
  // o takes the place of v, which this block alone has read.
  float* out = v + static_cast<std::size_t>(t2) * channels + 16 * column_tile + g;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    if (plan::stages == 1 && chunk > 0) __syncthreads();
    __syncthreads();
    const std::uint32_t stage = base + chunk % plan::stages * plan::stage_bytes;
    step.run(state, stage, stage + v_at, out, channels, [] {
      if constexpr (plan::stages == 1) __syncthreads(), __syncthreads();
    });
    out += static_cast<std::size_t>(delta_chunk) * channels;
  }
  state.each(step.half, column_tile, [&](float& element, int at) { block[at] = element; });
  let_next_grid_start();
}

}  // namespace nibble
