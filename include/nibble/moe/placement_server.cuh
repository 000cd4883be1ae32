// SPDX-License-Identifier: Apache-2.0
/// \file
/// The host thread that computes the experts kernels leave to the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nibble/core/bf16.hpp"
#include "nibble/core/device_memory.cuh"
#include "nibble/core/idle_wait.hpp"
#include "nibble/moe/placement_host_types.hpp"

namespace nibble::moe {

/// Serves until destroyed. While it lives, the launches that use it must come from one stream at a time.
class host_experts_server {
 public:
  /// y[t] = Σ weights[t][j] · expert ids[t][j] of the layer (x[t]); -1 adds nothing. x and y are fp32, dense.
  /// May use threads of its own; may throw, which fails the step.
  using compute = std::function<void(int layer, int rows, const std::int32_t* ids, const float* weights,
                                     const float* x, float* y)>;

  /// Throws device_error or out_of_memory.
  host_experts_server(int hidden, int top_k, compute run)
      : hidden_(hidden),
        top_k_(top_k),
        run_(std::move(run)),
        mail_memory_(sizeof(host_experts_mail)),
        out_(host_rows_out_bytes(hidden, top_k)),
        in_(static_cast<std::uint64_t>(most_host_rows) * static_cast<unsigned>(hidden) * sizeof(float)),
        asked_(sizeof(std::uint32_t)) {
    mail_ = ::new (mail_memory_.data()) host_experts_mail{};
    start();
  }
  host_experts_server(const host_experts_server&) = delete;
  host_experts_server& operator=(const host_experts_server&) = delete;
  ~host_experts_server() { stop(); }

  /// Fills in what a launch needs of the server.
  void set(host_experts_params& p) const {
    p.hidden = hidden_, p.top_k = top_k_;
    p.mail = mail_, p.rows_out = out_.as<std::uint8_t>(), p.rows_in = in_.as<float>();
    p.asked = asked_.as<std::uint32_t>();
  }
  /// What went wrong since the last call, "" for nothing.
  [[nodiscard]] std::string take_failure() {
    const std::lock_guard hold(guard_);
    return std::exchange(failure_, {});
  }
  /// Microseconds that the last answer took to compute; read it once the answer is there.
  [[nodiscard]] float last_compute_us() const { return last_us_.load(std::memory_order_relaxed); }
  /// After a step failed, with no launch under way.
  void reset() {
    stop();
    start();
  }

 private:
  void start() {
    *mail_ = host_experts_mail{};
    require(runtime_status(cudaMemset(asked_.data(), 0, sizeof(std::uint32_t)),
                           "nibble::moe::host_experts_server", "the state was not cleared"));
    require(
        runtime_status(cudaDeviceSynchronize(), "nibble::moe::host_experts_server", "the device has failed"));
    stopping_ = false;
    thread_ = std::thread([this] { work(); });
  }
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void work() {
    std::uint32_t seen = 0;
    idle_wait idle;
    while (!stopping_) {
      const std::uint32_t asked = std::atomic_ref(mail_->asked).load(std::memory_order_acquire);
      if (asked == seen) {
        idle.look_again();
        continue;
      }
      seen = asked;
      std::uint64_t answer = 1;
      const auto begin = std::chrono::steady_clock::now();
      try {
        serve();
      } catch (const std::exception& failure) {
        answer = 2;
        const std::lock_guard hold(guard_);
        if (failure_.empty()) failure_ = failure.what();
      }
      idle.worked();
      last_us_.store(
          std::chrono::duration<float, std::micro>(std::chrono::steady_clock::now() - begin).count(),
          std::memory_order_relaxed);
      std::atomic_ref(mail_->answered).store(std::uint64_t{seen} << 32 | answer, std::memory_order_release);
    }
  }
  void serve() {
    const int rows = std::clamp(mail_->rows, 0, most_host_rows),
              count = std::clamp(mail_->count, 0, most_split_misses);
    const auto values = static_cast<std::size_t>(rows) * static_cast<std::size_t>(hidden_);
    const auto chosen = static_cast<std::size_t>(rows) * static_cast<std::size_t>(top_k_);
    const std::byte* const x = out_.data();
    const std::byte* const ids =
        x + 2 * static_cast<std::size_t>(most_host_rows) * static_cast<std::size_t>(hidden_);
    const std::byte* const weights =
        ids + 4 * static_cast<std::size_t>(most_host_rows) * static_cast<std::size_t>(top_k_);
    x_.resize(values), ids_.resize(chosen), weights_.resize(chosen);
    for (std::size_t i = 0; i < values; ++i) {
      std::uint16_t v;
      std::memcpy(&v, x + 2 * i, 2);
      x_[i] = bf16::decode(v);
    }
    std::memcpy(ids_.data(), ids, 4 * chosen);
    std::memcpy(weights_.data(), weights, 4 * chosen);
    const std::int32_t* const listed = mail_->experts;
    for (std::int32_t& id : ids_)
      if (std::find(listed, listed + count, id) == listed + count) id = -1;
    run_(mail_->layer, rows, ids_.data(), weights_.data(), x_.data(), in_.as<float>());
  }

  int hidden_, top_k_;
  compute run_;
  pinned_memory mail_memory_, out_, in_;
  device_memory asked_;
  host_experts_mail* mail_ = nullptr;
  std::atomic<bool> stopping_ = false;
  std::atomic<float> last_us_ = 0;
  std::thread thread_;
  std::vector<float> x_, weights_;
  std::vector<std::int32_t> ids_;
  std::mutex guard_;
  std::string failure_;
};

}  // namespace nibble::moe
