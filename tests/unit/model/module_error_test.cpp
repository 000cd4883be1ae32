// SPDX-License-Identifier: Apache-2.0
// The bounds that a device's modules are held to (support/module_error.hpp): rounding activations to bf16
// stays within them, mistakes do not.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "compiled/ratio2_mixed.hpp"
#include "compiled/ratio3_nvfp4.hpp"
#include "support/catch.hpp"
#include "support/module_walk.hpp"
#include "support/pooled_weights.hpp"
#include "support/rounded_backend.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::test;

namespace {

/// Prefills of unequal lengths, decodes after them, and both in one step.
template <class Config, class Walk>
void run_steps(Walk& walk, const runner_limits& limits) {
  std::mt19937 random(3);
  std::vector<std::int32_t> tokens(600);
  for (auto& t : tokens)
    t = static_cast<std::int32_t>(random() % static_cast<unsigned>(Config::value.vocab_size));
  const int each = limits.pages / limits.slots;
  std::vector<std::int32_t> pages(static_cast<std::size_t>(limits.pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<int> length(static_cast<std::size_t>(limits.slots), 0);
  const auto share = [&](int slot, int count, wanted_logits logits) {
    auto& done = length[static_cast<std::size_t>(slot)];
    const step_sequence s{
        std::span(tokens).subspan(static_cast<std::size_t>(100 * slot + done),
                                  static_cast<std::size_t>(count)),
        done, slot,
        std::span(pages).subspan(static_cast<std::size_t>(slot * each), static_cast<std::size_t>(each)),
        logits};
    done += count;
    return s;
  };
  for (int slot = 0; slot < limits.slots; ++slot) walk.clear_slot(slot);
  std::vector<step_sequence> step{share(0, 33, wanted_logits::all)};
  walk.step(step, "prefill");
  step = {share(1, 5, wanted_logits::last), share(2, 17, wanted_logits::last)};
  walk.step(step, "prefill");
  for (int i = 0; i < 3; ++i) {
    step = {share(0, 1, wanted_logits::last), share(1, 1, wanted_logits::last),
            share(2, 1, wanted_logits::last)};
    walk.step(step, "decode");
  }
  step = {share(0, 1, wanted_logits::last), share(1, 9, wanted_logits::none)};
  walk.step(step, "mixed");
}

template <class Config>
module_errors errors_of(const causal_lm<Config>& ours, const causal_lm<Config>& theirs) {
  const runner_limits limits{Config::value.vocab_size, 64, 8, 24, 3, 64};
  nibble::host::thread_pool pool(2);
  module_errors errors;
  rounded_backend<Config> subject(theirs, limits, pool);
  module_walk<Config, rounded_backend<Config>> walk(ours, limits, pool, subject, errors);
  run_steps<Config>(walk, limits);
  return errors;
}

template <class Config>
void check_rounding() {
  pooled_weights<Config> weights(5);
  const auto errors = errors_of<Config>(weights.lm(), weights.lm());
  for (const auto& e : errors.modules()) {
    CAPTURE(e.module, e.kind, e.rows, e.rms_relative(), e.rms_bound(), e.max_relative(), e.max_bound());
    CHECK(e.good());
    // Bounds are near what they bound: a module that merely rounds uses a tenth of its own at least.
    if (e.module != "embedding" && e.module != "head" && e.module != "router weights" &&
        e.module != "gate of the shared expert")
      CHECK(e.rms_relative() > 0.1 * e.rms_bound());
  }
  for (const auto& e : errors.routings()) CHECK(e.wrong == 0);
}

template <class Config>
int modules_out_of_bounds(const causal_lm<Config>& ours, const causal_lm<Config>& theirs,
                          const std::string& module) {
  const auto errors = errors_of<Config>(ours, theirs);
  return static_cast<int>(std::count_if(errors.modules().begin(), errors.modules().end(),
                                        [&](const auto& e) { return e.module == module && !e.good(); }));
}

}  // namespace

TEST_CASE("module errors: rounded activations stay within their bounds") {
  check_rounding<compiled::ratio2_mixed>();
  check_rounding<compiled::ratio3_nvfp4>();
}

TEST_CASE("module errors: a mistake of a few per cent, or in one expert, does not") {
  using config = compiled::ratio3_nvfp4;
  pooled_weights<config> weights(6);
  auto theirs = weights.lm();
  for (int i = 0; i < config::value.layers; ++i)
    theirs.model.layers.visit(i, [&](auto& layer) {
      layer.mlp.experts[0].gate_up.segments[1].global_scale *= 1.5f;
      if constexpr (requires { layer.self_attn; })
        layer.self_attn.o_proj.segments[0].global_scale *= 1.05f;
      else
        layer.linear_attn.qkvz.segments[1].global_scale *= 1.03f;
    });
  CHECK(modules_out_of_bounds<config>(weights.lm(), theirs, "experts") > 0);
  CHECK(modules_out_of_bounds<config>(weights.lm(), theirs, "output product") > 0);
  CHECK(modules_out_of_bounds<config>(weights.lm(), theirs, "norm and q, k, v, z") > 0);
  CHECK(modules_out_of_bounds<config>(weights.lm(), theirs, "attention") == 0);
  // Another router: every choice is wrong.
  auto turned = weights.lm();
  turned.model.layers.visit(0, [&](auto& layer) {
    turned.model.layers.visit(1, [&](auto& other) { std::swap(layer.mlp.router, other.mlp.router); });
  });
  const auto errors = errors_of<config>(weights.lm(), turned);
  CHECK(std::any_of(errors.routings().begin(), errors.routings().end(),
                    [](const auto& e) { return e.wrong > 0; }));
}
