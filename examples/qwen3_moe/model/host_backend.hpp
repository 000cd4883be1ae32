// SPDX-License-Identifier: Apache-2.0
/// \file
/// The forward pass's operations on the CPU: fp32 activations, weights as the checkpoint stores them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/model_runner.hpp"
#include "model/forward.hpp"
#include "model/model_config.hpp"
#include "nibble/core/host_arena.hpp"
#include "nibble/host/attention.hpp"
#include "nibble/host/experts.hpp"
#include "nibble/host/linear.hpp"
#include "nibble/host/norm.hpp"
#include "nibble/host/sequence_span.hpp"
#include "nibble/host/thread_pool.hpp"
#include "nibble/op/leaves.hpp"

namespace qwen3_moe {

/// A matrix of activations, rows dense.
struct host_tensor {
  float* data = nullptr;
  int rows = 0;
  int columns = 0;

  [[nodiscard]] float* row(int i) const { return data + static_cast<std::ptrdiff_t>(i) * columns; }
};

/// Activations, caches and the operations on them, for one model's sizes. The templates only unpack a leaf;
/// the work is in host_backend.cpp and nibble::host.
class host_backend {
 public:
  /// Reserves activations for limits.step_tokens rows, KV pages and states. Memory is committed as it is
  /// used.
  host_backend(const model_config& config, const runner_limits& limits, nibble::host::thread_pool& pool);

  /// Views of the weights that the operations want in another form than leaves: experts, convolution taps.
  template <class Config>
  void prepare(const causal_lm<Config>& lm) {
    for (int i = 0; i < Config::value.layers; ++i)
      lm.model.layers.visit(i, [&](const auto& layer) { prepare_layer(layer); });
  }

  /// Sets the rows of the next forward pass, and where the logits of the wanted ones go.
  void begin_step(std::span<const step_sequence> sequences, float* logits_out);
  void clear_slot(int slot);

  host_tensor hidden, qkv, qkvz, mixed, selected, logits;

  template <class Embedding>
  void embed(const Embedding& table, host_tensor& out) {
    embed_rows(table.data, Embedding::columns, out);
  }
  template <class Norm>
  [[nodiscard]] const host_tensor& normed(const Norm& norm, const host_tensor& x) {
    rms_norm(norm.weight.data, x, normed_);
    return normed_;
  }
  template <class Linear>
  void project(const Linear& weight, const host_tensor& x, host_tensor& y) {
    for (int i = 0; i < Linear::shape.segments(); ++i)
      project_segment(view(weight, i), x, y, Linear::shape.first_row_of(i));
  }
  template <class Linear>
  void project_and_add(const Linear& weight, const host_tensor& x, host_tensor& sum) {
    branch_.rows = x.rows;
    project(weight, x, branch_);
    add(branch_, sum);
  }
  template <class Attention>
  void attend(const Attention& op, layer_place place, host_tensor& qkv_rows, host_tensor& out) {
    attend_rows(op.q_norm.weight.data, op.k_norm.weight.data, place.of_its_kind, qkv_rows, out);
  }
  template <class DeltaNet>
  void apply_delta_rule(const DeltaNet& op, layer_place place, const host_tensor& x,
                        const host_tensor& qkvz_rows, host_tensor& out) {
    project(op.ba, x, ba_);
    delta_rows(op.a_log.data, op.dt_bias.data, op.norm.weight.data, place.of_its_kind, qkvz_rows, out);
  }
  template <class Experts, class Norm>
  void mix_experts(const Experts& op, layer_place place, const Norm& norm, host_tensor& sum) {
    const host_tensor& x = normed(norm, sum);
    project(op.router, x, router_logits_);
    expert_rows(place.layer, x, sum);
  }
  void select_wanted(const host_tensor& x, host_tensor& out);

 private:
  template <class Linear>
  [[nodiscard]] static nibble::host::weight_view view(const Linear& weight, int segment) {
    return view_of(weight.segments[static_cast<std::size_t>(segment)], Linear::shape.format,
                   Linear::shape.rows_of(segment), Linear::shape.k);
  }
  template <class Expert>
  [[nodiscard]] static nibble::host::expert_weights expert_view(const Expert& expert) {
    return {view(expert.gate_up, 0), view(expert.gate_up, 1), view(expert.down, 0)};
  }
  template <class Layer>
  void prepare_layer(const Layer& layer) {
    auto& place = layer_experts_.emplace_back();
    for (int e = 0; e < config_.experts; ++e) place.routed.push_back(expert_view(layer.mlp.experts[e]));
    if constexpr (std::remove_reference_t<decltype(layer.mlp)>::has_shared) {
      place.shared = expert_view(layer.mlp.shared.shared_expert);
      place.shared_gate = view(layer.mlp.shared.gate, 0);
    }
    if constexpr (requires { layer.linear_attn; }) add_taps(layer.linear_attn.conv1d.weight.data);
  }

  [[nodiscard]] static nibble::host::weight_view view_of(const nibble::matrix_segment& segment,
                                                         weight_format format, int rows, int k);
  void add_taps(const float* channel_major);
  void embed_rows(const std::uint16_t* table, int columns, host_tensor& out);
  void rms_norm(const float* weight, const host_tensor& x, host_tensor& y);
  void project_segment(const nibble::host::weight_view& weight, const host_tensor& x, host_tensor& y,
                       int first_column);
  void add(const host_tensor& x, host_tensor& sum);
  void attend_rows(const float* q_norm, const float* k_norm, int cache, host_tensor& qkv_rows,
                   host_tensor& out);
  void delta_rows(const float* a_log, const float* dt_bias, const float* norm, int cache,
                  const host_tensor& qkvz_rows, host_tensor& out);
  void expert_rows(int layer, const host_tensor& x, host_tensor& sum);

  [[nodiscard]] float* reserve(std::uint64_t floats);
  [[nodiscard]] host_tensor make_tensor(int columns, int most_rows);
  [[nodiscard]] std::uint64_t arena_bytes() const;
  [[nodiscard]] std::uint64_t kv_floats() const;           ///< keys of one layer
  [[nodiscard]] std::uint64_t delta_state_floats() const;  ///< of one slot and layer
  [[nodiscard]] std::uint64_t conv_state_floats() const;

  struct layer_weights {
    std::vector<nibble::host::expert_weights> routed;
    nibble::host::expert_weights shared;
    nibble::host::weight_view shared_gate;
  };
  struct delta_cache {
    float* state;  ///< [slots][value heads][key dim][value dim]
    float* conv;   ///< [slots][width - 1][channels]
  };

  model_config config_;
  runner_limits limits_;
  nibble::host::thread_pool& pool_;
  nibble::host::norm_weight norm_kind_;
  nibble::host_arena arena_;

  std::vector<layer_weights> layer_experts_;
  std::vector<std::vector<float>> conv_taps_;  ///< for each delta layer, [width][channels]
  std::vector<nibble::host::kv_cache_view> kv_caches_;
  std::vector<delta_cache> delta_caches_;
  std::vector<float> frequencies_;

  host_tensor normed_, ba_, branch_, router_logits_, convolved_, delta_;
  float *log_decay_ = nullptr, *beta_ = nullptr, *cosine_ = nullptr, *sine_ = nullptr,
        *expert_weight_ = nullptr;
  std::vector<std::int32_t> expert_ids_;

  std::vector<nibble::host::sequence_span> spans_;
  std::vector<std::int32_t> tokens_;
  std::vector<int> wanted_rows_;
};

}  // namespace qwen3_moe
