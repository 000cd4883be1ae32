// SPDX-License-Identifier: Apache-2.0
/// \file
/// The trained checkpoint in the hands of device tests: reference answers, sequences, what every way of
/// serving it must hold.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/device_probe.hpp"
#include "model/registry.hpp"
#include "support/reference_answers.hpp"

namespace trained {

using namespace qwen3_moe;

/// A few steps of everything: NIBBLE_TEST_QUICK is set, for tools under which kernels are slow.
inline const bool quick = std::getenv("NIBBLE_TEST_QUICK") != nullptr;

inline int failures = 0;
inline void check(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

using test::reference_case;
using test::sequence;
inline std::vector<reference_case> reference_cases(const std::filesystem::path& folder) {
  auto cases = test::reference_cases(folder);
  if (quick) {
    cases.resize(std::min<std::size_t>(cases.size(), 12));
    for (auto& c : cases) c.completion.resize(std::min<std::size_t>(c.completion.size(), 3));
  }
  return cases;
}

/// Decode logits of a sequence alone, and among seven strangers of other lengths: the same bits.
inline void check_batches(model_runner& runner, const std::vector<reference_case>& cases,
                          const std::string& name) {
  const auto& first = cases[0];
  sequence alone(runner, 3);
  alone.append(first.prompt, 64);
  std::vector<std::vector<float>> expected{alone.logits()};
  for (const auto token : first.completion) {
    alone.append({&token, 1}, 1);
    expected.push_back(alone.logits());
  }
  for (const int strangers : {1, 3, 7}) {
    std::vector<sequence> all;
    for (int s = 0; s <= strangers; ++s) {
      all.emplace_back(runner, s == 0 ? 3 : s <= 3 ? s - 1 : s);
      const auto& c = cases[static_cast<std::size_t>(s)];
      all.back().append(c.prompt, 64);
    }
    check(all[0].logits() == expected[0], name + ": the prompt's logits changed");
    std::vector<float> logits(all.size() * static_cast<std::size_t>(runner.limits().vocab_size));
    for (std::size_t t = 0; t < first.completion.size(); ++t) {
      std::vector<step_sequence> shares;
      std::vector<std::int32_t> tokens(all.size());
      for (std::size_t s = 0; s < all.size(); ++s) {
        const auto& stranger = cases[s].completion;
        tokens[s] = s == 0 ? first.completion[t] : stranger[t % stranger.size()];
        shares.push_back(all[s].share({&tokens[s], 1}, wanted_logits::last));
      }
      std::rotate(shares.begin(), shares.begin() + static_cast<std::ptrdiff_t>(t % shares.size()),
                  shares.end());
      const std::size_t mine = (shares.size() - t % shares.size()) % shares.size();
      runner.step(shares, logits);
      for (auto& s : all) s.advance(1);
      const auto width = static_cast<std::ptrdiff_t>(runner.limits().vocab_size);
      check(std::equal(expected[t + 1].begin(), expected[t + 1].end(),
                       logits.begin() + static_cast<std::ptrdiff_t>(mine) * width),
            name + ": step " + std::to_string(t) + " among " + std::to_string(strangers) +
                " strangers has other bits");
    }
  }
}

/// A prompt that arrives while others decode, in one step with them.
inline void check_mixed_steps(model_runner& runner, const std::vector<reference_case>& cases,
                              const std::string& name) {
  sequence decoding(runner, 0);
  decoding.append(cases[1].prompt, 64);
  sequence arriving(runner, 1);
  std::vector<float> logits(2 * static_cast<std::size_t>(runner.limits().vocab_size));
  const std::span<const std::int32_t> prompt(cases[2].prompt);
  std::size_t done = 0;
  for (std::size_t t = 0; t < cases[1].completion.size() && done < prompt.size(); ++t) {
    const std::size_t count = std::min<std::size_t>(1 + 5 * t, prompt.size() - done);
    const bool last = done + count == prompt.size();
    const std::int32_t token = cases[1].completion[t];
    const step_sequence shares[] = {
        arriving.share(prompt.subspan(done, count), last ? wanted_logits::last : wanted_logits::none),
        decoding.share({&token, 1}, wanted_logits::last)};
    runner.step(shares, logits);
    arriving.advance(count), decoding.advance(1);
    done += count;
    const auto width = static_cast<std::ptrdiff_t>(runner.limits().vocab_size);
    const float* row = logits.data() + (last ? width : 0);
    const auto best = static_cast<std::int32_t>(std::max_element(row, row + width) - row);
    if (t + 1 < cases[1].completion.size())
      check(best == cases[1].completion[t + 1],
            name + ": a mixed step changed the decoding sequence's token");
    if (last) {
      const auto first = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.begin() + width) -
                                                   logits.begin());
      check(first == cases[2].completion[0], name + ": a prompt in mixed steps yields another token");
    }
  }
}

/// Draws of the runner: greedy tokens, two steps in flight, are those of the logits.
inline void check_draws(model_runner& runner, const std::vector<reference_case>& cases,
                        const std::string& name) {
  check(runner.draws(), name + ": the runner draws");
  for (int i = 0; i < 6; ++i) {
    const auto& c = cases[static_cast<std::size_t>(i)];
    sequence by_logits(runner, 0);
    by_logits.append(c.prompt, 512);
    std::vector<std::int32_t> expected;
    for (std::size_t t = 0; t < c.completion.size(); ++t) {
      expected.push_back(by_logits.best());
      by_logits.append({&expected.back(), 1}, 1);
    }
    sequence drawn(runner, 1);
    sampling_options greedy;
    greedy.temperature = 0;
    greedy.logprobs = i % 2 == 0 ? std::optional<int>(3) : std::nullopt;
    runner.set_draws(1, greedy, {});
    std::vector<std::int32_t> tokens;
    const auto begin = [&](std::span<const std::int32_t> ids) {
      const auto share = drawn.share(ids, wanted_logits::last);
      runner.begin({&share, 1});
      drawn.advance(ids.size());
    };
    begin(c.prompt);
    for (std::size_t t = 1; t < c.completion.size(); ++t) {
      begin({&previous_token, 1});
      tokens.push_back(runner.finish()[0].token);
    }
    const auto row = runner.finish()[0];
    tokens.push_back(row.token);
    check(row.status == 0, name + ": a draw failed");
    if (greedy.logprobs)
      check(row.top_count == 3 && row.top_token[0] == row.token, name + ": likeliest tokens");
    check(tokens == expected,
          name + ": drawn tokens differ from those of the logits, case " + std::to_string(i));
  }
}

inline load_options gpu_options() {
  load_options options;
  options.device = device_choice::cuda;
  options.max_running = 8;
  options.context_tokens = 2048;
  options.step_tokens = 512;
  return options;
}

/// The program's main: a device, the checkpoint, then run(folder of the layouts).
inline int run_on_checkpoint(const std::function<void(const std::filesystem::path&)>& run) try {
  const auto probe = probe_cuda_device();
  if (!probe.usable) {
    std::printf("skipped: %s\n", probe.reason.c_str());
    return 4;
  }
  const char* shared = std::getenv("NIBBLE_SHARED");
  const auto root =
      std::filesystem::path(shared != nullptr ? shared : NIBBLE_SOURCE_DIR "/../shared") / "tiny_model";
  if (!std::filesystem::exists(root / "mixed")) {
    std::printf("skipped: %s is absent\n", root.string().c_str());
    return 4;
  }
  run(root);
  std::printf("%d failed checks\n", failures);
  return failures == 0 ? 0 : 1;
} catch (const std::exception& problem) {
  std::printf("FAILED: %s\n", problem.what());
  return 1;
}

}  // namespace trained
