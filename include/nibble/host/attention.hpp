// SPDX-License-Identifier: Apache-2.0
/// \file
/// Causal grouped-query attention over a paged KV cache, with an optional sigmoid gate on the output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nibble/host/sequence_span.hpp>
#include <nibble/host/thread_pool.hpp>
#include <span>

namespace nibble::host {

enum class kv_format { f32, bf16 };

/// Keys and values of one layer: two arrays [pages][kv_heads][page_tokens][head_dim].
struct kv_cache_view {
  void* keys = nullptr;
  void* values = nullptr;
  kv_format format = kv_format::f32;
  int pages = 0;
  int kv_heads = 0;
  int page_tokens = 0;
  int head_dim = 0;

  /// Elements of one of the two arrays.
  [[nodiscard]] std::size_t elements() const noexcept {
    return static_cast<std::size_t>(pages) * static_cast<std::size_t>(kv_heads) *
           static_cast<std::size_t>(page_tokens) * static_cast<std::size_t>(head_dim);
  }
};

/// Writes the keys and values of a step's rows to their places in the pages (rounded to nearest even for
/// bf16). Call it before attention().
/// \param k,v [rows][kv_heads][head_dim], rows `ldk`, `ldv` apart, heads dense
void append_kv(thread_pool& pool, const kv_cache_view& cache, std::span<const sequence_span> spans,
               const float* k, std::ptrdiff_t ldk, const float* v, std::ptrdiff_t ldv);

/// Queries of a step, and the gate beside them. Both are found at row·row_stride + head·head_stride, so a
/// projection that interleaves [q | gate] per head is used in place.
struct attention_input {
  const float* q = nullptr;
  std::ptrdiff_t q_row_stride = 0;
  std::ptrdiff_t q_head_stride = 0;
  const float* gate = nullptr;  ///< null: no gate
  std::ptrdiff_t gate_row_stride = 0;
  std::ptrdiff_t gate_head_stride = 0;
  int heads = 0;    ///< a multiple of kv_heads; head h reads KV head h / (heads / kv_heads)
  float scale = 1;  ///< of the scores, head_dim^-0.5 as a rule
};

/// out[r][h] = softmax_{j <= p}(scale · q·k_j) · v_j, ⊙ sigmoid(gate), p the row's position.
///
/// Online softmax in fp32 over blocks of 16 tokens that begin at multiples of 16: a row's result depends on
/// its own position and history alone, not on how the sequence was cut into steps, its batch or the threads.
/// \param out [rows][heads][head_dim], rows `ldo` apart, heads dense; must not overlap q or gate
void attention(thread_pool& pool, const kv_cache_view& cache, std::span<const sequence_span> spans,
               const attention_input& input, float* out, std::ptrdiff_t ldo);

}  // namespace nibble::host
