// SPDX-License-Identifier: Apache-2.0
/// \file
/// A layer's router applied one layer early: which experts it is likely to choose, so that they can be
/// fetched while the layer before computes.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "model/model_config.hpp"

namespace qwen3_moe {

/// A layer's router as the layer before it needs it.
struct router_ahead {
  const __nv_bfloat16* weight = nullptr;
  const __nv_bfloat16* gate = nullptr;
  const float* norm = nullptr;
};

/// Where such a router writes.
struct router_ahead_rows {
  __nv_bfloat16* normed = nullptr;
  std::int32_t* ids = nullptr;
  float *weights = nullptr, *shared_weights = nullptr;
  std::byte* workspace = nullptr;
};

/// That room where the mixers' projections lie, which nobody needs between two mixers.
/// \param projected of the step's rows
template <const model_config& C>
[[nodiscard]] router_ahead_rows rows_in_projected(__nv_bfloat16* projected, int rows, std::byte* workspace) {
  static_assert(
      2 * std::max(C.q_rows() + 2 * C.kv_width(), C.delta_conv_channels() + C.delta_value_width()) >=
          2 * C.hidden_size + 8 * C.experts_per_token + 4,
      "projections are wider than what a router writes");
  const auto count = static_cast<std::ptrdiff_t>(rows);
  router_ahead_rows r;
  r.normed = projected;
  r.ids = reinterpret_cast<std::int32_t*>(r.normed + count * C.hidden_size);
  r.weights = reinterpret_cast<float*>(r.ids + count * C.experts_per_token);
  r.shared_weights = r.weights + count * C.experts_per_token;
  r.workspace = workspace;
  return r;
}

}  // namespace qwen3_moe
