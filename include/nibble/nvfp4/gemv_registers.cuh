// SPDX-License-Identifier: Apache-2.0
/// \file
/// Weights from memory straight to registers, several tiles ahead: small shapes, and any device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/nvfp4/gemv_product.cuh"

namespace nibble::device {

/// Streams the row tiles × K tiles of one warp through the policy's register buffers and leaves
/// the warp's sums at part[row · stride]. Weights are asked for before the wait for the previous grid, x
/// after it. \param base the warp's first tile  \param rows,k_tiles how many of them exist
template <resident_layout Layout, gemv_policy Policy, bool Ragged, class Product, class State>
__device__ __forceinline__ void stream_registers(const std::uint8_t* base, int rows, int k_tiles,
                                                 const typename Product::x_rows& x_rows, int warp,
                                                 typename Product::vec* part, int stride, State& input) {
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  constexpr int per_warp = plan.k_tiles_warp, steps = plan.row_tiles_cta * per_warp,
                depth = Policy.depth < steps ? Policy.depth : steps,
                unrolled = Policy.rolled ? 1 : (steps + depth - 1) / depth;
  constexpr int held = plan.holds_x ? per_warp : 1;
  const int lane = threadIdx.x & 31, first_k_tile = warp * per_warp;
  const auto live = [&](int u) { return !Ragged || (u / per_warp < rows && u % per_warp < k_tiles); };
  const auto tile = [&](int u) {
    return base + (u / per_warp) * static_cast<std::size_t>(plan.row_bytes) +
           (u % per_warp) * plan.tile_bytes;
  };
  fragment<Layout.shape.format> f[depth];
  typename Product::x_t x[held];
  const auto load_x = [&] {
    load_in_turns<Policy.warps, Policy.x_in_turns>(warp, [&] {
#pragma unroll
      for (int k = 0; k < held; ++k)
        if (!Ragged || k < k_tiles) Product::load_x(x[k], x_rows, first_k_tile + k);
    });
  };
  // Not chained: two tiles, x, the other tiles, since loads return in order and every block wants x's lines.
#pragma unroll
  for (int d = 0; d < depth; ++d) {
    if (!chains && d == (depth < 2 ? depth : 2)) load_x();
    if (live(d)) f[d].load(tile(d), lane);
  }
  input.ask();
  if constexpr (chains) {
    wait_for_previous_grid();
    let_next_grid_start();
    load_x();
  } else if constexpr (depth <= 2) {
    load_x();
  }
  input.arrived();
#pragma unroll
  for (int k = 0; k < held; ++k)
    if (!Ragged || k < k_tiles) input.apply(x[k], k, true);
  if constexpr (plan.holds_x) input.leave();
  typename Product::acc_t acc;
#pragma unroll unrolled
  for (int first = 0; first < steps; first += depth)
#pragma unroll
    for (int d = 0; d < depth; ++d) {
      const int u = first + d, r = u / per_warp, k = u % per_warp;
      if (steps % depth != 0 && u >= steps) break;
      if (k == 0) Product::zero(acc);
      if (live(u)) {
        if constexpr (!plan.holds_x)
          if (u > 0) {
            Product::load_x(x[0], x_rows, first_k_tile + k);
            input.apply(x[0], k, r == 0);
          }
        f[d].multiply(acc, x[plan.holds_x ? k : 0]);
      }
      if (u + depth < steps && live(u + depth)) f[d].load(tile(u + depth), lane);
      if (k == per_warp - 1 && (!Ragged || r < rows)) Product::leave(part + r * stride, acc, lane);
    }
  if constexpr (!plan.holds_x) input.leave();
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
  stream_registers<Layout, Policy, ragged, product>(base, rows,
                                                    ragged_k ? plan.k_tiles - k0 : plan.k_tiles_warp, x_rows,
                                                    warp, part + warp * units, W * units, input);
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

}  // namespace nibble::device
