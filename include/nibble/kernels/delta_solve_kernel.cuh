// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the chunks of the delta rule need and no chunk waits for: per chunk and value head
///
///     L_ij = β_i (γ_i / γ_j) k̂_i·k̂_j  (j < i);   T = (I + L)⁻¹ diag β;   A_ij = (γ_i / γ_j) q̂_i·k̂_j  (j <=
///     i)
///
/// with γ_i the product of the chunk's decays up to i. Ratios of two are products of the decays between, so a
/// decay of zero is no special case. No element of T is larger than 1 and none of A larger than a norm of q̂:
/// both fit f16 as they are, A delta_query_factor times larger as q̂ is.
#pragma once

#include "nibble/kernels/delta_chunk_ops.cuh"
#include "nibble/kernels/delta_prefill_kernel.cuh"

namespace nibble {

/// A block has two value heads of one key head where it can, 128 threads each. Shared memory: the rows of k̂
/// and q̂, later the inverses and intermediate products, and beside them a matrix of 64 × 64 per head.
template <int Ratio, int KeyDim, int SharedBytes>
struct delta_solve_plan {
  static constexpr int ld = delta_chunk + 8;       ///< floats from row to row
  static constexpr int ldy = delta_chunk / 2 + 4;  ///< of an intermediate product
  static constexpr int matrix_bytes = 4 * delta_chunk * ld;
  static constexpr int inverse_bytes = matrix_bytes + 4 * (delta_chunk / 2) * ldy;
  static constexpr int rows_bytes(int heads) {
    constexpr int bytes = 4 * device::chunk_rows<KeyDim>::bytes;
    return bytes > heads * inverse_bytes ? bytes : heads * inverse_bytes;
  }
  static constexpr int bytes_of(int heads) {
    return rows_bytes(heads) + heads * (matrix_bytes + 8 * delta_chunk);
  }
  static constexpr int heads = Ratio % 2 == 0 && bytes_of(2) <= SharedBytes ? 2 : 1;
  static constexpr int threads = 128 * heads;
  static constexpr int matrix_at = rows_bytes(heads), gates_at = matrix_at + heads * matrix_bytes;
  static constexpr int shared_bytes = bytes_of(heads);
  static_assert(shared_bytes <= SharedBytes,
                "a block of this architecture has too little shared memory for a chunk");
};

namespace device {

/// c[tile] += 16 rows of a times 8 rows of b per tile, transposed, for the tiles up to the diagonal.
/// \param a,b shared addresses of the first parts; the rests are chunk_rows::bytes behind  \param square of
/// the 16 rows of a
template <int KeyDim>
__device__ __forceinline__ void triangle_product(float (&c)[8][4], std::uint32_t a, std::uint32_t b,
                                                 int square) {
  using rows = chunk_rows<KeyDim>;
  const int lane = threadIdx.x & 31;
  const std::uint32_t from_a = a + rows::at(16 * square + (lane & 15), lane >> 4);
  const std::uint32_t from_b = b + rows::at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
  for (int k = 0; k < KeyDim / 16; ++k) {
    std::uint32_t first[4], rest[4];
    load_matrices(first, from_a ^ (k << 5));
    load_matrices(rest, (from_a ^ (k << 5)) + rows::bytes);
    std::uint32_t at[4][4], left[4][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
      if (pair <= square) {
        load_matrices(at[pair], (from_b ^ (k << 5)) + pair * 16 * rows::row_bytes);
        load_matrices(left[pair], (from_b ^ (k << 5)) + pair * 16 * rows::row_bytes + rows::bytes);
      }
    const auto multiply = [&](const std::uint32_t(&x)[4], const std::uint32_t(&y)[4][4]) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        if (pair <= square) {
          mma_f16_in_order(c[2 * pair], x, y[pair][0], y[pair][1]);
          mma_f16_in_order(c[2 * pair + 1], x, y[pair][2], y[pair][3]);
        }
    };
    multiply(rest, at), multiply(first, left), multiply(first, at);
  }
}

/// x = (I + l)⁻¹ for the four 16 × 16 squares on the diagonal, a warp each: a column a lane. \param t 0…127
template <int Ld>
__device__ __forceinline__ void invert_diagonal(float* x, const float* l, int t) {
  const int lane = t & 31, square = t >> 5, column = lane & 15;
  const int corner = 16 * square * (Ld + 1);
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = __fmaf_rn(-l[corner + i * Ld + m], v[m], sum);
    v[i] = sum;
  }
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) x[corner + i * Ld + column] = v[i];
}

/// Four neighbouring columns of a row of a · b, `count` inner elements, a multiple of four.
__device__ __forceinline__ float4 row_product(const float* a, const float* b, int ldb, int count) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int m = 0; m < count; m += 4) {
    const float4 left = *reinterpret_cast<const float4*>(a + m);
    const float by[4] = {left.x, left.y, left.z, left.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(b + (m + i) * ldb);
      sum.x = __fmaf_rn(by[i], v.x, sum.x), sum.y = __fmaf_rn(by[i], v.y, sum.y);
      sum.z = __fmaf_rn(by[i], v.z, sum.z), sum.w = __fmaf_rn(by[i], v.w, sum.w);
    }
  }
  return sum;
}
__device__ __forceinline__ float4 negated(const float4& v) { return make_float4(-v.x, -v.y, -v.z, -v.w); }

/// The squares below the diagonal: with I + l = [a 0; c b] that of the inverse is -b⁻¹ c a⁻¹, for halves of
/// 32 and then for the whole. All threads of the block; y is an intermediate product of 32 rows.  \param t
/// 0…127
template <int Ld, int Ldy>
__device__ __forceinline__ void invert_below(float* x, const float* l, float* y, int t) {
  {
    const int half = t >> 6, row = (t & 63) >> 2, column = 4 * (t & 3);
    const int corner = 32 * half * (Ld + 1), below = corner + 16 * Ld;
    float* const mine = y + 16 * half * Ldy;
    *reinterpret_cast<float4*>(mine + row * Ldy + column) =
        row_product(l + below + row * Ld, x + corner + column, Ld, 16);
    __syncthreads();
    *reinterpret_cast<float4*>(x + below + row * Ld + column) =
        negated(row_product(x + below + 16 + row * Ld, mine + column, Ldy, 16));
    __syncthreads();
  }
  // a⁻¹ and b⁻¹ have nothing above their diagonals, so whole squares are left out.
  const int column = 4 * (t & 7), from = column & 16;
  const float* const right = x + from * Ld + column;
#pragma unroll 1
  for (int row = t >> 3; row < 32; row += 16)
    *reinterpret_cast<float4*>(y + row * Ldy + column) =
        row_product(l + (32 + row) * Ld + from, right, Ld, 32 - from);
  __syncthreads();
#pragma unroll 1
  for (int row = t >> 3; row < 32; row += 16)
    *reinterpret_cast<float4*>(x + (32 + row) * Ld + column) =
        negated(row_product(x + (32 + row) * Ld + 32, y + column, Ldy, (row & 16) + 16));
  __syncthreads();
}

/// A lane's part of 8 rows × 16 columns of a record. \param near,far elements 2 (lane % 4) and the next of
/// the row lane / 4, in the columns 0 … 7 and in the columns 8 … 15
__device__ __forceinline__ void store_part(std::byte* part, const f16_parts& near, const f16_parts& far) {
  reinterpret_cast<uint4*>(part)[threadIdx.x & 31] = make_uint4(near.first, far.first, near.rest, far.rest);
}

}  // namespace device

/// A block per (64 rows, one or two value heads): the records of the chunk that begins there.
template <int SharedBytes, int KeyHeads, int ValueHeads, int KeyDim, int ValueDim>
__global__ __launch_bounds__((
    delta_solve_plan<ValueHeads / KeyHeads, KeyDim,
                     SharedBytes>::threads)) void delta_solve_kernel(const __grid_constant__ delta_rule_params
                                                                         p) {
  using namespace device;
  constexpr delta_shape shape{256, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  constexpr int channels = shape.channels();
  using plan = delta_solve_plan<ValueHeads / KeyHeads, KeyDim, SharedBytes>;
  using rows = chunk_rows<KeyDim>;
  using record = delta_chunk_record;
  extern __shared__ __align__(256) std::uint8_t chunk_shared[];
  const int t = threadIdx.x & 127, own = static_cast<int>(threadIdx.x) >> 7;  // of the block's heads
  const int warp = t >> 5, lane = t & 31, g = lane >> 2, t2 = 2 * (lane & 3);
  const int slot = blockIdx.x, first_head = plan::heads * static_cast<int>(blockIdx.y);
  const int first = find_chunk(p.step, slot);
  wait_for_previous_grid();
  let_next_grid_start();
  if (first < 0) return;
  const delta_workspace<channels, ValueHeads> work(p);
  const auto* const q = reinterpret_cast<const std::uint8_t*>(
      work.rows + static_cast<std::size_t>(first) * channels + first_head / (ValueHeads / KeyHeads) * KeyDim);
  const std::uint8_t* const k = q + 4 * shape.key_width();
  const std::uint32_t k_at = shared_address(chunk_shared), q_at = k_at + 2 * rows::bytes;
  const auto fetch = [&](std::uint32_t to, const std::uint8_t* from) {
    rows::template fetch<plan::threads>(to, from, 4 * channels, static_cast<int>(threadIdx.x));
  };
  fetch(k_at, k), fetch(k_at + rows::bytes, k + 2 * KeyDim);
  fetch(q_at, q), fetch(q_at + rows::bytes, q + 2 * KeyDim);
  copy_async_commit();

  const auto matrix_of = [&](int head) {
    return reinterpret_cast<float*>(chunk_shared + plan::matrix_at + head * plan::matrix_bytes);
  };
  const auto beta_of = [&](int head) {
    return reinterpret_cast<float*>(chunk_shared + plan::gates_at + 4 * delta_chunk * head);
  };
  const auto record_of = [&](int head) {
    return work.records(p) +
           (static_cast<std::size_t>(slot) * ValueHeads + first_head + head) * record::bytes;
  };
  float* const matrix = matrix_of(own);
  float* const beta = beta_of(own);
  float* const decay = beta_of(plan::heads + own);
  if (t < delta_chunk) {
    const float2 gate = work.gates[static_cast<std::size_t>(first + t) * ValueHeads + first_head + own];
    decay[t] = gate.x, beta[t] = gate.y;
  }
  __syncthreads();
  // matrix_ij = γ_i / γ_j, a column a thread, while k̂ and q̂ arrive.
  auto* const factors = reinterpret_cast<float*>(record_of(own) + record::factors_at);
  if (t < delta_chunk) {
    float ratio = 1;
#pragma unroll 8
    for (int i = 0; i < delta_chunk; ++i) {
      ratio = i <= t ? 1.0f : __fmul_rn(ratio, decay[i]);
      matrix[i * plan::ld + t] = ratio;
    }
    factors[delta_chunk + t] = ratio;
  } else {
    float product = 1, mine = 0;
#pragma unroll 8
    for (int i = 0; i < delta_chunk; ++i) {
      product = __fmul_rn(product, decay[i]);
      if (i == t - delta_chunk) mine = product;
    }
    factors[t - delta_chunk] = mine;
  }
  copy_async_wait<0>();
  __syncthreads();

  // k̂·k̂ for the first head's warps, q̂·k̂ for the second's, where there are two; each for both heads. The
  // longest row of squares of one product shares its scheduler with the shortest of the other.
  float keys[8][4] = {};
  const int query_square = 3 - warp;
  if (plan::heads == 1 || own == 1) {
    float queries[8][4] = {};
    triangle_product<KeyDim>(queries, q_at, k_at, query_square);
#pragma unroll 1
    for (int head = 0; head < plan::heads; ++head) {
      const float* const ratios = matrix_of(head);
      std::byte* const to = record_of(head) + record::matrix_bytes;
#pragma unroll
      for (int square = 0; square < 4; ++square)
        if (square <= query_square)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = 16 * query_square + 8 * h + g;
            f16_parts part[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int column = 16 * square + 8 * i + t2;
              const float2 by = *reinterpret_cast<const float2*>(ratios + row * plan::ld + column);
              const float* c = queries[2 * square + i] + 2 * h;
              part[i] = split(column <= row ? __fmul_rn(c[0], by.x) : 0.0f,
                              column < row ? __fmul_rn(c[1], by.y) : 0.0f);
            }
            store_part(to + record::at(2 * query_square + h, square), part[0], part[1]);
          }
    }
  }
  if (plan::heads == 1 || own == 0) triangle_product<KeyDim>(keys, k_at, k_at, warp);
  __syncthreads();
  // L takes the place of the ratios; what is on and above the diagonal is never read.
  if (plan::heads == 1 || own == 0)
#pragma unroll 1
    for (int head = 0; head < plan::heads; ++head) {
      float* const to = matrix_of(head);
      const float* const factor = beta_of(head);
#pragma unroll
      for (int tile = 0; tile < 8; ++tile)
        if (tile < 2 * warp + 2)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = 16 * warp + 8 * h + g;
            auto* at = reinterpret_cast<float2*>(to + row * plan::ld + 8 * tile + t2);
            const float2 by = *at;
            *at = make_float2(__fmul_rn(__fmul_rn(factor[row], by.x), keys[tile][2 * h]),
                              __fmul_rn(__fmul_rn(factor[row], by.y), keys[tile][2 * h + 1]));
          }
    }
  __syncthreads();
  auto* const inverse = reinterpret_cast<float*>(chunk_shared + own * plan::inverse_bytes);
  invert_diagonal<plan::ld>(inverse, matrix, t);
  __syncthreads();
  invert_below<plan::ld, plan::ldy>(inverse, matrix, inverse + delta_chunk * plan::ld, t);

  std::byte* const to = record_of(own);
  for (int part = warp; part < 2 * record::squares; part += 4) {
    const int square = part / 2, i = square < 1 ? 0 : square < 3 ? 1 : square < 6 ? 2 : 3;
    const int j = square - i * (i + 1) / 2, column = 16 * j + t2;
    const float* from = inverse + (16 * i + 8 * (part & 1) + g) * plan::ld + column;
    store_part(to + record::at(2 * i + (part & 1), j),
               split(__fmul_rn(from[0], beta[column]), __fmul_rn(from[1], beta[column + 1])),
               split(__fmul_rn(from[8], beta[column + 8]), __fmul_rn(from[9], beta[column + 9])));
  }
}

}  // namespace nibble
