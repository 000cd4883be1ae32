// SPDX-License-Identifier: Apache-2.0
/// \file
/// A fixed set of workers for loops of microseconds: woken by a spin where one is short, asleep otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

namespace nibble::host {

/// Cores this process may use: the smaller of its affinity mask and its cgroup CPU quota (rounded up); at
/// least 1.
[[nodiscard]] int available_cores();

/// The CPU quota in cores (rounded up, at least 1) that control groups grant, 0 where there is none.
/// \param membership the text of /proc/self/cgroup
/// \param root where the control-group file systems are mounted, "/sys/fs/cgroup"
[[nodiscard]] int cgroup_cores(std::string_view membership, const std::string& root);

/// Workers that share loops with the thread that calls.
///
/// One loop runs at a time. A loop started from inside another, or from a second thread while one runs, is
/// executed inline by its caller: nothing waits and nothing is oversubscribed. A process may hold several
/// pools. Results of the kernels never depend on the number of threads.
class thread_pool {
 public:
  /// \param threads how many threads share a loop, the caller among them; 0 takes available_cores(), and
  ///        more than available_cores() is lowered to it.
  explicit thread_pool(int threads = 0);
  ~thread_pool();
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  /// Threads that share a loop, the caller among them.
  [[nodiscard]] int threads() const noexcept;

  /// Calls fn(begin, end) for ranges of at most `grain` indices that cover [0, n) once each, in no fixed
  /// order, and returns when all are done. The first exception of fn is thrown again here; ranges not yet
  /// begun are then dropped.
  template <class Function>
  void parallel_for(std::int64_t n, std::int64_t grain, Function&& fn) {
    using function = std::remove_reference_t<Function>;
    run(
        n, grain,
        [](void* context, std::int64_t begin, std::int64_t end) {
          (*static_cast<function*>(context))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
  }

 private:
  using range_function = void (*)(void* context, std::int64_t begin, std::int64_t end);
  void run(std::int64_t n, std::int64_t grain, range_function fn, void* context);

  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace nibble::host
