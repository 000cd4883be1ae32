// SPDX-License-Identifier: Apache-2.0
/// \file
/// The host threads behind fetch_staged: they read experts that kernels ask for into a page-locked ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/core/idle_wait.hpp"
#include "nibble/moe/fetch_staged_types.hpp"

namespace nibble::moe {

/// Serves until destroyed. While it lives, the launches that use it must come from one stream at a time.
class fetch_server {
 public:
  /// Reads expert `number` into the span of slot_bytes; may throw, which fails the step that asked.
  using reader = std::function<void(int number, std::span<std::byte>)>;

  /// Throws device_error or out_of_memory. \param threads that read, each another expert: 1, 2 or 4, so that
  /// tags may wrap
  fetch_server(std::size_t slot_bytes, reader read, int threads = 2)
      : slot_bytes_(slot_bytes),
        read_(std::move(read)),
        threads_wanted_(threads >= 4   ? 4
                        : threads >= 2 ? 2
                                       : 1),
        mail_memory_(sizeof(fetch_mail)),
        ring_(slot_bytes * fetch_ring_places),
        state_(sizeof(fetch_state)) {
    mail_ = ::new (mail_memory_.data()) fetch_mail{};
    start();
  }
  fetch_server(const fetch_server&) = delete;
  fetch_server& operator=(const fetch_server&) = delete;
  ~fetch_server() { stop(); }

  /// The parameters of a launch. \param fetch list, store and slots  \param locked experts read directly
  [[nodiscard]] staged_fetch_params params(const fetch_params& fetch, int locked,
                                           std::uint64_t* failures) const {
    return {fetch, locked, mail_, ring_.as<std::uint8_t>(), state_.as<fetch_state>(), failures};
  }

  /// What went wrong since the last call, "" for nothing.
  [[nodiscard]] std::string take_failure() {
    const std::lock_guard hold(guard_);
    return std::exchange(failure_, {});
  }
  /// After a step failed, with no launch under way: forgets what was asked for.
  void reset() {
    stop();
    start();
  }

 private:
  void start() {
    *mail_ = fetch_mail{};
    require(runtime_status(cudaMemset(state_.data(), 0, sizeof(fetch_state)), "nibble::moe::fetch_server",
                           "the state was not cleared"));
    require(runtime_status(cudaDeviceSynchronize(), "nibble::moe::fetch_server", "the device has failed"));
    stopping_ = false;
    for (int i = 0; i < threads_wanted_; ++i)
      threads_.emplace_back([this, i] { work(static_cast<std::uint32_t>(i)); });
  }
  void stop() {
    stopping_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  /// Thread `self` answers every threads_wanted_-th tag, in order.
  void work(std::uint32_t self) {
    idle_wait idle;
    for (std::uint32_t tag = 1 + self; !stopping_; tag += static_cast<std::uint32_t>(threads_wanted_)) {
      std::atomic_ref<std::uint64_t> asked(mail_->asked[tag % 1024]);
      std::uint64_t question;
      while ((question = asked.load(std::memory_order_acquire)) >> 32 != tag || question == 0) {
        if (stopping_) return;
        idle.look_again();
      }
      serve(static_cast<int>(question & 0xFFFF'FFFFu), tag);
      idle.worked();
    }
  }
  void serve(int number, std::uint32_t tag) {
    const std::uint32_t place = tag % fetch_ring_places;
    std::atomic_ref<std::uint32_t> taken(mail_->taken[place]);
    while (taken.load(std::memory_order_acquire) != tag - fetch_ring_places)
      if (stopping_) return;
    std::uint64_t answer = fetch_answer_good;
    try {
      read_(number, {ring_.data() + place * slot_bytes_, slot_bytes_});
    } catch (const std::exception& failure) {
      answer = fetch_answer_failed;
      const std::lock_guard hold(guard_);
      if (failure_.empty()) failure_ = failure.what();
    }
    std::atomic_ref(mail_->answers[place])
        .store(std::uint64_t{tag} << 32 | answer, std::memory_order_release);
  }

  std::size_t slot_bytes_;
  reader read_;
  int threads_wanted_;
  pinned_memory mail_memory_, ring_;
  device_memory state_;
  fetch_mail* mail_ = nullptr;
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;
  std::mutex guard_;
  std::string failure_;
};

}  // namespace nibble::moe
