// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the attention launchers take.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>

#include "nibble/kernels/attention_types.hpp"
#include "nibble/kernels/step.hpp"

namespace nibble {

/// One attention layer of one step.
///
/// The arrays of `step` must be older than the kernel launched just before; `qkv` may be that kernel's
/// output. A sequence whose position is negative is padding: nothing is read or written for it, except that
/// decode zeroes its output row.
struct attention_params {
  step_view step{};                            ///< at most max_attention_sequences
  kv_pool pool{};                              ///< pages 16-byte aligned
  const __nv_bfloat16* qkv = nullptr;          ///< [rows][qkv_width], 16-byte aligned
  int ldqkv = 0;                               ///< elements, a multiple of 8
  __nv_bfloat16* out = nullptr;                ///< [rows][heads · head_dim], 16-byte aligned
  int ldo = 0;                                 ///< elements, a multiple of 8
  const float* q_norm = nullptr;               ///< [head_dim]
  const float* k_norm = nullptr;               ///< [head_dim]
  const float* inverse_frequencies = nullptr;  ///< [rotary_dim / 2], fp32: theta^(-2 i / rotary_dim)
  float eps = 1e-6f;

  int rows = 0;  ///< append and prefill: rows of all sequences of `step` together, at most (sets the grid)

  std::byte* workspace = nullptr;  ///< decode: laid out by `layout`, 256-byte aligned, counters zeroed once
  attention_workspace layout{};    ///< decode: attention_workspace_of(…) with at least step.sequences
};

}  // namespace nibble
