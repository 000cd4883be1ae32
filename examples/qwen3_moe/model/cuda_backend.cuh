// SPDX-License-Identifier: Apache-2.0
/// \file
/// The forward pass's operations on a GPU: bf16 activations, resident tiles, paged KV, recurrent states.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "model/cuda_families.cuh"
#include "model/device_rows.cuh"
#include "model/device_workspace.hpp"
#include "model/forward.hpp"
#include "model/routed_ids.cuh"
#include "model/router_ahead.cuh"
#include "nibble/graph/op_scope.hpp"

namespace qwen3_moe {

/// Activations and the operations on them. Launches only; never allocates, waits or throws: the first status
/// that is not good ends the step and is kept.
template <class Config, nibble::kv_format Kv, nibble::device_class Device>
class cuda_backend {
  static constexpr model_config c = Config::value;

 public:
  using shapes = cuda_shapes<Config, Kv, Device>;
  using families = cuda_families<Config, Kv, Device>;
  using launcher = nibble::launcher<typename families::table>;
  using offload_type = nibble::moe::expert_offload<shapes::residency>;

  cuda_backend() = default;
  /// \param workspace device_workspace_of(…).bytes, zeroed
  cuda_backend(const device_sizes& sizes, std::byte* workspace, cudaStream_t stream)
      : sizes_(sizes), layout_{sizes.step_tokens, sizes.sequences} {
    options_.stream = stream;
    options_.chain = nibble::chain_of(Device);
    const device_workspace w = device_workspace_of(c, Kv, sizes, Device);
    const auto at = [workspace]<class T>(T*& pointer, std::uint64_t offset) {
      pointer = reinterpret_cast<T*>(workspace + offset);
    };
    hidden.columns = c.hidden_size;
    at(hidden.data, w.hidden);
    at(qkv.data, w.projected);
    at(qkvz.data, w.projected);
    at(mixed.data, w.mixed);
    at(normed_, w.normed);
    at(step_words_, w.step_words);
    at(page_table_, w.page_table);
    at(expert_ids_, w.expert_ids);
    at(expert_weights_, w.expert_weights);
    at(shared_weights_, w.shared_weights);
    at(expert_h_, w.expert_h);
    at(experts_workspace_, w.experts);
    experts_workspace_bytes_ = w.experts_bytes;
    at(shared_h_, w.shared_h);
    at(router_workspace_, w.router);
    at(attention_workspace_, w.attention);
    attention_layout_ = w.attention_layout;
    at(delta_workspace_, w.delta);
    at(inverse_frequencies_, w.inverse_frequencies);
    at(logits_, w.logits);
    at(previous_, w.previous);
  }

  device_rows hidden, qkv, qkvz, mixed;
  selected_rows selected;
  device_logits logits;

  // What the caches' owner sets.
  std::byte* kv_pages = nullptr;
  std::byte* states = nullptr;
  device_experts experts;
  const offload_type* offload = nullptr;  ///< brings experts; null where all are resident
  cudaStream_t side = nullptr;            ///< a second stream to fetch on
  /// Experts of the next layer that small steps may fetch ahead; 0: none. Needs what follows.
  int ahead_limit = 0;
  /// The next layer's router as a layer applies it to at most most_ahead_rows rows; none for the last layer.
  std::array<nibble::router_operands, static_cast<std::size_t>(c.layers)> next_routers{};
  /// Puts a benchmark's ids in the place of the router's, so that routing follows a trace.
  router_hook after_router = nullptr;
  void* after_router_self = nullptr;
  /// The name of an op that is not launched: what a benchmark subtracts. Null: every op is.
  const char* left_out = nullptr;

  /// Words of the step on the device, laid out by device_step_layout; the page table.
  [[nodiscard]] std::int32_t* step_words() const { return step_words_; }
  [[nodiscard]] std::int32_t* page_table() const { return page_table_; }
  [[nodiscard]] const device_step_layout& step_layout() const { return layout_; }
  [[nodiscard]] cudaStream_t stream() const { return options_.stream; }
  [[nodiscard]] const nibble::status& result() const { return status_; }
  [[nodiscard]] float* logits_buffer() const { return logits_; }
  [[nodiscard]] float* inverse_frequencies() const {
    return inverse_frequencies_;
  }  ///< [rotary_dim / 2], to fill

  static constexpr std::size_t page_bytes = kv_page_bytes_of(c, Kv);
  static constexpr std::size_t slot_state_bytes = state_slot_bytes_of(c);

  /// Sets the shape of the next forward pass; its arrays are on the device when it runs.
  void begin_step(int rows, int decodes, int sequences) {
    rows_ = rows, decodes_ = decodes, sequences_ = sequences;
    hidden.rows = qkv.rows = qkvz.rows = mixed.rows = rows;
    want_all_rows();
    status_ = {};
    // Experts then come beside the whole step.
    options_.left_multiprocessors = fetches_beside() ? nibble::moe::beside_fetch_family::multiprocessors : 0;
  }
  /// Every row gets logits, in order; or `count` of the wanted ones from number `first` on.
  void want_all_rows() { set_wanted(nullptr, rows_); }
  void want_rows(int first, int count) { set_wanted(step_words_ + layout_.wanted_at() + first, count); }

  template <class Embedding>
  void embed(const Embedding& table, device_rows& out) {
    launch<typename families::embed>("embed", [&](nibble::embed_params& p) {
      p.rows = rows_;
      p.table = reinterpret_cast<const __nv_bfloat16*>(table.data);
      p.ids = step_words_ + layout_.tokens_at();
      p.y = out.data, p.ldy = out.columns;
      p.previous = previous_, p.slot = step_words_ + layout_.slot_at();
    });
  }

  template <class Norm>
  [[nodiscard]] normed_rows normed(const Norm& norm, const device_rows& x) {
    if (x.rows <= nibble::max_gemv_tokens) return {x.data, x.rows, x.columns, norm.weight.data};
    return norm_rows(norm.weight.data, x.rows, nullptr);
  }
  template <class Norm>
  [[nodiscard]] normed_rows normed(const Norm& norm, const selected_rows& x) {
    return norm_rows(norm.weight.data, x.rows, wanted_);
  }
  template <class Linear>
  void project(const Linear& weight, const normed_rows& x, device_rows& y) {
    y.columns = Linear::shape.n;
    const auto fill = [&](auto& p) {
      set_operands(p, weight, x.data, x.columns, x.rows);
      p.in.weight = x.weight, p.in.eps = static_cast<float>(c.norm_eps);
      p.out.y = y.data, p.out.ldy = y.columns;
    };
    if (x.weight != nullptr)
      launch<normed_project_family<Linear, Device>>("project", fill);
    else
      launch<project_many_family<Linear, Device>>("project", fill);
  }
  template <class Linear>
  void project(const Linear& weight, const normed_rows& x, device_logits& y) {
    if (y.rows == 0) return;
    launch<logits_family<Linear, Device>>("lm_head", [&](auto& p) {
      set_operands(p, weight, x.data, x.columns, y.rows);
      p.out.y = y.data, p.out.ldy = logit_stride_of(c);
    });
  }
  template <class Linear>
  void project_and_add(const Linear& weight, const device_rows& x, device_rows& sum) {
    launch<add_family<Linear, Device>>("project_and_add", [&](auto& p) {
      set_operands(p, weight, x.data, x.columns, x.rows);
      p.out.y = sum.data, p.out.ldy = sum.columns;
      p.out.residual = sum.data, p.out.ldr = sum.columns;
    });
  }

  template <class Attention>
  void attend(const Attention& op, layer_place place, const device_rows& rows, device_rows& out) {
    out.columns = c.attention_width();
    const auto fill = [&](nibble::attention_params& p) {
      p.pool = {kv_pages, page_bytes,
                static_cast<std::size_t>(place.of_its_kind) * shapes::attention.page_bytes()};
      p.qkv = rows.data, p.ldqkv = rows.columns;
      p.out = out.data, p.ldo = out.columns;
      p.q_norm = op.q_norm.weight.data, p.k_norm = op.k_norm.weight.data;
      p.inverse_frequencies = inverse_frequencies_;
      p.eps = static_cast<float>(c.norm_eps);
      p.workspace = attention_workspace_, p.layout = attention_layout_;
    };
    if (decodes_ > 0)
      launch<typename families::attention_decode, nibble::attention_params>("attention",
                                                                            [&](nibble::attention_params& p) {
                                                                              fill(p);
                                                                              p.step = decode_view();
                                                                              p.rows = decodes_;
                                                                            });
    if (sequences_ > decodes_) {
      const auto prefill = [&](nibble::attention_params& p) {
        fill(p);
        p.step = prefill_view();
        p.rows = rows_ - decodes_;
      };
      launch<typename families::attention_append, nibble::attention_params>("attention append", prefill);
      launch<typename families::attention_prefill, nibble::attention_params>("attention prefill", prefill);
    }
  }

  template <class DeltaNet>
  void apply_delta_rule(const DeltaNet& op, layer_place place, const normed_rows& x,
                        const device_rows& qkvz_rows, device_rows& out) {
    out.columns = c.delta_value_width();
    const auto fill = [&](nibble::delta_rule_params& p) {
      p.pool = {states, slot_state_bytes,
                static_cast<std::size_t>(place.of_its_kind) * nibble::state_bytes(shapes::delta)};
      p.qkvz = qkvz_rows.data, p.ldqkvz = qkvz_rows.columns;
      p.x = x.data, p.ldx = x.columns;
      p.out = out.data, p.ldo = out.columns;
      p.ba = reinterpret_cast<const __nv_bfloat16*>(op.ba.segments[0].weight);
      p.conv = op.conv1d.weight.data;
      p.a_log = op.a_log.data, p.dt_bias = op.dt_bias.data;
      p.norm = op.norm.weight.data;
      p.eps = static_cast<float>(c.norm_eps);
      p.input_norm = x.weight;
      p.workspace = delta_workspace_;
    };
    const auto decode = [&](nibble::delta_rule_params& p) {
      fill(p);
      p.step = decode_view();
      p.rows = decodes_;
    };
    if (decodes_ > 0 && x.weight != nullptr)
      launch<typename families::delta::decode>("delta rule", decode);
    else if (decodes_ > 0)
      launch<typename families::delta::decode_normed>("delta rule", decode);
    if (sequences_ > decodes_) {
      const normed_rows done = x.weight == nullptr ? x : norm_rows(x.weight, rows_, nullptr);
      launch<typename families::delta::prefill>("delta rule prefill", [&](nibble::delta_rule_params& p) {
        fill(p);
        p.x = done.data;
        p.step = prefill_view();
        p.rows = rows_ - decodes_;
      });
    }
  }

  template <class Experts, class Norm>
  void mix_experts(const Experts& op, layer_place place, const Norm& norm, device_rows& sum) {
    launch<typename families::router>("router", [&](nibble::router_params& p) {
      p.rows = rows_;
      p.hidden = sum.data, p.ldh = sum.columns, p.ldn = sum.columns;
      p.eps = static_cast<float>(c.norm_eps);
      p.norm = norm.weight.data;
      p.weight = reinterpret_cast<const __nv_bfloat16*>(op.router.segments[0].weight);
      if constexpr (Experts::has_shared)
        p.gate = reinterpret_cast<const __nv_bfloat16*>(op.shared.gate.segments[0].weight);
      p.normed = normed_, p.ids = expert_ids_, p.weights = expert_weights_,
      p.shared_weights = shared_weights_;
      p.workspace = router_workspace_;
      if (looks_ahead())
        p.beside = next_router(place.layer);
      else if (streams_ahead())
        p.beside = next_router_of_many(place.layer);
    });
    routed_ids routed{expert_ids_, next_ids(place.layer)};
    if (after_router != nullptr)
      run("after router",
          [&] { return after_router(after_router_self, place.layer, rows_, routed, options_); });
    if constexpr (families::separate_shared) {
      const auto& expert = op.shared.shared_expert;
      launch<typename families::shared::up>("shared expert gate|up", [&](auto& p) {
        set_operands(p, expert.gate_up, normed_, c.hidden_size, rows_);
        p.out.y = shared_h_, p.out.ldy = c.shared_intermediate;
      });
      launch<typename families::shared::down>("shared expert down", [&](auto& p) {
        set_operands(p, expert.down, shared_h_, c.shared_intermediate, rows_);
        p.out.y = sum.data, p.out.ldy = sum.columns;
        p.out.residual = sum.data, p.out.ldr = sum.columns;
        p.out.weight = shared_weights_;
      });
    }
    // A step that asks for more experts than there are slots goes through them in pieces.
    const int piece = offload == nullptr ? rows_ : std::min(rows_, std::max(1, offload->most_rows()));
    for (int first = 0; first < rows_; first += piece) {
      const int count = std::min(piece, rows_ - first);
      const routed_ids part = routed.from(first, c.experts_per_token);
      if (offload != nullptr) bring_experts(place, part, sum, first, count);
      run_experts(op, place, part.ids, sum, first, count);
      if (offload != nullptr) add_host_share(place, part.ids, sum, first, count);
    }
  }

  void select_wanted(const device_rows&, selected_rows&) {}

  /// Takes ids out of the first `rows` rows of logits, then draws from them.
  void draw(const nibble::sampling_launch_params& draws, const std::int32_t* forbidden, int forbidden_count) {
    if (forbidden_count > 0)
      launch<typename families::forbid>("forbid", [&](forbid_params& p) {
        p = {logits_, logit_stride_of(c), draws.rows, forbidden, forbidden_count};
      });
    launch<typename families::sampling>("sampling", [&](nibble::sampling_launch_params& p) {
      p = draws;
      p.logits = logits_, p.ldl = logit_stride_of(c);
    });
  }

 private:
  /// Whether the step fetches what the next layer is likely to ask for. The same for all of its layers.
  [[nodiscard]] bool looks_ahead() const {
    if constexpr (shapes::residency.valid())
      return ahead_limit > 0 && side != nullptr && offload != nullptr &&
             offload->looks_ahead(rows_, ahead_limit);
    else
      return false;
  }
  /// Whether a longer prefill step does.
  [[nodiscard]] bool streams_ahead() const {
    if constexpr (shapes::residency.valid())
      return ahead_limit > 0 && side != nullptr && offload != nullptr &&
             rows_ > nibble::moe::most_ahead_rows && placing() == nibble::moe::place_mode::streaming &&
             offload->streams_ahead();
    else
      return false;
  }
  /// Whether a kernel brings experts beside the whole step.
  [[nodiscard]] bool fetches_beside() const {
    if constexpr (shapes::residency.valid())
      return (streams_ahead() || streams_layers(rows_)) && !offload->fetches_by_engine();
    else
      return false;
  }
  /// Whether `rows` of a prefill step bring all of the next layer while a layer computes.
  [[nodiscard]] bool streams_layers(int rows) const {
    if constexpr (shapes::residency.valid())
      return side != nullptr && offload != nullptr && placing() == nibble::moe::place_mode::streaming &&
             !offload->staged() && offload->streams_layers(rows);
    else
      return false;
  }
  /// The router of the layer behind `layer`, on the residual stream as it is before the experts of this one.
  [[nodiscard]] const nibble::router_operands& next_router(int layer) const {
    return next_routers[static_cast<std::size_t>(layer)];
  }
  /// The same for a step of any number of rows.
  [[nodiscard]] nibble::router_operands next_router_of_many(int layer) const {
    return results_in_projected<Config::value>(next_router(layer), qkv.data, rows_);
  }
  /// Where the step's routers put what they take the next layer's ids to be.
  [[nodiscard]] const std::int32_t* next_ids(int layer) const {
    if (looks_ahead()) return next_router(layer).ids;
    return streams_ahead() ? next_router_of_many(layer).ids : nullptr;
  }
  /// Makes the experts that `count` rows from `first` on go to resident. \param routed of these rows
  void bring_experts(layer_place place, const routed_ids& routed, const device_rows& sum, int first,
                     int count) {
    if constexpr (shapes::residency.valid())
      run("bring experts", [&] {
        using nibble::moe::place_mode;
        const place_mode mode = placing();
        const std::int32_t* ids = routed.ids;
        const auto share = host_share(sum, first);
        if (looks_ahead())
          return offload->bring_ahead(
              place.layer, ids, count, mode, {routed.next, ahead_limit, side}, options_,
              []<class Family>(std::type_identity<Family>, const auto& p, const nibble::launch_options& how) {
                return launcher::template launch<Family>(p, how);
              },
              &share);
        if (streams_ahead())
          return offload->bring_streaming(place.layer, ids, count, options_, side, routed.next);
        if (streams_layers(count)) return offload->bring_streaming(place.layer, ids, count, options_, side);
        return offload->bring(
            place.layer, ids, count, mode,
            [this]<class Family>(std::type_identity<Family>, const auto& p) {
              return launcher::template launch<Family>(p, options_);
            },
            &share);
      });
    if constexpr (shapes::residency.valid()) run("pace", [&] { return offload->pace(options_.stream); });
  }
  /// What the CPU computed of them, behind the others.
  void add_host_share(layer_place place, const std::int32_t* ids, const device_rows& sum, int first,
                      int count) {
    if constexpr (shapes::residency.valid())
      if (offload->shares_with_host())
        run("host experts", [&] {
          return offload->add_host_share(
              place.layer, ids, count, placing(),
              [this]<class Family>(std::type_identity<Family>, const auto& p) {
                return launcher::template launch<Family>(p, options_);
              },
              host_share(sum, first));
        });
  }
  /// A prompt's experts come and go without displacing what decode keeps coming back to.
  [[nodiscard]] nibble::moe::place_mode placing() const {
    return sequences_ > decodes_ ? nibble::moe::place_mode::streaming : nibble::moe::place_mode::decode;
  }
  [[nodiscard]] typename offload_type::host_share host_share(const device_rows& sum, int first) const {
    const auto row = static_cast<std::ptrdiff_t>(first);
    return {expert_weights_ + row * c.experts_per_token, normed_ + row * c.hidden_size, c.hidden_size,
            sum.data + row * sum.columns, sum.columns};
  }

  /// The routed experts of `count` rows from `first` on, and the shared one where it joins them.
  /// \param ids of these rows
  template <class Experts>
  void run_experts(const Experts& op, layer_place place, const std::int32_t* ids, device_rows& sum, int first,
                   int count) {
    run("experts", [&] {
      nibble::moe::experts_params p;
      const auto row = static_cast<std::ptrdiff_t>(first);
      p.m = count;
      p.slots = experts.slots, p.slot_scales = experts.slot_scales, p.slot_count = experts.slot_count;
      p.slot_of = experts.slot_of + static_cast<std::ptrdiff_t>(place.layer) * c.experts;
      if constexpr (shared_joins_routed(c)) {
        const auto& expert = op.shared.shared_expert;
        p.shared_expert = reinterpret_cast<const std::uint8_t*>(expert.gate_up.segments[0].weight);
        p.shared_scales[0] = expert.gate_up.segments[0].global_scale;
        p.shared_scales[1] = expert.gate_up.segments[1].global_scale;
        p.shared_scales[2] = expert.down.segments[0].global_scale;
        p.shared_weights = shared_weights_ + row;
      }
      p.ids = ids, p.weights = expert_weights_ + row * c.experts_per_token;
      p.x = normed_ + row * c.hidden_size, p.ldx = c.hidden_size;
      p.h = expert_h_;
      p.workspace = experts_workspace_, p.workspace_bytes = experts_workspace_bytes_;
      p.y = sum.data + row * sum.columns, p.ldy = sum.columns;
      p.residual = p.y, p.ldr = sum.columns;
      const auto begins =
          looks_ahead() && offload->joins(place.layer) ? nibble::launch_chain::plain : options_.chain;
      return launcher::template launch<typename families::experts>(p, rows_, options_, begins);
    });
  }

  void set_wanted(const std::int32_t* rows, int count) {
    wanted_ = rows;
    selected.rows = count;
    logits = {logits_, count};
  }

  [[nodiscard]] normed_rows norm_rows(const float* weight, int rows, const std::int32_t* index) {
    if (rows > 0)
      launch<typename families::norm>("norm", [&](nibble::rms_norm_params& p) {
        p.rows = rows;
        p.x = hidden.data, p.ldx = hidden.columns;
        p.weight = weight, p.eps = static_cast<float>(c.norm_eps);
        p.y = normed_, p.ldy = hidden.columns;
        p.index = index, p.index_limit = rows_;
      });
    return {normed_, rows, hidden.columns, nullptr};
  }

  template <class Launch>
  void run(const char* op, Launch&& launch) {
    if (!status_.ok() || (left_out != nullptr && std::strcmp(op, left_out) == 0)) return;
    const nibble::op_scope scope(op);
    status_ = launch();
  }
  template <class Family, class Params = typename Family::params, class Fill>
  void launch(const char* op, Fill&& fill) {
    run(op, [&] {
      Params p{};
      fill(p);
      return launcher::template launch<Family>(p, options_);
    });
  }

  template <class Params, class Linear>
  static void set_operands(Params& p, const Linear& weight, const __nv_bfloat16* x, int ldx, int rows) {
    p.tiles = reinterpret_cast<const std::uint8_t*>(weight.segments[0].weight);
    p.x = x, p.ldx = ldx, p.m = rows;
    for (std::size_t i = 0; i < weight.segments.size(); ++i) p.scale[i] = weight.segments[i].global_scale;
  }

  [[nodiscard]] nibble::step_view view(int first, int count) const {
    return {count,
            step_words_ + layout_.first_row_at() + first,
            step_words_ + layout_.position_at() + first,
            step_words_ + layout_.slot_at() + first,
            page_table_ + static_cast<std::ptrdiff_t>(first) * sizes_.page_stride,
            sizes_.page_stride};
  }
  [[nodiscard]] nibble::step_view decode_view() const { return view(0, decodes_); }
  [[nodiscard]] nibble::step_view prefill_view() const { return view(decodes_, sequences_ - decodes_); }
  device_sizes sizes_{};
  std::size_t experts_workspace_bytes_ = 0;
  device_step_layout layout_{};
  nibble::attention_workspace attention_layout_{};
  nibble::launch_options options_{};
  nibble::status status_{};
  int rows_ = 0, decodes_ = 0, sequences_ = 0;
  const std::int32_t* wanted_ = nullptr;  ///< null: every row

  std::int32_t *step_words_ = nullptr, *page_table_ = nullptr, *expert_ids_ = nullptr, *previous_ = nullptr;
  __nv_bfloat16 *normed_ = nullptr, *expert_h_ = nullptr, *shared_h_ = nullptr;
  float *expert_weights_ = nullptr, *shared_weights_ = nullptr, *inverse_frequencies_ = nullptr,
        *logits_ = nullptr;
  std::byte *experts_workspace_ = nullptr, *router_workspace_ = nullptr, *attention_workspace_ = nullptr,
            *delta_workspace_ = nullptr;
};

}  // namespace qwen3_moe
