// SPDX-License-Identifier: Apache-2.0
#include "model/host_backend.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "nibble/core/bf16.hpp"
#include "nibble/core/checked.hpp"
#include "nibble/host/activation.hpp"
#include "nibble/host/conv.hpp"
#include "nibble/host/delta_rule.hpp"
#include "nibble/host/rope.hpp"
#include "nibble/host/router.hpp"

namespace qwen3_moe {

namespace host = nibble::host;

namespace {
constexpr float l2_norm_eps = 1e-6f;

std::uint64_t product(std::initializer_list<int> sizes) {
  std::uint64_t result = 1;
  for (const int size : sizes) {
    const auto next = nibble::checked_multiply(result, static_cast<std::uint64_t>(size));
    if (!next) throw nibble::out_of_memory("a cache of these sizes is over 2^64 elements");
    result = *next;
  }
  return result;
}
}  // namespace

std::uint64_t host_backend::kv_floats() const {
  return product({limits_.pages, config_.kv_heads, limits_.page_tokens, config_.head_dim});
}
std::uint64_t host_backend::delta_state_floats() const {
  return product({config_.delta_value_heads, config_.delta_key_dim, config_.delta_value_dim});
}
std::uint64_t host_backend::conv_state_floats() const {
  return config_.delta_layers() == 0 ? 0
                                     : product({config_.delta_conv_width - 1, config_.delta_conv_channels()});
}

std::uint64_t host_backend::arena_bytes() const {
  const auto slots = static_cast<std::uint64_t>(limits_.slots);
  const std::uint64_t cache_floats = static_cast<std::uint64_t>(config_.full_layers()) * 2 * kv_floats() +
                                     static_cast<std::uint64_t>(config_.delta_layers()) * slots *
                                         (delta_state_floats() + conv_state_floats());
  const int columns = 4 * config_.hidden_size + config_.q_rows() + 2 * config_.kv_width() +
                      2 * config_.delta_conv_channels() + 2 * config_.delta_value_width() +
                      4 * config_.delta_value_heads + config_.experts + config_.rotary_dim +
                      config_.experts_per_token +
                      std::max(config_.attention_width(), config_.delta_value_width());
  const std::uint64_t row_floats = product({limits_.step_tokens, columns});
  const std::uint64_t pieces = 32 + 4 * static_cast<std::uint64_t>(config_.layers);
  return 4 * (cache_floats + row_floats) + nibble::host_arena::alignment_bytes * pieces;
}

float* host_backend::reserve(std::uint64_t floats) {
  return reinterpret_cast<float*>(arena_.allocate(4 * floats).data());
}

host_tensor host_backend::make_tensor(int columns, int most_rows) {
  return {reserve(product({most_rows, columns})), 0, columns};
}

host_backend::host_backend(const model_config& config, const runner_limits& limits, host::thread_pool& pool)
    : config_(config),
      limits_(limits),
      pool_(pool),
      norm_kind_(config.zero_centred_norm ? host::norm_weight::zero_centred : host::norm_weight::plain),
      arena_(arena_bytes()),
      frequencies_(host::rope_frequencies(config.rope_theta, config.rotary_dim)) {
  const int rows = limits_.step_tokens;
  hidden = make_tensor(config_.hidden_size, rows);
  normed_ = make_tensor(config_.hidden_size, rows);
  selected = make_tensor(config_.hidden_size, rows);
  branch_ = make_tensor(config_.hidden_size, rows);
  qkv = make_tensor(config_.q_rows() + 2 * config_.kv_width(), rows);
  mixed = make_tensor(std::max(config_.attention_width(), config_.delta_value_width()), rows);
  router_logits_ = make_tensor(config_.experts, rows);
  expert_weight_ = make_tensor(config_.experts_per_token, rows).data;
  cosine_ = make_tensor(config_.rotary_dim / 2, rows).data;
  sine_ = make_tensor(config_.rotary_dim / 2, rows).data;
  expert_ids_.resize(product({rows, config_.experts_per_token}));
  if (config_.delta_layers() > 0) {
    qkvz = make_tensor(config_.delta_conv_channels() + config_.delta_value_width(), rows);
    ba_ = make_tensor(2 * config_.delta_value_heads, rows);
    convolved_ = make_tensor(config_.delta_conv_channels(), rows);
    delta_ = make_tensor(config_.delta_value_width(), rows);
    log_decay_ = make_tensor(config_.delta_value_heads, rows).data;
    beta_ = make_tensor(config_.delta_value_heads, rows).data;
  }
  for (int i = 0; i < config_.full_layers(); ++i)
    kv_caches_.push_back({reserve(kv_floats()), reserve(kv_floats()), host::kv_format::f32, limits_.pages,
                          config_.kv_heads, limits_.page_tokens, config_.head_dim});
  const auto slots = static_cast<std::uint64_t>(limits_.slots);
  for (int i = 0; i < config_.delta_layers(); ++i)
    delta_caches_.push_back({reserve(slots * delta_state_floats()), reserve(slots * conv_state_floats())});
}

host::weight_view host_backend::view_of(const nibble::matrix_segment& segment, weight_format format, int rows,
                                        int k) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(segment.weight);
  switch (format) {
    case weight_format::bf16:
      return host::bf16_view{reinterpret_cast<const std::uint16_t*>(segment.weight), rows, k};
    case weight_format::fp8:
      return host::fp8_view{bytes, segment.global_scale, rows, k};
    case weight_format::nvfp4:
      return host::nvfp4_view{bytes, reinterpret_cast<const std::uint8_t*>(segment.block_scale),
                              segment.global_scale, rows, k};
  }
  throw nibble::error("unknown weight format");
}

void host_backend::add_taps(const float* channel_major) {
  const auto channels = static_cast<std::size_t>(config_.delta_conv_channels());
  const auto width = static_cast<std::size_t>(config_.delta_conv_width);
  auto& taps = conv_taps_.emplace_back(channels * width);
  for (std::size_t c = 0; c < channels; ++c)
    for (std::size_t j = 0; j < width; ++j) taps[j * channels + c] = channel_major[c * width + j];
}

void host_backend::begin_step(std::span<const step_sequence> sequences, float* logits_out) {
  spans_.clear();
  tokens_.clear();
  wanted_rows_.clear();
  for (const auto& sequence : sequences) {
    const int first = static_cast<int>(tokens_.size());
    const int rows = static_cast<int>(sequence.tokens.size());
    spans_.push_back({first, rows, sequence.position, sequence.slot, sequence.pages.data()});
    tokens_.insert(tokens_.end(), sequence.tokens.begin(), sequence.tokens.end());
    if (sequence.logits == wanted_logits::all)
      for (int i = 0; i < rows; ++i) wanted_rows_.push_back(first + i);
    else if (sequence.logits == wanted_logits::last)
      wanted_rows_.push_back(first + rows - 1);
  }
  const int rows = static_cast<int>(tokens_.size());
  for (host_tensor* tensor :
       {&hidden, &qkv, &qkvz, &mixed, &ba_, &branch_, &router_logits_, &convolved_, &delta_})
    tensor->rows = rows;
  selected.rows = static_cast<int>(wanted_rows_.size());
  logits = {logits_out, selected.rows, config_.vocab_size};
  host::rope_angles(spans_, frequencies_, cosine_, sine_);
}

void host_backend::clear_slot(int slot) {
  for (const auto& cache : delta_caches_) {
    std::fill_n(cache.state + static_cast<std::uint64_t>(slot) * delta_state_floats(), delta_state_floats(),
                0.0f);
    std::fill_n(cache.conv + static_cast<std::uint64_t>(slot) * conv_state_floats(), conv_state_floats(),
                0.0f);
  }
}

void host_backend::embed_rows(const std::uint16_t* table, int columns, host_tensor& out) {
  pool_.parallel_for(out.rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const std::uint16_t* from =
          table + static_cast<std::int64_t>(tokens_[static_cast<std::size_t>(i)]) * columns;
      float* to = out.row(static_cast<int>(i));
      for (int j = 0; j < columns; ++j) to[j] = nibble::bf16::decode(from[j]);
    }
  });
}

void host_backend::rms_norm(const float* weight, const host_tensor& x, host_tensor& y) {
  y.rows = x.rows;
  host::rms_norm(pool_, x.data, x.columns, weight, norm_kind_, static_cast<float>(config_.norm_eps), x.rows,
                 x.columns, y.data, y.columns);
}

void host_backend::project_segment(const host::weight_view& weight, const host_tensor& x, host_tensor& y,
                                   int first_column) {
  host::linear(pool_, weight, x.data, x.columns, x.rows, y.data + first_column, y.columns);
}

void host_backend::add(const host_tensor& x, host_tensor& sum) {
  pool_.parallel_for(x.rows, 16, [&](std::int64_t begin, std::int64_t end) {
    const auto columns = static_cast<std::size_t>(x.columns);
    host::add(sum.row(static_cast<int>(begin)), x.row(static_cast<int>(begin)),
              static_cast<std::size_t>(end - begin) * columns);
  });
}

void host_backend::attend_rows(const float* q_norm, const float* k_norm, int cache, host_tensor& qkv_rows,
                               host_tensor& out) {
  const int dim = config_.head_dim;
  const std::ptrdiff_t stride = qkv_rows.columns;
  const std::ptrdiff_t q_head_stride = config_.attention_gate ? 2 * dim : dim;
  const auto eps = static_cast<float>(config_.norm_eps);
  float* q = qkv_rows.data;
  float* k = q + config_.q_rows();
  float* v = k + config_.kv_width();
  const int rows = qkv_rows.rows;
  host::head_rms_norm(pool_, q, stride, q_head_stride, q_norm, norm_kind_, eps, rows, config_.attention_heads,
                      dim);
  host::head_rms_norm(pool_, k, stride, dim, k_norm, norm_kind_, eps, rows, config_.kv_heads, dim);
  const int half = config_.rotary_dim / 2;
  host::rope(pool_, q, stride, q_head_stride, rows, config_.attention_heads, half, cosine_, sine_);
  host::rope(pool_, k, stride, dim, rows, config_.kv_heads, half, cosine_, sine_);
  const auto& pages = kv_caches_[static_cast<std::size_t>(cache)];
  host::append_kv(pool_, pages, spans_, k, stride, v, stride);
  host::attention_input input;
  input.q = q;
  input.q_row_stride = stride;
  input.q_head_stride = q_head_stride;
  if (config_.attention_gate) {
    input.gate = q + dim;
    input.gate_row_stride = stride;
    input.gate_head_stride = q_head_stride;
  }
  input.heads = config_.attention_heads;
  input.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  out.columns = config_.attention_width();
  host::attention(pool_, pages, spans_, input, out.data, out.columns);
}

void host_backend::delta_rows(const float* a_log, const float* dt_bias, const float* norm, int cache,
                              const host_tensor& qkvz_rows, host_tensor& out) {
  const auto& [state, conv] = delta_caches_[static_cast<std::size_t>(cache)];
  const int rows = qkvz_rows.rows, heads = config_.delta_value_heads,
            channels = config_.delta_conv_channels();
  const int key_width = config_.delta_key_width();
  host::causal_conv_silu(pool_, spans_, qkvz_rows.data, qkvz_rows.columns,
                         conv_taps_[static_cast<std::size_t>(cache)].data(), config_.delta_conv_width,
                         channels, conv, convolved_.data, channels);
  float* q = convolved_.data;
  float* k = q + key_width;
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(config_.delta_key_dim));
  host::l2_norm(pool_, q, channels, l2_norm_eps, q_scale, rows, config_.delta_key_heads,
                config_.delta_key_dim);
  host::l2_norm(pool_, k, channels, l2_norm_eps, 1.0f, rows, config_.delta_key_heads, config_.delta_key_dim);
  const float* b = ba_.data;
  const float* a = b + heads;
  host::delta_rule_gates(a, ba_.columns, b, ba_.columns, a_log, dt_bias, rows, heads, log_decay_, beta_);
  const host::delta_rule_shape shape{config_.delta_key_heads, heads, config_.delta_key_dim,
                                     config_.delta_value_dim};
  const host::delta_rule_input input{q, k, k + key_width, channels, log_decay_, beta_};
  host::delta_rule_recurrent(pool_, spans_, shape, input, state, delta_.data, delta_.columns);
  out.columns = config_.delta_value_width();
  host::gated_rms_norm(pool_, delta_.data, delta_.columns, qkvz_rows.data + channels, qkvz_rows.columns, norm,
                       static_cast<float>(config_.norm_eps), rows, heads, config_.delta_value_dim, out.data,
                       out.columns);
}

void host_backend::expert_rows(int layer, const host_tensor& x, host_tensor& sum) {
  const auto& weights = layer_experts_[static_cast<std::size_t>(layer)];
  host::route(pool_, router_logits_.data, router_logits_.columns, x.rows, config_.experts,
              config_.experts_per_token, config_.normalise_top_k, expert_ids_.data(), expert_weight_);
  host::routed_experts(pool_, weights.routed, expert_ids_.data(), expert_weight_, config_.experts_per_token,
                       x.data, x.columns, x.rows, branch_.data, branch_.columns);
  if (config_.shared_intermediate > 0)
    host::shared_expert(pool_, weights.shared, weights.shared_gate, x.data, x.columns, x.rows, branch_.data,
                        branch_.columns);
  branch_.rows = x.rows;
  add(branch_, sum);
}

void host_backend::select_wanted(const host_tensor& x, host_tensor& out) {
  for (std::size_t i = 0; i < wanted_rows_.size(); ++i)
    std::memcpy(out.row(static_cast<int>(i)), x.row(wanted_rows_[i]),
                sizeof(float) * static_cast<std::size_t>(x.columns));
}

}  // namespace qwen3_moe
