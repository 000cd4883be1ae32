// SPDX-License-Identifier: Apache-2.0
/// \file
/// The op tree of a Qwen3.5/3.6-MoE or Qwen3-MoE decoder. Member names are the checkpoint's.
///
/// `Config` is a type with `static constexpr model_config value`: a short name in symbols and errors for all
/// the numbers below.
#pragma once

#include <type_traits>

#include "model/model_config.hpp"
#include "nibble/geometry/geometry.hpp"
#include "nibble/op/containers.hpp"
#include "nibble/op/leaves.hpp"
#include "nibble/op/member.hpp"

namespace qwen3_moe {

using nibble::fused;
using nibble::linear;
using nibble::matrix;
using nibble::member;
using nibble::members;
using nibble::parameter;
using nibble::part;

/// The weight of an RMSNorm over `Width` values.
template <int Width>
struct norm_weight {
  parameter<"weight", Width> weight;
  using op_members = members<part<&norm_weight::weight>>;
};

/// Gated attention: q (with a gate beside each head, where the model has one), k, v; q and k are normalised.
template <class Config>
struct attention {
  static constexpr model_config c = Config::value;
  linear<fused(c.hidden_size, c.formats.attention_qkv, c.q_rows(), c.kv_width(), c.kv_width()), "q_proj",
         "k_proj", "v_proj">
      qkv;
  norm_weight<c.head_dim> q_norm;
  norm_weight<c.head_dim> k_norm;
  linear<matrix(c.hidden_size, c.attention_width(), c.formats.attention_out), "o_proj"> o_proj;
  using op_members = members<part<&attention::qkv>, member<"q_norm", &attention::q_norm>,
                             member<"k_norm", &attention::k_norm>, part<&attention::o_proj>>;
};

/// Gated DeltaNet: projections, causal convolution, decay and write strength, gated norm.
template <class Config>
struct delta_net {
  static constexpr model_config c = Config::value;
  linear<fused(c.hidden_size, c.formats.delta_qkvz, c.delta_conv_channels(), c.delta_value_width()),
         "in_proj_qkv", "in_proj_z">
      qkvz;
  linear<fused(c.hidden_size, weight_format::bf16, c.delta_value_heads, c.delta_value_heads), "in_proj_b",
         "in_proj_a">
      ba;
  struct convolution {
    parameter<"weight", c.delta_conv_channels(), 1, c.delta_conv_width> weight;
    using op_members = members<part<&convolution::weight>>;
  } conv1d;
  parameter<"A_log", c.delta_value_heads> a_log;
  parameter<"dt_bias", c.delta_value_heads> dt_bias;
  norm_weight<c.delta_value_dim> norm;
  linear<matrix(c.hidden_size, c.delta_value_width(), c.formats.delta_out), "out_proj"> out_proj;
  using op_members =
      members<part<&delta_net::qkvz>, part<&delta_net::ba>, member<"conv1d", &delta_net::conv1d>,
              part<&delta_net::a_log>, part<&delta_net::dt_bias>, member<"norm", &delta_net::norm>,
              part<&delta_net::out_proj>>;
};

/// One SwiGLU expert, down(silu(gate x) ⊙ up x).
template <int Hidden, int Intermediate, weight_format GateUp, weight_format Down>
struct expert {
  linear<fused(Hidden, GateUp, Intermediate, Intermediate), "gate_proj", "up_proj"> gate_up;
  linear<matrix(Hidden, Intermediate, Down), "down_proj"> down;
  using op_members = members<part<&expert::gate_up>, part<&expert::down>>;
};

template <class Config>
struct shared_expert_parts {
  static constexpr model_config c = Config::value;
  expert<c.hidden_size, c.shared_intermediate, c.formats.shared_gate_up, c.formats.shared_down> shared_expert;
  linear<matrix(1, c.hidden_size, weight_format::bf16), "shared_expert_gate"> gate;
  using op_members =
      members<member<"shared_expert", &shared_expert_parts::shared_expert>, part<&shared_expert_parts::gate>>;
};

namespace detail {
template <class Config, bool Present>
struct shared_or_absent {
  using type = shared_expert_parts<Config>;
};
template <class Config>
struct shared_or_absent<Config, false> {
  using type = nibble::absent_op;
};
}  // namespace detail

/// Router, routed experts, and the shared expert where the model has one.
template <class Config>
struct mixture_of_experts {
  static constexpr model_config c = Config::value;
  static constexpr bool has_shared = c.shared_intermediate > 0;
  linear<matrix(c.experts, c.hidden_size, weight_format::bf16), "gate"> router;
  nibble::op_list<
      expert<c.hidden_size, c.expert_intermediate, c.formats.expert_gate_up, c.formats.expert_down>,
      c.experts>
      experts;
  typename detail::shared_or_absent<Config, has_shared>::type shared;
  using op_members =
      members<part<&mixture_of_experts::router>, member<"experts", &mixture_of_experts::experts>,
              part<&mixture_of_experts::shared>>;
};

template <class Config>
struct attention_layer {
  static constexpr model_config c = Config::value;
  norm_weight<c.hidden_size> input_layernorm;
  attention<Config> self_attn;
  norm_weight<c.hidden_size> post_attention_layernorm;
  mixture_of_experts<Config> mlp;
  using op_members = members<member<"input_layernorm", &attention_layer::input_layernorm>,
                             member<"self_attn", &attention_layer::self_attn>,
                             member<"post_attention_layernorm", &attention_layer::post_attention_layernorm>,
                             member<"mlp", &attention_layer::mlp>>;
};

template <class Config>
struct delta_layer {
  static constexpr model_config c = Config::value;
  norm_weight<c.hidden_size> input_layernorm;
  delta_net<Config> linear_attn;
  norm_weight<c.hidden_size> post_attention_layernorm;
  mixture_of_experts<Config> mlp;
  using op_members = members<member<"input_layernorm", &delta_layer::input_layernorm>,
                             member<"linear_attn", &delta_layer::linear_attn>,
                             member<"post_attention_layernorm", &delta_layer::post_attention_layernorm>,
                             member<"mlp", &delta_layer::mlp>>;
};

/// Which layer is of which kind: 0 attention, 1 delta.
template <class Config>
struct layer_pattern {
  static constexpr int size = Config::value.layers;
  static constexpr int kind_at(int i) {
    return Config::value.full_attention[static_cast<std::size_t>(i)] ? 0 : 1;
  }
};

namespace detail {
/// A model without linear attention has no delta layer type: its sizes would be zero.
template <class Config, bool Hybrid>
struct layer_sequence {
  using type = nibble::op_sequence<layer_pattern<Config>, attention_layer<Config>, delta_layer<Config>>;
};
template <class Config>
struct layer_sequence<Config, false> {
  using type = nibble::op_sequence<layer_pattern<Config>, attention_layer<Config>>;
};
}  // namespace detail

template <class Config>
struct decoder {
  static constexpr model_config c = Config::value;
  struct token_embedding {
    nibble::embedding<"weight", c.vocab_size, c.hidden_size> table;
    using op_members = members<part<&token_embedding::table>>;
  } embed_tokens;
  typename detail::layer_sequence<Config, (c.delta_layers() > 0)>::type layers;
  norm_weight<c.hidden_size> norm;
  using op_members = members<member<"embed_tokens", &decoder::embed_tokens>,
                             member<"layers", &decoder::layers>, member<"norm", &decoder::norm>>;
};

/// The whole model: tensor names of the tree are "model.…" and "lm_head.…".
template <class Config>
struct causal_lm {
  static constexpr model_config c = Config::value;
  decoder<Config> model;
  linear<matrix(c.vocab_size, c.hidden_size, c.formats.lm_head), "lm_head"> lm_head;
  using op_members = members<member<"model", &causal_lm::model>, part<&causal_lm::lm_head>>;
};

}  // namespace qwen3_moe
