// SPDX-License-Identifier: Apache-2.0
/// \file
/// Fills the cache before prefill attention: normalised and rotated keys, values as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/kernels/attention_params.cuh"
#include "nibble/kernels/attention_sequences.cuh"
#include "nibble/kernels/kv_element.cuh"
#include "nibble/kernels/rope.cuh"

namespace nibble {

inline constexpr int attention_append_threads = 256;

/// A warp for each key or value head of each row.
template <int Heads, int KvHeads, int Dim, int Rotary, int Gated, int Centred, int PageTokens, int Format>
__global__ __launch_bounds__(attention_append_threads) void attention_append(const attention_params p) {
  constexpr attention_shape shape{Heads,      KvHeads,      Dim,        Rotary,
                                  Gated != 0, Centred != 0, PageTokens, kv_format(Format)};
  using head = device::warp_head<Dim, Rotary, Centred != 0>;
  using layout = device::page_layout<KvHeads, Dim, PageTokens, shape.format>;
  __shared__ device::sequence_table first_row;
  __shared__ float norm[Dim];
  constexpr int warps = attention_append_threads / 32;
  __shared__ float2 angle[warps][Rotary / 2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int s = threadIdx.x; s <= p.step.sequences; s += attention_append_threads)
    first_row.before[s] = p.step.first_row[s];
  for (int d = threadIdx.x; d < Dim; d += attention_append_threads) norm[d] = p.k_norm[d];
  __syncthreads();
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int begin = first_row.before[0], end = first_row.before[p.step.sequences];
  for (int i = blockIdx.x * warps + warp; i < (end - begin) * 2 * KvHeads; i += gridDim.x * warps) {
    const int row = begin + i / (2 * KvHeads), kv = i % KvHeads;
    const bool value = i / KvHeads % 2 != 0;
    const int s = device::sequence_of(first_row, p.step.sequences, row);
    const int position = p.step.position[s];
    if (position < 0) continue;
    const int token = position + row - first_row.before[s];
    const int page = p.step.pages[static_cast<std::size_t>(s) * p.step.page_stride + token / PageTokens];
    std::byte* place = layout::key(p.pool, page, kv, token) + (value ? layout::values_offset : 0);
    typename head::bits bits;
    head::load(bits,
               p.qkv + static_cast<std::size_t>(row) * p.ldqkv + shape.q_width() +
                   (value ? shape.kv_width() : 0) + kv * Dim,
               lane);
    typename head::values x;
    head::unpack(x, bits);
    if (!value) {
      __syncwarp();
      head::fill_angles(angle[warp], token, p.inverse_frequencies, lane);
      head::normalise(x, norm, p.eps, lane);
      __syncwarp();
      head::rotate(x, angle[warp], lane);
    }
    const int swizzle = value ? device::value_swizzle<layout::row_bytes>(token)
                              : device::key_swizzle<layout::row_bytes>(token);
    device::store_in_cache<shape.format>(place, swizzle, lane, x, true);
  }
}

}  // namespace nibble
