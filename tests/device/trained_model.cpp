// SPDX-License-Identifier: Apache-2.0
// The trained checkpoint on the GPU against reference outputs of an fp32 run of its dequantised weights.
#include <random>

#include "activity_counter.hpp"
#include "trained_checkpoint.hpp"

using namespace trained;

namespace {

/// Follows the reference's continuations; one may leave where its two best tokens are closer than bf16
/// rounds.
int follow(model_runner& runner, const std::vector<reference_case>& cases, std::size_t piece,
           const std::string& name) {
  int same = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    sequence run(runner, 0);
    run.append(cases[i].prompt, piece);
    bool left = false;
    for (const auto expected : cases[i].completion) {
      if (run.best() != expected) {
        check(run.gap() < 0.25f, name + " continuation " + std::to_string(i) +
                                     ": another token at a gap of " + std::to_string(run.gap()));
        left = true;
        break;
      }
      run.append({&expected, 1}, 1);
    }
    same += !left;
  }
  return same;
}

/// C089, C090: a slot whose sequence was given up in its prompt or while it decoded is empty for the next.
void check_reuse(model_runner& runner, const std::vector<reference_case>& cases, const std::string& name) {
  sequence fresh(runner, 3);
  fresh.append(cases[0].prompt, 512);
  for (std::size_t round = 0; round < (quick ? 2u : 30u); ++round) {
    const auto& stranger = cases[1 + round % (cases.size() - 1)];
    const std::span<const std::int32_t> prompt(stranger.prompt);
    sequence before(runner, 5);
    before.append(prompt.first(1 + round * 7 % prompt.size()), 11);
    for (std::size_t i = 0; i < round % 3; ++i) before.append({&stranger.completion[0], 1}, 1);
    sequence after(runner, 5);
    after.append(cases[0].prompt, 512);
    check(after.logits() == fresh.logits(),
          name + ": round " + std::to_string(round) + ": a used slot shows");
  }
}

/// Nothing is loaded, allocated or instantiated by 10,000 mixed steps after the start, whatever they carry.
void check_steady_state(const std::filesystem::path& folder, const std::string& name) {
  for (const int slots : {0, 40}) {
    auto options = gpu_options();
    options.cuda.expert_slots = slots;
    const auto model = load_model(folder, options);
    auto& runner = model->runner();
    const auto& limits = runner.limits();
    std::mt19937 random(11);
    std::vector<sequence> all;
    std::vector<int> lengths(static_cast<std::size_t>(limits.slots), 0);
    for (int s = 0; s < limits.slots; ++s) all.emplace_back(runner, s);
    std::vector<float> logits(static_cast<std::size_t>(limits.slots) *
                              static_cast<std::size_t>(limits.vocab_size));
    std::vector<std::int32_t> tokens(4096);
    for (auto& t : tokens) t = static_cast<std::int32_t>(random() % 1900);
    device_test::activity_counter counter;
    for (int step = 0; step < 10'000; ++step) {
      std::vector<step_sequence> shares;
      std::vector<std::pair<std::size_t, std::size_t>> advances;
      int room = limits.step_tokens;
      for (std::size_t s = 0; s < all.size(); ++s) {
        if (random() % 4 == 0 && shares.size() + 1 < all.size()) continue;
        const int count = std::min(room, random() % 16 == 0 ? static_cast<int>(1 + random() % 200) : 1);
        if (count < 1) break;
        if (lengths[s] + count > 1000) {
          all[s] = sequence(runner, static_cast<int>(s));
          lengths[s] = 0;
        }
        const bool none = count > 1 && random() % 2 == 0;
        shares.push_back(
            all[s].share(std::span(tokens).subspan(random() % 2000, static_cast<std::size_t>(count)),
                         none ? wanted_logits::none : wanted_logits::last));
        advances.emplace_back(s, count);
        room -= count;
      }
      if (shares.empty()) continue;
      runner.step(shares, logits);
      for (const auto& [s, count] : advances) all[s].advance(count), lengths[s] += static_cast<int>(count);
    }
    if (!counter.available()) {
      std::printf("%s: CUPTI is not there, loads and allocations are not counted\n", name.c_str());
      continue;
    }
    const auto counts = counter.stop();
    check(counts.none(), name + ", " + std::to_string(slots) + " slots: after the start " + counts.text());
    std::printf("%s, %d slots asked for: 10,000 steps, %s\n", name.c_str(), slots, counts.text().c_str());
  }
}

void check_layout(const std::filesystem::path& folder, const std::string& name, bool fp8) {
  auto options = gpu_options();
  options.cuda.kv_fp8 = fp8;
  const auto model = load_model(folder, options);
  const auto result = verify(*model, folder / "reference.safetensors");
  const auto cases = reference_cases(folder);
  auto& runner = model->runner();
  std::printf("%s%s: KL %.3g, top-1 %.4f over %lld positions;", name.c_str(), fp8 ? ", FP8 KV" : "",
              result.mean_kl_divergence, result.top1_agreement, static_cast<long long>(result.positions));
  check(result.positions == 285, name + ": positions");
  check(result.mean_kl_divergence < (fp8 ? 5e-3 : 1e-3), name + ": mean KL divergence");
  if (!fp8) {
    const int whole = follow(runner, cases, 512, name), pieces = follow(runner, cases, 7, name);
    std::printf(" continuations equal to the end %d and, in pieces of 7, %d of %zu;", whole, pieces,
                cases.size());
    check_mixed_steps(runner, cases, name);
    check_draws(runner, cases, name);
    check_reuse(runner, cases, name);
  }
  check_batches(runner, cases, name);
  std::printf(" done\n");
}

}  // namespace

int main(int argc, char** argv) {
  const auto wants = [&](const std::string& group) { return argc < 2 || group == argv[1]; };
  return run_on_checkpoint([&](const std::filesystem::path& root) {
    for (const std::string layout : {"mixed", "nvfp4", "ct"})
      if (wants(layout)) {
        check_layout(root / layout, layout, false);
        check_layout(root / layout, layout, true);
      }
    if (wants("steady")) check_steady_state(root / "mixed", "mixed");
  });
}
