// SPDX-License-Identifier: Apache-2.0
/// \file
/// Prefill of the delta rule: the gates, the convolution, the recurrence token by token, the gated norm.
///
/// The recurrence does a token's steps in decode's order with the state in registers, so the results are the
/// same bits however what goes token by token is cut. Rows of the workspace count from the launch's first
/// row.
#pragma once

#include <type_traits>

#include "nibble/kernels/delta_chunk_ops.cuh"
#include "nibble/kernels/delta_params.cuh"
#include "nibble/kernels/delta_step.cuh"
#include "nibble/kernels/rows_product.cuh"

namespace nibble {

/// Rows of a run, a warp's share, in the convolution and in the gated norm. A warp asks for several rows at
/// once: with one at a time both wait for memory most of the time.
inline constexpr int delta_conv_run = 16, delta_norm_run = 8;

/// Where the parts of a prefill's workspace lie, in floats.
template <int Channels, int ValueHeads>
struct delta_workspace {
  float* rows;    ///< [rows][Channels]: q̂ | k̂ | v, o in place of v; see delta_records_at
  float2* gates;  ///< [rows][ValueHeads]: decay, β
  __device__ __forceinline__ explicit delta_workspace(const delta_rule_params& p)
      : rows(reinterpret_cast<float*>(p.workspace)),
        gates(reinterpret_cast<float2*>(rows + static_cast<std::size_t>(p.rows) * Channels)) {}
  /// [rows / delta_chunk][ValueHeads] records of chunks, each at its first row / delta_chunk.
  __device__ __forceinline__ static std::byte* records(const delta_rule_params& p) {
    return p.workspace + delta_records_at(Channels, ValueHeads, p.rows);
  }
};

/// decay and β of 64 rows a block, from x and the b|a matrix.
template <int SharedBytes, int Hidden, int Channels, int ValueHeads>
__global__ __launch_bounds__(256, 1) void delta_gates_kernel(const __grid_constant__ delta_rule_params p) {
  using namespace device;
  using plan = rows_product_plan<2 * ValueHeads, false, Hidden, SharedBytes>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int base = load_int(p.step.first_row);
  const int count = min(p.rows, load_int(p.step.first_row + p.step.sequences) - base);
  wait_for_previous_grid();
  let_next_grid_start();
  const int first = plan::tile_rows * static_cast<int>(blockIdx.x);
  if (first >= count) return;
  const __nv_bfloat16* x = p.x + static_cast<std::size_t>(base) * p.ldx;
  const float* results = rows_product<2 * ValueHeads, false, Hidden, SharedBytes>({x, p.ldx, p.ba, nullptr},
                                                                                  first, count - 1, shared);
  const delta_workspace<Channels, ValueHeads> work(p);
  for (int i = static_cast<int>(threadIdx.x); i < plan::tile_rows * ValueHeads; i += plan::threads) {
    const int token = i / ValueHeads, head = i % ValueHeads;
    if (first + token >= count) break;
    const float* r = results + token * plan::ldr;
    const delta_gates g = gates_of(r[head], r[ValueHeads + head], expf(p.a_log[head]), p.dt_bias[head]);
    work.gates[static_cast<std::size_t>(first + token) * ValueHeads + head] = make_float2(g.decay, g.beta);
  }
}

namespace device {

// Stores that stay whole: the compiler otherwise splits some where registers are few.
__device__ __forceinline__ void store_8(void* to, std::uint32_t a, std::uint32_t b) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_16(void* to, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                         std::uint32_t d) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/// Count neighbouring bf16 as they lie in memory: 1, 2, 4 or 8.
template <int Count>
struct bf16_run {
  static_assert(Count == 1 || Count == 2 || Count == 4 || Count == 8);
  using word = std::conditional_t<Count == 1, std::uint16_t, std::uint32_t>;
  static constexpr int words = Count == 1 ? 1 : Count / 2;
  word w[words];

  __device__ __forceinline__ void load(const __nv_bfloat16* from) {
    if constexpr (words == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else if constexpr (words == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      w[0] = v.x, w[1] = v.y;
    } else {
      w[0] = *reinterpret_cast<const word*>(from);
    }
  }
  __device__ __forceinline__ void store(__nv_bfloat16* to) const {
    if constexpr (words == 4)
      store_16(to, w[0], w[1], w[2], w[3]);
    else if constexpr (words == 2)
      store_8(to, w[0], w[1]);
    else
      *reinterpret_cast<word*>(to) = w[0];
  }
  __device__ __forceinline__ void unpack_to(float (&to)[Count]) const {
    if constexpr (Count == 1) {
      to[0] = __uint_as_float(static_cast<std::uint32_t>(w[0]) << 16);
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) {
        const float2 v = unpack(w[i]);
        to[2 * i] = v.x, to[2 * i + 1] = v.y;
      }
    }
  }
  __device__ __forceinline__ void round(const float (&from)[Count]) {
    if constexpr (Count == 1) {
      w[0] = static_cast<std::uint16_t>(pack(from[0], 0.0f));
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) w[i] = pack(from[2 * i], from[2 * i + 1]);
    }
  }
};

/// Squares of a head's channels, Each neighbouring ones a lane, in decode's order: a tree over every 32.
/// \param sums of each 32
template <int Each>
__device__ __forceinline__ void sum_squares(float (&sums)[Each], const float (&of)[Each]) {
  float s[Each];
#pragma unroll
  for (int i = 0; i < Each; ++i) s[i] = __fmul_rn(of[i], of[i]);
#pragma unroll
  for (int width = Each; width > 1; width /= 2)
#pragma unroll
    for (int i = 0; i < width / 2; ++i) s[i] = __fadd_rn(s[2 * i], s[2 * i + 1]);
  const float group = sum_lanes<32 / Each>(s[0]);
#pragma unroll
  for (int i = 0; i < Each; ++i) sums[i] = __shfl_sync(whole_warp, group, i * (32 / Each));
}

/// One warp: a run of one head's Dim channels, Dim / 32 neighbouring ones a lane. The first run of a sequence
/// begins with the window and leaves the new one in it. Normalised rows of chunks are stored as pairs of f16,
/// times pair_factor.
template <int Dim, bool Normalised>
__device__ __forceinline__ void convolve_run(const delta_rule_params& p, const row_tile& tile, int channels,
                                             int channel, __nv_bfloat16* window, int position, float scale,
                                             float pair_factor, float* work, int base) {
  constexpr int each = Dim / 32, ahead = each > 4 ? 2 : 4;
  const int at = channel + each * (threadIdx.x & 31);
  const auto load = [](float(&to)[each], const __nv_bfloat16* from) {
    bf16_run<each> v;
    v.load(from);
    v.unpack_to(to);
  };
  const auto row = [&](int r) { return p.qkvz + static_cast<std::size_t>(r) * p.ldqkvz + at; };
  // Rows that do not exist are the last one again.
  const auto ask = [&](bf16_run<each>(&to)[ahead], int from) {
#pragma unroll
    for (int i = 0; i < ahead; ++i) to[i].load(row(tile.first_row + min(from + i, tile.rows - 1)));
  };
  bf16_run<each> now[ahead];
  ask(now, 0);
  int chunks_from = 0, chunks_rows = 0;  // of the tile's rows
  if constexpr (Normalised) {
    const delta_chunks c = delta_chunks_of(position, tile.end - tile.begin);
    chunks_from = c.first - (tile.first_row - tile.begin), chunks_rows = c.count * delta_chunk;
  }
  float4 weight[each];
#pragma unroll
  for (int i = 0; i < each; ++i) weight[i] = load_float4(p.conv + 4 * (at + i));
  float x[4][each];
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    const int back = tile.first_row - 3 + j;
    if (back >= tile.begin)
      load(x[j], row(back));
    else  // position + (back - begin) is the input's own position
      load(x[j], window + ((position + back - tile.begin) & 3) * channels + at);
  }
  if (tile.index == 0) {  // this warp alone reads and writes these channels of the window
    __syncwarp();
    const int first = tile.end - tile.begin - 4;
    bf16_run<each> last[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i >= 0) last[i].load(row(tile.begin + first + i));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i >= 0) last[i].store(window + ((position + first + i) & 3) * channels + at);
  }
  const auto finish = [&](int r) {
    float y[each];
#pragma unroll
    for (int i = 0; i < each; ++i) y[i] = conv_tap(weight[i], x[0][i], x[1][i], x[2][i], x[3][i]);
    if constexpr (Normalised) {
      float groups[each];
      sum_squares(groups, y);
      float sum = groups[0];
#pragma unroll
      for (int i = 1; i < each; ++i) sum = __fadd_rn(sum, groups[i]);
      const float factor = l2_factor(sum, scale);
#pragma unroll
      for (int i = 0; i < each; ++i) y[i] = __fmul_rn(y[i], factor);
    }
    float* to = work + static_cast<std::size_t>(tile.first_row + r - base) * channels + at;
    if (Normalised && static_cast<unsigned>(r - chunks_from) < static_cast<unsigned>(chunks_rows)) {
      if constexpr (Normalised) {
        auto* pair = reinterpret_cast<std::uint32_t*>(to) - each / 2 * (threadIdx.x & 31);
        std::uint32_t first[each / 2], left[each / 2];
#pragma unroll
        for (int i = 0; i < each; i += 2) {
          const f16_parts v = split(__fmul_rn(y[i], pair_factor), __fmul_rn(y[i + 1], pair_factor));
          first[i / 2] = v.first, left[i / 2] = v.rest;
        }
        if constexpr (each == 4) {
          *reinterpret_cast<uint2*>(pair) = make_uint2(first[0], first[1]);
          *reinterpret_cast<uint2*>(pair + Dim / 2) = make_uint2(left[0], left[1]);
        } else {
          pair[0] = first[0];
          pair[Dim / 2] = left[0];
        }
      }
    } else if constexpr (each % 4 == 0) {
#pragma unroll
      for (int i = 0; i < each; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(y[i], y[i + 1], y[i + 2], y[i + 3]);
    } else if constexpr (each == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(y[0], y[1]);
    } else {
      to[0] = y[0];
    }
  };
#pragma unroll 1
  for (int first = 0; first < tile.rows; first += ahead) {
    bf16_run<each> next[ahead];
    if (first + ahead < tile.rows) ask(next, first + ahead);
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (first + i >= tile.rows) break;
      now[i].unpack_to(x[3]);
      finish(first + i);
#pragma unroll
      for (int c = 0; c < each; ++c) x[0][c] = x[1][c], x[1][c] = x[2][c], x[2][c] = x[3][c];
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) now[i] = next[i];
  }
}

}  // namespace device

/// Convolution, SiLU and l2 norms: a warp per (run of rows, head), the heads of q, of k, of v in turn.
template <int KeyHeads, int ValueHeads, int KeyDim, int ValueDim>
__global__ __launch_bounds__(256, ValueDim > 128 ? 2 : 3) void delta_conv_kernel(
    const __grid_constant__ delta_rule_params p) {
  using namespace device;
  constexpr delta_shape shape{256, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  constexpr int channels = shape.channels();
  wait_for_previous_grid();
  let_next_grid_start();
  const row_tile tile =
      find_tile<delta_conv_run>(p.step.first_row, p.step.sequences, static_cast<int>(blockIdx.x));
  const int head = 8 * static_cast<int>(blockIdx.y) + (static_cast<int>(threadIdx.x) >> 5);
  if (tile.sequence < 0 || head >= 2 * KeyHeads + ValueHeads) return;
  const int position = p.step.position[tile.sequence];
  if (position < 0) return;
  const int base = p.step.first_row[0];
  auto* const window =
      reinterpret_cast<__nv_bfloat16*>(p.pool.slot(p.step.slot[tile.sequence]) + shape.recurrent_bytes());
  auto* const work = delta_workspace<channels, ValueHeads>(p).rows;
  if (head < 2 * KeyHeads)
    convolve_run<KeyDim, true>(p, tile, channels, head * KeyDim, window, position,
                               head < KeyHeads ? query_scale<KeyDim> : 1.0f,
                               head < KeyHeads ? delta_query_factor : 1.0f, work, base);
  else
    convolve_run<ValueDim, false>(p, tile, channels, 2 * KeyHeads * KeyDim + (head - 2 * KeyHeads) * ValueDim,
                                  window, position, 1.0f, 1.0f, work, base);
}

/// Sizes of the recurrence: tokens come through shared memory in stages.
template <int KeyDim>
struct delta_stream {
  static constexpr int tokens = 16, stages = 3;
  static constexpr int token_floats = 2 * KeyDim + delta_columns;  ///< q̂ | k̂ | v
  static constexpr int stage_bytes = tokens * (4 * token_floats + 8);
  static constexpr int shared_bytes = stages * stage_bytes;
};

/// A block per (32 columns, value head, sequence). \param behind false: what is before a piece's chunks, all
/// of it where it has none; true: what is behind them
template <int KeyHeads, int ValueHeads, int KeyDim, int ValueDim>
__global__ __launch_bounds__(device::delta_threads) void delta_recurrence_kernel(
    const __grid_constant__ delta_rule_params p, bool behind) {
  using namespace device;
  constexpr delta_shape shape{256, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  constexpr int channels = shape.channels(), splits = shape.splits();
  using stream = delta_stream<KeyDim>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int t = threadIdx.x, split = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const int key_head = head / (ValueHeads / KeyHeads);
  const int base = load_int(p.step.first_row);
  int begin = load_int(p.step.first_row + sequence) - base;
  int count = load_int(p.step.first_row + sequence + 1) - base - begin;
  const int position = load_int(p.step.position + sequence), slot = load_int(p.step.slot + sequence);
  const delta_chunks chunks = delta_chunks_of(position, count);
  if (behind) {
    const int skipped = chunks.count > 0 ? chunks.first + chunks.count * delta_chunk : count;
    begin += skipped, count -= skipped;
  } else if (chunks.count > 0) {
    count = chunks.first;
  }
  const bool idle = position < 0 || count <= 0;
  float* const state = reinterpret_cast<float*>(p.pool.slot(idle ? 0 : slot)) +
                       static_cast<std::size_t>(head * splits + split) * (KeyDim * delta_columns);
  delta_fragment<KeyDim> s;
  if (!idle && !behind) s.load(state, t);
  wait_for_previous_grid();
  if (idle) return;
  if (behind) s.load(state, t);
  const delta_workspace<channels, ValueHeads> work(p);
  float* const rows = work.rows + static_cast<std::size_t>(begin) * channels;
  const float2* const gates = work.gates + static_cast<std::size_t>(begin) * ValueHeads + head;
  const int v_at = 2 * shape.key_width() + head * ValueDim + split * delta_columns;

  // A pass of the block brings q̂ (and k̂) of `together` tokens; v of a stage comes in one.
  constexpr int pieces = KeyDim / 4, together = delta_threads / pieces;
  static_assert(stream::tokens * delta_columns / 4 <= delta_threads && stream::tokens % together == 0);
  const float* const q_from =
      rows + static_cast<std::size_t>(t / pieces) * channels + key_head * KeyDim + 4 * (t % pieces);
  const float* const v_from = rows + static_cast<std::size_t>(t / 8) * channels + v_at + 4 * (t % 8);
  const std::uint32_t q_to =
      shared_address(shared) + 4 * (t / pieces * stream::token_floats + 4 * (t % pieces));
  const std::uint32_t v_to =
      shared_address(shared) + 4 * (t / 8 * stream::token_floats + 2 * KeyDim + 4 * (t % 8));
  const auto fetch = [&](int stage) {
    const int first = stage * stream::tokens, left = count - first;
    const std::uint32_t to = stage % stream::stages * stream::stage_bytes;
    const std::size_t from = static_cast<std::size_t>(first) * channels;
#pragma unroll
    for (int i = 0; i < stream::tokens / together; ++i)
      if (t / pieces + together * i < left) {
        const float* q = q_from + from + static_cast<std::size_t>(together * i) * channels;
        copy_async_16(q_to + to + 4 * together * i * stream::token_floats, q);
        copy_async_16(q_to + to + 4 * (together * i * stream::token_floats + KeyDim), q + shape.key_width());
      }
    if (t / 8 < stream::tokens && t / 8 < left) copy_async_16(v_to + to, v_from + from);
    if (t < stream::tokens && t < left)
      copy_async_8(shared_address(shared) + to + stream::tokens * 4 * stream::token_floats + 8 * t,
                   gates + static_cast<std::size_t>(first + t) * ValueHeads);
  };
  const int stages = (count + stream::tokens - 1) / stream::tokens;
#pragma unroll
  for (int i = 0; i < stream::stages - 1; ++i) {
    if (i < stages) fetch(i);
    copy_async_commit();
  }
  constexpr int each = delta_fragment<KeyDim>::rows;
  const int pair = t / 16;
  const bool writes = (t & 14) == 0;
  // o of a token takes the place of its v, a token later; before the first there is nothing to write.
  float* out = rows + v_at + 2 * pair + (t & 1) - channels;
  float q[each] = {};
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    copy_async_wait<stream::stages - 2>();
    __syncthreads();
    if (i + stream::stages - 1 < stages) fetch(i + stream::stages - 1);
    copy_async_commit();
    const auto* data = reinterpret_cast<const float*>(shared + i % stream::stages * stream::stage_bytes);
    const auto* gate = reinterpret_cast<const float2*>(data + stream::tokens * stream::token_floats);
    const int tokens = min(stream::tokens, count - i * stream::tokens);
    float k[each];
    load_key<KeyDim>(k, data + KeyDim, t);
    float2 g = gate[0], v = *reinterpret_cast<const float2*>(data + 2 * KeyDim + 2 * pair);
    // The output of a token is computed beside the next token's first product, and the next token's k, v and
    // gates are asked for early: neither is on the chain from state to state.
#pragma unroll 2
    for (int token = 0; token < tokens; ++token) {
      const float* row = data + token * stream::token_floats;
      const int next = min(token + 1, tokens - 1);
      const float* next_row = data + next * stream::token_floats;
      const float2 seen = sum_columns(s.dot(k));
      float next_k[each];
      load_key<KeyDim>(next_k, next_row + KeyDim, t);
      const float2 next_g = gate[next];
      const float2 next_v = *reinterpret_cast<const float2*>(next_row + 2 * KeyDim + 2 * pair);
      const float o = sum_own_column(s.dot(q));
      if (writes && i + token > 0) *out = o;
      out += channels;
      load_key<KeyDim>(q, row, t);
      s.decay(g.x);
      s.add(k, delta_of(v, seen, g.x, g.y));
#pragma unroll
      for (int j = 0; j < each; ++j) k[j] = next_k[j];
      g = next_g, v = next_v;
    }
  }
  const float o = sum_own_column(s.dot(q));
  if (writes) *out = o;
  s.store(state, t);
  // Not before: the gated norm's many blocks would wait on these multiprocessors all the while.
  let_next_grid_start();
}

/// The gated norm: a warp per (run of rows, head), eight heads a block.
template <int KeyHeads, int ValueHeads, int KeyDim, int ValueDim>
__global__ __launch_bounds__(256) void delta_norm_kernel(const __grid_constant__ delta_rule_params p) {
  using namespace device;
  constexpr delta_shape shape{256, KeyHeads, ValueHeads, KeyDim, ValueDim, 4};
  constexpr int channels = shape.channels(), each = shape.splits();  // neighbouring columns of a lane
  const int head = 8 * static_cast<int>(blockIdx.y) + (static_cast<int>(threadIdx.x) >> 5);
  const int column = each * (static_cast<int>(threadIdx.x) & 31);
  float norm[each];
#pragma unroll
  for (int i = 0; i < each; ++i) norm[i] = load_float(p.norm + column + i);
  wait_for_previous_grid();
  let_next_grid_start();
  const row_tile tile =
      find_tile<delta_norm_run>(p.step.first_row, p.step.sequences, static_cast<int>(blockIdx.x));
  if (tile.sequence < 0 || head >= ValueHeads) return;
  const int at = head * ValueDim + column;
  __nv_bfloat16* const out = p.out + static_cast<std::size_t>(tile.first_row) * p.ldo + at;
  if (p.step.position[tile.sequence] < 0) {
    for (int r = 0; r < tile.rows; ++r) {
      bf16_run<each> zeros{};
      zeros.store(out + static_cast<std::size_t>(r) * p.ldo);
    }
    return;
  }
  const float* const o = delta_workspace<channels, ValueHeads>(p).rows +
                         static_cast<std::size_t>(tile.first_row - p.step.first_row[0]) * channels +
                         2 * shape.key_width() + at;
  const __nv_bfloat16* const z = p.qkvz + static_cast<std::size_t>(tile.first_row) * p.ldqkvz + channels + at;
  // All rows of the run are asked for at once; rows that do not exist are the last one again.
  float value[delta_norm_run][each];
  bf16_run<each> gate[delta_norm_run];
#pragma unroll
  for (int r = 0; r < delta_norm_run; ++r) {
    const int row = min(r, tile.rows - 1);
    const float* from = o + static_cast<std::size_t>(row) * channels;
    if constexpr (each % 4 == 0) {
#pragma unroll
      for (int i = 0; i < each; i += 4) {
        const float4 v = load_float4(from + i);
        value[r][i] = v.x, value[r][i + 1] = v.y, value[r][i + 2] = v.z, value[r][i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < each; ++i) value[r][i] = load_float(from + i);
    }
    gate[r].load(z + static_cast<std::size_t>(row) * p.ldqkvz);
  }
#pragma unroll
  for (int r = 0; r < delta_norm_run; ++r) {
    if (r >= tile.rows) break;
    float squares[each], by[each];
    sum_squares(squares, value[r]);
    const float factor = gated_norm_factor<each>(squares, p.eps);
    gate[r].unpack_to(by);
#pragma unroll
    for (int i = 0; i < each; ++i) value[r][i] = gated(value[r][i], factor, norm[i], by[i]);
    bf16_run<each> result;
    result.round(value[r]);
    result.store(out + static_cast<std::size_t>(r) * p.ldo);
  }
}

}  // namespace nibble
