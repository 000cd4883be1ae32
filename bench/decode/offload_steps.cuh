// SPDX-License-Identifier: Apache-2.0
/// \file
/// Whole steps of a model whose experts do not all fit: decode by a routing trace against the larger of all
/// bytes over memory bandwidth and missed bytes over the link's; prompts by the model's own routing.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "forced_routing.cuh"
#include "timing.cuh"

namespace bench {

/// What the steps of a runner moved.
struct moved_experts {
  double hits = 0, misses = 0, guessed = 0;
  double guesses = 0;  ///< wrong ones too
  [[nodiscard]] double hit_rate() const { return (hits - guessed) / (hits + misses); }
  [[nodiscard]] double missed() const { return misses + guessed; }
};

template <class Runner>
class offload_benchmark {
 public:
  using config_type = typename Runner::config_type;
  static constexpr qwen3_moe::model_config c = config_type::value;

  /// \param dense_bytes that a step reads whatever its routing, states and cache included
  offload_benchmark(Runner& runner, std::string facts, double memory_bytes_per_us, double link_bytes_per_us)
      : runner_(runner),
        facts_(std::move(facts)),
        clock_(runner.engine().model().backend().stream()),
        memory_(memory_bytes_per_us),
        link_(link_bytes_per_us),
        counts_(sizeof(nibble::moe::residency_counts)) {}

  /// Decode steps of one row that lie on the device, routed by a trace: 600 to warm the pool, then 300.
  /// \param ahead guesses a layer, at most what the start allowed \param guess_right probability that one is
  /// right
  void decode(double vram_gib, double exponent, double dense_bytes, int ahead, double guess_right) {
    constexpr int warm_steps = 600, steps = 300;
    const auto captured = runner_.engine().graphs_of_steps().sizes();
    forced_routing routing(
        {c.layers, c.experts, c.experts_per_token, exponent, warm_steps + steps, guess_right},
        captured.empty() ? 1 : *std::max_element(captured.begin(), captured.end()));
    auto& limit = runner_.engine().model().backend().ahead_limit;
    const int usual = limit;
    limit = ahead;
    route(&routing);
    auto& engine = runner_.engine();
    for (int i = 0; i < warm_steps; ++i) nibble::require(engine.decode(1));
    const auto before = read();
    const double us = clock_.us([&] {
      for (int i = 0; i < steps; ++i) nibble::require(engine.decode(1));
    }) / steps;
    const auto m = since(before);
    limit = usual;
    route(nullptr);
    const double bytes = dense_bytes + (m.hits + m.misses) / steps * slot_bytes;
    const double cpu = runner_.engine().model().host_bytes_per_us();
    const double bound = std::max(bytes / memory_, m.missed() / steps * slot_bytes / (link_ + cpu));
    std::printf(
        "{\"bench\":\"offload\",\"suite\":\"steps\",\"model\":\"%s\",\"vram_gib\":%g,\"slots\":%d,"
        "\"trace\":\"%s\",\"policy\":\"worth\",\"cpu_gbps\":%.1f,\"fetch\":\"%s\",\"ahead\":%d,"
        "\"guess_right\":%g,\"guesses_per_step\":%.1f,"
        "\"guesses_used_per_step\":%.1f,\"hit_rate\":%.4f,\"us_per_step\":%.0f,"
        "\"bound_us\":%.0f,"
        "\"over_bound\":%.3f,\"tokens_per_s\":%.1f,\"pcie_gbps\":%.1f%s}\n",
        std::string(config_type::name).c_str(), vram_gib, slots(), exponent > 0 ? "zipf" : "uniform",
        cpu / 1e3, how(), ahead, guess_right, m.guesses / steps, m.guessed / steps, m.hit_rate(), us, bound,
        us / bound, 1e6 / us, link_ / 1e3, facts_.c_str());
    std::fflush(stdout);
  }

  /// Milliseconds from a fresh prompt to its first token, drawn on the device, on the host; medians of several
  /// prompts.
  struct prompt_time {
    double ms = 0, missed = 0;
  };
  prompt_time prompt(int tokens) {
    const auto& limits = runner_.limits();
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens)),
        pages(static_cast<std::size_t>(limits.pages));
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int32_t>(i);
    qwen3_moe::sampling_options greedy;
    greedy.temperature = 0;
    runner_.set_draws(0, greedy, {});
    std::vector<prompt_time> all;
    for (int round = 0; round < 6; ++round) {
      for (auto& id : ids) id = static_cast<std::int32_t>(random_() % static_cast<unsigned>(c.vocab_size));
      runner_.clear_slot(0);
      const auto before = read();
      const auto begin = std::chrono::steady_clock::now();
      for (int done = 0; done < tokens;) {
        const int count = std::min(limits.step_tokens, tokens - done);
        const bool last = done + count == tokens;
        const qwen3_moe::step_sequence sequence{
            std::span(ids).subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)), done, 0,
            pages, last ? qwen3_moe::wanted_logits::last : qwen3_moe::wanted_logits::none};
        runner_.begin({&sequence, 1});
        static_cast<void>(runner_.finish());
        done += count;
      }
      const double ms =
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      if (round > 0) all.push_back({ms, since(before).missed()});
    }
    std::nth_element(all.begin(), all.begin() + 2, all.end(),
                     [](const prompt_time& a, const prompt_time& b) { return a.ms < b.ms; });
    return all[2];
  }
  /// The row of a prompt. \param resident_ms the same with all experts resident
  void first_token(double vram_gib, int tokens, double resident_ms, int ahead) {
    auto& limit = runner_.engine().model().backend().ahead_limit;
    const int usual = limit;
    limit = ahead;
    route(nullptr);  // a prompt of one token is a captured step
    const prompt_time t = prompt(tokens);
    limit = usual;
    route(nullptr);
    const double fetch_ms = t.missed * slot_bytes / link_ / 1e3, bound = std::max(fetch_ms, resident_ms);
    std::printf(
        "{\"bench\":\"offload\",\"suite\":\"first token\",\"model\":\"%s\",\"vram_gib\":%g,\"slots\":%d,"
        "\"fetch\":\"%s\",\"ahead\":%d,\"step_tokens\":%d,\"prompt_tokens\":%d,\"ms\":%.2f,\"bound_ms\":%.2f,"
        "\"over_bound\":%."
        "3f,"
        "\"fetched_experts\":%.0f,\"resident_ms\":%.2f%s}\n",
        std::string(config_type::name).c_str(), vram_gib, slots(), how(), ahead, runner_.limits().step_tokens,
        tokens, t.ms, bound, t.ms / bound, t.missed, resident_ms, facts_.c_str());
    std::fflush(stdout);
  }

  /// A row for each phase of the start.
  void start(double vram_gib) {
    double all = 0;
    for (const auto& phase : runner_.engine().context().times()) {
      // Parts of the phase "caches" are told one by one, too.
      if (std::string(phase.phase).rfind("experts", 0) != 0) all += phase.ms;
      start_row(vram_gib, phase.phase, phase.ms);
    }
    start_row(vram_gib, "all", all);
  }

 private:
  static constexpr double slot_bytes = static_cast<double>(qwen3_moe::expert_slot_bytes_of(c));

  void start_row(double vram_gib, const char* phase, double ms) {
    std::printf(
        "{\"bench\":\"offload\",\"suite\":\"start\",\"model\":\"%s\",\"vram_gib\":%g,\"phase\":\"%s\","
        "\"ms\":%.1f%s}\n",
        std::string(config_type::name).c_str(), vram_gib, phase, ms, facts_.c_str());
  }
  /// What brings experts.
  [[nodiscard]] const char* how() const {
    const auto* offload = runner_.engine().model().offload();
    return offload != nullptr && offload->fetches_by_engine() ? "engine" : "kernel";
  }
  [[nodiscard]] int slots() const {
    const auto* offload = runner_.engine().model().offload();
    return offload != nullptr ? offload->slot_count() : qwen3_moe::expert_count(c);
  }
  /// Captures the steps anew with this routing, or with the model's own.
  void route(forced_routing* routing) {
    auto& model = runner_.engine().model();
    model.backend().after_router = routing != nullptr ? &forced_routing::hook : nullptr;
    model.backend().after_router_self = routing;
    nibble::require(runner_.engine().graphs_of_steps().recapture(model.signature()));
  }
  [[nodiscard]] nibble::moe::residency_counts read() {
    const auto* offload = runner_.engine().model().offload();
    if (offload == nullptr) return {};
    auto* const counts = counts_.as<nibble::moe::residency_counts>();
    nibble::require(offload->read_counts(counts, clock_.stream()));
    good(cudaStreamSynchronize(clock_.stream()), "counts");
    if (!counts->good()) throw nibble::error("a step did not have its experts");
    return *counts;
  }
  [[nodiscard]] moved_experts since(const nibble::moe::residency_counts& before) {
    const auto now = read();
    const auto of = [](std::uint64_t a, std::uint64_t b) { return static_cast<double>(a - b); };
    return {of(now.hits, before.hits), of(now.misses, before.misses), of(now.ahead_used, before.ahead_used),
            of(now.ahead, before.ahead)};
  }

  Runner& runner_;
  std::string facts_;
  clock clock_;
  double memory_, link_;
  nibble::pinned_memory counts_;
  std::mt19937 random_{5};
};

}  // namespace bench
