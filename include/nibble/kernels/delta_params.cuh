// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the delta-rule launchers take.
#pragma once

#include <cuda_bf16.h>

#include "nibble/kernels/delta_types.hpp"
#include "nibble/kernels/step.hpp"

namespace nibble {

/// One delta layer of one step. Pointers 16-byte aligned, row strides in elements and multiples of 8.
///
/// `step` (first_row, position, slot) and the states must be older than the kernel launched just before: a
/// layer never follows itself without another kernel between. `qkvz` and `x` may be that kernel's output. No
/// two sequences of a launch share a slot. A sequence whose position is negative is padding: its state is
/// left alone, its output rows are zeroed. A slot must be all zero bytes before its sequence's position 0.
struct delta_rule_params {
  step_view step{};  ///< first_row, position, slot; rows are absolute, so part of a step may be given
  state_pool pool{};
  const __nv_bfloat16* qkvz = nullptr;  ///< [rows][projected()]
  int ldqkvz = 0;
  const __nv_bfloat16* x = nullptr;  ///< [rows][hidden], normalised (or raw: see delta_rule_decode)
  int ldx = 0;
  __nv_bfloat16* out = nullptr;  ///< [rows][value_width()]
  int ldo = 0;

  const __nv_bfloat16* ba = nullptr;  ///< [2 · value_heads][hidden] row-major, the b rows first
  const float* conv = nullptr;        ///< [channels()][conv_width]
  const float* a_log = nullptr;       ///< [value_heads]
  const float* dt_bias = nullptr;     ///< [value_heads]
  const float* norm = nullptr;        ///< [value_dim], used as it is
  float eps = 1e-6f;                  ///< of the gated norm and of the input norm

  const float* input_norm = nullptr;  ///< [hidden]: only where x is raw
  bool zero_centred = false;          ///< input_norm enters as 1 + w

  int rows = 0;                    ///< prefill: rows of all sequences of `step` together (sets the grid)
  std::byte* workspace = nullptr;  ///< prefill: delta_prefill_workspace_bytes(shape, rows)
};

}  // namespace nibble
