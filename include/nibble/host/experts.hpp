// SPDX-License-Identifier: Apache-2.0
/// \file
/// Mixture of experts: routed experts grouped so that each one's weights stream once, and the shared expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nibble/host/linear.hpp>
#include <nibble/host/thread_pool.hpp>
#include <span>

namespace nibble::host {

/// One SwiGLU expert: down( silu(gate(x)) ⊙ up(x) ). Each part keeps its own format and scale.
struct expert_weights {
  weight_view gate;  ///< [intermediate][hidden]
  weight_view up;    ///< [intermediate][hidden]
  weight_view down;  ///< [hidden][intermediate]
};

/// y[r] = Σ_s weights[r][s] · expert_{ids[r][s]}(x[r]), summed over ascending s. Overwrites y.
///
/// All experts have the same shapes and, part by part, the same formats. A row's result does not depend on
/// the other rows or on the threads. \param ids [m][top_k], each in [0, experts.size()), distinct within a
/// row; -1 skips the slot \param weights [m][top_k] \param x [m][hidden], rows `ldx` apart  \param y
/// [m][hidden], rows `ldy` apart; must not overlap x
void routed_experts(thread_pool& pool, std::span<const expert_weights> experts, const std::int32_t* ids,
                    const float* weights, int top_k, const float* x, std::ptrdiff_t ldx, int m, float* y,
                    std::ptrdiff_t ldy);

/// y[r] += sigmoid(x[r] · gate_row) · expert(x[r]). Adds to y.
/// \param gate_row [1][hidden]; an empty view means the factor 1
void shared_expert(thread_pool& pool, const expert_weights& expert, const weight_view& gate_row,
                   const float* x, std::ptrdiff_t ldx, int m, float* y, std::ptrdiff_t ldy);

}  // namespace nibble::host
