// SPDX-License-Identifier: Apache-2.0
// Whole steps of full-size models on random weights: decode against the bytes it must move, prefill, the
// share of each op, the ledger. JSON rows on stdout.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "compiled/bench_model.hpp"
#include "model/cuda_runner.cuh"
#include "offload_steps.cuh"
#include "random_source.cuh"
#include "timing.cuh"

namespace {

using config = qwen3_moe::compiled::NIBBLE_BENCH_IDENTIFIER;
constexpr const qwen3_moe::model_config& c = config::value;
constexpr auto kv = nibble::kv_format::NIBBLE_BENCH_KV;
using core = qwen3_moe::cuda_core<config, kv>;
using runner = qwen3_moe::cuda_runner<config, kv>;

struct arguments {
  std::vector<int> batches{1, 8}, contexts{512}, prefills{8192};
  int step_tokens = 8192;
  int most_context = 0;
  std::uint64_t vram_limit_bytes = 0;
  std::vector<int> offload_gib;   ///< cards on which not all experts fit
  std::vector<int> first_tokens;  ///< prompts on the card of 12 GiB, or on the only one
  int ahead = 0;                  ///< experts fetched ahead; measured with and without
  double guess_right = 0.8;       ///< probability that an expert named ahead by a trace is asked for
  qwen3_moe::expert_fetch fetch = qwen3_moe::expert_fetch::measured;
  bool cpu = false;  ///< misses may be left to the CPU, where that measures faster
  bool breakdown = false;
  std::string facts;  ///< further fields of every row: device, driver, commit, date
};

std::vector<int> numbers(const char* text) {
  std::vector<int> out;
  for (const char* at = text; *at != '\0';) {
    out.push_back(std::atoi(at));
    const char* comma = std::strchr(at, ',');
    if (comma == nullptr) break;
    at = comma + 1;
  }
  return out;
}

using bench::clock;
using bench::good;
using bench::median;

/// Bytes a decode step cannot avoid, whatever its routing: dense weights but for the embedding table, keys
/// and values of the context, states read and written.
double dense_step_bytes(int batch, int context) {
  double bytes = static_cast<double>(qwen3_moe::dense_device_bytes<config>()) -
                 2.0 * c.vocab_size * c.hidden_size + 2.0 * batch * c.hidden_size;
  bytes += static_cast<double>(batch) * context * static_cast<double>(qwen3_moe::kv_page_bytes_of(c, kv)) /
           qwen3_moe::device_page_tokens;
  bytes += 2.0 * batch * static_cast<double>(qwen3_moe::state_slot_bytes_of(c));
  return bytes;
}
/// The same with the distinct experts that uniform routing chooses.
double step_bytes(int batch, int context) {
  double missed = 1;
  for (int b = 0; b < batch; ++b) missed *= 1.0 - static_cast<double>(c.experts_per_token) / c.experts;
  return dense_step_bytes(batch, context) +
         c.layers * (1 - missed) * c.experts * static_cast<double>(qwen3_moe::expert_slot_bytes_of(c));
}

class benchmark {
 public:
  benchmark(runner& r, const arguments& a)
      : runner_(r), arguments_(a), stream_(r.engine().model().backend().stream()), clock_(stream_) {
    bytes_per_us_ = bench::memory_bytes_per_us(clock_);
  }

  [[nodiscard]] double bytes_per_us() const { return bytes_per_us_; }
  [[nodiscard]] double link_bytes_per_us() { return bench::link_bytes_per_us(clock_); }
  /// See place().
  void place_one(int context) { place(1, context, context / runner_.limits().page_tokens + 1); }

  void decode(int batch, int context) {
    const auto& limits = runner_.limits();
    const int pages_each = context / limits.page_tokens + 1;
    if (batch > limits.slots || context >= limits.context_tokens ||
        static_cast<std::int64_t>(batch) * pages_each > limits.pages) {
      std::fprintf(stderr, "batch %d at context %d does not fit\n", batch, context);
      return;
    }
    place(batch, context, pages_each);
    const double us = time_decode(batch);
    const double bytes = step_bytes(batch, context), floor_us = bytes / bytes_per_us_;
    std::printf(
        "{\"bench\":\"decode\",\"model\":\"%s\",\"batch\":%d,\"context\":%d,\"us_per_step\":%.1f,"
        "\"tokens_per_s\":%.1f,\"bytes\":%.0f,\"floor_us\":%.1f%s}\n",
        std::string(config::name).c_str(), batch, context, us, 1e6 * batch / us, bytes, floor_us,
        arguments_.facts.c_str());
    std::fflush(stdout);
    if (arguments_.breakdown) breakdown(batch, us);
  }

  void prefill(int tokens) {
    const auto& limits = runner_.limits();
    if (tokens >= limits.context_tokens) return;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens)),
        pages(static_cast<std::size_t>(limits.pages));
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::int32_t>((i * 2654435761u) % c.vocab_size);
    std::iota(pages.begin(), pages.end(), 0);
    std::vector<float> logits(static_cast<std::size_t>(c.vocab_size));
    std::vector<double> all;
    for (int round = 0; round < 4; ++round) {
      runner_.clear_slot(0);
      const double us = clock_.us([&] {
        for (int done = 0; done < tokens;) {
          const int count = std::min(limits.step_tokens, tokens - done);
          const bool last = done + count == tokens;
          const qwen3_moe::step_sequence sequence{
              std::span(ids).subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)), done,
              0, pages, last ? qwen3_moe::wanted_logits::last : qwen3_moe::wanted_logits::none};
          runner_.step({&sequence, 1}, logits);
          done += count;
        }
      });
      if (round > 0) all.push_back(us);
    }
    const double ms = median(all) / 1000;
    std::printf(
        "{\"bench\":\"prefill\",\"model\":\"%s\",\"tokens\":%d,\"ms\":%.2f,\"tokens_per_s\":%.0f%s}\n",
        std::string(config::name).c_str(), tokens, ms, 1000.0 * tokens / ms, arguments_.facts.c_str());
    std::fflush(stdout);
    if (arguments_.breakdown) prefill_breakdown(tokens, ids, pages);
  }

 private:
  /// One real step, after which the device's arrays describe `batch` sequences at `context`.
  void place(int batch, int context, int pages_each) {
    pages_.assign(static_cast<std::size_t>(batch) * static_cast<std::size_t>(pages_each), 0);
    std::iota(pages_.begin(), pages_.end(), 0);
    tokens_.resize(static_cast<std::size_t>(batch));
    std::vector<qwen3_moe::step_sequence> sequences;
    for (int b = 0; b < batch; ++b) {
      runner_.clear_slot(b);
      tokens_[static_cast<std::size_t>(b)] = (b * 7919 + 11) % c.vocab_size;
      sequences.push_back({std::span(tokens_).subspan(static_cast<std::size_t>(b), 1), context, b,
                           std::span(pages_).subspan(static_cast<std::size_t>(b * pages_each),
                                                     static_cast<std::size_t>(pages_each)),
                           qwen3_moe::wanted_logits::last});
    }
    logits_.resize(static_cast<std::size_t>(batch) * static_cast<std::size_t>(c.vocab_size));
    runner_.step(sequences, logits_);
    for (const float v : logits_)
      if (!(v == v)) {
        std::fprintf(stderr, "batch %d at context %d: the logits hold NaN\n", batch, context);
        std::exit(1);
      }
  }
  double time_decode(int batch) {
    auto& engine = runner_.engine();
    const int rows = engine.padded(batch);
    std::vector<double> all;
    for (int round = 0; round < 12; ++round) {
      constexpr int steps = 10;
      const double us = clock_.us([&] {
        for (int i = 0; i < steps; ++i) nibble::require(engine.decode(rows));
      });
      if (round > 1) all.push_back(us / steps);
    }
    return median(all);
  }

  /// What the step gains when one op is left out: its share of the chain.
  void breakdown(int batch, double whole_us) {
    auto& backend = runner_.engine().model().backend();
    auto& graphs = runner_.engine().graphs_of_steps();
    const int rows = runner_.engine().padded(batch);
    const std::vector<int> sizes(graphs.sizes().begin(), graphs.sizes().end());
    const int ahead =
        std::exchange(backend.ahead_limit, 0);  // a layer ahead relies on the experts being there
    for (const char* op : {"embed", "norm", "project", "project_and_add", "attention", "delta rule", "router",
                           "experts", "lm_head"}) {
      backend.left_out = op;
      nibble::require(graphs.capture({rows}, runner_.engine().model().signature(), false));
      const double us = time_decode(batch);
      std::printf("{\"bench\":\"decode_share\",\"model\":\"%s\",\"batch\":%d,\"op\":\"%s\",\"us\":%.1f%s}\n",
                  std::string(config::name).c_str(), batch, op, whole_us - us, arguments_.facts.c_str());
    }
    backend.left_out = nullptr;
    backend.ahead_limit = ahead;
    nibble::require(graphs.capture(sizes, runner_.engine().model().signature(), false));
    std::fflush(stdout);
  }
  void prefill_breakdown(int tokens, std::vector<std::int32_t>& ids, std::vector<std::int32_t>& pages) {
    auto& backend = runner_.engine().model().backend();
    const int count = std::min(tokens, runner_.limits().step_tokens);
    const qwen3_moe::step_sequence sequence{std::span(ids).first(static_cast<std::size_t>(count)), 0, 0,
                                            pages, qwen3_moe::wanted_logits::none};
    const auto time = [&] {
      std::vector<double> all;
      for (int i = 0; i < 4; ++i) {
        runner_.clear_slot(0);
        all.push_back(clock_.us([&] { runner_.step({&sequence, 1}, {}); }));
      }
      return median(all);
    };
    const double whole_us = time();
    for (const char* op : {"norm", "project", "project_and_add", "attention append", "attention prefill",
                           "delta rule prefill", "router", "experts"}) {
      backend.left_out = op;
      std::printf(
          "{\"bench\":\"prefill_share\",\"model\":\"%s\",\"tokens\":%d,\"op\":\"%s\",\"us\":%.1f%s}\n",
          std::string(config::name).c_str(), count, op, whole_us - time(), arguments_.facts.c_str());
    }
    backend.left_out = nullptr;
    std::fflush(stdout);
  }

  runner& runner_;
  const arguments& arguments_;
  cudaStream_t stream_;
  clock clock_;
  double bytes_per_us_ = 1;
  std::vector<std::int32_t> pages_, tokens_;
  std::vector<float> logits_;
};

/// A start as the server makes it, but for the context.
runner start(bench::random_model<config>& weights, double vram_gib, int step_tokens, int context, bool cpu,
             int ahead, qwen3_moe::expert_fetch fetch) {
  nibble::start_options options;
  auto& request = options.request;
  request.context_tokens = context;
  request.max_running = 1;
  request.preferred_step_tokens = 512;
  request.preferred_step_tokens_fetching = 8192;
  if (step_tokens > 0) request.step_tokens = step_tokens;
  if (vram_gib > 0) request.vram_limit_bytes = static_cast<std::uint64_t>(vram_gib * 1073741824.0);
  options.log = [](std::string_view line) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
  };
  auto source = weights.source();
  source.keeping.ahead = ahead, source.keeping.fetch = fetch;
  source.keeping.cpu = cpu ? qwen3_moe::cpu_share::split : qwen3_moe::cpu_share::off;
  return runner(nibble::startup::start<core>(std::move(options), std::move(source), context));
}

/// Rows of bench/results/…/offload.json: decode on each card, then prompts and the start.
int run_offload(const arguments& a) {
  using offload = bench::offload_benchmark<runner>;
  constexpr int decode_context = 512;
  int context = 1024;
  for (const int tokens : a.first_tokens) context = std::max(context, tokens + 16);
  bench::random_model<config> weights(7);
  double memory = 1, link = 1;
  std::vector<std::pair<int, double>> resident;  // step tokens of 2048 and of the whole prompt
  {
    runner whole = start(weights, 0, a.step_tokens, context, false, 0, a.fetch);
    benchmark b(whole, a);
    memory = b.bytes_per_us(), link = b.link_bytes_per_us();
    offload o(whole, a.facts, memory, link);
    for (const int tokens : a.first_tokens) resident.emplace_back(tokens, o.prompt(tokens).ms);
  }
  std::vector<int> on_and_off{0};
  if (a.ahead > 0) on_and_off.push_back(a.ahead);
  const auto prompts = [&](offload& o, int gib, int least) {
    for (const auto& [tokens, ms] : resident)
      for (const int ahead : on_and_off)
        if (tokens >= least) o.first_token(gib, tokens, ms, ahead);
  };
  bool whole_prompts = false;
  for (const int gib : a.offload_gib) {
    const bool all = gib == 12 || a.offload_gib.size() == 1;
    runner r = start(weights, gib, 0, context, a.cpu, a.ahead, a.fetch);
    benchmark b(r, a);
    offload o(r, a.facts, memory, link);
    if (all) o.start(gib);
    b.place_one(decode_context);
    for (const double exponent : {0.0, 1.0})
      for (const int ahead : on_and_off)
        o.decode(gib, exponent, dense_step_bytes(1, decode_context), ahead, a.guess_right);
    if (all) prompts(o, gib, 0), whole_prompts = r.limits().step_tokens >= a.step_tokens;
  }
  for (const int gib : a.offload_gib)
    if (!whole_prompts && (gib == 12 || a.offload_gib.size() == 1)) {
      // Long prompts in one step: every expert is fetched once.
      runner r = start(weights, gib, a.step_tokens, context, a.cpu, a.ahead, a.fetch);
      offload o(r, a.facts, memory, link);
      prompts(o, gib, 2049);
    }
  return 0;
}

int run(int argc, char** argv) {
  arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--batch")
      a.batches = numbers(value());
    else if (name == "--context")
      a.contexts = numbers(value());
    else if (name == "--prefill")
      a.prefills = numbers(value());
    else if (name == "--step-tokens")
      a.step_tokens = std::atoi(value());
    else if (name == "--vram-limit-gib")
      a.vram_limit_bytes = static_cast<std::uint64_t>(std::atof(value()) * 1073741824.0);
    else if (name == "--offload-gib")
      a.offload_gib = numbers(value());
    else if (name == "--first-token")
      a.first_tokens = numbers(value());
    else if (name == "--ahead")
      a.ahead = std::atoi(value());
    else if (name == "--guess-right")
      a.guess_right = std::atof(value());
    else if (name == "--fetch") {
      const auto fetch = qwen3_moe::expert_fetch_of(value());
      if (!fetch) {
        std::fprintf(stderr, "--fetch takes auto, kernel or engine\n");
        return 2;
      }
      a.fetch = *fetch;
    } else if (name == "--cpu")
      a.cpu = true;
    else if (name == "--breakdown")
      a.breakdown = true;
    else if (name == "--facts")
      a.facts = value();
    else {
      std::fprintf(stderr,
                   "bench_steps [--batch 1,8] [--context 512] [--prefill 8192] [--step-tokens 8192] "
                   "[--vram-limit-gib 12] [--breakdown] [--offload-gib 8,12,16 [--first-token 1,64,8192] "
                   "[--ahead 1 [--guess-right 0.8]] [--fetch auto|kernel|engine] [--cpu]] "
                   "[--facts ,\\\"device\\\":…]\n");
      return 2;
    }
  }
  if (!(a.guess_right >= 0 && a.guess_right <= 1)) {
    std::fprintf(stderr, "--guess-right takes a probability\n");
    return 2;
  }
  if (!a.offload_gib.empty()) return run_offload(a);
  nibble::start_options options;
  auto& request = options.request;
  const int most_context =
      std::max(*std::max_element(a.contexts.begin(), a.contexts.end()),
               a.prefills.empty() ? 0 : *std::max_element(a.prefills.begin(), a.prefills.end())) +
      16;
  const int most_batch = *std::max_element(a.batches.begin(), a.batches.end());
  request.context_tokens = most_context;
  request.max_running = most_batch;
  request.step_tokens = a.step_tokens;
  if (a.vram_limit_bytes != 0) request.vram_limit_bytes = a.vram_limit_bytes;
  request.captured_sizes = a.batches;
  options.log = [](std::string_view line) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
  };
  bench::random_model<config> weights(7);
  runner r(nibble::startup::start<core>(std::move(options), weights.source(), most_context));
  benchmark b(r, a);
  for (const int context : a.contexts)
    for (const int batch : a.batches) b.decode(batch, context);
  for (const int tokens : a.prefills) b.prefill(tokens);
  return 0;
}

}  // namespace

int main(int argc, char** argv) try { return run(argc, argv); } catch (const std::exception& problem) {
  std::fprintf(stderr, "bench_steps: %s\n", problem.what());
  return 1;
}
