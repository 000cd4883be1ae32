// SPDX-License-Identifier: Apache-2.0
// tests/data/tiny-qwen3: plain attention, no shared expert, random weights in NVFP4. Its reference was
// computed by tests/oracles/tiny_qwen3.py in fp32; the script saw to it that no choice in it is a near tie,
// so tokens are equal.
#include <memory>
#include <vector>

#include "engine/scheduler.hpp"
#include "model/registry.hpp"
#include "support/catch.hpp"
#include "support/reference_answers.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::test;

namespace {

constexpr const char* folder = NIBBLE_SOURCE_DIR "/tests/data/tiny-qwen3";

std::unique_ptr<loaded_model> load(int max_running, int step_tokens = 512) {
  load_options options;
  options.device = device_choice::host;
  options.context_tokens = 128;
  options.max_running = max_running;
  options.step_tokens = step_tokens;
  return load_model(folder, options);
}

struct keeping_sink : generation_sink {
  std::vector<std::int32_t> tokens;
  void on_token(const sampled_token& token) override { tokens.push_back(token.id); }
  void on_finish(const generation_end&) override {}
};

}  // namespace

TEST_CASE("Qwen3-MoE checkpoint: logits of the reference") {
  for (const int step_tokens : {512, 16, 7}) {
    const auto model = load(1, step_tokens);
    CHECK(model->compiled_name == "tiny-qwen3");
    CHECK(model->config.delta_layers() == 0);
    CHECK(model->config.shared_intermediate == 0);
    const auto result = verify(*model, std::filesystem::path(folder) / "reference.safetensors");
    CAPTURE(step_tokens, result.largest_difference, result.mean_kl_divergence);
    CHECK(result.prompts == 4);
    CHECK(result.positions == 122);
    CHECK(result.largest_difference < 2e-4);  // logits have a deviation of 3
    CHECK(result.mean_kl_divergence < 1e-9);
    CHECK(result.top1_agreement == 1.0);
  }
}

TEST_CASE("Qwen3-MoE checkpoint: greedy continuations, token by token") {
  const auto model = load(1);
  const auto cases = reference_cases(folder);
  REQUIRE(cases.size() == 8);
  for (const auto& c : cases) {
    REQUIRE(c.completion.size() == 24);
    for (const std::size_t piece : {1u, 7u, 512u}) {
      sequence run(model->runner(), 0);
      run.append(c.prompt, piece);
      std::vector<std::int32_t> answer;
      while (answer.size() < c.completion.size()) {
        answer.push_back(run.best());
        run.append(std::span(answer).last(1), 1);
      }
      CHECK(answer == c.completion);
    }
  }
}

TEST_CASE("Qwen3-MoE checkpoint: the same continuations from one batch of the engine") {
  const auto cases = reference_cases(folder);
  for (const int max_running : {8, 3}) {
    const auto model = load(max_running, 20);
    engine_counters counters;
    scheduler target(model->runner(), {}, counters);
    std::vector<std::shared_ptr<keeping_sink>> sinks;
    for (const auto& c : cases) {
      generation_request request;
      request.prompt = c.prompt;
      request.max_tokens = static_cast<int>(c.completion.size());
      request.sampling.temperature = 0;
      sinks.push_back(std::make_shared<keeping_sink>());
      target.add(std::make_shared<generation>(std::move(request), sinks.back()));
    }
    for (int steps = 0; target.step(); ++steps) REQUIRE(steps < 1000);
    for (std::size_t i = 0; i < cases.size(); ++i) CHECK(sinks[i]->tokens == cases[i].completion);
  }
}
