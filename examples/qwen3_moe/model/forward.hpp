// SPDX-License-Identifier: Apache-2.0
/// \file
/// The forward pass, written once over a backend.
///
/// A backend is a type with the operations and activations used below. Activations are matrices of its own
/// type with one row for each token of the step (`selected` and `logits`: one for each wanted row); a backend
/// decides element type, place and fusion. The residual stream is `hidden`; what ends a branch adds to it.
/// `normed` yields whatever the backend's operations take as normalised rows: a matrix, or a promise that the
/// operation itself keeps.
#pragma once

#include "model/model.hpp"

namespace qwen3_moe {

/// Where a layer's caches are: its number among the attention or among the delta layers.
struct layer_place {
  int layer;  ///< in the model
  int of_its_kind;
};

template <class Backend, class Config, class Rows>
void run_mixer(Backend& backend, const attention_layer<Config>& layer, layer_place place,
               const Rows& normed) {
  backend.project(layer.self_attn.qkv, normed, backend.qkv);
  backend.attend(layer.self_attn, place, backend.qkv, backend.mixed);
  backend.project_and_add(layer.self_attn.o_proj, backend.mixed, backend.hidden);
}

template <class Backend, class Config, class Rows>
void run_mixer(Backend& backend, const delta_layer<Config>& layer, layer_place place, const Rows& normed) {
  backend.project(layer.linear_attn.qkvz, normed, backend.qkvz);
  backend.apply_delta_rule(layer.linear_attn, place, normed, backend.qkvz, backend.mixed);
  backend.project_and_add(layer.linear_attn.out_proj, backend.mixed, backend.hidden);
}

/// One step: embeds the batch's tokens, runs every layer, and leaves the logits of the wanted rows in
/// `backend.logits`. Caches are extended by the batch's rows.
template <class Backend, class Config>
void forward(Backend& backend, const causal_lm<Config>& lm) {
  constexpr const model_config& c = Config::value;
  backend.embed(lm.model.embed_tokens.table, backend.hidden);
  int attention_layers = 0, delta_layers = 0;
  for (int i = 0; i < c.layers; ++i) {
    int& of_its_kind = c.full_attention[static_cast<std::size_t>(i)] ? attention_layers : delta_layers;
    const layer_place place{i, of_its_kind++};
    lm.model.layers.visit(i, [&](const auto& layer) {
      run_mixer(backend, layer, place, backend.normed(layer.input_layernorm, backend.hidden));
      backend.mix_experts(layer.mlp, place, layer.post_attention_layernorm, backend.hidden);
    });
  }
  backend.select_wanted(backend.hidden, backend.selected);
  backend.project(lm.lm_head, backend.normed(lm.model.norm, backend.selected), backend.logits);
}

}  // namespace qwen3_moe
