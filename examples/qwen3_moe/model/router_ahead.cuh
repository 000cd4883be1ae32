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
#include "nibble/kernels/router_params.cuh"

namespace qwen3_moe {

/// `router` with results for so many rows where the mixers' projections lie, which nobody needs between two
/// mixers. \param projected of the step's rows
template <const model_config& C>
[[nodiscard]] nibble::router_operands results_in_projected(nibble::router_operands router,
                                                           __nv_bfloat16* projected, int rows) {
  static_assert(
      2 * std::max(C.q_rows() + 2 * C.kv_width(), C.delta_conv_channels() + C.delta_value_width()) >=
          2 * C.hidden_size + 8 * C.experts_per_token + 4,
      "projections are wider than what a router writes");
  const auto count = static_cast<std::ptrdiff_t>(rows);
  router.normed = projected;
  router.ids = reinterpret_cast<std::int32_t*>(router.normed + count * C.hidden_size);
  router.weights = reinterpret_cast<float*>(router.ids + count * C.experts_per_token);
  router.shared_weights = router.weights + count * C.experts_per_token;
  return router;
}

}  // namespace qwen3_moe
