// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a model is specialised on: the numbers of its config.json as one constant.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "nibble/geometry/geometry.hpp"

namespace qwen3_moe {

using nibble::weight_format;

inline constexpr int max_layers = 256;

/// The stored format of each kind of matrix. Router, shared-expert gate and the a/b projections are bf16.
struct module_formats {
  weight_format attention_qkv = weight_format::bf16;
  weight_format attention_out = weight_format::bf16;
  weight_format delta_qkvz = weight_format::bf16;
  weight_format delta_out = weight_format::bf16;
  weight_format expert_gate_up = weight_format::bf16;
  weight_format expert_down = weight_format::bf16;
  weight_format shared_gate_up = weight_format::bf16;
  weight_format shared_down = weight_format::bf16;
  weight_format lm_head = weight_format::bf16;

  friend constexpr bool operator==(const module_formats&, const module_formats&) = default;
};

/// A Qwen3.5/3.6-MoE (hybrid, gated, zero-centred norms) or Qwen3-MoE (plain attention) decoder.
struct model_config {
  int vocab_size = 0;
  int hidden_size = 0;
  int layers = 0;

  int attention_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int rotary_dim = 0;  ///< the first dimensions of a head that rotate
  double rope_theta = 0;
  bool attention_gate = false;  ///< q_proj also yields a gate for each head

  int delta_key_heads = 0;  ///< all delta_* are 0 in a model without linear attention
  int delta_value_heads = 0;
  int delta_key_dim = 0;
  int delta_value_dim = 0;
  int delta_conv_width = 0;

  int experts = 0;
  int experts_per_token = 0;
  int expert_intermediate = 0;
  int shared_intermediate = 0;  ///< 0: no shared expert
  bool normalise_top_k = true;

  double norm_eps = 1e-6;
  bool zero_centred_norm = false;  ///< RMSNorm multiplies by 1 + w
  bool tied_embeddings = false;    ///< lm_head is the embedding table

  std::array<bool, max_layers> full_attention{};  ///< for each layer; otherwise the gated delta rule
  module_formats formats{};

  friend constexpr bool operator==(const model_config&, const model_config&) = default;

  [[nodiscard]] constexpr int full_layers() const {
    int count = 0;
    for (int i = 0; i < layers; ++i) count += full_attention[static_cast<std::size_t>(i)];
    return count;
  }
  [[nodiscard]] constexpr int delta_layers() const { return layers - full_layers(); }
  [[nodiscard]] constexpr int q_rows() const { return attention_heads * head_dim * (attention_gate ? 2 : 1); }
  [[nodiscard]] constexpr int attention_width() const { return attention_heads * head_dim; }
  [[nodiscard]] constexpr int kv_width() const { return kv_heads * head_dim; }
  [[nodiscard]] constexpr int delta_key_width() const { return delta_key_heads * delta_key_dim; }
  [[nodiscard]] constexpr int delta_value_width() const { return delta_value_heads * delta_value_dim; }
  /// Channels of the causal convolution: q | k | v.
  [[nodiscard]] constexpr int delta_conv_channels() const {
    return 2 * delta_key_width() + delta_value_width();
  }
};

/// Two configurations describe one model up to the stored formats.
[[nodiscard]] constexpr bool same_shapes(model_config a, model_config b) {
  a.formats = b.formats = {};
  return a == b;
}

/// "8 layers (2 attention, 6 delta), hidden 256, 16 experts top-4, vocabulary 2048".
[[nodiscard]] std::string describe(const model_config& config);
/// "experts nvfp4, shared nvfp4, attention fp8, delta fp8, lm_head nvfp4".
[[nodiscard]] std::string describe(const module_formats& formats);

}  // namespace qwen3_moe
