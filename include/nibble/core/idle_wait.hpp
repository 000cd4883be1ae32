// SPDX-License-Identifier: Apache-2.0
/// \file
/// How a host thread that serves kernels looks for work: awake while there is some, nearly for nothing when
/// idle.
#pragma once

#include <chrono>
#include <thread>

namespace nibble {

/// Looks again at once for 20 ms after the last work, then every 100 µs. For one thread.
class idle_wait {
 public:
  void worked() { last_work_ = clock::now(); }
  /// Between two looks that found nothing.
  void look_again() const {
    if (clock::now() - last_work_ > std::chrono::milliseconds(20))
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point last_work_ = clock::now();
};

}  // namespace nibble
