// SPDX-License-Identifier: Apache-2.0
/// \file
/// Threads for the work between socket and engine: parsing, templates, tokenising, writing JSON.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace qwen3_moe {

/// Runs tasks in order of arrival on a fixed number of threads. A task must not throw. Its owner keeps it
/// alive until nothing posts any more; the destructor runs what is left and joins.
class task_pool {
 public:
  /// Throws std::system_error where the system gives no more threads.
  explicit task_pool(std::size_t threads) {
    threads_.reserve(threads);
    try {
      for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { loop(); });
    } catch (...) {
      stop();  // those that run already use this object
      throw;
    }
  }

  ~task_pool() { stop(); }
  task_pool(const task_pool&) = delete;
  task_pool& operator=(const task_pool&) = delete;

  /// False, and the task is dropped, after stop().
  bool post(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return false;
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
    return true;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_)
      if (thread.joinable()) thread.join();
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace qwen3_moe
