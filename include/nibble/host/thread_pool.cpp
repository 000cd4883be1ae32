// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <nibble/host/thread_pool.hpp>
#include <thread>
#include <utility>
#include <vector>

namespace nibble::host {
namespace {

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// How long an idle worker watches for the next loop before it sleeps: longer than the serial parts of a
/// decode step, far shorter than a person notices as load.
constexpr std::chrono::microseconds idle_spin{50};

// The gate is one word, so that a worker joins a loop if and only if it is still open:
// epoch in the upper half, then the open bit, then the number of workers inside.
constexpr std::uint64_t open_bit = std::uint64_t{1} << 31;
constexpr std::uint64_t inside_mask = open_bit - 1;
constexpr std::uint64_t epoch_of(std::uint64_t gate) noexcept { return gate >> 32; }

}  // namespace

struct thread_pool::state {
  alignas(64) std::atomic<std::uint64_t> gate{0};
  alignas(64) std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  alignas(64) std::atomic<bool> busy{false};
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  // Written by the caller while the gate is closed and nobody is inside.
  range_function function = nullptr;
  void* context = nullptr;
  std::int64_t n = 0;
  std::int64_t grain = 1;
  std::exception_ptr failure;  // written by the one that sets `failed`

  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;

  void share() noexcept {
    while (!failed.load(std::memory_order_relaxed)) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      try {
        function(context, begin, std::min(n, begin + grain));
      } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
      }
    }
  }

  /// Returns the first gate value of another epoch than `seen`, or stops.
  std::uint64_t await(std::uint64_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + idle_spin;
    do {
      for (int i = 0; i < 16; ++i) {
        const std::uint64_t value = gate.load(std::memory_order_acquire);
        if (epoch_of(value) != seen || stop.load(std::memory_order_relaxed)) return value;
        relax();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    std::unique_lock lock(mutex);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return epoch_of(gate.load()) != seen || stop.load(); });
    sleepers.fetch_sub(1);
    return gate.load(std::memory_order_acquire);
  }

  void work() {
    for (std::uint64_t seen = 0;;) {
      std::uint64_t value = await(seen);
      if (stop.load(std::memory_order_relaxed)) return;
      seen = epoch_of(value);
      while ((value & open_bit) != 0 && epoch_of(value) == seen)
        if (gate.compare_exchange_weak(value, value + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
          share();
          gate.fetch_sub(1, std::memory_order_release);
          break;
        }
    }
  }

  void end() noexcept {
    {
      const std::lock_guard lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
};

thread_pool::thread_pool(int threads) : state_(std::make_unique<state>()) {
  const int cores = available_cores();
  const int count = threads <= 0 ? cores : std::min(threads, cores);
  try {
    for (int i = 1; i < count; ++i) state_->workers.emplace_back([s = state_.get()] { s->work(); });
  } catch (...) {
    state_->end();
    throw;
  }
}

thread_pool::~thread_pool() { state_->end(); }

int thread_pool::threads() const noexcept { return static_cast<int>(state_->workers.size()) + 1; }

void thread_pool::run(std::int64_t n, std::int64_t grain, range_function fn, void* context) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  state& s = *state_;
  if (s.workers.empty() || n <= grain || s.busy.exchange(true, std::memory_order_acquire)) {
    for (std::int64_t begin = 0; begin < n; begin += std::min(grain, n - begin))
      fn(context, begin, begin + std::min(grain, n - begin));
    return;
  }
  s.function = fn;
  s.context = context;
  s.n = n;
  s.grain = grain;
  s.next.store(0, std::memory_order_relaxed);
  s.failed.store(false, std::memory_order_relaxed);
  const std::uint64_t epoch = (epoch_of(s.gate.load(std::memory_order_relaxed)) + 1) & 0xFFFF'FFFFu;
  s.gate.store((epoch << 32) | open_bit);
  // A worker counts itself asleep before it looks at the gate a last time, so it is either seen here or sees
  // the new epoch.
  if (const int asleep = s.sleepers.load(); asleep > 0) {
    const std::lock_guard lock(s.mutex);
    const std::int64_t helpers = std::min<std::int64_t>(asleep, (n - 1) / grain);
    for (std::int64_t i = 0; i < helpers; ++i) s.wake.notify_one();
  }
  s.share();
  std::uint64_t value = s.gate.fetch_and(~open_bit, std::memory_order_acq_rel);
  for (int spins = 0; (value & inside_mask) != 0; ++spins) {
    if (spins < 4096)
      relax();
    else
      std::this_thread::yield();
    value = s.gate.load(std::memory_order_acquire);
  }
  const std::exception_ptr failure = std::exchange(s.failure, nullptr);
  s.busy.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace nibble::host
