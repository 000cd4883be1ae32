// SPDX-License-Identifier: Apache-2.0
/// \file
/// A model as the phases of a start know it: weights, then kernels, then caches by the plan, then steps that
/// can be captured.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "model/cuda_backend.cuh"
#include "model/device_memory_model.hpp"
#include "model/device_weights.cuh"
#include "model/host_misses.cuh"
#include "model/kept_experts.cuh"
#include "nibble/core/device_arena.cuh"
#include "nibble/core/device_memory.cuh"
#include "nibble/moe/fetch_engine_measure.cuh"
#include "nibble/startup/cuda_platform.cuh"
#include "nibble/startup/phases.hpp"
#include "nibble/startup/representative.cuh"

namespace qwen3_moe {

/// Where a start gets its weights from.
template <class Config>
struct weight_source {
  /// Fills the dense region and points the leaves at it.
  std::function<void(device_uploader&, std::byte* memory, causal_lm<Config>&)> write_dense;
  /// Sends experts first … first + count - 1 to the slots at `to`.
  std::function<void(device_uploader&, int first, int count, std::byte* to)> send_experts;
  /// The same for one expert and host memory; thread-safe.
  expert_packer pack_expert;
  /// fp32 scales of every expert.
  std::vector<expert_scales> scales;
  int threads = 0;           ///< that pack, 0: one per core
  expert_keeping keeping{};  ///< of experts that do not fit
};

/// \tparam Device the class of devices whose kernels it launches
template <class Config, nibble::kv_format Kv, nibble::device_class Device = nibble::default_device>
class cuda_core {
  static constexpr model_config c = Config::value;
  static_assert(device_refusal(c).empty());
  static_assert(dense_device_bytes_of(c) == dense_device_bytes<Config>(),
                "the byte count from the configuration and that from the type disagree");

 public:
  using platform = nibble::cuda_platform;
  using backend_type = cuda_backend<Config, Kv, Device>;
  using offload_type = typename backend_type::offload_type;
  using kernel_table = typename backend_type::families::table;
  using context_type = nibble::start_context<platform>;

  cuda_core(context_type& context, weight_source<Config> source, int max_positions)
      : source_(std::move(source)), max_positions_(max_positions), stream_(context.platform().stream()) {
    dense_ = nibble::device_memory(dense_device_bytes<Config>() + expert_table_bytes_of(c));
    device_uploader uploader(stream_);
    source_.write_dense(uploader, dense_.data(), lm_);
    auto* scales = dense_.data() + dense_device_bytes<Config>();
    const auto experts = static_cast<std::size_t>(expert_count(c));
    slot_scales_ = reinterpret_cast<float*>(scales);
    slot_of_ = reinterpret_cast<std::int32_t*>(scales + aligned_device_bytes(12 * experts));
    uploader.finish();
  }

  [[nodiscard]] nibble::memory_model memory() const {
    return device_memory_model(c, max_positions_, Kv, source_.keeping, Device);
  }

  /// Every distinct projection and the head once, on scratch that is given back.
  [[nodiscard]] nibble::status representative_launch(int rows) {
    using lm = causal_lm<Config>;
    const std::uint64_t bytes = nibble::representatives_bytes<product_family, lm>(rows);
    nibble::device_memory scratch;
    if (const auto s = nibble::device_memory::try_allocate(bytes, scratch); !s.ok()) return s;
    nibble::launch_options options;
    options.stream = stream_;
    options.chain = nibble::chain_of(Device);
    auto s = nibble::runtime_status(cudaMemsetAsync(scratch.data(), 0, bytes, stream_), where,
                                    "scratch could not be cleared");
    if (s.ok()) s = nibble::launch_representatives<product_family>(lm_, rows, scratch.data(), options);
    const auto ended =
        nibble::runtime_status(cudaStreamSynchronize(stream_), where, "a representative launch failed");
    return s.ok() ? ended : s;
  }

  /// All or nothing: what was there before it failed is given back, so that another plan can count on it.
  void allocate(context_type& context, const nibble::memory_plan& plan) {
    try {
      allocate_all(context, plan);
    } catch (...) {
      give_back();
      throw;
    }
  }

  /// Brings KV pages and, where experts are fetched, expert slots to the plan's sizes; their addresses stay.
  /// A start with every expert resident keeps them all: there is no host memory to fetch them from.
  [[nodiscard]] nibble::status resize(context_type& context, const nibble::memory_plan& plan) {
    using nibble::ledger_line;
    // A step under way needs the thread that asks for copies, which calls that map memory could keep out.
    if (offload_ != nullptr && offload_->fetches_by_engine()) offload_->finish(stream_);
    if (backend_type::page_bytes > 0) {
      if (const auto s = kv_pages_.resize(plan.kv_pages * backend_type::page_bytes); !s.ok()) return s;
      context.set_measured(ledger_line::kv_pages, kv_pages_.mapped_bytes());
    }
    const int slots = static_cast<int>(plan.expert_slots);
    if (offload_ == nullptr || slots == offload_->slot_count()) return nibble::status::success();
    const std::uint64_t tables =
        context.lines()[ledger_line::expert_slots].measured_bytes.value_or(0) - expert_slots_.mapped_bytes();
    const bool grows = slots > offload_->slot_count();
    // Tables name only slots that are there, before and after.
    if (grows)
      if (const auto s = expert_slots_.resize(plan.expert_slots * slot_bytes); !s.ok()) return s;
    offload_->resize(slots, stream_);
    if (!grows)
      if (const auto s = expert_slots_.resize(plan.expert_slots * slot_bytes); !s.ok()) return s;
    context.set_measured(ledger_line::expert_slots, tables + expert_slots_.mapped_bytes());
    return nibble::status::success();
  }
  /// What graphs hold by value and resize could change: the pieces in which a decode step goes through its
  /// experts, and whether it looks ahead. Slots are found through tables on the device, so their number is
  /// not among it.
  [[nodiscard]] std::uint64_t signature() const {
    if (offload_ == nullptr) return 0;
    return static_cast<std::uint64_t>(std::min(offload_->most_rows(), sizes_.sequences)) |
           static_cast<std::uint64_t>(offload_->rows_ahead(backend_.ahead_limit)) << 32;
  }
  void set_pages_in_use(std::uint64_t pages) { pages_in_use_ = pages; }
  [[nodiscard]] std::uint64_t pages_in_use() const { return pages_in_use_; }

  /// One decode step of `rows` rows, as the arrays on the device say.
  [[nodiscard]] nibble::status record(int rows) {
    backend_.begin_step(rows, rows, rows);
    forward(backend_, lm_);
    return backend_.result();
  }

  [[nodiscard]] backend_type& backend() { return backend_; }
  [[nodiscard]] const causal_lm<Config>& model() const { return lm_; }
  [[nodiscard]] const device_sizes& sizes() const { return sizes_; }
  /// Null where every expert is resident.
  [[nodiscard]] offload_type* offload() { return offload_.get(); }
  /// Bytes a microsecond of experts that the CPU computes; 0 where it takes no share.
  [[nodiscard]] double host_bytes_per_us() const { return host_bytes_per_us_; }
  /// Waits for whatever was launched, after a step that could not be launched to its end. Experts that it
  /// placed may not have come. Throws where the device has failed.
  void settle() {
    static_cast<void>(cudaStreamSynchronize(stream_));
    if (kept_ != nullptr) static_cast<void>(cudaStreamSynchronize(kept_->side()));
    if (offload_ != nullptr) offload_->abandon(stream_);
  }
  /// Saves which experts are in use, where that was asked for. Throws where the device has failed.
  void remember_experts() {
    if (offload_ != nullptr && kept_->files().remembers())
      kept_->files().save_worth(offload_->worth(stream_));
  }
  [[nodiscard]] std::byte* workspace() const { return workspace_.data(); }
  [[nodiscard]] device_workspace workspace_layout() const {
    return device_workspace_of(c, Kv, sizes_, Device);
  }

 private:
  static constexpr const char* where = "qwen3_moe::cuda_core";
  template <class Leaf>
  using product_family = product_family_of<Leaf, Device>;
  static constexpr std::uint64_t slot_bytes = expert_slot_bytes_of(c);

  void allocate_all(context_type& context, const nibble::memory_plan& plan) {
    using nibble::ledger_line;
    const auto& limits = plan.limits;
    sizes_ = device_sizes_of(limits.step_tokens, limits.running, limits.context_tokens);
    context.measure(ledger_line::workspace, [&] {
      workspace_ = nibble::device_memory(workspace_layout().bytes);
      zero(workspace_.data(), workspace_.bytes());
    });
    context.measure(ledger_line::states, [&] {
      states_ = nibble::device_memory(plan.state_slots * backend_type::slot_state_bytes);
      zero(states_.data(), states_.bytes());
    });
    context.measure(ledger_line::kv_pages,
                    [&] { open(kv_pages_, plan.kv_pages * backend_type::page_bytes); });
    context.measure(ledger_line::expert_slots, [&] { open(expert_slots_, plan.expert_slots * slot_bytes); });
    const int slots = static_cast<int>(plan.expert_slots);
    offload_.reset();
    if (slots >= expert_count(c)) {
      if (source_.keeping.cache_file) context.log("experts: all fit on the GPU, no cache file is needed");
      fill_slots();
    } else {
      context.measure(ledger_line::expert_slots, [&] { offload(context, slots); });
    }
    backend_ = backend_type(sizes_, workspace_.data(), stream_);
    backend_.kv_pages = kv_pages_.base();
    backend_.states = states_.data();
    context.measure(ledger_line::expert_slots, [&] { take_experts(slots); });
    send_frequencies();
    pad_step();
  }
  void give_back() {
    static_cast<void>(cudaStreamSynchronize(stream_));
    backend_ = {};
    offload_.reset();
    kept_.reset();
    expert_slots_ = {}, kv_pages_ = {};
    ahead_ = {}, states_ = {}, workspace_ = {};
  }

  void take_experts(int slots) {
    auto& experts = backend_.experts;
    experts.slots = reinterpret_cast<const std::uint8_t*>(expert_slots_.base());
    experts.slot_scales = slot_scales_;
    experts.slot_count = slots;
    experts.slot_of = slot_of_;
    backend_.offload = offload_.get();
    if (offload_ == nullptr) return;
    const auto tables = offload_->tables();
    experts.slot_scales = tables.slot_scales;
    experts.slot_count = tables.slot_count;
    experts.slot_of = tables.slot_of;
    backend_.side = kept_->side();
    look_ahead();
  }
  /// What steps that look ahead need, where that is asked for.
  void look_ahead() {
    static_assert(most_ahead == nibble::moe::most_ahead);
    backend_.ahead_limit = source_.keeping.ahead_on(
        Device, offload_->fetches_by_engine() ? expert_fetch::engine : expert_fetch::kernel);
    if (backend_.ahead_limit == 0) return;
    constexpr router_ahead_workspace w = router_ahead_workspace_of(c);
    ahead_ = nibble::device_memory(w.bytes);
    zero(ahead_.data(), ahead_.bytes());
    const auto at = [this]<class T>(T*& pointer, std::uint64_t offset) {
      pointer = reinterpret_cast<T*>(ahead_.data() + offset);
    };
    nibble::router_operands results;
    at(results.normed, w.normed);
    at(results.ids, w.ids);
    at(results.weights, w.weights);
    at(results.shared_weights, w.shared_weights);
    at(results.workspace, w.router);
    for (int i = 1; i < c.layers; ++i)
      lm_.model.layers.visit(i, [&](const auto& layer) {
        auto& router = backend_.next_routers[static_cast<std::size_t>(i) - 1] = results;
        router.weight = reinterpret_cast<const __nv_bfloat16*>(layer.mlp.router.segments[0].weight);
        router.norm = layer.post_attention_layernorm.weight.data;
        if constexpr (std::remove_cvref_t<decltype(layer.mlp)>::has_shared)
          router.gate = reinterpret_cast<const __nv_bfloat16*>(layer.mlp.shared.gate.segments[0].weight);
      });
  }

  void zero(std::byte* at, std::uint64_t bytes) {
    if (bytes == 0) return;
    nibble::require(
        nibble::runtime_status(cudaMemsetAsync(at, 0, bytes, stream_), where, "memory could not be cleared"));
  }
  static void open(nibble::device_arena& arena, std::uint64_t bytes) {
    if (bytes == 0) return;
    nibble::require(nibble::open_device_arena(bytes, arena));
    nibble::require(arena.resize(bytes));
  }

  /// All experts into host memory, once, and as many as there are slots onto the device.
  void offload(context_type& context, int slots) {
    constexpr nibble::moe::residency_shape shape = backend_type::shapes::residency;
    if constexpr (shape.valid()) {
      if (nibble::moe::largest_placed_rows(shape, slots) < 1)
        throw nibble::out_of_memory(std::to_string(slots) + " expert slots: a token chooses " +
                                    std::to_string(c.experts_per_token));
      if (kept_ == nullptr) {
        const auto begin = std::chrono::steady_clock::now();
        kept_ =
            std::make_unique<kept_experts>(source_.keeping, shape.total(), slot_bytes, source_.pack_expert,
                                           source_.scales, context.platform().index(), source_.threads,
                                           [&context](std::string_view line) { context.log(line); });
        context.finish_phase("experts in host memory", begin);
      }
      auto engine = engine_of(context, slots);
      host_misses shared = share_misses(context, slots, engine.get());
      const auto begin = std::chrono::steady_clock::now();
      offload_ = std::make_unique<offload_type>(kept_->store(), expert_slots_.base(), slots, slots,
                                                kept_->files().load_worth(), stream_, kept_->reader());
      if (engine != nullptr) offload_->fetch_by_engine(std::move(engine));
      if (shared.server != nullptr) offload_->share_with_host(std::move(shared.server), shared.fetch_of);
      host_bytes_per_us_ = offload_->shares_with_host() ? shared.bytes_per_us : 0;
      context.finish_phase("experts to slots", begin);
    } else {
      throw nibble::out_of_memory(
          "the model has more experts than the tables of resident ones: all must fit");
    }
  }

  /// The copy engine, where it is to bring what is missing.
  [[nodiscard]] std::unique_ptr<nibble::moe::copy_engine> engine_of(context_type& context, int slots) {
    const expert_fetch wish = source_.keeping.fetch;
    if (wish == expert_fetch::kernel || !kept_->all_locked()) return nullptr;
    auto engine = std::make_unique<nibble::moe::copy_engine>(
        kept_->store(), expert_slots_.base(), expert_count(c), c.experts, kept_->before_read());
    const nibble::moe::fetch_times times = nibble::moe::measure_fetch(
        nibble::moe::whole_experts(kept_->store(), expert_slots_.base(), slots), *engine, stream_);
    const bool taken = wish == expert_fetch::engine ? times.engine_answers() : times.engine_pays();
    const auto us = [](float value) {
      return value < 1e6f ? std::to_string(static_cast<int>(value)) + " us" : std::string("too long");
    };
    context.log("experts: " + std::to_string(times.experts) + " are fetched by a kernel in " +
                us(times.kernel_us) + " and by the copy engine in " + us(times.engine_us) +
                (taken ? ", which is taken" : "; the kernel is taken"));
    return taken ? std::move(engine) : nullptr;
  }

  /// Whether and how the CPU takes a share of the misses.
  [[nodiscard]] host_misses share_misses(context_type& context, int slots,
                                         const nibble::moe::copy_engine* engine) {
    const cpu_share wish = source_.keeping.cpu;
    if (wish == cpu_share::off || c.formats.expert_gate_up != weight_format::nvfp4 || !kept_->all_locked())
      return {};
    const auto begin = std::chrono::steady_clock::now();
    host_misses shared = measure_host_misses(kept_->store(), wish, c.hidden_size, c.expert_intermediate,
                                             c.layers, c.experts_per_token, expert_slots_.base(), slots,
                                             source_.threads, stream_, engine);
    context.log(shared.text);
    context.finish_phase("experts measured", begin);
    return shared;
  }

  /// Every expert into its own slot.
  void fill_slots() {
    const int experts = expert_count(c);
    device_uploader uploader(stream_);
    source_.send_experts(uploader, 0, experts, expert_slots_.base());
    uploader.send(
        reinterpret_cast<std::byte*>(slot_scales_), 12 * source_.scales.size(),
        [&](std::span<std::uint8_t> out) { std::memcpy(out.data(), source_.scales.data(), out.size()); });
    uploader.send(reinterpret_cast<std::byte*>(slot_of_), 4 * static_cast<std::size_t>(experts),
                  [&](std::span<std::uint8_t> out) {
                    for (std::int32_t e = 0; e < experts; ++e)
                      std::memcpy(out.data() + 4 * static_cast<std::size_t>(e), &e, 4);
                  });
    uploader.finish();
  }

  void send_frequencies() {
    constexpr int pairs = c.rotary_dim / 2;
    std::vector<float> values(static_cast<std::size_t>(pairs));
    for (int i = 0; i < pairs; ++i)
      values[static_cast<std::size_t>(i)] =
          static_cast<float>(std::pow(c.rope_theta, -2.0 * i / static_cast<double>(c.rotary_dim)));
    copy(backend_.inverse_frequencies(), values.data(), 4 * values.size());
  }
  /// The step's arrays for captures: rows that read and write no cache.
  void pad_step() {
    std::vector<std::int32_t> words(static_cast<std::size_t>(backend_.step_layout().words()));
    device_step step(backend_.step_layout(), words.data());
    step.compose({}, sizes_.sequences);
    copy(backend_.step_words(), words.data(), 4 * words.size());
  }
  void copy(void* to, const void* from, std::size_t bytes) {
    nibble::require(nibble::runtime_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_),
                                           where, "a table could not be sent"));
    nibble::require(
        nibble::runtime_status(cudaStreamSynchronize(stream_), where, "a table could not be sent"));
  }

  weight_source<Config> source_;
  int max_positions_;
  cudaStream_t stream_;
  causal_lm<Config> lm_;
  nibble::device_memory dense_, workspace_, states_, ahead_;
  nibble::device_arena kv_pages_, expert_slots_;
  std::unique_ptr<kept_experts> kept_;
  std::unique_ptr<offload_type> offload_;
  double host_bytes_per_us_ = 0;
  float* slot_scales_ = nullptr;
  std::int32_t* slot_of_ = nullptr;
  device_sizes sizes_;
  std::uint64_t pages_in_use_ = 0;
  backend_type backend_;
};

}  // namespace qwen3_moe
