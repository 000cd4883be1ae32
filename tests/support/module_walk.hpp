// SPDX-License-Identifier: Apache-2.0
/// \file
/// Runs a model module by module on the host backend and on another one, each module of both on the same
/// input: what the other backend made of the module before. So an error is the module's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "model/forward.hpp"
#include "model/host_backend.hpp"
#include "nibble/host/experts.hpp"
#include "nibble/host/router.hpp"
#include "support/module_error.hpp"

namespace qwen3_moe::test {

/// What a backend's router left for the experts, one entry for each row.
struct routed_rows {
  std::vector<std::int32_t> ids;               ///< [rows][experts per token]
  std::vector<float> weights, shared_weights;  ///< [rows][experts per token], [rows]
  std::vector<float> normed;                   ///< [rows][hidden]
};

/// A leaf's segment, and an expert, as nibble::host takes them.
template <class Linear>
[[nodiscard]] nibble::host::weight_view host_view(const Linear& weight, int segment) {
  const auto& from = weight.segments[static_cast<std::size_t>(segment)];
  nibble::host::weight_view made;
  made.format = Linear::shape.format;
  made.data = from.weight;
  made.block_scales = reinterpret_cast<const std::uint8_t*>(from.block_scale);
  made.scale = from.global_scale;
  made.n = Linear::shape.rows_of(segment), made.k = Linear::shape.k;
  return made;
}
template <class Expert>
[[nodiscard]] nibble::host::expert_weights host_expert(const Expert& expert) {
  return {host_view(expert.gate_up, 0), host_view(expert.gate_up, 1), host_view(expert.down, 0)};
}
/// Of every layer.
template <class Config>
[[nodiscard]] std::vector<std::vector<nibble::host::expert_weights>> host_experts(
    const causal_lm<Config>& lm) {
  std::vector<std::vector<nibble::host::expert_weights>> all;
  for (int i = 0; i < Config::value.layers; ++i)
    lm.model.layers.visit(i, [&](const auto& layer) {
      auto& views = all.emplace_back();
      for (int e = 0; e < Config::value.experts; ++e) views.push_back(host_expert(layer.mlp.experts[e]));
    });
  return all;
}

/// \tparam Subject the other backend with what a test needs of it:
///   backend()  what forward() takes, lm() its weights, begin(sequences), clear_slot(slot),
///   read(activations)  their rows as floats, routed()  after mix_experts,
///   head(lm, rows)  the head's logits of all wanted rows
template <class Config, class Subject>
class module_walk {
  static constexpr model_config c = Config::value;

 public:
  module_walk(const causal_lm<Config>& lm, const runner_limits& limits, nibble::host::thread_pool& pool,
              Subject& subject, module_errors& errors)
      : lm_(lm),
        pool_(pool),
        subject_(subject),
        errors_(errors),
        host_(Config::value, limits, pool),
        experts_(host_experts(lm)) {
    host_.prepare(lm);
  }

  void clear_slot(int slot) {
    host_.clear_slot(slot);
    subject_.clear_slot(slot);
  }

  /// Sequences of one token first. \param kind names the step in the results
  void step(std::span<const step_sequence> sequences, const std::string& kind) {
    begin(sequences, kind);
    auto& s = subject_.backend();
    host_.embed(lm_.model.embed_tokens.table, host_.hidden);
    s.embed(subject_.lm().model.embed_tokens.table, s.hidden);
    compare("embedding", 0, host_.hidden, s.hidden);
    int attention_layers = 0, delta_layers = 0;
    for (int i = 0; i < c.layers; ++i) {
      int& of_its_kind = c.full_attention[static_cast<std::size_t>(i)] ? attention_layers : delta_layers;
      const layer_place place{i, of_its_kind++};
      lm_.model.layers.visit(i, [&](const auto& ours) {
        subject_.lm().model.layers.visit(i, [&](const auto& theirs) {
          if constexpr (std::is_same_v<decltype(ours), decltype(theirs)>) layer(ours, theirs, place);
        });
      });
    }
    load(host_.hidden, s.hidden);
    host_.select_wanted(host_.hidden, host_.selected);
    host_.project(lm_.lm_head, host_.normed(lm_.model.norm, host_.selected), host_.logits);
    errors_.add("head", kind_, rows_, 1, logits_, subject_.head(wanted_));
  }

  /// The whole forward pass of each backend on its own, from tokens to logits.
  /// \return for each wanted row |theirs - ours| / |ours|
  std::vector<double> whole(std::span<const step_sequence> sequences) {
    begin(sequences, "");
    forward(host_, lm_);
    forward(subject_.backend(), subject_.lm());
    const std::vector<float> theirs = subject_.read(subject_.backend().logits);
    std::vector<double> errors;
    for (int row = 0; row < wanted_; ++row) {
      double error = 0, size = 0;
      for (int i = 0; i < c.vocab_size; ++i) {
        const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(c.vocab_size) +
                        static_cast<std::size_t>(i);
        const double d = static_cast<double>(theirs.at(at)) - static_cast<double>(logits_[at]);
        error += d * d;
        size += static_cast<double>(logits_[at]) * static_cast<double>(logits_[at]);
      }
      errors.push_back(std::sqrt(error / size));
    }
    return errors;
  }

 private:
  void begin(std::span<const step_sequence> sequences, const std::string& kind) {
    kind_ = kind;
    rows_ = wanted_ = 0;
    for (const auto& s : sequences) {
      const int rows = static_cast<int>(s.tokens.size());
      rows_ += rows;
      wanted_ += s.logits == wanted_logits::all ? rows : s.logits == wanted_logits::last ? 1 : 0;
    }
    logits_.assign(static_cast<std::size_t>(wanted_) * static_cast<std::size_t>(c.vocab_size), std::nanf(""));
    host_.begin_step(sequences, logits_.data());
    subject_.begin(sequences);
  }

  template <class Layer>
  void layer(const Layer& ours, const Layer& theirs, layer_place place) {
    auto& s = subject_.backend();
    load(host_.hidden, s.hidden);
    const host_tensor& x = host_.normed(ours.input_layernorm, host_.hidden);
    const auto& their_x = s.normed(theirs.input_layernorm, s.hidden);
    if constexpr (requires { ours.self_attn; }) {
      host_.project(ours.self_attn.qkv, x, host_.qkv);
      s.project(theirs.self_attn.qkv, their_x, s.qkv);
      compare("norm and q, k, v", 2, host_.qkv, s.qkv);
      load(host_.qkv, s.qkv);
      host_.attend(ours.self_attn, place, host_.qkv, host_.mixed);
      s.attend(theirs.self_attn, place, s.qkv, s.mixed);
      // q, keys, values, the weights of the values, the output
      compare("attention", 5, host_.mixed, s.mixed);
      output_product(ours.self_attn.o_proj, theirs.self_attn.o_proj);
    } else {
      host_.project(ours.linear_attn.qkvz, x, host_.qkvz);
      s.project(theirs.linear_attn.qkvz, their_x, s.qkvz);
      compare("norm and q, k, v, z", 2, host_.qkvz, s.qkvz);
      load(host_.qkvz, s.qkvz);
      host_.apply_delta_rule(ours.linear_attn, place, x, host_.qkvz, host_.mixed);
      s.apply_delta_rule(theirs.linear_attn, place, their_x, s.qkvz, s.mixed);
      // the normalised rows of b and a, the output; two more where products run on tensor cores
      compare("delta rule", rows_ > 16 ? 4 : 2, host_.mixed, s.mixed);
      output_product(ours.linear_attn.out_proj, theirs.linear_attn.out_proj);
    }
    experts(ours, theirs, place);
  }

  template <class Linear>
  void output_product(const Linear& ours, const Linear& theirs) {
    auto& s = subject_.backend();
    load(host_.mixed, s.mixed);
    std::vector<float> branch(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(c.hidden_size));
    host_tensor out{branch.data(), rows_, c.hidden_size};
    host_.project(ours, host_.mixed, out);
    const std::vector<float> before = values(host_.hidden);
    s.project_and_add(theirs, s.mixed, s.hidden);
    // Only the sum is rounded, unless the products of a step of many rows meet in bf16.
    errors_.add("output product", kind_, rows_, 1, branch, subject_.read(s.hidden), before);
  }

  template <class Layer>
  void experts(const Layer& ours, const Layer& theirs, layer_place place) {
    auto& s = subject_.backend();
    load(host_.hidden, s.hidden);
    const std::vector<float> before = values(host_.hidden);
    const host_tensor& x = host_.normed(ours.post_attention_layernorm, host_.hidden);
    const auto rows = static_cast<std::size_t>(rows_), top_k = static_cast<std::size_t>(c.experts_per_token);
    std::vector<float> logits(rows * static_cast<std::size_t>(c.experts)), weights(rows * top_k), gate(rows);
    std::vector<std::int32_t> ids(rows * top_k);
    host_tensor to{logits.data(), rows_, c.experts};
    host_.project(ours.mlp.router, x, to);
    nibble::host::route(pool_, logits.data(), c.experts, rows_, c.experts, c.experts_per_token,
                        c.normalise_top_k, ids.data(), weights.data());
    s.mix_experts(theirs.mlp, place, theirs.post_attention_layernorm, s.hidden);
    const routed_rows routed = subject_.routed();
    errors_.add("norm", kind_, rows_, 1, values(x), routed.normed);
    const std::vector<bool> same =
        errors_.add_routing(kind_, rows_, c.experts, c.experts_per_token, logits, ids, routed.ids);
    compare_weights(same, ids, weights, routed);
    // The experts of both backends get the subject's rows and its choice.
    std::vector<float> branch(before.size());
    nibble::host::routed_experts(pool_, experts_[static_cast<std::size_t>(place.layer)], routed.ids.data(),
                                 routed.weights.data(), c.experts_per_token, routed.normed.data(),
                                 c.hidden_size, rows_, branch.data(), c.hidden_size);
    if constexpr (std::remove_cvref_t<decltype(ours.mlp)>::has_shared) {
      host_tensor gates{gate.data(), rows_, 1};
      host_.project(ours.mlp.shared.gate, x, gates);
      for (auto& g : gate) g = 1 / (1 + std::exp(-g));
      errors_.add("gate of the shared expert", kind_, rows_, 1, gate, routed.shared_weights);
      nibble::host::shared_expert(pool_, host_expert(ours.mlp.shared.shared_expert),
                                  host_view(ours.mlp.shared.gate, 0), routed.normed.data(), c.hidden_size,
                                  rows_, branch.data(), c.hidden_size);
    }
    // SwiGLU's rows, and each expert's result where a step has many rows.
    errors_.add("experts", kind_, rows_, rows_ > 16 ? 2 : 1, branch, subject_.read(s.hidden), before);
  }

  /// Weights of rows that went to the same experts, matched by expert.
  void compare_weights(const std::vector<bool>& same, std::span<const std::int32_t> ids,
                       std::span<const float> weights, const routed_rows& routed) {
    const auto top_k = static_cast<std::size_t>(c.experts_per_token);
    std::vector<float> ours, theirs;
    for (std::size_t r = 0; r < same.size(); ++r)
      for (std::size_t i = 0; same[r] && i < top_k; ++i) {
        const auto* first = routed.ids.data() + r * top_k;
        const auto at = static_cast<std::size_t>(std::find(first, first + top_k, ids[r * top_k + i]) - first);
        ours.push_back(weights[r * top_k + i]);
        theirs.push_back(routed.weights[r * top_k + at]);
      }
    if (!ours.empty()) errors_.add("router weights", kind_, rows_, 1, ours, theirs);
  }

  template <class Theirs>
  void compare(const char* module, int roundings, const host_tensor& ours, const Theirs& theirs) {
    errors_.add(module, kind_, rows_, roundings, values(ours), subject_.read(theirs));
  }
  template <class Theirs>
  void load(host_tensor& to, const Theirs& from) {
    const std::vector<float> rows = subject_.read(from);
    to.columns = from.columns;
    std::copy(rows.begin(), rows.end(), to.data);
  }
  static std::vector<float> values(const host_tensor& t) {
    return {t.data, t.data + static_cast<std::ptrdiff_t>(t.rows) * t.columns};
  }

  const causal_lm<Config>& lm_;
  nibble::host::thread_pool& pool_;
  Subject& subject_;
  module_errors& errors_;
  host_backend host_;
  std::vector<std::vector<nibble::host::expert_weights>> experts_;
  std::vector<float> logits_;
  std::string kind_;
  int rows_ = 0, wanted_ = 0;
};

}  // namespace qwen3_moe::test
