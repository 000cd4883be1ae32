// SPDX-License-Identifier: Apache-2.0
/// \file
/// A producer warp keeps row tiles in flight for persistent blocks: sm_90 and later, large N.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/ring_release.hpp"
#include "nibble/nvfp4/gemv_product.cuh"

namespace nibble::device {

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

}  // namespace nibble::device
