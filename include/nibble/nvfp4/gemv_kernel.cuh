// SPDX-License-Identifier: Apache-2.0
/// \file
/// The matrix-vector kernel, one interface over three ways for weights to travel.
///
/// A block takes a contiguous share of the row tiles; its warps split K. A warp multiplies its K tiles of a
/// row tile into two accumulator chains, which are added; the warps' sums are added in the order of the warps
/// through shared memory. That order is the same for every variant, column count and device.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "nibble/kernels/fragment.cuh"
#include "nibble/kernels/ring_release.hpp"
#include "nibble/nvfp4/gemv_epilogue.cuh"
#include "nibble/nvfp4/gemv_input.cuh"
#include "nibble/nvfp4/gemv_types.hpp"

namespace nibble {

template <class Epilogue, class Input = plain_input>
struct gemv_params {
  const std::uint8_t* tiles = nullptr;  ///< layout.bytes(), 128-byte aligned
  const __nv_bfloat16* x = nullptr;     ///< [m][k], rows `ldx` apart, 16-byte aligned
  int ldx = 0;                          ///< elements, a multiple of 8
  int m = 0;                            ///< tokens, at most the policy's columns
  float scale[max_segments] = {};       ///< per row segment
  typename Epilogue::params out{};
  typename Input::params in{};
};

namespace device {

/// Arithmetic of one warp for a fixed number of token columns.
template <weight_format Format, int Columns, int K>
struct warp_product {
  static constexpr int token_tiles = Columns == 16 ? 2 : 1;
  static constexpr int pairs = Columns == 1 ? 1 : Columns / 2;
  static constexpr int units = 8 * pairs;
  using vec = std::conditional_t<Columns == 1, float2, float4>;
  using acc_t = accumulators<token_tiles>;
  using x_t = activations<token_tiles>;
  using x_rows = const __nv_bfloat16* [token_tiles];

  /// The token whose column lane group g feeds.
  static __device__ __forceinline__ int token_of(int j, int m) {
    const int g = (threadIdx.x >> 2) & 7;
    const int token = (g & (Columns < 8 ? Columns - 1 : 7)) + 8 * j;
    return token < m ? token : m - 1;
  }
  static __device__ __forceinline__ void point(x_rows& rows, const __nv_bfloat16* x, int ldx, int m) {
#pragma unroll
    for (int j = 0; j < token_tiles; ++j)
      rows[j] = x + static_cast<std::size_t>(token_of(j, m)) * ldx + 8 * (threadIdx.x & 3);
  }
  static __device__ __forceinline__ void load_x(x_t& x, const x_rows& rows, int kt) {
#pragma unroll
    for (int j = 0; j < token_tiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = kt * tile_columns + 32 * i;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (K % tile_columns == 0 || column + 8 * static_cast<int>(threadIdx.x & 3) < K)
          v = *reinterpret_cast<const uint4*>(rows[j] + column);
        x[j][4 * i] = v.x, x[j][4 * i + 1] = v.y, x[j][4 * i + 2] = v.z, x[j][4 * i + 3] = v.w;
      }
  }
  static __device__ __forceinline__ void zero(acc_t& acc) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int j = 0; j < token_tiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[c][j][i] = 0.0f;
  }
  static __device__ __forceinline__ void leave(vec* to, const acc_t& acc, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < token_tiles; ++j) {
      const float c0 = acc[0][j][0] + acc[1][j][0], c1 = acc[0][j][1] + acc[1][j][1];
      const float c2 = acc[0][j][2] + acc[1][j][2], c3 = acc[0][j][3] + acc[1][j][3];
      if (t + 4 * j < pairs) {
        if constexpr (Columns == 1)
          to[g] = make_float2(c0, c2);
        else
          to[8 * (t + 4 * j) + g] = make_float4(c0, c1, c2, c3);
      }
    }
  }
  /// The sum over warps of a unit, `stride` vectors apart.
  template <int Warps>
  static __device__ __forceinline__ vec sum(const vec* p, int stride) {
    vec v = p[0];
#pragma unroll
    for (int w = 1; w < Warps; ++w) {
      const vec q = p[w * stride];
      v.x += q.x, v.y += q.y;
      if constexpr (Columns > 1) v.z += q.z, v.w += q.w;
    }
    return v;
  }
  /// Item `j` of four row tiles at a time → (row tile, unit): a warp writes 64 rows of one token pair.
  static __device__ __forceinline__ int2 wide_item(int j) {
    const int block = j / (4 * units), in = j % (4 * units);
    return make_int2(4 * block + in % 32 / 8, 8 * (in / 32) + in % 8);
  }
};

/// Scale of a row, the format's own factor included.
template <resident_layout Layout>
__device__ __forceinline__ float scale_of_row(const float (&scale)[max_segments], int row) {
  using layout = layout_constants<Layout>;
  float s = scale[0];
  if (layout::segments > 1 && row >= layout::first_row_1) s = scale[1];
  if (layout::segments > 2 && row >= layout::first_row_2) s = scale[2];
  if (layout::segments > 3 && row >= layout::first_row_3) s = scale[3];
  return s * fragment<layout::format>::unscale;
}

/// Hands one unit's sums to the epilogue. `tile` is a row tile of the matrix. State is the input's.
template <resident_layout Layout, class Epilogue, class State, int Columns, bool Keep, class Input, class Vec>
__device__ __forceinline__ void emit(const gemv_params<Epilogue, Input>& p, typename Epilogue::shared& shared,
                                     const typename State::shared& input, int tile, int unit, Vec v) {
  constexpr int rows = layout_constants<Layout>::rows;
  constexpr bool paired = layout_constants<Layout>::paired;
  const int row = paired ? 8 * tile + unit % 8 : tile_rows * tile + 2 * (unit % 8);
  const float s0 = scale_of_row<Layout>(p.scale, paired ? 0 : row);
  const float s1 = scale_of_row<Layout>(p.scale, paired ? rows : row + 1);
  if constexpr (Columns == 1) {
    if constexpr (Input::normed) {
      const float f = State::factor(p.in, input, 0);
      v.x *= f, v.y *= f;
    }
    Epilogue::template pair<rows, Keep>(p.out, shared, 0, row, v.x * s0, v.y * s1);
  } else {
    const int token = 2 * (unit / 8);
    if constexpr (Input::normed) {
      const float f = State::factor(p.in, input, token), f1 = State::factor(p.in, input, token + 1);
      v.x *= f, v.z *= f, v.y *= f1, v.w *= f1;
    }
    if (token < p.m) Epilogue::template pair<rows, Keep>(p.out, shared, token, row, v.x * s0, v.z * s1);
    if (token + 1 < p.m)
      Epilogue::template pair<rows, Keep>(p.out, shared, token + 1, row, v.y * s0, v.w * s1);
  }
}

/// Whether the weights of a norm may wait in shared memory beside the rest of a block: two blocks of the
/// matrix's copies must still fit a multiprocessor.
template <class Input, int K, int SharedBytes>
inline constexpr bool norm_is_staged =
    Input::norm_bytes <= 2 || SharedBytes + K* Input::norm_bytes <= 112 * 1024;

/// First row tile of block `b`: equal contiguous shares.
template <int RowTiles, int Grid>
__device__ __forceinline__ int share(int b) {
  if constexpr (RowTiles % Grid == 0) return b * (RowTiles / Grid);
  return static_cast<int>(static_cast<std::int64_t>(b) * RowTiles / Grid);
}

/// Streams up to `Rows` row tiles × `PerWarp` K tiles of one warp through `Depth` register buffers and leaves
/// the warp's sums at part[row · stride]. Weights are asked for before the wait for the previous grid, x
/// after it. \param row_bytes from one row tile to the next  \param rows,k_tiles how many of them exist
template <class Product, weight_format Format, int PerWarp, int Rows, int Depth, bool Chained, bool Ragged,
          class State>
__device__ __forceinline__ void stream_registers(const std::uint8_t* base, std::size_t row_bytes, int rows,
                                                 int k_tiles, const typename Product::x_rows& x_rows,
                                                 int first_k_tile, typename Product::vec* part, int stride,
                                                 State& input) {
  constexpr int steps = Rows * PerWarp, depth = Depth < steps ? Depth : steps;
  constexpr bool all_x = PerWarp <= 2;
  constexpr std::size_t bytes = tile_bytes(Format);
  const int lane = threadIdx.x & 31;
  const auto live = [&](int u) { return !Ragged || (u / PerWarp < rows && u % PerWarp < k_tiles); };
  const auto tile = [&](int u) { return base + (u / PerWarp) * row_bytes + (u % PerWarp) * bytes; };
  fragment<Format> f[depth];
  typename Product::x_t x[all_x ? PerWarp : 1];
  const auto load_all_x = [&] {
#pragma unroll
    for (int k = 0; k < (all_x ? PerWarp : 1); ++k)
      if (!Ragged || k < k_tiles) Product::load_x(x[k], x_rows, first_k_tile + k);
  };
  const auto apply_all = [&] {
    input.arrived();
#pragma unroll
    for (int k = 0; k < (all_x ? PerWarp : 1); ++k)
      if (!Ragged || k < k_tiles) input.apply(x[k], k, true);
    if constexpr (all_x) input.leave();
  };
  // Not chained: two tiles, x, the other tiles, since loads return in order and every block wants x's lines.
#pragma unroll
  for (int d = 0; d < depth; ++d) {
    if (!Chained && d == (depth < 2 ? depth : 2)) load_all_x();
    if (live(d)) f[d].load(tile(d), lane);
  }
  input.ask();
  if constexpr (Chained) {
    wait_for_previous_grid();
    let_next_grid_start();
    load_all_x();
  } else if constexpr (depth <= 2) {
    load_all_x();
  }
  apply_all();
  typename Product::acc_t acc;
#pragma unroll
  for (int u = 0; u < steps; ++u) {
    const int r = u / PerWarp, k = u % PerWarp;
    if (k == 0) Product::zero(acc);
    if (live(u)) {
      if constexpr (!all_x)
        if (u > 0) {
          Product::load_x(x[0], x_rows, first_k_tile + k);
          input.apply(x[0], k, r == 0);
        }
      f[u % depth].multiply(acc, x[all_x ? k : 0]);
    }
    if (u + depth < steps && live(u + depth)) f[u % depth].load(tile(u + depth), lane);
    if (k == PerWarp - 1 && (!Ragged || r < rows)) Product::leave(part + r * stride, acc, lane);
  }
  if constexpr (!all_x) input.leave();
}

template <resident_layout Layout, gemv_policy Policy, class Epilogue, class Input>
__device__ __forceinline__ void gemv_registers(const gemv_params<Epilogue, Input>& p) {
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  using product = warp_product<Layout.shape.format, Policy.columns, Layout.shape.k>;
  constexpr int W = Policy.warps, units = plan.units;
  constexpr bool ragged_k = plan.k_tiles_warp * W != plan.k_tiles,
                 ragged = ragged_k || plan.row_tiles % Policy.grid != 0;
  extern __shared__ __align__(128) std::uint8_t shared[];
  using state = typename Input::template state<W, plan.k_tiles_warp, Policy.columns, Layout.shape.k, true>;
  __shared__ typename Epilogue::shared out;
  __shared__ typename state::shared in;
  auto* part = reinterpret_cast<typename product::vec*>(shared);  // [rows][warps][units]
  const int warp = threadIdx.x >> 5, first = share<plan.row_tiles, Policy.grid>(blockIdx.x);
  const int rows = ragged ? share<plan.row_tiles, Policy.grid>(blockIdx.x + 1) - first : plan.row_tiles_cta;
  const int k0 = warp * plan.k_tiles_warp;
  if constexpr (Epilogue::finishes) Epilogue::start(out);
  typename product::x_rows x_rows;
  product::point(x_rows, p.x, p.ldx, p.m);
  const std::uint8_t* base =
      p.tiles + (static_cast<std::size_t>(first) * plan.k_tiles + k0) * plan.tile_bytes;
  state input(p.in, in, warp);
  stream_registers<product, Layout.shape.format, plan.k_tiles_warp, plan.row_tiles_cta, Policy.depth, chains,
                   ragged>(base, plan.row_bytes, rows, ragged_k ? plan.k_tiles - k0 : plan.k_tiles_warp,
                           x_rows, k0, part + warp * units, W * units, input);
  __syncthreads();
  for (int i = threadIdx.x; i < rows * units; i += plan.threads) {
    const int r = i / units, u = i % units;
    emit<Layout, Epilogue, state, Policy.columns, Policy.keep_output>(
        p, out, in, first + r, u, product::template sum<W>(part + r * W * units + u, units));
  }
  if constexpr (Epilogue::finishes) {
    __syncthreads();
    Epilogue::finish(p.out, out, p.m);
  }
}

template <resident_layout Layout, gemv_policy Policy, class Epilogue, class Input>
__device__ __forceinline__ void gemv_one_shot(const gemv_params<Epilogue, Input>& p) {
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  using product = warp_product<Layout.shape.format, Policy.columns, Layout.shape.k>;
  using vec = typename product::vec;
  constexpr int W = Policy.warps, units = plan.units, per_warp = plan.k_tiles_warp, Rows = plan.row_tiles_cta;
  constexpr int slice_bytes = per_warp * plan.tile_bytes, row_bytes = plan.row_bytes;
  constexpr bool whole = Policy.whole_rows, all_x = per_warp <= 2;
  extern __shared__ __align__(128) std::uint8_t shared[];  // [rows][warps][slice]
  using state = typename Input::template state<W, per_warp, Policy.columns, Layout.shape.k,
                                               norm_is_staged<Input, Layout.shape.k, plan.shared_bytes>>;
  __shared__ std::uint64_t barriers[whole ? 1 : W][Rows];
  __shared__ typename Epilogue::shared out;
  __shared__ typename state::shared in;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first = share<plan.row_tiles, Policy.grid>(blockIdx.x);
  const int rows =
      plan.row_tiles % Policy.grid != 0 ? share<plan.row_tiles, Policy.grid>(blockIdx.x + 1) - first : Rows;
  std::uint64_t* mine = barriers[whole ? 0 : warp];
  if (whole ? threadIdx.x == 0 : lane == 0) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) barrier_init(shared_address(&mine[r]), 1);
    barrier_init_fence();
    const std::uint64_t policy = evict_first_policy();
    constexpr int bytes = whole ? row_bytes : slice_bytes;
    const int skip = whole ? 0 : warp * slice_bytes;
#pragma unroll
    for (int r = 0; r < Rows; ++r)
      if (r < rows) {
        barrier_expect(shared_address(&mine[r]), bytes);
        bulk_copy(shared_address(shared + r * row_bytes + skip),
                  p.tiles + static_cast<std::size_t>(first + r) * row_bytes + skip, bytes,
                  shared_address(&mine[r]), policy);
      }
  }
  state input(p.in, in, warp);
  input.ask();
  if constexpr (Epilogue::finishes) Epilogue::start(out);
  typename product::x_rows x_rows;
  product::point(x_rows, p.x, p.ldx, p.m);
  if constexpr (whole)
    __syncthreads();
  else
    __syncwarp();
  std::uint8_t* slice = shared + warp * slice_bytes;
  // In a chain the first tile is often there before the previous grid has ended: it is decoded while waiting.
  operands first_tile;
  const bool early = Policy.decode_early && barrier_ready(shared_address(&mine[0]), 0);
  const auto decode_first = [&] {
    fragment<Layout.shape.format> f;
    f.load(shared_address(slice), lane);
    f.decode(first_tile);
  };
  if (early) decode_first();
  wait_for_previous_grid();
  let_next_grid_start();
  typename product::x_t x[all_x ? per_warp : 1];
#pragma unroll
  for (int k = 0; k < (all_x ? per_warp : 1); ++k) product::load_x(x[k], x_rows, warp * per_warp + k);
  input.arrived();
#pragma unroll
  for (int k = 0; k < (all_x ? per_warp : 1); ++k) input.apply(x[k], k, true);
  if constexpr (all_x) input.leave();
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    if (r >= rows) break;
    typename product::acc_t acc;
    product::zero(acc);
    if (r > 0 || !early) barrier_wait(shared_address(&mine[r]), 0);
#pragma unroll
    for (int k = 0; k < per_warp; ++k) {
      if constexpr (!all_x)
        if (k > 0 || r > 0) {
          product::load_x(x[0], x_rows, warp * per_warp + k);
          input.apply(x[0], k, r == 0);
        }
      if (Policy.decode_early && r == 0 && k == 0) {
        if (!early) decode_first();
#pragma unroll
        for (int s = 0; s < 8; ++s) multiply_step<product::token_tiles>(acc, first_tile[s], x[0], s);
        continue;
      }
      fragment<Layout.shape.format> f;
      f.load(shared_address(slice + r * row_bytes + k * plan.tile_bytes), lane);
      f.multiply(acc, x[all_x ? k : 0]);
    }
    __syncwarp();  // every lane has read the tiles its warp's sums now overwrite
    product::leave(reinterpret_cast<vec*>(slice + r * row_bytes), acc, lane);
  }
  if constexpr (!all_x) input.leave();
  __syncthreads();
  for (int i = threadIdx.x; i < rows * units; i += plan.threads) {
    const int r = i / units, u = i % units;
    const vec* sums = reinterpret_cast<const vec*>(shared + r * row_bytes) + u;
    emit<Layout, Epilogue, state, Policy.columns, Policy.keep_output>(
        p, out, in, first + r, u,
        product::template sum<W>(sums, slice_bytes / static_cast<int>(sizeof(vec))));
  }
  if constexpr (Epilogue::finishes) {
    __syncthreads();
    Epilogue::finish(p.out, out, p.m);
  }
}

template <resident_layout Layout, gemv_policy Policy, class Epilogue, class Input>
__device__ __forceinline__ void gemv_ring(const gemv_params<Epilogue, Input>& p) {
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  using product = warp_product<Layout.shape.format, Policy.columns, Layout.shape.k>;
  using vec = typename product::vec;
  constexpr int W = Policy.warps, units = plan.units, per_warp = plan.k_tiles_warp, bytes = plan.row_bytes;
  constexpr int stages = Policy.stages, batch = Policy.batch, buffers = Policy.columns == 16 ? 1 : 2;
  extern __shared__ __align__(128) std::uint8_t shared[];
  using state = typename Input::template state<W, per_warp, Policy.columns, Layout.shape.k,
                                               norm_is_staged<Input, Layout.shape.k, plan.shared_bytes>>;
  __shared__ std::uint64_t full[stages], empty[stages];
  __shared__ typename Epilogue::shared out;
  __shared__ typename state::shared in;
  auto* part = reinterpret_cast<vec*>(shared + stages * bytes);  // [buffers][batch][warps][units]
  // With 16 columns the second token tile's x waits in shared memory, in the order its lane wants it.
  constexpr bool parked = product::token_tiles == 2;
  auto* park = reinterpret_cast<uint4*>(shared + stages * bytes + buffers * batch * W * plan.part_bytes);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first = share<plan.row_tiles, Policy.grid>(blockIdx.x);
  const int count = share<plan.row_tiles, Policy.grid>(blockIdx.x + 1) - first;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(shared_address(&full[s]), 1);
      barrier_init(shared_address(&empty[s]), W * ring_arrivals);
    }
    barrier_init_fence();
  }
  if constexpr (Epilogue::finishes) Epilogue::start(out);
  __syncthreads();
  if (warp == W) {
    if (lane == 0) {
      const std::uint8_t* from = p.tiles + static_cast<std::size_t>(first) * bytes;
      const std::uint64_t policy = evict_first_policy();
#pragma unroll 1
      for (int i = 0, s = 0, phase = 1; i < count; ++i) {
        if (i >= stages) barrier_wait(shared_address(&empty[s]), phase);
        barrier_expect(shared_address(&full[s]), bytes);
        bulk_copy(shared_address(shared + s * bytes), from + static_cast<std::size_t>(i) * bytes, bytes,
                  shared_address(&full[s]), policy);
        if (++s == stages) s = 0, phase ^= 1;
      }
      wait_for_previous_grid();
      let_next_grid_start();
    }
    return;
  }
  typename product::x_rows x_rows;
  product::point(x_rows, p.x, p.ldx, p.m);
  state input(p.in, in, warp);
  input.ask();
  wait_for_previous_grid();
  typename product::x_t x[per_warp];
#pragma unroll
  for (int k = 0; k < per_warp; ++k) product::load_x(x[k], x_rows, warp * per_warp + k);
  input.arrived();
#pragma unroll
  for (int k = 0; k < per_warp; ++k) {
    input.apply(x[k], k, true);
    if constexpr (parked)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        park[((warp * per_warp + k) * 4 + i) * 32 + lane] =
            make_uint4(x[k][1][4 * i], x[k][1][4 * i + 1], x[k][1][4 * i + 2], x[k][1][4 * i + 3]);
  }
  input.leave();
  int s = 0, phase = 0, done = 0;
  vec* buffer = part;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    barrier_wait(shared_address(&full[s]), phase);
    fragment<Layout.shape.format> f[per_warp];
#pragma unroll
    for (int k = 0; k < per_warp; ++k)
      f[k].load(shared_address(shared + s * bytes + (warp * per_warp + k) * plan.tile_bytes), lane);
    __syncwarp();
    if (lane < ring_arrivals) barrier_arrive(shared_address(&empty[s]));
    typename product::acc_t acc;
    product::zero(acc);
#pragma unroll
    for (int k = 0; k < per_warp; ++k) {
      if constexpr (parked)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4 v = load_shared(shared_address(park + ((warp * per_warp + k) * 4 + j) * 32 + lane));
          x[k][1][4 * j] = v.x, x[k][1][4 * j + 1] = v.y, x[k][1][4 * j + 2] = v.z, x[k][1][4 * j + 3] = v.w;
        }
      f[k].multiply(acc, x[k]);
    }
    product::leave(buffer + ((i - done) * W + warp) * units, acc, lane);
    if (++s == stages) s = 0, phase ^= 1;
    if (i - done == batch - 1 || i == count - 1) {
      partial_block_barrier<32 * W>();
      for (int j = threadIdx.x; j < 4 * ((batch + 3) / 4) * units; j += 32 * W) {
        const int2 item = product::wide_item(j);
        if (done + item.x > i) continue;
        emit<Layout, Epilogue, state, Policy.columns, Policy.keep_output>(
            p, out, in, first + done + item.x, item.y,
            product::template sum<W>(buffer + item.x * W * units + item.y, units));
      }
      done = i + 1;
      if constexpr (buffers == 1)
        partial_block_barrier<32 * W>();
      else
        buffer = buffer == part ? part + batch * W * units : part;
    }
  }
  if constexpr (Epilogue::finishes) {
    partial_block_barrier<32 * W>();
    Epilogue::finish(p.out, out, p.m);
  }
}

}  // namespace device

template <class Epilogue, class Input, std::uint64_t Policy, int... LayoutNumbers>
__global__ __launch_bounds__(
    plan_for<layout_from<LayoutNumbers...>, policy_from<Policy>>.threads,
    policy_from<Policy>.min_blocks) void gemv_kernel(const __grid_constant__ gemv_params<Epilogue, Input> p) {
  if constexpr (policy_from<Policy>.variant == gemv_variant::registers)
    device::gemv_registers<layout_from<LayoutNumbers...>, policy_from<Policy>, Epilogue, Input>(p);
  else if constexpr (policy_from<Policy>.variant == gemv_variant::one_shot)
    device::gemv_one_shot<layout_from<LayoutNumbers...>, policy_from<Policy>, Epilogue, Input>(p);
  else
    device::gemv_ring<layout_from<LayoutNumbers...>, policy_from<Policy>, Epilogue, Input>(p);
}

/// The kernel of a layout, policy, epilogue and input.
template <resident_layout L, gemv_policy Policy, class Epilogue, class Input = plain_input>
inline constexpr auto gemv_kernel_of =
    &gemv_kernel<Epilogue, Input, encode(Policy), L.shape.n, L.shape.k, static_cast<int>(L.shape.format),
                 static_cast<int>(L.order), L.shape.segment_rows[0], L.shape.segment_rows[1],
                 L.shape.segment_rows[2], L.shape.segment_rows[3]>;

}  // namespace nibble
