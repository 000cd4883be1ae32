// SPDX-License-Identifier: Apache-2.0
/// \file
/// Private to http_server.cpp: what an exchange and its connection share, between threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>

namespace qwen3_moe::http_detail {

struct exchange_state {
  std::atomic<bool> gone{false};
  std::atomic<bool> complete{false};
  std::atomic<std::size_t> unsent{0};
  std::mutex mutex;
  std::function<void()> on_disconnect;
  std::function<void()> on_writable;

  // What the calls hold is let go of after the lock.
  void disconnect() {
    std::function<void()> call, unused;
    {
      const std::lock_guard lock(mutex);
      if (complete || gone.exchange(true)) return;
      call.swap(on_disconnect);
      unused.swap(on_writable);
    }
    if (call) call();
  }
  void finish() {
    std::function<void()> unused, unused_too;
    const std::lock_guard lock(mutex);
    complete = true;
    unused.swap(on_disconnect);
    unused_too.swap(on_writable);
  }
  void writable() {
    std::function<void()> call;
    {
      const std::lock_guard lock(mutex);
      call.swap(on_writable);
    }
    if (call) call();
  }
};

}  // namespace qwen3_moe::http_detail
