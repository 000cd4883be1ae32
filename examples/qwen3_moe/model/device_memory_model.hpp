// SPDX-License-Identifier: Apache-2.0
/// \file
/// A model's bytes on a device for the planner, from its configuration: no checkpoint, no device needed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model/device_workspace.hpp"
#include "model/expert_keeping.hpp"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/residency_types.hpp"
#include "nibble/plan/memory_model.hpp"

namespace qwen3_moe {

/// Bytes of everything but the routed experts. Equal to dense_device_bytes<Config>() of the compiled type.
[[nodiscard]] constexpr std::uint64_t dense_device_bytes_of(const model_config& c) {
  const auto tiles = [](const nibble::geometry& shape,
                        nibble::row_order order = nibble::row_order::adjacent) -> std::uint64_t {
    return aligned_device_bytes(nibble::resident_layout{shape, order}.bytes());
  };
  const auto floats = [](int count) { return aligned_device_bytes(4 * static_cast<std::uint64_t>(count)); };
  const auto rows = [](int n, int k) {
    return aligned_device_bytes(nibble::matrix(n, k, weight_format::bf16).bytes());
  };
  const int h = c.hidden_size;
  std::uint64_t layer = 2 * floats(h) + rows(c.experts, h);
  if (c.shared_intermediate > 0)
    layer += tiles(nibble::fused(h, c.formats.shared_gate_up, c.shared_intermediate, c.shared_intermediate),
                   nibble::row_order::gate_up) +
             tiles(nibble::matrix(h, c.shared_intermediate, c.formats.shared_down)) + rows(1, h);
  const std::uint64_t attention =
      tiles(nibble::fused(h, c.formats.attention_qkv, c.q_rows(), c.kv_width(), c.kv_width())) +
      2 * floats(c.head_dim) + tiles(nibble::matrix(h, c.attention_width(), c.formats.attention_out));
  std::uint64_t delta = 0;
  if (c.delta_layers() > 0)
    delta = tiles(nibble::fused(h, c.formats.delta_qkvz, c.delta_conv_channels(), c.delta_value_width())) +
            rows(2 * c.delta_value_heads, h) + floats(c.delta_conv_channels() * c.delta_conv_width) +
            2 * floats(c.delta_value_heads) + floats(c.delta_value_dim) +
            tiles(nibble::matrix(h, c.delta_value_width(), c.formats.delta_out));
  return static_cast<std::uint64_t>(c.layers) * layer +
         static_cast<std::uint64_t>(c.full_layers()) * attention +
         static_cast<std::uint64_t>(c.delta_layers()) * delta + rows(c.vocab_size, h) + floats(h) +
         tiles(nibble::matrix(c.vocab_size, h, c.formats.lm_head));
}

/// One routed expert: gate|up tiles, then down tiles.
[[nodiscard]] constexpr std::uint64_t expert_slot_bytes_of(const model_config& c) {
  return experts_shape_of(c).slot_bytes();
}

/// Small tables beside the weights: scales of the slots and where each expert is.
[[nodiscard]] constexpr std::uint64_t expert_table_bytes_of(const model_config& c) {
  const auto experts = static_cast<std::uint64_t>(expert_count(c));
  return aligned_device_bytes(12 * experts) + aligned_device_bytes(4 * experts);
}

/// Room for machine code: the driver took 2 MiB for the 89 kernels of Qwen3.6-35B-A3B on an H200.
inline constexpr std::uint64_t kernel_bytes_estimate = std::uint64_t{16} << 20;
/// Room for one captured decode step: four of them took 2 MiB together.
inline constexpr std::uint64_t graph_bytes_estimate = std::uint64_t{4} << 20;

/// Tables of which experts are in so many slots, and the buffers of what is done about the others: the router
/// of the next layer, the CPU's share. Together one block of small allocations.
[[nodiscard]] inline std::uint64_t fetching_table_bytes_of(const model_config& c,
                                                           const expert_keeping& keeping, std::uint64_t slots,
                                                           nibble::device_class device) {
  const nibble::moe::residency_shape shape{c.layers, c.experts, c.experts_per_token};
  std::uint64_t bytes = nibble::moe::residency_layout_of(shape, static_cast<int>(slots)).bytes;
  if (keeping.ahead_on(device, keeping.fetch) > 0) bytes += router_ahead_workspace_of(c).bytes;
  if (keeping.cpu != cpu_share::off) bytes += 4 * nibble::moe::host_split_words;
  if (keeping.fetch != expert_fetch::kernel) bytes += sizeof(nibble::moe::engine_state);
  return bytes;
}

/// \param keeping of the experts, where not all fit
[[nodiscard]] inline nibble::memory_model device_memory_model(
    const model_config& config, int max_positions, nibble::kv_format kv, const expert_keeping& keeping = {},
    nibble::device_class device = nibble::default_device) {
  nibble::memory_model m;
  m.weight_bytes = dense_device_bytes_of(config) + expert_table_bytes_of(config);
  m.kernel_bytes = kernel_bytes_estimate;
  m.graph_bytes = graph_bytes_estimate;
  m.workspace_bytes = [config, kv, device](const nibble::step_limits& limits) {
    return device_workspace_of(
               config, kv, device_sizes_of(limits.step_tokens, limits.running, limits.context_tokens), device)
        .bytes;
  };
  m.max_context_tokens = max_positions;
  m.state_slot_bytes = state_slot_bytes_of(config);
  m.kv_page_bytes = kv_page_bytes_of(config, kv);
  m.page_tokens = device_page_tokens;
  m.padding_writes = false;  // padding rows have the position -1, which the kernels pass over
  m.expert_slot_bytes = expert_slot_bytes_of(config);
  m.experts = static_cast<std::uint64_t>(expert_count(config));
  m.layer_experts = static_cast<std::uint64_t>(config.experts);
  m.experts_per_token = static_cast<std::uint64_t>(config.experts_per_token);
  m.expert_map_bytes =
      nibble::moe::page_table_bytes_of(std::min(m.experts * m.expert_slot_bytes, keeping.lock_limit_bytes));
  m.expert_table_bytes = [config, keeping, device](std::uint64_t slots) {
    return fetching_table_bytes_of(config, keeping, slots, device);
  };
  m.all_experts_stay = true;  // host memory has them only where not all have slots
  return m;
}

}  // namespace qwen3_moe
