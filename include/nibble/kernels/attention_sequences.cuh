// SPDX-License-Identifier: Apache-2.0
/// \file
/// What every attention kernel asks of a step: how much work each sequence is, whose a piece of it is, and
/// where a token's keys and values lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/attention_types.hpp"

namespace nibble::device {

/// Pieces of work before each sequence; a search finds whose a piece is.
struct sequence_table {
  std::int32_t before[max_attention_sequences + 1];
};

/// Fills the table with the first warp: sequence s has pieces_of(s) pieces. The caller synchronises.
template <class PiecesOf>
__device__ __forceinline__ void fill_table(sequence_table& table, int sequences, PiecesOf pieces_of) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int total = 0;
#pragma unroll 1
  for (int first = 0; first < sequences; first += 32) {
    const int s = first + lane;
    int sum = s < sequences ? pieces_of(s) : 0;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xFFFF'FFFFu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (s < sequences) table.before[s + 1] = total + sum;
    total += __shfl_sync(0xFFFF'FFFFu, sum, 31);
  }
  if (lane == 0) table.before[0] = 0;
}

/// The last sequence whose pieces begin at or before `piece`, which must be less than all pieces.
__device__ __forceinline__ int sequence_of(const sequence_table& table, int sequences, int piece) {
  int low = 0, high = sequences;  // before[low] <= piece < before[high]
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.before[middle] <= piece)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/// Where one layer's keys and values lie in a page.
template <int KvHeads, int Dim, int PageTokens, kv_format Format>
struct page_layout {
  static constexpr int row_bytes = Dim * bytes_of(Format);
  static constexpr int head_bytes = PageTokens * row_bytes;
  static constexpr std::size_t values_offset = static_cast<std::size_t>(KvHeads) * head_bytes;
  /// Of token `token`'s key in KV head `head`; the value lies values_offset behind.
  static __device__ __forceinline__ std::byte* key(const kv_pool& pool, int page, int head, int token) {
    return pool.page(page) + head * head_bytes + token % PageTokens * row_bytes;
  }
};

}  // namespace nibble::device
