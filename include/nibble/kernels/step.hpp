// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the kernels between the matrices know of a step: its rows, its sequences, and where their caches are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"

namespace nibble {

/// The sequences of one launch. All arrays are on the device. Sequence s brings the rows first_row[s] …
/// first_row[s + 1] - 1 of the step's activations, at positions position[s], position[s] + 1, …
/// Decode kernels take sequences of one row each.
struct step_view {
  int sequences = 0;
  const std::int32_t* first_row = nullptr;  ///< [sequences + 1], ascending
  const std::int32_t* position = nullptr;   ///< [sequences], tokens the caches hold already
  const std::int32_t* slot = nullptr;       ///< [sequences], recurrent-state slots
  const std::int32_t* pages = nullptr;      ///< [sequences][page_stride], KV page ids
  int page_stride = 0;
};

enum class kv_format : std::uint8_t { bf16, fp8 };

[[nodiscard]] constexpr int bytes_of(kv_format format) { return format == kv_format::bf16 ? 2 : 1; }

/// The KV cache of one attention layer inside a pool of pages that hold every layer. Page p's keys lie at
/// base + p · page_bytes + layer_offset_bytes as [kv_heads][page_tokens][head_dim], its values behind them.
struct kv_pool {
  std::byte* base = nullptr;
  std::size_t page_bytes = 0;
  std::size_t layer_offset_bytes = 0;

  [[nodiscard]] NIBBLE_HOST_DEVICE std::byte* page(int id) const {
    return base + static_cast<std::size_t>(id) * page_bytes + layer_offset_bytes;
  }
};

/// The recurrent state of one delta-rule layer inside a pool of slots that hold every layer.
struct state_pool {
  std::byte* base = nullptr;
  std::size_t slot_bytes = 0;
  std::size_t layer_offset_bytes = 0;

  [[nodiscard]] NIBBLE_HOST_DEVICE std::byte* slot(int id) const {
    return base + static_cast<std::size_t>(id) * slot_bytes + layer_offset_bytes;
  }
};

}  // namespace nibble
