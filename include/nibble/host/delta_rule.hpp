// SPDX-License-Identifier: Apache-2.0
/// \file
/// The gated delta rule: linear attention with a decaying matrix state per value head.
///
/// With S [k_dim][v_dim], per token:   S ← e^g S;   δ = β (v − Sᵀk);   S ← S + k δᵀ;   o = Sᵀq.
#pragma once

#include <cstddef>
#include <nibble/host/sequence_span.hpp>
#include <nibble/host/thread_pool.hpp>
#include <span>

namespace nibble::host {

/// beta = sigmoid(b), log_decay = -exp(a_log) · softplus(a + dt_bias); per (row, value head).
/// \param a,b [rows][heads], rows `lda`, `ldb` apart  \param a_log,dt_bias [heads]
/// \param log_decay,beta [rows][heads], dense
void delta_rule_gates(const float* a, std::ptrdiff_t lda, const float* b, std::ptrdiff_t ldb,
                      const float* a_log, const float* dt_bias, int rows, int heads, float* log_decay,
                      float* beta);

struct delta_rule_shape {
  int k_heads = 0;
  int v_heads = 0;  ///< a multiple of k_heads; value head h reads key head h / (v_heads / k_heads)
  int k_dim = 0;
  int v_dim = 0;
};

/// q and k already L2-normalised (and q scaled by k_dim^-0.5): see l2_norm.
struct delta_rule_input {
  const float* q = nullptr;          ///< [rows][k_heads][k_dim], rows `row_stride` apart
  const float* k = nullptr;          ///< likewise
  const float* v = nullptr;          ///< [rows][v_heads][v_dim], rows `row_stride` apart
  std::ptrdiff_t row_stride = 0;     ///< of q, k and v: they may be parts of one matrix
  const float* log_decay = nullptr;  ///< [rows][v_heads], dense, at most 0
  const float* beta = nullptr;       ///< [rows][v_heads], dense
};

/// Token by token. The model's default: the result is the same bits however a prompt is cut into steps.
/// Cost: the state is read and written once for each step and sequence, and stays in cache between rows.
/// \param state [slots][v_heads][k_dim][v_dim], updated in place
/// \param out [rows][v_heads][v_dim], rows `ldo` apart; must not overlap the inputs
void delta_rule_recurrent(thread_pool& pool, std::span<const sequence_span> spans,
                          const delta_rule_shape& shape, const delta_rule_input& input, float* state,
                          float* out, std::ptrdiff_t ldo);

/// In chunks of `chunk` tokens by matrix products (the WY form). Mathematically the same, but rounded
/// differently (about 1e-6 relative), and where the chunks begin depends on how the prompt is cut.
/// \param chunk 1 to 128
void delta_rule_chunked(thread_pool& pool, std::span<const sequence_span> spans,
                        const delta_rule_shape& shape, const delta_rule_input& input, float* state,
                        float* out, std::ptrdiff_t ldo, int chunk = 64);

}  // namespace nibble::host
