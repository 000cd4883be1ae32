// SPDX-License-Identifier: Apache-2.0
/// \file
/// Causal depthwise convolution over the tokens of each sequence, then SiLU.
#pragma once

#include <cstddef>
#include <nibble/host/sequence_span.hpp>
#include <nibble/host/thread_pool.hpp>
#include <span>

namespace nibble::host {

/// y_t = silu( Σ_j weight[j] ⊙ x_{t - (width-1) + j} ), j ascending; inputs before the span come from
/// `state`, which afterwards holds the last width-1 inputs. A new sequence begins with a zeroed state. \param
/// x [rows][channels], rows `ldx` apart  \param y likewise, `ldy`; must not overlap x \param weight
/// [width][channels]: the checkpoint's [channels][1][width], transposed \param width 1 to 8 \param state
/// [slots][width-1][channels], oldest first
void causal_conv_silu(thread_pool& pool, std::span<const sequence_span> spans, const float* x,
                      std::ptrdiff_t ldx, const float* weight, int width, int channels, float* state,
                      float* y, std::ptrdiff_t ldy);

}  // namespace nibble::host
