// SPDX-License-Identifier: Apache-2.0
/// \file
/// A loop cut into equal shares over threads, for work done once at load.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace nibble {

/// Calls body(begin, end) on disjoint ranges that cover [0, count). `workers` 0 means one per core. The
/// calling thread takes a share, and those of threads that the system refuses; `body` must not throw.
template <class Body>
void parallel_ranges(int count, int workers, Body body) {
  if (workers <= 0) workers = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  workers = std::clamp(workers, 1, std::max(1, count));
  const auto bound = [&](int w) { return static_cast<int>(static_cast<long long>(count) * w / workers); };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(workers));
  int started = 1;
  try {
    for (; started < workers; ++started)
      threads.emplace_back([=, w = started] { body(bound(w), bound(w + 1)); });
  } catch (const std::exception&) {  // no more threads to be had: this one does the rest
  }
  body(0, bound(1));
  body(bound(started), count);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace nibble
