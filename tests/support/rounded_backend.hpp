// SPDX-License-Identifier: Apache-2.0
/// \file
/// The host backend with activations rounded to bf16 wherever a GPU keeps them so: what rounding alone costs.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "model/host_backend.hpp"
#include "nibble/core/bf16.hpp"
#include "nibble/host/router.hpp"
#include "support/module_walk.hpp"

namespace qwen3_moe::test {

/// A subject of module_walk that needs no device.
template <class Config>
class rounded_backend {
  static constexpr model_config c = Config::value;

 public:
  rounded_backend(const causal_lm<Config>& lm, const runner_limits& limits, nibble::host::thread_pool& pool)
      : lm_(lm), pool_(pool), host_(Config::value, limits, pool), experts_(host_experts(lm)) {
    host_.prepare(lm);
  }

  // What module_walk asks for.
  [[nodiscard]] rounded_backend& backend() { return *this; }
  [[nodiscard]] const causal_lm<Config>& lm() const { return lm_; }
  void clear_slot(int slot) { host_.clear_slot(slot); }
  void begin(std::span<const step_sequence> sequences) {
    int rows = 0, wanted = 0;
    for (const auto& s : sequences) {
      const int count = static_cast<int>(s.tokens.size());
      rows += count;
      wanted += s.logits == wanted_logits::all ? count : s.logits == wanted_logits::last ? 1 : 0;
    }
    logits_memory_.assign(static_cast<std::size_t>(wanted) * static_cast<std::size_t>(c.vocab_size), 0.0f);
    normed_memory_.assign(
        static_cast<std::size_t>(std::max(rows, 1)) * static_cast<std::size_t>(c.hidden_size), 0.0f);
    host_.begin_step(sequences, logits_memory_.data());
  }
  [[nodiscard]] std::vector<float> read(const host_tensor& t) const {
    return {t.data, t.data + static_cast<std::ptrdiff_t>(t.rows) * t.columns};
  }
  [[nodiscard]] routed_rows routed() const { return routed_; }
  [[nodiscard]] std::vector<float> head(int) {
    select_wanted(hidden, selected);
    project(lm_.lm_head, normed(lm_.model.norm, selected), logits);
    return read(logits);
  }

  // What forward() asks for.
  void embed(const auto& table, host_tensor& out) { host_.embed(table, out); }
  [[nodiscard]] const host_tensor& normed(const auto& norm, const host_tensor& x) {
    const host_tensor& y = host_.normed(norm, x);
    normed_ = {normed_memory_.data(), y.rows, y.columns};
    std::copy(y.data, y.row(y.rows), normed_.data);
    round(normed_);
    return normed_;
  }
  void project(const auto& weight, const host_tensor& x, host_tensor& y) {
    host_.project(weight, x, y);
    if (y.data != host_.logits.data) round(y);
  }
  void project_and_add(const auto& weight, const host_tensor& x, host_tensor& sum) {
    host_.project_and_add(weight, x, sum);
    round(sum);
  }
  void attend(const auto& op, layer_place place, host_tensor& rows, host_tensor& out) {
    host_.attend(op, place, rows, out);
    round(out);
  }
  void apply_delta_rule(const auto& op, layer_place place, const host_tensor& x, const host_tensor& rows,
                        host_tensor& out) {
    host_.apply_delta_rule(op, place, x, rows, out);
    round(out);
  }
  template <class Experts>
  void mix_experts(const Experts& op, layer_place place, const auto& norm, host_tensor& sum) {
    const host_tensor& x = normed(norm, sum);
    const auto rows = static_cast<std::size_t>(x.rows), top_k = static_cast<std::size_t>(c.experts_per_token);
    std::vector<float> logits_rows(rows * static_cast<std::size_t>(c.experts)),
        branch(rows * static_cast<std::size_t>(c.hidden_size));
    host_tensor to{logits_rows.data(), x.rows, c.experts};
    host_.project(op.router, x, to);
    routed_.ids.assign(rows * top_k, 0);
    routed_.weights.assign(rows * top_k, 0.0f);
    nibble::host::route(pool_, to.data, c.experts, x.rows, c.experts, c.experts_per_token, c.normalise_top_k,
                        routed_.ids.data(), routed_.weights.data());
    routed_.normed = read(x);
    nibble::host::routed_experts(pool_, experts_[static_cast<std::size_t>(place.layer)], routed_.ids.data(),
                                 routed_.weights.data(), c.experts_per_token, x.data, x.columns, x.rows,
                                 branch.data(), c.hidden_size);
    if constexpr (Experts::has_shared) {
      routed_.shared_weights.assign(rows, 0.0f);
      host_tensor gates{routed_.shared_weights.data(), x.rows, 1};
      host_.project(op.shared.gate, x, gates);
      for (auto& g : routed_.shared_weights) g = 1 / (1 + std::exp(-g));
      nibble::host::shared_expert(pool_, host_expert(op.shared.shared_expert), host_view(op.shared.gate, 0),
                                  x.data, x.columns, x.rows, branch.data(), c.hidden_size);
    }
    for (std::size_t i = 0; i < branch.size(); ++i) sum.data[i] += branch[i];
    round(sum);
  }
  void select_wanted(const host_tensor& x, host_tensor& out) { host_.select_wanted(x, out); }

 private:
  static void round(host_tensor& t) {
    for (float* v = t.row(0); v != t.row(t.rows); ++v) *v = nibble::bf16::decode(nibble::bf16::encode(*v));
  }

  const causal_lm<Config>& lm_;
  nibble::host::thread_pool& pool_;
  host_backend host_;
  std::vector<std::vector<nibble::host::expert_weights>> experts_;
  std::vector<float> logits_memory_, normed_memory_;
  host_tensor normed_;
  routed_rows routed_;

 public:
  host_tensor &hidden = host_.hidden, &qkv = host_.qkv, &qkvz = host_.qkvz, &mixed = host_.mixed,
              &selected = host_.selected, &logits = host_.logits;
};

}  // namespace qwen3_moe::test
