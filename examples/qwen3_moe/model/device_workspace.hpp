// SPDX-License-Identifier: Apache-2.0
/// \file
/// The memory of a step on the device: activations, page table, logits, kernels' workspaces. One function
/// both sizes it for the planner and places it for the backend. Compiles without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "model/device_layout.hpp"
#include "model/device_step.hpp"
#include "nibble/kernels/attention_types.hpp"
#include "nibble/kernels/delta_types.hpp"
#include "nibble/kernels/router_types.hpp"
#include "nibble/kernels/sampling_types.hpp"
#include "nibble/moe/experts_workspace.hpp"
#include "nibble/moe/residency_types.hpp"

namespace qwen3_moe {

/// Tokens of a KV page on the device.
inline constexpr int device_page_tokens = 16;

[[nodiscard]] constexpr nibble::attention_shape attention_shape_of(const model_config& c,
                                                                   nibble::kv_format kv) {
  return {c.attention_heads, c.kv_heads, c.head_dim,         c.rotary_dim,
          c.attention_gate,  false,      device_page_tokens, kv};
}
[[nodiscard]] constexpr nibble::delta_shape delta_shape_of(const model_config& c) {
  return {c.hidden_size,   c.delta_key_heads, c.delta_value_heads,
          c.delta_key_dim, c.delta_value_dim, c.delta_conv_width};
}
[[nodiscard]] constexpr nibble::router_shape router_shape_of(const model_config& c) {
  return {c.hidden_size, c.experts, c.experts_per_token, c.shared_intermediate > 0, c.normalise_top_k};
}

/// Why the device kernels cannot run a model, or nothing.
[[nodiscard]] constexpr std::string_view device_refusal(const model_config& c) {
  if (c.formats.expert_gate_up != c.formats.expert_down)
    return "the routed experts' gate|up and down matrices have different formats";
  if (c.formats.expert_gate_up == weight_format::bf16) return "the routed experts are bf16";
  if (c.hidden_size % 16 != 0 || c.expert_intermediate % 16 != 0 || c.shared_intermediate % 16 != 0 ||
      c.attention_width() % 16 != 0 || c.delta_value_width() % 16 != 0)
    return "a width is not a multiple of 16";
  if (c.hidden_size % 256 != 0 || c.hidden_size > 8192)
    return "the hidden size is not a multiple of 256 up to 8192";
  if (c.experts_per_token + (c.shared_intermediate > 0 ? 1 : 0) > 16 || c.experts > 4096)
    return "a token passes through more than 16 experts, or there are more than 4096";
  if (const char* fault = attention_shape_of(c, nibble::kv_format::bf16).fault(); fault != nullptr)
    return fault;
  if (c.delta_layers() > 0 && !delta_shape_of(c).valid())
    return "the delta rule has other head sizes or another window than its kernels";
  if (!router_shape_of(c).valid()) return "the router has other sizes than its kernels";
  return {};
}

/// Bytes of one KV page, and of one sequence's recurrent states, over all layers.
[[nodiscard]] constexpr std::uint64_t kv_page_bytes_of(const model_config& c, nibble::kv_format kv) {
  return static_cast<std::uint64_t>(c.full_layers()) * attention_shape_of(c, kv).page_bytes();
}
[[nodiscard]] constexpr std::uint64_t state_slot_bytes_of(const model_config& c) {
  return c.delta_layers() == 0
             ? 0
             : static_cast<std::uint64_t>(c.delta_layers()) * nibble::state_bytes(delta_shape_of(c));
}

/// Sizes that a step's memory depends on.
struct device_sizes {
  int step_tokens = 0;
  int sequences = 0;    ///< at once
  int page_stride = 0;  ///< pages of the longest context
  int logit_rows = 0;   ///< rows of logits made in one go
};

/// Sizes for what the planner may choose.
[[nodiscard]] constexpr device_sizes device_sizes_of(int step_tokens, int running, int context_tokens) {
  return {std::max(step_tokens, running), running,
          (context_tokens + device_page_tokens - 1) / device_page_tokens, std::max(running, 8)};
}

/// Offsets in bytes from the start of the workspace, each a multiple of 256.
struct device_workspace {
  std::uint64_t step_words, page_table, hidden, normed, projected, mixed;
  std::uint64_t expert_ids, expert_weights, shared_weights, expert_h, experts, shared_h;
  std::uint64_t router, attention, delta, inverse_frequencies, logits;
  std::uint64_t sampling, sampling_rows, sampled;                 ///< of one step's draws
  std::uint64_t seen, allowed, bias, drawn, previous, forbidden;  ///< of every slot
  nibble::attention_workspace attention_layout;
  std::uint64_t experts_bytes;  ///< of the experts' part
  std::uint64_t bytes;
};

/// Offsets of the same kind, for what the next layer's router writes beside a layer's own. Zeroed once.
struct router_ahead_workspace {
  std::uint64_t normed, ids, weights, shared_weights, router;
  std::uint64_t bytes;
};
[[nodiscard]] constexpr router_ahead_workspace router_ahead_workspace_of(const model_config& c) {
  router_ahead_workspace w{};
  const auto take = [&w](std::uint64_t bytes) {
    const std::uint64_t at = w.bytes;
    w.bytes = (at + bytes + 255) / 256 * 256;
    return at;
  };
  constexpr std::uint64_t rows = nibble::moe::most_ahead_rows;
  w.normed = take(2 * rows * static_cast<unsigned>(c.hidden_size));
  w.ids = take(4 * rows * static_cast<unsigned>(c.experts_per_token));
  w.weights = take(4 * rows * static_cast<unsigned>(c.experts_per_token));
  w.shared_weights = take(4 * rows);
  w.router = take(nibble::router_workspace_bytes(router_shape_of(c)));
  return w;
}

/// Biased tokens that a slot's draws can have on the device.
inline constexpr int most_device_biases = 512;
/// Rows of logits are this many floats apart.
[[nodiscard]] constexpr int logit_stride_of(const model_config& c) { return (c.vocab_size + 3) / 4 * 4; }

[[nodiscard]] constexpr device_workspace device_workspace_of(const model_config& c, nibble::kv_format kv,
                                                             const device_sizes& sizes,
                                                             nibble::device_class device) {
  device_workspace w{};
  const auto take = [&w](std::uint64_t bytes) {
    const std::uint64_t at = w.bytes;
    w.bytes = (at + bytes + 255) / 256 * 256;
    return at;
  };
  const auto rows = static_cast<std::uint64_t>(sizes.step_tokens);
  const auto matrix = [&](int columns) { return take(2 * rows * static_cast<unsigned>(columns)); };
  const auto sequences = static_cast<std::uint64_t>(sizes.sequences);
  const auto logit_rows = static_cast<std::uint64_t>(sizes.logit_rows);
  w.step_words =
      take(4 * static_cast<std::uint64_t>(device_step_layout{sizes.step_tokens, sizes.sequences}.words()));
  w.page_table = take(4 * sequences * static_cast<unsigned>(sizes.page_stride));
  w.hidden = matrix(c.hidden_size);
  w.normed = matrix(c.hidden_size);
  // Rows of an attention layer and of a delta layer are never alive together.
  w.projected =
      matrix(std::max(c.q_rows() + 2 * c.kv_width(), c.delta_conv_channels() + c.delta_value_width()));
  w.mixed = matrix(std::max(c.attention_width(), c.delta_value_width()));
  w.expert_ids = take(4 * rows * static_cast<unsigned>(c.experts_per_token));
  w.expert_weights = take(4 * rows * static_cast<unsigned>(c.experts_per_token));
  w.shared_weights = take(4 * rows);
  const nibble::moe::experts_shape experts = experts_shape_of(c);
  w.expert_h =
      take(2 * rows * static_cast<unsigned>(experts.groups()) * static_cast<unsigned>(experts.inner));
  w.experts_bytes = sizes.step_tokens <= nibble::moe::max_tokens
                        ? 0
                        : nibble::moe::workspace_of(experts, sizes.step_tokens).bytes;
  w.experts = take(w.experts_bytes);
  w.shared_h = matrix(experts.shared ? 0 : c.shared_intermediate);
  w.router = take(nibble::router_workspace_bytes(router_shape_of(c)));
  const auto attention = attention_shape_of(c, kv);
  w.attention_layout =
      nibble::attention_workspace_of(attention, nibble::select_attention(attention, device), sizes.sequences);
  w.attention = take(w.attention_layout.bytes);
  w.delta = take(c.delta_layers() == 0
                     ? 0
                     : nibble::delta_prefill_workspace_bytes(delta_shape_of(c), sizes.step_tokens));
  w.inverse_frequencies = take(4 * static_cast<unsigned>(c.rotary_dim / 2));
  w.logits = take(4 * logit_rows * static_cast<unsigned>(logit_stride_of(c)));
  w.sampling = take(nibble::sampling_workspace_bytes(c.vocab_size, sizes.logit_rows));
  w.sampling_rows = take(sizeof(nibble::sampling_row) * logit_rows);
  w.sampled = take(sizeof(nibble::sampled_row) * logit_rows);
  const auto vocab = static_cast<std::uint64_t>(c.vocab_size);
  w.seen = take(4 * sequences * vocab);
  w.allowed = take(4 * sequences * ((vocab + 31) / 32));
  w.bias = take(sizeof(nibble::device_token_bias) * sequences * most_device_biases);
  w.drawn = take(8 * sequences);
  w.previous = take(4 * sequences);
  w.forbidden = take(4 * vocab);
  return w;
}

}  // namespace qwen3_moe
