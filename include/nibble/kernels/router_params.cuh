// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the router launcher takes.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/router_types.hpp"

namespace nibble {

/// Pointers 16-byte aligned, row strides in elements and multiples of 8. A row with a NaN logit gets valid
/// ids and NaN weights.
struct router_params {
  int rows = 0;
  const __nv_bfloat16* hidden = nullptr;  ///< [rows][hidden], before the norm
  int ldh = 0;
  const float* norm = nullptr;  ///< [hidden]
  bool zero_centred = false;
  float eps = 1e-6f;
  const __nv_bfloat16* weight = nullptr;  ///< [experts][hidden] row-major
  const __nv_bfloat16* gate = nullptr;    ///< [hidden]: the shared expert's gate, where there is one
  __nv_bfloat16* normed = nullptr;        ///< [rows][hidden] out; must not overlap `hidden`
  int ldn = 0;
  std::int32_t* ids = nullptr;      ///< [rows][top_k] out, likeliest first
  float* weights = nullptr;         ///< [rows][top_k] out
  float* shared_weights = nullptr;  ///< [rows] out: sigmoid of the gate
  std::byte* workspace = nullptr;   ///< router_workspace_bytes(shape)
};

}  // namespace nibble
