// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the launchers over whole rows take: RMSNorm, embedding, row selection.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace nibble {

/// y = bf16(x · rsqrt(mean x² + eps) ⊙ w), w or 1 + w. Pointers 16-byte aligned, strides multiples of 8
/// elements. y may be x.
struct rms_norm_params {
  int rows = 0;
  const __nv_bfloat16* x = nullptr;
  int ldx = 0;
  const float* weight = nullptr;  ///< [width]
  bool zero_centred = false;
  float eps = 1e-6f;
  __nv_bfloat16* y = nullptr;
  int ldy = 0;
  /// Null, or [rows]: row r of y is the norm of row index[r] of x (y may then not be x). Indices are below
  /// `index_limit`; one outside is clamped. May be the previous kernel's output.
  const std::int32_t* index = nullptr;
  int index_limit = 0;
};

/// y[r] = table[ids[r]]; where ids[r] < 0 and `previous` is given, table[previous[slot[r]]]: the token that a
/// step before left on the device. An id outside the table reads a row at its edge and adds one to
/// *out_of_range.
struct embed_params {
  int rows = 0;
  const __nv_bfloat16* table = nullptr;  ///< [vocab][hidden], 16-byte aligned
  const std::int32_t* ids = nullptr;     ///< [rows], on the device
  __nv_bfloat16* y = nullptr;
  int ldy = 0;
  std::uint32_t* out_of_range = nullptr;   ///< null, or a counter on the device
  const std::int32_t* previous = nullptr;  ///< null, or [slots]
  const std::int32_t* slot = nullptr;      ///< [rows] where an id may be negative
};

/// y[r] = x[index[r]], an index outside [0, limit) clamped.
struct select_rows_params {
  int rows = 0;
  const __nv_bfloat16* x = nullptr;
  int ldx = 0;
  const std::int32_t* index = nullptr;  ///< [rows], on the device
  int limit = 0;                        ///< rows of x
  __nv_bfloat16* y = nullptr;           ///< must not overlap x
  int ldy = 0;
};

}  // namespace nibble
