// SPDX-License-Identifier: Apache-2.0
// Tokens per second and start-up of a checkpoint on the host backend: bench_model [MODEL_DIR] [--commit ID]
// [--date DAY] Prints a table; with --json FILE also writes rows
// {"suite","model","threads","batch","tokens","seconds","tokens_per_s",…}.
#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "model/registry.hpp"
#include "nibble/host/simd.hpp"

namespace {

using namespace qwen3_moe;
namespace json = boost::json;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// The middle of several runs.
double median_seconds(int runs, const std::function<double()>& one) {
  std::vector<double> seconds(static_cast<std::size_t>(runs));
  for (auto& s : seconds) s = one();
  std::nth_element(seconds.begin(), seconds.begin() + runs / 2, seconds.end());
  return seconds[static_cast<std::size_t>(runs / 2)];
}

/// `batch` sequences with pages of their own, stepped side by side.
class batch_run {
 public:
  batch_run(model_runner& runner, int batch) : runner_(runner), batch_(batch), position_(0) {
    const auto& limits = runner.limits();
    const int pages_each = limits.pages / batch;
    for (int i = 0; i < batch; ++i) {
      runner.clear_slot(i);
      auto& pages = pages_.emplace_back(static_cast<std::size_t>(pages_each));
      std::iota(pages.begin(), pages.end(), i * pages_each);
    }
    logits_.resize(static_cast<std::size_t>(batch) * static_cast<std::size_t>(limits.vocab_size));
  }
  /// Appends `count` tokens to every sequence in one step.
  void append(int count) {
    const int vocab = runner_.limits().vocab_size;
    tokens_.resize(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) tokens_[static_cast<std::size_t>(i)] = (position_ + i) * 7919 % vocab;
    std::vector<step_sequence> sequences;
    for (int i = 0; i < batch_; ++i)
      sequences.push_back({tokens_, position_, i, pages_[static_cast<std::size_t>(i)], wanted_logits::last});
    runner_.step(sequences, logits_);
    position_ += count;
  }

 private:
  model_runner& runner_;
  int batch_;
  int position_;
  std::vector<std::vector<std::int32_t>> pages_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> logits_;
};

}  // namespace

int main(int argc, char** argv) {
  std::string folder = NIBBLE_SOURCE_DIR "/examples/qwen3_moe/models/tiny", output, commit, day;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--json" && has_value)
      output = argv[++i];
    else if (argument == "--commit" && has_value)
      commit = argv[++i];
    else if (argument == "--date" && has_value)
      day = argv[++i];
    else
      folder = argument;
  }
  json::array rows;
  try {
    for (const int threads : {1, 0}) {
      load_options options;
      options.threads = threads;
      options.context_tokens = 2048;
      options.max_running = 8;
      std::unique_ptr<loaded_model> model;
      const double start_up = median_seconds(5, [&] {
        model.reset();
        return seconds_of([&] { model = load_model(folder, options); });
      });
      const int used = threads == 0 ? nibble::host::available_cores() : threads;
      const auto add = [&](const char* suite, int batch, int tokens, double seconds) {
        std::printf("%-14s %2d thread%s batch %d  %5d tokens  %9.3f ms  %9.0f tokens/s\n", suite, used,
                    used == 1 ? " " : "s", batch, tokens, seconds * 1e3, tokens / seconds);
        rows.push_back({{"suite", suite},
                        {"model", model->compiled_name},
                        {"threads", used},
                        {"batch", batch},
                        {"tokens", tokens},
                        {"seconds", seconds},
                        {"tokens_per_s", tokens / seconds},
                        {"commit", commit},
                        {"date", day}});
      };
      std::printf("start-up       %2d thread%s %.1f ms, %.1f MB of weights\n", used, used == 1 ? " " : "s",
                  start_up * 1e3, static_cast<double>(model->weight_bytes()) / 1e6);
      rows.push_back({{"suite", "start_up"},
                      {"model", model->compiled_name},
                      {"threads", used},
                      {"seconds", start_up},
                      {"bytes", model->weight_bytes()},
                      {"commit", commit},
                      {"date", day}});
      for (const int tokens : {64, 512})
        add("prefill", 1, tokens, median_seconds(7, [&] {
              batch_run run(model->runner(), 1);
              return seconds_of([&] { run.append(tokens); });
            }));
      for (const int batch : {1, 8}) {
        constexpr int steps = 64;
        add("decode", batch, steps * batch, median_seconds(7, [&] {
              batch_run run(model->runner(), batch);
              run.append(64 / batch);
              return seconds_of([&] {
                for (int i = 0; i < steps; ++i) run.append(1);
              });
            }));
      }
    }
    if (!output.empty()) std::ofstream(output) << json::serialize(rows) << "\n";
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 2;
  }
  return 0;
}
