// SPDX-License-Identifier: Apache-2.0
// Random requests at full speed over the GPU, from several threads: lengths, options, cancels, batch sizes.
// Afterwards pages, slots and device memory are as they were, and a fixed request has the same answer.
//   device_soak [resident|offload|host] [SECONDS]      20 seconds, of which a third with fewer expert slots;
//                                                      host: the same on the CPU, without a look at memory
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <boost/json.hpp>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.hpp"
#include "model/config_json.hpp"
#include "model/device_probe.hpp"
#include "model/device_workspace.hpp"
#include "model/registry.hpp"
#include "nibble/io/file.hpp"

using namespace qwen3_moe;
using namespace std::chrono_literals;

namespace {

std::atomic<int> failures = 0;
void check(bool good, const std::string& what) {
  if (good) return;
  if (++failures <= 40) std::printf("FAILED %s\n", what.c_str());
}

bool on_host = false;

/// What the driver says is free. Exact only where nobody else uses the device.
std::size_t free_device_bytes() {
  if (on_host) return 0;
  std::size_t free = 0, total = 0;
  check(cudaDeviceSynchronize() == cudaSuccess, "the device is lost");
  check(cudaMemGetInfo(&free, &total) == cudaSuccess, "free memory cannot be read");
  return free;
}

/// When a request is to end before its time.
struct ending {
  int after_tokens = -1;  ///< tokens after which the sink acts; -1: it does not
  enum class way { cancel, satisfied, exception } by_sink = way::cancel;
};

/// Checks what comes and can be waited for.
class watching_sink final : public generation_sink {
 public:
  watching_sink(const generation_request& request, const ending& end, int vocab_size)
      : sampling_(request.sampling), max_tokens_(request.max_tokens), ending_(end), vocab_size_(vocab_size) {}

  void on_token(const sampled_token& token) override {
    const std::lock_guard lock(mutex_);
    check(!finished_, "a token came after the end");
    check(token.id >= 0 && token.id < vocab_size_ - unnamed,
          "token " + std::to_string(token.id) + " was drawn");
    if (!sampling_.allowed.empty() && token.id >= 0 && token.id < vocab_size_)
      check((sampling_.allowed[static_cast<std::size_t>(token.id) / 32] >> (token.id % 32) & 1) != 0,
            "a token outside the mask was drawn");
    if (sampling_.logprobs) {
      check(token.logprob.has_value() && *token.logprob < 1e-4f && std::isfinite(*token.logprob),
            "a log-probability is missing or none");
      check(token.top.size() <= static_cast<std::size_t>(*sampling_.logprobs), "too many likeliest tokens");
    }
    tokens_.push_back(token.id);
    check(static_cast<int>(tokens_.size()) <= max_tokens_, "more tokens than asked for");
    if (static_cast<int>(tokens_.size()) != ending_.after_tokens) return;
    if (ending_.by_sink == ending::way::exception) throw nibble::error(own_error);
    if (handle_ == nullptr) return;
    if (ending_.by_sink == ending::way::cancel)
      handle_->cancel();
    else
      handle_->satisfied();
  }
  void on_finish(const generation_end& end) override {
    const std::lock_guard lock(mutex_);
    check(!finished_, "a request ended twice");
    check(end.reason != finish_reason::error || end.message == own_error, "a request failed: " + end.message);
    finished_ = true;
    reason_ = end.reason;
    handle_ = nullptr;
    ended_.notify_all();
  }
  void take(std::shared_ptr<generation> handle) {
    const std::lock_guard lock(mutex_);
    if (!finished_) handle_ = std::move(handle);
  }
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, limit, [this] { return finished_; });
  }
  void cancel() {
    const std::lock_guard lock(mutex_);
    if (handle_ != nullptr) handle_->cancel();
  }
  /// After the end.
  [[nodiscard]] const std::vector<std::int32_t>& tokens() const { return tokens_; }
  [[nodiscard]] finish_reason reason() const { return reason_; }

  /// The last ids of the vocabulary, which the engine is told to draw never.
  static constexpr int unnamed = 3;
  static constexpr const char* own_error = "the sink of this test threw";

 private:
  sampling_options sampling_;
  int max_tokens_;
  ending ending_;
  int vocab_size_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::shared_ptr<generation> handle_;
  std::vector<std::int32_t> tokens_;
  finish_reason reason_ = finish_reason::error;
  bool finished_ = false;
};

/// A request whose greedy answer is known.
struct known_request {
  generation_request request;
  std::vector<std::int32_t> answer;
};

class random_requests {
 public:
  random_requests(unsigned seed, int vocab_size, int context_tokens)
      : random_(seed), vocab_size_(vocab_size), context_tokens_(context_tokens) {}

  /// True once in `count` calls on average.
  bool once_in(unsigned count) { return random_() % count == 0; }
  int between(int low, int high) {
    return low + static_cast<int>(random_() % static_cast<unsigned>(high - low + 1));
  }

  generation_request next() {
    generation_request r;
    const int most = context_tokens_ - 2;
    const int length = once_in(20) ? between(513, most) : once_in(4) ? between(65, 512) : between(1, 64);
    for (int i = 0; i < std::min(length, most); ++i) r.prompt.push_back(between(0, vocab_size_ - 1));
    r.max_tokens = once_in(15) ? between(200, 2000) : once_in(3) ? between(33, 200) : between(1, 32);
    auto& s = r.sampling;
    s.seed = random_();
    s.temperature = once_in(3) ? 0.0f : 0.1f * static_cast<float>(between(1, 20));
    if (once_in(3)) s.top_k = between(1, 100);
    if (once_in(3)) s.top_p = 0.01f * static_cast<float>(between(0, 100));
    if (once_in(4)) s.min_p = 0.01f * static_cast<float>(between(0, 30));
    if (once_in(4)) s.repetition_penalty = 0.1f * static_cast<float>(between(8, 20));
    if (once_in(4)) s.presence_penalty = 0.1f * static_cast<float>(between(-20, 20));
    if (once_in(4)) s.frequency_penalty = 0.1f * static_cast<float>(between(-20, 20));
    if (once_in(4))  // now and then more than the device takes: such sequences are drawn on the host
      for (int i = between(1, once_in(8) ? 700 : 20); i > 0; --i)
        s.logit_bias.push_back({between(0, vocab_size_ - 1), 0.5f * static_cast<float>(between(-20, 20))});
    if (once_in(4)) s.logprobs = between(0, once_in(6) ? 40 : 20);
    if (once_in(5)) {
      s.allowed.assign((static_cast<std::size_t>(vocab_size_) + 31) / 32, 0);
      const bool few = once_in(2);
      for (auto& word : s.allowed) word = few ? 0 : static_cast<std::uint32_t>(random_());
      for (int i = between(1, 5); i > 0; --i) {
        const int id = between(0, vocab_size_ - 1 - watching_sink::unnamed);
        s.allowed[static_cast<std::size_t>(id) / 32] |= 1u << (id % 32);
      }
    }
    for (int i = between(0, 3); i > 0; --i) r.stop_tokens.push_back(between(0, vocab_size_ - 1));
    return r;
  }

  ending end_of(const generation_request& r) {
    ending e;
    if (!once_in(5)) return e;
    e.after_tokens = between(1, r.max_tokens);
    const int way = between(0, 9);
    e.by_sink = way < 5 ? ending::way::cancel : way < 8 ? ending::way::satisfied : ending::way::exception;
    return e;
  }

 private:
  std::minstd_rand random_;
  int vocab_size_, context_tokens_;
};

class soak {
 public:
  soak(loaded_model& model, std::string name)
      : name_(std::move(name)),
        limits_(model.runner().limits()),
        free_at_start_(free_device_bytes()),
        engine_(std::make_unique<engine>(model.runner(), options_of(limits_))) {}

  void run(const std::vector<known_request>& known, double seconds) {
    const auto answers = answers_of(known);
    const std::size_t free_before = free_device_bytes();
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> clients;
    for (unsigned i = 0; i < client_count; ++i) clients.emplace_back([&, i] { be_client(i, answers); });
    std::minstd_rand random(5);
    const int levels[] = {1, 2, 3, 5, 8, 13, 40};
    while (std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(seconds)) {
      outstanding_limit_ = levels[random() % std::size(levels)];
      std::this_thread::sleep_for(std::chrono::milliseconds(50 + random() % 500));
    }
    stopping_ = true;
    for (auto& client : clients) client.join();
    check(idle_within(30s), name_ + ": the engine is not idle 30 s after the last answer");
    const auto& n = engine_->counters();
    // As before: first the caches, then the answers, then the memory.
    check_caches();
    const auto again = answers_of(known);
    for (std::size_t i = 0; i < answers.size(); ++i)
      check(again[i].answer == answers[i].answer,
            name_ + ": known request " + std::to_string(i) + " has another answer");
    check_caches();
    const std::size_t free_after = free_device_bytes();
    check(free_after == free_before,
          name_ + ": " + std::to_string(free_before) + " bytes were free, now " + std::to_string(free_after));
    check(engine_->drain(30s), name_ + ": not drained");
    check(n.finished_stop + n.finished_length + n.finished_error + n.aborted == accepted_ + 2 * known.size(),
          name_ + ": the counters of ends and the requests disagree");
    check(engine_->failure().empty(), name_ + ": " + engine_->failure());
    check(known_same_ * 5 >= known_run_ * 4, name_ + ": among strangers " + std::to_string(known_same_) +
                                                 " of " + std::to_string(known_run_) +
                                                 " known answers came out the same");
    std::printf(
        "{\"soak\":\"%s\",\"seconds\":%.1f,\"requests\":%llu,\"steps\":%llu,\"prompt_tokens\":%llu,"
        "\"completion_tokens\":%llu,\"stop\":%llu,\"length\":%llu,\"cancelled\":%llu,\"own_errors\":%llu,"
        "\"preempted\":%llu,\"rejected\":%llu,\"known\":%llu,\"known_same\":%llu,\"free_bytes_at_start\":%zu,"
        "\"free_bytes_before\":%zu,\"free_bytes_after\":%zu}\n",
        name_.c_str(), std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
        number(accepted_), number(n.steps), number(n.prompt_tokens), number(n.completion_tokens),
        number(n.finished_stop), number(n.finished_length), number(n.aborted), number(n.finished_error),
        number(n.preempted), number(n.rejected), number(known_run_), number(known_same_), free_at_start_,
        free_before, free_after);
  }

 private:
  static constexpr unsigned client_count = 6;
  static constexpr int most_queued = 16;

  static unsigned long long number(std::uint64_t v) { return v; }
  static engine_options options_of(const runner_limits& limits) {
    engine_options o;
    o.max_queued = most_queued;
    for (int i = 1; i <= watching_sink::unnamed; ++i)
      o.scheduler.unnamed_tokens.push_back(limits.vocab_size - i);
    return o;
  }

  void check_caches() {
    check(idle_within(10s), name_ + ": the engine does not become idle");
    const auto& n = engine_->counters();
    check(n.free_pages == limits_.pages, name_ + ": " + std::to_string(n.free_pages) + " pages of " +
                                             std::to_string(limits_.pages) + " are free");
    check(n.free_slots == limits_.slots, name_ + ": " + std::to_string(n.free_slots) + " slots of " +
                                             std::to_string(limits_.slots) + " are free");
  }
  /// The engine publishes its counters after the step that delivered the last token.
  bool idle_within(std::chrono::milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    const auto& n = engine_->counters();
    while (n.running != 0 || n.queued != 0 || n.free_slots != limits_.slots ||
           n.free_pages != limits_.pages) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }

  std::shared_ptr<watching_sink> submit(const generation_request& request, const ending& end) {
    auto sink = std::make_shared<watching_sink>(request, end, limits_.vocab_size);
    auto submitted = engine_->submit(request, sink);
    if (submitted.status == submit_status::queue_full) return nullptr;
    if (submitted.status != submit_status::accepted) {
      check(false, name_ + ": a request was refused: " + submitted.message);
      stopping_ = true;
      return nullptr;
    }
    sink->take(std::move(submitted.handle));
    return sink;
  }

  /// One after the other, alone.
  std::vector<known_request> answers_of(std::vector<known_request> requests) {
    for (auto& known : requests) {
      const auto sink = submit(known.request, {});
      if (sink == nullptr || !sink->wait(30s)) {
        check(false, name_ + ": a request alone does not end");
        std::fflush(stdout);
        std::_Exit(1);
      }
      known.answer = sink->tokens();
      check(sink->reason() == finish_reason::length, name_ + ": a known request ended early");
    }
    return requests;
  }

  /// Keeps its share of the requests under way, cancels some at random moments.
  void be_client(unsigned seed, const std::vector<known_request>& known) {
    random_requests random(seed * 7919 + 13, limits_.vocab_size, engine_->context_tokens());
    struct item {
      std::shared_ptr<watching_sink> sink;
      std::chrono::steady_clock::time_point cancel_at;
      std::size_t known;  ///< its number among the known requests, or none
    };
    constexpr std::size_t none = SIZE_MAX;
    std::vector<item> mine;
    const auto sweep = [&](std::chrono::milliseconds patience) {
      const auto now = std::chrono::steady_clock::now();
      for (auto& i : mine)
        if (now >= i.cancel_at) i.sink->cancel(), i.cancel_at = std::chrono::steady_clock::time_point::max();
      if (!mine.empty()) mine[random.once_in(2) ? 0 : mine.size() - 1].sink->wait(patience);
      mine.erase(std::remove_if(mine.begin(), mine.end(),
                                [&](const item& i) {
                                  if (!i.sink->wait(0ms)) return false;
                                  if (i.known != none) {
                                    ++known_run_;
                                    known_same_ += i.sink->tokens() == known[i.known].answer;
                                  }
                                  --outstanding_;
                                  return true;
                                }),
                 mine.end());
    };
    while (!stopping_) {
      if (outstanding_.fetch_add(1) >= outstanding_limit_) {
        --outstanding_;
        sweep(2ms);
        continue;
      }
      item next{nullptr, std::chrono::steady_clock::time_point::max(), none};
      if (random.once_in(10)) {
        next.known = static_cast<std::size_t>(random.between(0, static_cast<int>(known.size()) - 1));
        next.sink = submit(known[next.known].request, {});
      } else {
        const auto request = random.next();
        next.sink = submit(request, random.end_of(request));
        if (random.once_in(4))
          next.cancel_at =
              std::chrono::steady_clock::now() + std::chrono::microseconds(random.between(0, 60'000));
      }
      if (next.sink == nullptr) {
        --outstanding_;
        sweep(1ms);
        continue;
      }
      ++accepted_;
      mine.push_back(std::move(next));
      if (random.once_in(3)) sweep(0ms);
    }
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (!mine.empty()) {
      sweep(5ms);
      if (std::chrono::steady_clock::now() < end) continue;
      check(false, name_ + ": " + std::to_string(mine.size()) + " requests do not end");
      std::fflush(stdout);
      std::_Exit(1);
    }
  }

  std::string name_;
  runner_limits limits_;
  std::size_t free_at_start_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int> outstanding_ = 0, outstanding_limit_ = 1;
  std::atomic<std::uint64_t> accepted_ = 0, known_run_ = 0, known_same_ = 0;
  std::unique_ptr<engine> engine_;  // last: its thread uses none of the above, its sinks do
};

/// Prompts of the checkpoint's reference answers.
std::vector<known_request> known_requests(const std::filesystem::path& folder) {
  std::vector<known_request> all;
  const auto document = boost::json::parse(nibble::io::file::read_text(folder / "reference.json", 64 << 20));
  for (const auto& item : document.as_array()) {
    if (all.size() == 16) break;
    auto& known = all.emplace_back();
    known.request.prompt = boost::json::value_to<std::vector<std::int32_t>>(item.at("prompt_ids"));
    known.request.max_tokens = static_cast<int>(item.at("completion_ids").as_array().size());
    known.request.sampling.temperature = 0;
  }
  return all;
}

void run(const std::filesystem::path& folder, const std::string& name, int expert_slots, double seconds) {
  load_options options;
  options.device = on_host ? device_choice::host : device_choice::cuda;
  options.max_running = 8;
  options.context_tokens = 1024;
  options.step_tokens = 512;
  options.cuda.expert_slots = expert_slots;
  options.experts.fetch = expert_fetch::engine;  // a kernel is faster for experts this small
  // Two and a half full contexts for eight sequences: some are preempted.
  options.kv_tokens = 160 * device_page_tokens;
  options.cuda.kv_bytes = 160 * kv_page_bytes_of(read_config(folder).config, nibble::kv_format::bf16);
  const auto model = load_model(folder, options);
  soak(*model, name).run(known_requests(folder), seconds);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string group;
  double seconds = 20;
  for (int i = 1; i < argc; ++i) {
    if (std::atof(argv[i]) > 0)
      seconds = std::atof(argv[i]);
    else
      group = argv[i];
  }
  on_host = group == "host";
  if (!group.empty() && group != "resident" && group != "offload" && !on_host) {
    std::printf("FAILED: no test of group %s\n", group.c_str());
    return 1;
  }
  const auto probe = probe_cuda_device();
  if (!probe.usable && !on_host) {
    std::printf("skipped: %s\n", probe.reason.c_str());
    return 4;
  }
  const char* shared = std::getenv("NIBBLE_SHARED");
  const auto folder = std::filesystem::path(shared != nullptr ? shared : NIBBLE_SOURCE_DIR "/../shared") /
                      "tiny_model" / "mixed";
  if (!std::filesystem::exists(folder)) {
    std::printf("skipped: %s is absent\n", folder.string().c_str());
    return 4;
  }
  if (group != "offload")
    run(folder, on_host ? "host" : "resident", 0, group.empty() ? seconds * 2 / 3 : seconds);
  if (group != "resident" && !on_host) run(folder, "offload", 40, group.empty() ? seconds / 3 : seconds);
  std::printf("%d failed checks\n", failures.load());
  return failures == 0 ? 0 : 1;
} catch (const std::exception& problem) {
  std::printf("FAILED: %s\n", problem.what());
  return 1;
}
