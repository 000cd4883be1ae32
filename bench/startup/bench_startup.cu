// SPDX-License-Identifier: Apache-2.0
// A start on random weights: the ledger line by line against the driver, the time of each phase, and what the
// driver loads and allocates over mixed decode and prefill steps afterwards. With --left-mib another
// allocation holds the card so that so much is left beside the weights; with --limit-mib the start itself
// keeps to so much while the card is free, and does the same work. JSON rows on stdout.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "activity_counter.hpp"
#include "compiled/bench_model.hpp"
#include "model/cuda_runner.cuh"
#include "random_source.cuh"

namespace {

using config = qwen3_moe::compiled::NIBBLE_BENCH_IDENTIFIER;
constexpr const qwen3_moe::model_config& c = config::value;
using core = qwen3_moe::cuda_core<config, nibble::kv_format::bf16>;
using runner = qwen3_moe::cuda_runner<config, nibble::kv_format::bf16>;
constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr std::uint64_t usual_context_bytes = 512 * mib;  ///< a limit counts the context too

struct arguments {
  int left_mib = 0;   ///< 0: all memory is free
  int limit_mib = 0;  ///< the same plan by a limit of one's own, with all memory free; 0: no limit
  int steps = 10'000;
  int context = 4096;
  std::string facts;  ///< further fields of every row: device, driver, commit, date
};

std::uint64_t free_bytes() {
  std::size_t free = 0, total = 0;
  nibble::require(nibble::runtime_status(cudaMemGetInfo(&free, &total), "bench_startup", "free memory"));
  return free;
}

/// `count` steps of 1 … slots sequences; every tenth also brings a prompt of up to 200 tokens.
void mixed_steps(runner& r, int count) {
  const auto& limits = r.limits();
  const int slots = std::min(limits.slots, 8), each = (limits.pages - 1) / slots;
  const int most = std::min({limits.context_tokens, each * limits.page_tokens, 1024}) - 1;
  std::vector<std::int32_t> pages(static_cast<std::size_t>(each) * static_cast<std::size_t>(slots)),
      tokens(200);
  std::iota(pages.begin(), pages.end(), 0);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::int32_t>((i * 2654435761u) % static_cast<unsigned>(c.vocab_size));
  std::vector<int> position(static_cast<std::size_t>(slots));
  std::vector<float> logits(static_cast<std::size_t>(slots) * static_cast<std::size_t>(c.vocab_size));
  for (int s = 0; s < slots; ++s) r.clear_slot(s);
  for (int i = 0; i < count; ++i) {
    const int sequences = 1 + i % slots;
    std::vector<qwen3_moe::step_sequence> step;
    for (int s = 0; s < sequences; ++s) {
      auto& at = position[static_cast<std::size_t>(s)];
      int length = i % 10 == 9 && s == 0 ? std::min(2 + i % 199, limits.step_tokens - sequences) : 1;
      if (at + length > most) {
        at = 0;
        r.clear_slot(s);
      }
      step.push_back(
          {std::span(tokens).first(static_cast<std::size_t>(length)), at, s,
           std::span(pages).subspan(static_cast<std::size_t>(s * each), static_cast<std::size_t>(each)),
           qwen3_moe::wanted_logits::last});
      at += length;
    }
    r.step(step, std::span(logits).first(static_cast<std::size_t>(sequences) *
                                         static_cast<std::size_t>(c.vocab_size)));
  }
}

int run(int argc, char** argv) {
  arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--left-mib")
      a.left_mib = std::atoi(value());
    else if (name == "--limit-mib")
      a.limit_mib = std::atoi(value());
    else if (name == "--steps")
      a.steps = std::atoi(value());
    else if (name == "--context")
      a.context = std::atoi(value());
    else if (name == "--facts")
      a.facts = value();
    else {
      std::fprintf(
          stderr,
          "bench_startup [--left-mib 700 | --limit-mib 700] [--steps 10000] [--context 4096] [--facts ,…]\n");
      return 2;
    }
  }
  nibble::start_options options;
  options.request.context_tokens = a.context;
  options.request.preferred_running = 8;
  options.request.preferred_step_tokens = 512;
  options.log = [](std::string_view line) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
  };
  bench::random_model<config> weights(7);
  nibble::device_memory ballast;
  const auto kept = [](int left_mib) {
    return nibble::align_up(qwen3_moe::dense_device_bytes<config>() + qwen3_moe::expert_table_bytes_of(c),
                            2 * mib) +
           static_cast<std::uint64_t>(left_mib) * mib;
  };
  if (a.left_mib > 0)
    ballast = nibble::device_memory(free_bytes() - kept(a.left_mib));
  else if (a.limit_mib > 0)
    options.request.vram_limit_bytes = kept(a.limit_mib) + usual_context_bytes;
  runner r(nibble::startup::start<core>(std::move(options), weights.source(), a.context));
  auto& context = r.engine().context();
  const std::string model(config::name), situation = a.left_mib > 0    ? "ballast"
                                                     : a.limit_mib > 0 ? "limit"
                                                                       : "free";
  const auto row = [&](const std::string& fields) {
    std::printf("{\"model\":\"%s\",\"memory\":\"%s\",%s%s},\n", model.c_str(), situation.c_str(),
                fields.c_str(), a.facts.c_str());
  };
  for (std::size_t i = 0; i < nibble::ledger_lines; ++i) {
    const auto line = static_cast<nibble::ledger_line>(i);
    const auto& e = context.lines()[line];
    row("\"line\":\"" + std::string(nibble::key_of(line)) +
        "\",\"planned_bytes\":" + std::to_string(e.planned_bytes) +
        ",\"measured_bytes\":" + (e.measured_bytes ? std::to_string(*e.measured_bytes) : "null"));
  }
  row("\"line\":\"unaccounted\",\"planned_bytes\":0,\"measured_bytes\":" +
      std::to_string(context.unaccounted_bytes()));
  double total = 0;
  for (const auto& t : context.times()) {
    char text[80];
    std::snprintf(text, sizeof text, "\"phase\":\"%s\",\"ms\":%.2f", t.phase, t.ms);
    row(text);
    total += t.ms;
  }
  char text[160];
  std::snprintf(text, sizeof text, "\"phase\":\"total\",\"ms\":%.2f", total);
  row(text);
  std::snprintf(text, sizeof text, "\"kernels\":%zu,\"geometries\":%zu,\"ms\":%.2f",
                context.kernels().kernels.size(), context.kernels().geometries, context.kernels().ms);
  row(text);
  std::snprintf(text, sizeof text, "\"graphs\":%zu,\"ms\":%.2f", r.engine().graphs_of_steps().graphs(),
                r.engine().graphs_of_steps().report().ms);
  row(text);

  device_test::activity_counter counter;
  const std::uint64_t before = free_bytes();  // the counter takes some for itself
  mixed_steps(r, a.steps);
  context.platform().synchronize();
  const bool counted = counter.available();
  const long long lost = static_cast<long long>(before) - static_cast<long long>(free_bytes());
  const auto seen = counter.stop();
  row("\"steps\":" + std::to_string(a.steps) + ",\"counted_by\":\"" + (counted ? "CUPTI" : "free memory") +
      "\",\"loads\":" + std::to_string(seen.module_loads) + ",\"allocations\":" +
      std::to_string(seen.allocations) + ",\"instantiations\":" + std::to_string(seen.instantiations) +
      ",\"lost_bytes\":" + std::to_string(lost));
  std::fprintf(stderr, "%d steps: %s\n", a.steps, seen.text().c_str());
  return seen.none() && lost == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& problem) {
  std::fprintf(stderr, "bench_startup: %s\n", problem.what());
  return 1;
}
