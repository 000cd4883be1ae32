// SPDX-License-Identifier: Apache-2.0
/// \file
/// Logits, and of each token and block the K largest: what a sampler with a small top k, or a report of the
/// likeliest tokens, needs instead of a second pass over the vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/nvfp4/gemv_epilogue.cuh"

namespace nibble {

/// Logits in fp32 and, per token and block, the `K` largest keys of the block's rows, largest first; where a
/// block has fewer rows, 0. The K largest of a token are the K largest of its blocks · K keys. Keys of a
/// token differ, so neither the threads' order nor the grid shows in the result. Order as in
/// store_and_argmax: ties go to the lower row, a NaN comes before every number.
///
/// Cost: 128 · K bytes of shared memory. A logit is compared with the block's K-th; of n rows in random order
/// about K · (1 + ln(n / K)) get further.
template <int K>
struct store_and_top_k {
  static_assert(K >= 1 && K <= 16, "a block keeps one to sixteen logits of a token");
  struct params {
    float* y = nullptr;
    int ldy = 0;
    unsigned long long* keys = nullptr;  ///< [m][blocks][K]
    int blocks = 0;                      ///< policy.grid or more; what is more gets zeros
  };
  struct shared {
    unsigned long long best[max_logit_tokens][K];
  };
  static constexpr row_order order = row_order::adjacent;
  static constexpr bool finishes = true;
  static constexpr bool ends_block = false;
  static constexpr int keys = K;  ///< of a token and block

  static status check(const params& p, int rows, const char* where) {
    if (p.keys == nullptr || p.blocks < 1) return status::invalid(where, "the key buffer is missing");
    return detail::check_output(p.y, p.ldy, rows, where);
  }
  static params advanced(params p, int tokens) {
    p.y += static_cast<std::ptrdiff_t>(tokens) * p.ldy;
    p.keys += static_cast<std::ptrdiff_t>(tokens) * p.blocks * K;
    return p;
  }
  static __device__ __forceinline__ void start(shared& s) {
    for (unsigned i = threadIdx.x; i < max_logit_tokens * K; i += blockDim.x) s.best[i / K][i % K] = 0;
  }
  /// Every place holds the largest of the keys that came to it and hands the others on, so that whatever the
  /// order of the threads, place i ends with the (i + 1)-th largest.
  static __device__ __forceinline__ void keep(shared& s, int token, unsigned long long key) {
    unsigned long long* const best = s.best[token];
    // Places only grow: a key below the last one is not among the K.
    if (key <= *static_cast<volatile unsigned long long*>(&best[K - 1])) return;
#pragma unroll 1
    for (int i = 0; i < K && key != 0; ++i) {
      const unsigned long long old = atomicMax(&best[i], key);
      key = old < key ? old : key;
    }
  }
  template <int Rows, bool Keep>
  static __device__ __forceinline__ void pair(const params& p, shared& s, int token, int row, float a,
                                              float b) {
    store<float>::shared none;
    store<float>::template pair<Rows, Keep>({p.y, p.ldy}, none, token, row, a, b);
    if (row < Rows) keep(s, token, logit_key(a, row));
    if (row + 1 < Rows) keep(s, token, logit_key(b, row + 1));
  }
  static __device__ __forceinline__ void finish(const params& p, shared& s, int m) {
    const auto token = static_cast<int>(threadIdx.x);
    if (token >= m) return;
    for (int block = static_cast<int>(blockIdx.x); block < p.blocks; block += static_cast<int>(gridDim.x)) {
      unsigned long long* const to = p.keys + (static_cast<std::size_t>(token) * p.blocks + block) * K;
#pragma unroll
      for (int i = 0; i < K; ++i) to[i] = block == static_cast<int>(blockIdx.x) ? s.best[token][i] : 0;
    }
  }
};

}  // namespace nibble
