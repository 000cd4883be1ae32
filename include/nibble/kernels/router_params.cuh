// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the router launcher takes.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/router_types.hpp"

namespace nibble {

/// One router's weights and results. Pointers 16-byte aligned.
struct router_operands {
  const float* norm = nullptr;            ///< [hidden]
  const __nv_bfloat16* weight = nullptr;  ///< [experts][hidden] row-major
  const __nv_bfloat16* gate = nullptr;    ///< [hidden]: the shared expert's gate, where there is one
  __nv_bfloat16* normed = nullptr;        ///< [rows][hidden] out; must not overlap `hidden`
  std::int32_t* ids = nullptr;            ///< [rows][top_k] out, likeliest first
  float* weights = nullptr;               ///< [rows][top_k] out
  float* shared_weights = nullptr;        ///< [rows] out: sigmoid of the gate
  std::byte* workspace = nullptr;         ///< router_workspace_bytes(shape)
};

/// Row strides in elements and multiples of 8. A row with a NaN logit gets valid ids and NaN weights.
struct router_params : router_operands {
  int rows = 0;
  const __nv_bfloat16* hidden = nullptr;  ///< [rows][hidden], before the norm
  int ldh = 0;
  bool zero_centred = false;
  float eps = 1e-6f;
  int ldn = 0;  ///< of normed
  /// Another router of the same shape for the same rows, beside the first where the rows are few: its results
  /// and its workspace overlap none of the first's. No weight: there is none.
  router_operands beside;
};

}  // namespace nibble
