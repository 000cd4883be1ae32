// SPDX-License-Identifier: Apache-2.0
/// \file
/// Where a layer's experts are on a device, and which of them a step's rows go to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/launch.cuh"

namespace qwen3_moe {

/// Where a layer's experts are.
struct device_experts {
  const std::uint8_t* slots = nullptr;    ///< expert slots of all layers
  const float* slot_scales = nullptr;     ///< [slots][3]
  int slot_count = 0;                     ///< that the tables may name, closed ones included
  const std::int32_t* slot_of = nullptr;  ///< [layers][experts]
};

/// Which experts a layer's rows go to, on the device: [rows][top_k].
struct routed_ids {
  const std::int32_t* ids = nullptr;
  /// What the step takes the next layer's to be; null where it does not look ahead, unread in the last one.
  const std::int32_t* next = nullptr;

  /// Those of the rows from `row` on.
  [[nodiscard]] routed_ids from(int row, int top_k) const {
    const auto at = static_cast<std::ptrdiff_t>(row) * top_k;
    return {ids + at, next != nullptr ? next + at : nullptr};
  }
};

/// Asked in every layer, behind the launch of its router, which ids the layer is to use. \param routed the
/// router's; may be replaced by others, which must be there once all that the stream has so far is done. The
/// hook may launch kernels on it that write them.
using router_hook = nibble::status (*)(void* self, int layer, int rows, routed_ids& routed,
                                       const nibble::launch_options& options);

}  // namespace qwen3_moe
