// SPDX-License-Identifier: Apache-2.0
// The trained checkpoint with fewer expert slots than experts: whatever was evicted and fetched before, by
// whichever way, the bits are those of a run with all experts resident.
#include <cuda_runtime.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

#include "nibble/core/driver_error.hpp"
#include "trained_checkpoint.hpp"

using namespace trained;

namespace {

/// Prompts of several lengths and their continuations, with the logits of every position that counts.
struct expected_answers {
  std::vector<reference_case> cases;
  std::vector<std::vector<std::vector<float>>> logits;  ///< [case][0 … completion]
};

/// Tokens of a prompt that go in one step: bits are the same for the same steps, whose kernels depend on the
/// number of rows.
std::size_t piece_of(std::size_t i) { return i % 3 == 0 ? 512 : i % 3 == 1 ? 9 : 64; }

expected_answers answers_of(const std::filesystem::path& folder, std::size_t count) {
  const auto whole = load_model(folder, gpu_options());
  expected_answers out;
  out.cases = reference_cases(folder);
  out.cases.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& c = out.cases[i];
    sequence s(whole->runner(), 0);
    auto& rows = out.logits.emplace_back();
    s.append(c.prompt, piece_of(i));
    rows.push_back(s.logits());
    for (const auto token : c.completion) {
      s.append({&token, 1}, 1);
      rows.push_back(s.logits());
    }
  }
  return out;
}

/// One case in some slot; whether every position has the expected bits.
bool same(model_runner& runner, const expected_answers& expected, std::size_t i) {
  sequence s(runner, static_cast<int>(i) % runner.limits().slots);
  s.append(expected.cases[i].prompt, piece_of(i));
  bool good = s.logits() == expected.logits[i][0];
  for (std::size_t t = 0; t < expected.cases[i].completion.size(); ++t) {
    s.append({&expected.cases[i].completion[t], 1}, 1);
    good = good && s.logits() == expected.logits[i][t + 1];
  }
  return good;
}
void check_all(model_runner& runner, const expected_answers& expected, const std::string& name) {
  for (std::size_t i = 0; i < expected.cases.size(); ++i)
    check(same(runner, expected, i),
          name + ", case " + std::to_string(i) + ": other bits than with all experts resident");
}

/// What brings missing experts in part_options.
expert_fetch brought_by = expert_fetch::kernel;

load_options part_options(int slots, std::string* log, int ahead = 0) {
  auto options = gpu_options();
  options.experts.fetch = brought_by;
  options.cuda.expert_slots = slots;
  options.experts.ahead = ahead;
  if (log != nullptr) options.log = [log](std::string_view line) { *log += std::string(line) + "\n"; };
  return options;
}
std::string notes_of(const loaded_model& model) {
  std::string text;
  for (const auto& note : model.notes) text += note + "\n";
  return text;
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// From the slots of one token up. Fewer than a layer's: a step goes through its experts in pieces; at 40 and
/// more a long prompt has the next layer's experts fetched on a second stream.
void check_slot_counts(const std::filesystem::path& folder, const std::string& name) {
  const auto expected = answers_of(folder, quick ? 2 : 12);
  for (const int slots : quick ? std::vector<int>{5, 23} : std::vector<int>{4, 5, 16, 23, 40, 64, 127}) {
    const auto part = load_model(folder, part_options(slots, nullptr));
    const std::string what = name + " with " + std::to_string(slots) + " expert slots";
    check_all(part->runner(), expected, what);
    check_all(part->runner(), expected, what + ", again");
    const auto traffic = part->runner().experts();
    check(traffic.hits > 0 && traffic.misses > 0, what + ": hits and misses are counted");
    if (slots == 40) {
      const auto cases = reference_cases(folder);
      check_batches(part->runner(), cases, what);
      check_mixed_steps(part->runner(), cases, what);
      check_draws(part->runner(), cases, what);
    }
  }
}

/// KL divergence of two rows of logits, in nats.
double divergence(const std::vector<float>& p, const std::vector<float>& q) {
  const auto log_sum = [](const std::vector<float>& row) {
    const double top = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const float v : row) sum += std::exp(v - top);
    return top + std::log(sum);
  };
  const double a = log_sum(p), b = log_sum(q);
  double total = 0;
  for (std::size_t i = 0; i < p.size(); ++i) total += std::exp(p[i] - a) * ((p[i] - a) - (q[i] - b));
  return total;
}

/// Nothing, or only half of the experts, page-locked: they come through the ring.
void check_unlocked(const std::filesystem::path& folder, const expected_answers& expected) {
  for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{2} << 20})
    for (const int slots : {4, 40}) {
      auto options = part_options(slots, nullptr);
      options.experts.lock_limit_bytes = limit;
      const auto part = load_model(folder, options);
      const std::string what =
          std::to_string(limit >> 20) + " MiB locked, " + std::to_string(slots) + " slots";
      check_all(part->runner(), expected, what);
      const std::string notes = notes_of(*part);
      const auto first = notes.find("could be page-locked");
      check(first != std::string::npos, what + ": the start says so");
      check(notes.find("could be page-locked", first + 1) == std::string::npos, what + ": once");
    }
}

/// A read on the host, or a copy, that fails ends the steps that needed it, with its reason, and nothing
/// else.
void check_failures(const std::filesystem::path& folder, const expected_answers& expected) {
  std::atomic<bool> broken = false;
  auto options = part_options(16, nullptr);
  if (brought_by == expert_fetch::kernel) options.experts.lock_limit_bytes = 0;
  options.experts.before_read = [&broken](int) {
    if (broken) throw std::runtime_error("the disk is gone");
  };
  const auto part = load_model(folder, options);
  auto& runner = part->runner();
  for (int round = 0; round < 3; ++round) {
    check(same(runner, expected, 0), "before a failure, round " + std::to_string(round));
    broken = true;
    std::string why;
    try {
      sequence s(runner, 1 % runner.limits().slots);
      s.append(expected.cases[1].prompt, 64);
    } catch (const nibble::error& problem) {
      why = problem.what();
    }
    check(has(why, "could not be read") && has(why, "the disk is gone"),
          "a failed read is the step's error: " + why);
    // Two steps in flight: both fail, as the second may have used what never came.
    int failed = 0;
    sequence s(runner, 0);
    sampling_options greedy;
    greedy.temperature = 0;
    runner.set_draws(0, greedy, {});
    const auto prompt = s.share(expected.cases[0].prompt, wanted_logits::last);
    runner.begin({&prompt, 1});
    s.advance(expected.cases[0].prompt.size());
    const auto next = s.share({&previous_token, 1}, wanted_logits::last);
    runner.begin({&next, 1});
    for (int i = 0; i < 2; ++i) try {
        static_cast<void>(runner.finish());
      } catch (const nibble::context_lost_error&) {
        throw;
      } catch (const nibble::error&) {
        ++failed;
      }
    check(failed == 2, "two steps in flight fail together");
    broken = false;
    for (std::size_t i = 0; i < 4; ++i)
      check(same(runner, expected, i), "after a failure, case " + std::to_string(i));
  }
}

/// Experts computed by the CPU: only the order of a sum and one rounding differ.
void check_cpu(const std::filesystem::path& folder) {
  for (const cpu_share wish : {cpu_share::always, cpu_share::measured}) {
    auto options = part_options(16, nullptr);
    options.experts.cpu = wish;
    const auto part = load_model(folder, options);
    const std::string notes = notes_of(*part), what = wish == cpu_share::always ? "always" : "measured";
    check(has(notes, wish == cpu_share::always ? "the CPU computes half" : "experts: one is fetched in"),
          "the start says what the CPU does: " + notes);
    // Prompts of one token after the other, so that every step is one that the CPU takes part in.
    const auto cases = reference_cases(folder);
    auto& runner = part->runner();
    const auto result = verify(*part, folder / "reference.safetensors");
    check(result.mean_kl_divergence < 1e-3, "the CPU's share, " + what + ": mean KL divergence");
    int same_tokens = 0, tokens = 0;
    double worst = 0, total = 0;
    const auto whole = load_model(folder, gpu_options());
    for (std::size_t i = 0; i < 8; ++i) {
      sequence a(whole->runner(), 0), b(runner, 0);
      a.append(cases[i].prompt, 1), b.append(cases[i].prompt, 1);
      for (const auto token : cases[i].completion) {
        const double here = divergence(a.logits(), b.logits());
        worst = std::max(worst, here), total += here;
        same_tokens += a.best() == b.best(), ++tokens;
        a.append({&token, 1}, 1), b.append({&token, 1}, 1);
      }
    }
    check(total / tokens < 1e-3 && worst < 1e-2 && same_tokens >= tokens * 98 / 100,
          "the CPU's share, " + what + ": mean KL " + std::to_string(total / tokens) + ", up to " +
              std::to_string(worst) + ", " + std::to_string(same_tokens) + " of " + std::to_string(tokens) +
              " tokens");
    std::printf("cpu %s: mean KL %.3g, at most %.3g, %d of %d tokens\n", what.c_str(), total / tokens, worst,
                same_tokens, tokens);
  }
}

/// Starts from the cache file and from what the last run had in use.
void check_files(const std::filesystem::path& folder, const expected_answers& expected) {
  const auto kept = std::filesystem::temp_directory_path() /
                    ("nibble-offload-" + std::to_string(static_cast<long>(::getpid())));
  std::filesystem::create_directories(kept);
  std::string notes[3];
  for (int start = 0; start < 3; ++start) {
    std::string log;
    {
      auto options = part_options(40, &log);
      options.experts.cache_file = kept / "experts.bin";
      options.experts.remember = true;
      options.experts.lock_limit_bytes = start == 2 ? 0 : UINT64_MAX;
      const auto part = load_model(folder, options);
      notes[start] = notes_of(*part);
      check_all(part->runner(), expected, "start " + std::to_string(start) + " with a cache file");
    }
    check(std::filesystem::exists(kept / "experts.bin.worth"), "which experts are in use is saved: " + log);
  }
  check(has(notes[0], "packed from the checkpoint") && has(notes[0], "written in"),
        "the first start packs and writes: " + notes[0]);
  for (int start = 1; start < 3; ++start) {
    check(!has(notes[start], "packed from"), "a later start packs nothing: " + notes[start]);
    check(has(notes[start], "are loaded first"), "a later start loads first what was in use");
  }
  std::filesystem::remove_all(kept);
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total) == cudaSuccess, "free memory is told");
  return free;
}

/// Another program takes memory and gives it back, twice: slots go and come, graphs stay, bits stay. (Caches
/// of this size are one block of their arena, so the device sees none of it; device_arena looks at that.)
void check_resize(const std::filesystem::path& folder, const expected_answers& expected, int ahead = 0) {
  std::string log;
  const auto part = load_model(folder, part_options(127, &log, ahead));
  auto& runner = part->runner();
  const auto& limits = runner.limits();
  const int pages = (limits.context_tokens + limits.page_tokens - 1) / limits.page_tokens;
  constexpr std::size_t mib = std::size_t{1} << 20;
  const std::string told = "caches now hold ";
  for (int round = 0; round < 2; ++round) {
    log.clear();
    std::vector<void*> taken;
    const auto take = [&](std::size_t bytes) {
      void* at = nullptr;
      if (cudaMalloc(&at, bytes) == cudaSuccess)
        taken.push_back(at);
      else
        static_cast<void>(cudaGetLastError());
    };
    if (const std::size_t free = free_bytes(); free > 700 * mib) take(free - 700 * mib);
    int changes = 0;
    std::size_t seen = 0;
    for (int i = 0; i < 160; ++i) {
      take(4 * mib);
      static_cast<void>(runner.adapt_pages(pages, true));
      if (log.size() == seen) continue;
      seen = log.size();
      ++changes;
      check(same(runner, expected, 0), "after caches shrank: " + log);
    }
    int least = 127;
    for (auto at = log.find(told); at != std::string::npos; at = log.find(told, at + 1))
      least = std::min(least, std::atoi(log.c_str() + at + told.size()));
    check(least < 127, "slots were given up: " + log);
    for (void* at : taken) check(cudaFree(at) == cudaSuccess, "memory is given back");
    static_cast<void>(runner.adapt_pages(pages, true));
    check(has(log, told + "127 expert slots"), "slots came back: " + log);
    check_all(runner, expected, "after slots came back");
    std::printf("resize: %d changes, down to %d slots\n", changes, least);
  }
}

/// Experts that come for the next layer while one computes: whether the guess was right, wrong, or for
/// another sequence of the batch, the bits are the same; and after thousands of steps guesses have been of
/// use.
void check_ahead(const std::filesystem::path& folder, const std::string& name,
                 const expected_answers& expected) {
  for (const int ahead : {1, 4})
    for (const int slots : quick ? std::vector<int>{23} : std::vector<int>{12, 16, 23, 40, 64, 127}) {
      const auto part = load_model(folder, part_options(slots, nullptr, ahead));
      auto& runner = part->runner();
      const std::string what =
          name + " with " + std::to_string(slots) + " expert slots, " + std::to_string(ahead) + " ahead";
      for (const char* round : {"", ", again", ", a third time"}) check_all(runner, expected, what + round);
      if (slots == 40 || slots == 64) {
        const auto cases = reference_cases(folder);
        check_batches(runner, cases, what);
        check_mixed_steps(runner, cases, what);
        check_draws(runner, cases, what);
        check_all(runner, expected, what + ", at the end");
      }
      // One row needs room for two layers' choices of 4, guesses that are coming, and new ones.
      const bool looks = slots >= 2 * 4 + 2 * ahead;
      const auto traffic = runner.experts();
      check(traffic.misses > 0, what + ": misses are counted");
      check((traffic.ahead > 0) == looks && (traffic.ahead_used > 0) == looks,
            what + ": " + std::to_string(traffic.ahead) + " guesses, " + std::to_string(traffic.ahead_used) +
                " of use");
      std::printf("%s: %llu hits, %llu misses, %llu guesses, %llu of use\n", what.c_str(),
                  static_cast<unsigned long long>(traffic.hits),
                  static_cast<unsigned long long>(traffic.misses),
                  static_cast<unsigned long long>(traffic.ahead),
                  static_cast<unsigned long long>(traffic.ahead_used));
    }
}
/// Where it cannot be, nothing changes: all experts resident, experts that are not page-locked.
void check_not_ahead(const std::filesystem::path& folder, const expected_answers& expected) {
  for (const int slots : {0, 40}) {
    auto options = part_options(slots, nullptr, 2);
    options.experts.lock_limit_bytes = slots == 0 ? UINT64_MAX : 0;
    const auto model = load_model(folder, options);
    const std::string what = slots == 0 ? "all resident, 2 ahead" : "nothing locked, 2 ahead";
    check_all(model->runner(), expected, what);
    check(model->runner().experts().ahead == 0, what + ": nothing is guessed");
  }
}

/// The start measures and says what brings experts, where that was not asked for and all are page-locked.
void check_engine(const std::filesystem::path& folder) {
  for (const std::uint64_t limit : {UINT64_MAX, std::uint64_t{0}}) {
    std::string log;
    auto options = part_options(40, &log);
    options.experts.fetch = expert_fetch::measured;
    options.experts.lock_limit_bytes = limit;
    const auto part = load_model(folder, options);
    check(has(notes_of(*part) + log, "are fetched by a kernel in") == (limit != 0),
          "the start says what was measured: " + notes_of(*part) + log);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto wants = [&](const std::string& group) { return argc < 2 || group == argv[1]; };
  return run_on_checkpoint([&](const std::filesystem::path& root) {
    if (wants("slots")) check_slot_counts(root / "mixed", "mixed"), check_slot_counts(root / "ct", "ct");
    if (wants("slots") && argc > 1) return;
    if (wants("engine")) {
      brought_by = expert_fetch::engine;
      check_engine(root / "mixed");
      check_slot_counts(root / "mixed", "mixed, by the copy engine");
      const auto expected = answers_of(root / "mixed", 8);
      check_failures(root / "mixed", expected);
      check_ahead(root / "mixed", "mixed, by the copy engine", expected);
      check_cpu(root / "mixed");
      brought_by = expert_fetch::kernel;
      if (argc > 1) return;
    }
    const auto expected = answers_of(root / "mixed", 8);
    if (wants("unlocked")) check_unlocked(root / "mixed", expected);
    if (wants("failures")) check_failures(root / "mixed", expected);
    if (wants("ahead")) {
      check_ahead(root / "mixed", "mixed", expected);
      check_ahead(root / "ct", "ct", answers_of(root / "ct", 4));
      check_not_ahead(root / "mixed", expected);
      check_resize(root / "mixed", expected, 1);
    }
    if (wants("cpu")) check_cpu(root / "mixed");
    if (wants("files")) check_files(root / "mixed", expected);
    for (const expert_fetch by : {expert_fetch::kernel, expert_fetch::engine}) {
      brought_by = by;
      if (wants("resize")) check_resize(root / "mixed", expected, by == expert_fetch::engine ? 1 : 0);
    }
  });
}
