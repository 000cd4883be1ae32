// SPDX-License-Identifier: Apache-2.0
/// \file
/// Steps of a loaded model on a GPU: arrays over, forward pass, logits or drawn tokens back; decode through
/// captured graphs, two steps in flight.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "engine/model_runner.hpp"
#include "model/cuda_core.cuh"
#include "model/cuda_draws.cuh"
#include "model/step_check.hpp"
#include "nibble/core/device_memory.cuh"

namespace qwen3_moe {

/// Host memory of one step in flight.
struct step_in_flight {
  step_in_flight(const device_step_layout& layout, int most_rows)
      : words(4u * static_cast<std::uint64_t>(layout.words())),
        rows(sizeof(nibble::sampling_row) * static_cast<std::uint64_t>(most_rows)),
        results(sizeof(nibble::sampled_row) * static_cast<std::uint64_t>(most_rows)),
        counts(sizeof(nibble::moe::residency_counts)),
        step(layout, words.as<std::int32_t>()) {
    nibble::require(nibble::runtime_status(cudaEventCreateWithFlags(&done, cudaEventDisableTiming),
                                           "qwen3_moe::step_in_flight", "no event could be made"));
  }
  step_in_flight(const step_in_flight&) = delete;
  step_in_flight& operator=(const step_in_flight&) = delete;
  ~step_in_flight() { static_cast<void>(cudaEventDestroy(done)); }

  nibble::pinned_memory words, rows, results, counts;
  device_step step;
  cudaEvent_t done = nullptr;
  std::size_t drawn = 0;         ///< rows of results
  std::uint64_t generation = 0;  ///< of the experts' tables when it was launched
};

template <class Config, nibble::kv_format Kv, nibble::device_class Device = nibble::default_device>
class cuda_runner final : public model_runner {
  static constexpr model_config c = Config::value;

 public:
  using config_type = Config;
  using core_type = cuda_core<Config, Kv, Device>;
  using backend_type = typename core_type::backend_type;
  using engine_type = nibble::startup::engine<core_type>;

  explicit cuda_runner(engine_type engine)
      : engine_(std::move(engine)),
        limits_(limits_of(engine_.context().plan(), core().sizes())),
        sizes_(core().sizes()),
        logits_(4u * static_cast<std::uint64_t>(sizes_.logit_rows) *
                static_cast<std::uint64_t>(c.vocab_size)),
        flights_{
            {{backend().step_layout(), sizes_.logit_rows}, {backend().step_layout(), sizes_.logit_rows}}},
        pages_(sizes_.sequences, sizes_.page_stride),
        draws_(c, core().workspace_layout(), sizes_, core().workspace(), stream()) {}

  [[nodiscard]] const runner_limits& limits() const override { return limits_; }

  void clear_slot(int slot) override {
    check_slot(limits_, slot);
    if constexpr (backend_type::slot_state_bytes > 0)
      nibble::require(nibble::runtime_status(
          cudaMemsetAsync(backend().states + static_cast<std::size_t>(slot) * backend_type::slot_state_bytes,
                          0, backend_type::slot_state_bytes, stream()),
          where, "a slot's state could not be cleared"));
  }

  void step(std::span<const step_sequence> sequences, std::span<float> logits) override {
    check_step(limits_, sequences, logits.size());
    step_in_flight& flight = flights_[0];
    const device_step& step = flight.step;
    int first = 0;
    try {
      first = launch_forward(sequences, flight);
      read_counts(flight);
    } catch (...) {
      core().settle();
      throw;
    }
    read_logits(logits.data(), first);
    check_counts(flight);
    for (int done = first; done < step.wanted();) {
      const int count = std::min(step.wanted() - done, sizes_.logit_rows);
      backend().want_rows(done, count);
      backend().project(lm().lm_head, backend().normed(lm().model.norm, backend().selected),
                        backend().logits);
      nibble::require(backend().result());
      read_logits(logits.data() + static_cast<std::size_t>(done) * static_cast<std::size_t>(c.vocab_size),
                  count);
      done += count;
    }
  }

  [[nodiscard]] bool draws() const override { return true; }
  [[nodiscard]] bool can_draw(const sampling_options& options) const override {
    return cuda_draws::can_draw(options);
  }
  void forbid(std::span<const std::int32_t> ids) override { draws_.forbid(ids); }
  void set_draws(int slot, const sampling_options& options, const draw_history& history) override {
    check_slot(limits_, slot);
    draws_.set(slot, options, history);
  }

  void begin(std::span<const step_sequence> sequences) override {
    check_drawing_step(limits_, sequences);
    if (begun_ - finished_ == max_steps_in_flight) throw nibble::error("two steps are in flight already");
    step_in_flight& flight = flights_[static_cast<std::size_t>(begun_ % max_steps_in_flight)];
    try {
      launch_draws(sequences, flight);
    } catch (...) {
      // What was sent already reads host memory that the next step writes.
      core().settle();
      throw;
    }
    ++begun_;
  }

  [[nodiscard]] std::span<const nibble::sampled_row> finish() override {
    if (finished_ == begun_) throw nibble::error("no step is in flight");
    step_in_flight& flight = flights_[static_cast<std::size_t>(finished_++ % max_steps_in_flight)];
    nibble::require(nibble::runtime_status(cudaEventSynchronize(flight.done), where, "the step failed"));
    check_counts(flight);
    return {flight.results.as<nibble::sampled_row>(), flight.drawn};
  }

  [[nodiscard]] expert_traffic experts() const override { return traffic_; }

  [[nodiscard]] int adapt_pages(int pages_in_use, bool now) override {
    core().set_pages_in_use(static_cast<std::uint64_t>(pages_in_use));
    static_cast<void>(engine_.adapt(now));
    return static_cast<int>(engine_.context().plan().kv_pages);
  }

  [[nodiscard]] engine_type& engine() { return engine_; }
  /// See cuda_core.
  void remember_experts() { core().remember_experts(); }

 private:
  static constexpr const char* where = "qwen3_moe::cuda_runner";

  [[nodiscard]] core_type& core() { return engine_.model(); }
  [[nodiscard]] backend_type& backend() { return core().backend(); }
  [[nodiscard]] const causal_lm<Config>& lm() { return core().model(); }
  [[nodiscard]] cudaStream_t stream() { return backend().stream(); }

  void launch_draws(std::span<const step_sequence> sequences, step_in_flight& flight) {
    const int wanted = launch_forward(sequences, flight);
    flight.drawn = static_cast<std::size_t>(wanted);
    if (wanted > 0) {
      const auto& layout = backend().step_layout();
      const std::span<const std::int32_t> slots(flight.words.as<std::int32_t>() + layout.drawing_slot_at(),
                                                flight.drawn);
      const auto draws = draws_.prepare(slots, flight.rows.as<nibble::sampling_row>(),
                                        backend().step_words() + layout.drawing_slot_at());
      backend().draw(draws, draws_.forbidden(), draws_.forbidden_count());
      nibble::require(backend().result());
      draws_.read(flight.results.as<nibble::sampled_row>(), flight.drawn);
    }
    read_counts(flight);
    nibble::require(nibble::runtime_status(cudaEventRecord(flight.done, stream()), where,
                                           "the step could not be marked"));
  }

  [[nodiscard]] static runner_limits limits_of(const nibble::memory_plan& plan, const device_sizes& sizes) {
    return {
        c.vocab_size,        plan.limits.context_tokens, device_page_tokens, static_cast<int>(plan.kv_pages),
        plan.limits.running, sizes.step_tokens,          nibble::delta_chunk};
  }

  /// Sends the step and launches its forward pass, decode steps of which every row is wanted as a graph.
  /// \return how many of the wanted rows have their logits in the buffer, in order: all of them, or as many
  /// as it holds
  int launch_forward(std::span<const step_sequence> sequences, step_in_flight& flight) {
    const bool all_decode = std::all_of(sequences.begin(), sequences.end(), [](const auto& s) {
      return s.tokens.size() == 1 && s.logits != wanted_logits::none;
    });
    const int exact = static_cast<int>(sequences.size());
    int padded = all_decode ? engine_.padded(exact) : 0;
    // A padding row would have experts of its own fetched.
    if (core().offload() != nullptr && padded > exact) padded = exact;
    if (core().offload() != nullptr) flight.generation = core().offload()->generation();
    device_step& step = flight.step;
    step.compose(sequences, padded);
    send(sequences, flight);
    if (padded > 0 && padded <= sizes_.sequences) {
      nibble::require(engine_.decode(padded));
      return step.wanted();
    }
    backend().begin_step(step.rows(), step.decodes(), step.sequences());
    const int first = std::min(step.wanted(), sizes_.logit_rows);
    backend().want_rows(0, first);
    forward(backend(), lm());
    nibble::require(backend().result());
    return first;
  }

  void read_counts(step_in_flight& flight) {
    if (core().offload() != nullptr)
      nibble::require(
          core().offload()->read_counts(flight.counts.as<nibble::moe::residency_counts>(), stream()));
  }
  /// A step whose experts were not all there has computed something else: it fails, the next one may not.
  void check_counts(step_in_flight& flight) {
    if (core().offload() == nullptr) return;
    const auto now = *flight.counts.as<nibble::moe::residency_counts>();
    // Counts begin at zero again when slots come or go and after a failure.
    if (now.hits < counted_.hits || now.misses < counted_.misses) counted_ = {};
    traffic_.hits += now.hits - counted_.hits, traffic_.misses += now.misses - counted_.misses;
    traffic_.ahead += now.ahead - counted_.ahead, traffic_.ahead_used += now.ahead_used - counted_.ahead_used;
    counted_ = now;
    const std::string what = core().offload()->failure(now, flight.generation, stream());
    if (!what.empty()) throw nibble::error(what);
  }

  void copy_to_device(std::int32_t* to, const std::int32_t* from, std::size_t count) {
    nibble::require(
        nibble::runtime_status(cudaMemcpyAsync(to, from, 4 * count, cudaMemcpyHostToDevice, stream()), where,
                               "the step's arrays could not be sent"));
  }
  void send(std::span<const step_sequence> sequences, step_in_flight& flight) {
    copy_to_device(backend().step_words(), flight.words.as<std::int32_t>(),
                   static_cast<std::size_t>(backend().step_layout().words()));
    const auto order = flight.step.order();
    for (std::size_t i = 0; i < order.size(); ++i) {
      const step_sequence& s = sequences[static_cast<std::size_t>(order[i])];
      const auto tokens = static_cast<std::size_t>(s.position) + s.tokens.size();
      const auto page_tokens = static_cast<std::size_t>(limits_.page_tokens);
      pages_.update(static_cast<int>(i), s.pages.first((tokens + page_tokens - 1) / page_tokens),
                    [&](std::size_t at, std::span<const std::int32_t> changed) {
                      copy_to_device(backend().page_table() + at, changed.data(), changed.size());
                    });
    }
  }

  /// Rows 0 … rows - 1 of the logits buffer to host memory, and the end of the step.
  void read_logits(float* to, int rows) {
    constexpr std::size_t row_bytes = 4 * static_cast<std::size_t>(c.vocab_size);
    if (rows > 0)
      nibble::require(nibble::runtime_status(
          cudaMemcpy2DAsync(logits_.data(), row_bytes, backend().logits_buffer(),
                            4 * static_cast<std::size_t>(logit_stride_of(c)), row_bytes,
                            static_cast<std::size_t>(rows), cudaMemcpyDeviceToHost, stream()),
          where, "the logits could not be read"));
    nibble::require(nibble::runtime_status(cudaStreamSynchronize(stream()), where, "the step failed"));
    std::memcpy(to, logits_.data(), row_bytes * static_cast<std::size_t>(rows));
  }

  engine_type engine_;
  runner_limits limits_;
  device_sizes sizes_;
  nibble::pinned_memory logits_;
  std::array<step_in_flight, max_steps_in_flight> flights_;
  page_table_shadow pages_;
  cuda_draws draws_;
  nibble::moe::residency_counts counted_{};  ///< at the last step that was finished
  expert_traffic traffic_{};
  std::uint64_t begun_ = 0, finished_ = 0;
};

}  // namespace qwen3_moe
