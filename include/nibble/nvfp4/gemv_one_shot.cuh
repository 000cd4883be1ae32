// SPDX-License-Identifier: Apache-2.0
/// \file
/// The copy engine brings a block's whole share at once: sm_90 and later, a few MB to a few tens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/nvfp4/gemv_product.cuh"

namespace nibble::device {

template <resident_layout Layout, gemv_policy Policy, class Epilogue, class Input>
__device__ __forceinline__ void gemv_one_shot(const gemv_params<Epilogue, Input>& p) {
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  using product = warp_product<Layout.shape.format, Policy.columns, Layout.shape.k>;
  using vec = typename product::vec;
  constexpr int W = Policy.warps, units = plan.units, per_warp = plan.k_tiles_warp, Rows = plan.row_tiles_cta;
  constexpr int slice_bytes = per_warp * plan.tile_bytes, row_bytes = plan.row_bytes;
  constexpr bool whole = Policy.whole_rows, all_x = plan.holds_x;
  constexpr int unrolled = Policy.x_at_use ? 1 : per_warp;
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
  load_in_turns<W, Policy.x_in_turns>(warp, [&] {
#pragma unroll
    for (int k = 0; k < (all_x ? per_warp : 1); ++k) product::load_x(x[k], x_rows, warp * per_warp + k);
  });
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
#pragma unroll unrolled
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

}  // namespace nibble::device
