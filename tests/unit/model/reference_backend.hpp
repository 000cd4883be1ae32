// SPDX-License-Identifier: Apache-2.0
/// \file
/// The forward pass's operations by nibble::ref in fp64: one sequence, all of it in one step, no caches.
#pragma once

#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "model/forward.hpp"
#include "nibble/core/bf16.hpp"
#include "nibble/ref/attention.hpp"
#include "nibble/ref/conv.hpp"
#include "nibble/ref/delta_rule.hpp"
#include "nibble/ref/experts.hpp"
#include "nibble/ref/matrix.hpp"
#include "nibble/ref/norm.hpp"
#include "nibble/ref/rope.hpp"
#include "nibble/ref/router.hpp"

namespace qwen3_moe::test {

namespace ref = nibble::ref;

class reference_backend {
 public:
  using tensor = std::vector<double>;

  reference_backend(const model_config& config, std::span<const std::int32_t> tokens)
      : c_(config), tokens_(tokens.begin(), tokens.end()), positions_(tokens.size()) {
    std::iota(positions_.begin(), positions_.end(), 0);
  }

  tensor hidden, qkv, qkvz, mixed, selected, logits;

  template <class Embedding>
  void embed(const Embedding& table, tensor& out) {
    out.clear();
    for (const auto token : tokens_)
      for (int j = 0; j < Embedding::columns; ++j)
        out.push_back(nibble::bf16::decode(table.data[token * Embedding::columns + j]));
  }
  template <class Norm>
  [[nodiscard]] tensor normed(const Norm& norm, const tensor& x) {
    return ref::rms_norm(x, values_of(norm.weight), c_.zero_centred_norm, c_.norm_eps);
  }
  template <class Linear>
  void project(const Linear& weight, const tensor& x, tensor& y) {
    constexpr int segments = Linear::shape.segments();
    std::vector<tensor> parts;
    for (int i = 0; i < segments; ++i) parts.push_back(ref::linear(decode(weight, i), x, rows()));
    y.clear();
    for (int row = 0; row < rows(); ++row)
      for (int i = 0; i < segments; ++i) {
        const auto begin = parts[static_cast<std::size_t>(i)].begin() + row * Linear::shape.rows_of(i);
        y.insert(y.end(), begin, begin + Linear::shape.rows_of(i));
      }
  }
  template <class Linear>
  void project_and_add(const Linear& weight, const tensor& x, tensor& sum) {
    tensor branch;
    project(weight, x, branch);
    add(branch, sum);
  }
  template <class Attention>
  void attend(const Attention& op, layer_place, const tensor& qkv_rows, tensor& out) {
    const int dim = c_.head_dim, width = c_.q_rows() + 2 * c_.kv_width();
    const int head_stride = c_.attention_gate ? 2 * dim : dim;
    tensor q, gate, k, v;
    for (int row = 0; row < rows(); ++row) {
      const double* at = qkv_rows.data() + row * width;
      for (int head = 0; head < c_.attention_heads; ++head) {
        q.insert(q.end(), at + head * head_stride, at + head * head_stride + dim);
        if (c_.attention_gate)
          gate.insert(gate.end(), at + head * head_stride + dim, at + (head + 1) * head_stride);
      }
      k.insert(k.end(), at + c_.q_rows(), at + c_.q_rows() + c_.kv_width());
      v.insert(v.end(), at + c_.q_rows() + c_.kv_width(), at + width);
    }
    q = ref::rms_norm(q, values_of(op.q_norm.weight), c_.zero_centred_norm, c_.norm_eps);
    k = ref::rms_norm(k, values_of(op.k_norm.weight), c_.zero_centred_norm, c_.norm_eps);
    q = ref::rope(q, positions_, c_.attention_heads, dim, c_.rotary_dim, c_.rope_theta);
    k = ref::rope(k, positions_, c_.kv_heads, dim, c_.rotary_dim, c_.rope_theta);
    out = ref::attention(q, gate, k, v, {c_.attention_heads, c_.kv_heads, dim}, 1.0 / std::sqrt(dim));
  }
  template <class DeltaNet>
  void apply_delta_rule(const DeltaNet& op, layer_place, const tensor& normed_rows, const tensor& qkvz_rows,
                        tensor& out) {
    tensor ba_rows;
    project(op.ba, normed_rows, ba_rows);
    const int channels = c_.delta_conv_channels(), width = channels + c_.delta_value_width(),
              heads = c_.delta_value_heads;
    tensor x, z, a, beta;
    for (int row = 0; row < rows(); ++row) {
      const double* at = qkvz_rows.data() + row * width;
      x.insert(x.end(), at, at + channels);
      z.insert(z.end(), at + channels, at + width);
      const double* gates = ba_rows.data() + row * 2 * heads;
      for (int h = 0; h < heads; ++h) beta.push_back(ref::sigmoid(gates[h])), a.push_back(gates[heads + h]);
    }
    tensor history(static_cast<std::size_t>((c_.delta_conv_width - 1) * channels), 0.0);
    x = ref::causal_conv_silu(x, values_of(op.conv1d.weight), c_.delta_conv_width, channels, history);
    tensor q, k, v;
    for (int row = 0; row < rows(); ++row) {
      const double* at = x.data() + row * channels;
      q.insert(q.end(), at, at + c_.delta_key_width());
      k.insert(k.end(), at + c_.delta_key_width(), at + 2 * c_.delta_key_width());
      v.insert(v.end(), at + 2 * c_.delta_key_width(), at + channels);
    }
    q = ref::l2_norm(q, c_.delta_key_dim, 1e-6, 1.0 / std::sqrt(c_.delta_key_dim));
    k = ref::l2_norm(k, c_.delta_key_dim, 1e-6, 1.0);
    const tensor decay = ref::delta_rule_log_decay(a, values_of(op.a_log), values_of(op.dt_bias));
    tensor state(static_cast<std::size_t>(heads * c_.delta_key_dim * c_.delta_value_dim), 0.0);
    const tensor o = ref::delta_rule(
        q, k, v, decay, beta, {c_.delta_key_heads, heads, c_.delta_key_dim, c_.delta_value_dim}, state);
    out = ref::gated_rms_norm(o, z, values_of(op.norm.weight), c_.norm_eps);
  }
  template <class Experts, class Norm>
  void mix_experts(const Experts& op, layer_place, const Norm& norm, tensor& sum) {
    const tensor x = normed(norm, sum);
    tensor router_logits;
    project(op.router, x, router_logits);
    const auto routing = ref::route(router_logits, c_.experts, c_.experts_per_token, c_.normalise_top_k);
    std::vector<ref::expert> experts;
    for (int e = 0; e < c_.experts; ++e) experts.push_back(expert_of(op.experts[e]));
    tensor branch =
        ref::routed_experts(experts, routing.ids, routing.weights, c_.experts_per_token, x, rows());
    if constexpr (Experts::has_shared)
      add(ref::shared_expert(expert_of(op.shared.shared_expert), decode(op.shared.gate, 0), x, rows()),
          branch);
    add(branch, sum);
  }
  void select_wanted(const tensor& x, tensor& out) { out = x; }

 private:
  [[nodiscard]] int rows() const { return static_cast<int>(tokens_.size()); }
  static void add(const tensor& x, tensor& sum) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
  }
  template <class Parameter>
  static tensor values_of(const Parameter& parameter) {
    return {parameter.data, parameter.data + Parameter::elements};
  }
  template <class Linear>
  static ref::matrix decode(const Linear& weight, int segment) {
    const auto& s = weight.segments[static_cast<std::size_t>(segment)];
    const int n = Linear::shape.rows_of(segment), k = Linear::shape.k;
    const auto elements = static_cast<std::size_t>(n) * static_cast<std::size_t>(k);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(s.weight);
    if constexpr (Linear::shape.format == weight_format::nvfp4)
      return ref::decode_nvfp4({bytes, elements / 2},
                               {reinterpret_cast<const std::uint8_t*>(s.block_scale), elements / 16},
                               s.global_scale, n, k);
    else if constexpr (Linear::shape.format == weight_format::fp8)
      return ref::decode_fp8({bytes, elements}, s.global_scale, n, k);
    else
      return ref::decode_bf16({reinterpret_cast<const std::uint16_t*>(s.weight), elements}, n, k);
  }
  template <class Expert>
  static ref::expert expert_of(const Expert& expert) {
    return {decode(expert.gate_up, 0), decode(expert.gate_up, 1), decode(expert.down, 0)};
  }

  model_config c_;
  std::vector<std::int32_t> tokens_;
  std::vector<int> positions_;
};

}  // namespace qwen3_moe::test
