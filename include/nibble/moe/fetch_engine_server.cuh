// SPDX-License-Identifier: Apache-2.0
/// \file
/// The host thread that has the copy engine bring what placements publish.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <chrono>
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
#include "nibble/core/driver.cuh"
#include "nibble/core/error.hpp"
#include "nibble/core/event.cuh"
#include "nibble/core/idle_wait.hpp"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/fetch_engine_types.hpp"
#include "nibble/moe/fetch_staged_types.hpp"

namespace nibble::moe {

/// Serves until destroyed, on a stream of its own. Launches that publish must come from one stream at a time.
/// While they run, no other thread may sit in a call of CUDA that waits for the device and keeps others out
/// (cudaMalloc, cudaFree, cudaHostRegister; a launch that finds the queue full, see pace()): the copies could
/// not be asked for, and the step would fail after fetch_patience_ns.
class copy_engine {
 public:
  /// Called on the thread before an expert is copied; what it throws fails the step. For tests.
  using before_copy = std::function<void(int number)>;

  /// \param store all of it page-locked  \param slots slot_count slots, of which not all have to be there yet
  /// \param layer_experts experts of a layer. Throws device_error, out_of_memory, error.
  copy_engine(const expert_store& store, std::byte* slots, int slot_count, int layer_experts,
              before_copy before = {})
      : store_(store),
        slots_(slots),
        slot_count_(slot_count),
        words_(engine_record_words(layer_experts)),
        head_bytes_(engine_head_bytes(store.slot_bytes())),
        before_(std::move(before)),
        records_(8 * engine_records * words_),
        state_(sizeof(engine_state)) {
    if (store.locked() < store.count() || store.count() > 65536 || slot_count > 65536)
      throw error("copy engine: needs page-locked experts, at most 65,536 of them and as many slots");
    require(driver().found);
    call(cudaGetDevice(&device_), "no device");
    int least = 0, most = 0;
    call(cudaDeviceGetStreamPriorityRange(&least, &most), "no priorities");
    call(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, most), "no stream for copies");
    try {
      start();
    } catch (...) {
      static_cast<void>(cudaStreamDestroy(stream_));
      throw;
    }
  }
  copy_engine(const copy_engine&) = delete;
  copy_engine& operator=(const copy_engine&) = delete;
  ~copy_engine() {
    stop();
    static_cast<void>(cudaStreamDestroy(stream_));
  }

  /// What placements publish through.
  [[nodiscard]] engine_link link() const {
    return {records_.as<std::uint64_t>(), state_.as<engine_state>(), static_cast<int>(words_), head_bytes_};
  }
  /// \param fetch list, store and slots of what was published
  [[nodiscard]] engine_wait_params wait_params(const fetch_params& fetch, std::uint64_t* failures) const {
    return {fetch, head_bytes_, state_.as<engine_state>(), failures};
  }
  /// Behind each layer that is launched, not captured: keeps the host at most 2 · paced_layers before the
  /// device, so that no launch ever waits for room in the stream's queue.
  [[nodiscard]] status pace(cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (const cudaError_t e = cudaStreamIsCapturing(stream, &capture); e != cudaSuccess)
      return runtime_status(e, where, "the stream does not say whether it is captured");
    if (capture != cudaStreamCaptureStatusNone || ++layers_ % paced_layers != 0) return status::success();
    cudaError_t e = cudaEventRecord(launched_[layers_ / paced_layers % 2].get(), stream);
    // The event before this one; what was never recorded is done.
    if (e == cudaSuccess) e = cudaEventSynchronize(launched_[(layers_ / paced_layers + 1) % 2].get());
    return runtime_status(e, where, "the stream failed");
  }
  /// Returns when all that was published has come. \pre what publishes has ended. Throws device_error; error
  /// where the thread does not get there.
  void drain() {
    engine_state state;
    call(cudaMemcpyAsync(&state, state_.data(), sizeof state, cudaMemcpyDeviceToHost, stream_), "no state");
    call(cudaStreamSynchronize(stream_), "copies failed");
    const auto begin = std::chrono::steady_clock::now();
    while (state.broken == 0 && handled_.load(std::memory_order_acquire) != state.published) {
      if (std::chrono::steady_clock::now() - begin > std::chrono::nanoseconds(fetch_patience_ns))
        throw error("copy engine: the thread that asks for copies is stuck");
      std::this_thread::yield();
    }
    call(cudaStreamSynchronize(stream_), "copies failed");
  }
  /// What went wrong since the last call, "" for nothing.
  [[nodiscard]] std::string take_failure() {
    engine_state state;
    if (cudaMemcpy(&state, state_.data(), sizeof state, cudaMemcpyDeviceToHost) != cudaSuccess) state = {};
    const std::lock_guard hold(guard_);
    if (failure_.empty() && state.broken != 0)
      return "the copy engine did not answer within " + std::to_string(fetch_patience_ns / 1'000'000'000) +
             " s";
    return std::exchange(failure_, {});
  }
  /// After a step failed, with nothing under way that publishes: forgets what was asked for.
  void reset() {
    stop();
    start();
  }

 private:
  static constexpr const char* where = "nibble::moe::copy_engine";
  /// A layer is some 20 launches, a stream's queue takes about 1,000.
  static constexpr std::size_t paced_layers = 8;
  static void call(cudaError_t e, const char* text) { require(runtime_status(e, where, text)); }

  void start() {
    for (std::size_t i = 0; i < engine_records * words_; ++i) records_.as<std::uint64_t>()[i] = 0;
    call(cudaMemsetAsync(state_.data(), 0, sizeof(engine_state), stream_), "the state was not cleared");
    call(cudaStreamSynchronize(stream_), "the device has failed");
    stopping_ = false, failed_ = false, handled_ = 0;
    thread_ = std::thread([this] { work(); });
  }
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    static_cast<void>(cudaStreamSynchronize(stream_));
  }
  /// A word of record `number` once it is there. \return false: to stop
  bool wait_for(const std::uint64_t& word, std::uint64_t number, std::uint64_t& value) {
    std::atomic_ref<const std::uint64_t> shared(word);
    while ((value = shared.load(std::memory_order_acquire)) >> 32 != (number & 0xFFFF'FFFF)) {
      if (stopping_) return false;
      idle_.look_again();
    }
    return true;
  }
  void work() {
    static_cast<void>(cudaSetDevice(device_));
    idle_.worked();
    try {
      for (std::uint64_t number = 1; serve(number); ++number) {
        idle_.worked();
        handled_.store(number, std::memory_order_release);
      }
    } catch (...) {  // no memory: kernels give up after a while
    }
  }
  bool serve(std::uint64_t number) {
    const std::uint64_t* const record = records_.as<std::uint64_t>() + number % engine_records * words_;
    std::uint64_t head = 0;
    if (!wait_for(record[0], number, head)) return false;
    const auto demanded = static_cast<std::size_t>(head >> 16 & 0xFFFF),
               guesses = static_cast<std::size_t>(head & (engine_head_flag - 1));
    const std::size_t skip = (head & engine_head_flag) != 0 ? head_bytes_ : 0;
    if (!copy(record + 1, demanded, number, skip)) return false;
    if (demanded > 0) say(2 * number);
    if (guesses == 0) return true;
    if (!copy(record + 1 + demanded, guesses, number, 0)) return false;
    say(2 * number + 1);
    return true;
  }
  /// One call for all of them: between copies that are asked for one by one the link idles for some 3 µs.
  /// \param skip bytes of the first that come otherwise
  bool copy(const std::uint64_t* entries, std::size_t count, std::uint64_t number, std::size_t skip) {
    to_.clear(), from_.clear(), sizes_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t entry = 0;
      if (!wait_for(entries[i], number, entry)) return false;
      const int expert = static_cast<int>(entry >> 16 & 0xFFFF), slot = static_cast<int>(entry & 0xFFFF);
      if (expert >= store_.count() || slot >= slot_count_) {
        fail("a record names no expert or no slot");
        continue;
      }
      try {
        if (before_) before_(expert);
      } catch (const std::exception& refused) {
        fail(refused.what());
      } catch (...) {
        fail("refused");
      }
      const std::size_t begin = i == 0 ? skip : 0;
      to_.push_back(slots_ + static_cast<std::size_t>(slot) * store_.slot_bytes() + begin);
      from_.push_back(store_.expert(expert).data() + begin);
      sizes_.push_back(store_.slot_bytes() - begin);
    }
    if (to_.empty()) return true;
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    if (const cudaError_t e = cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), to_.size(),
                                                   &attributes, &first, 1, stream_);
        e != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      fail(std::string("an expert could not be copied: ") + cudaGetErrorString(e));
    }
    return true;
  }
  /// Writes `done` behind the copies.
  void say(std::uint64_t done) {
    auto* const state = state_.as<engine_state>();
    if (failed_) write(&state->failed, 1);
    write(&state->done, done);
  }
  void write(const std::uint64_t* at, std::uint64_t value) {
    if (driver().stream_write_value(stream_, reinterpret_cast<CUdeviceptr>(at), value, 0) != CUDA_SUCCESS)
      fail("the device could not be told that experts have come");
  }
  void fail(std::string why) {
    failed_ = true;
    const std::lock_guard hold(guard_);
    if (failure_.empty()) failure_ = std::move(why);
  }

  const expert_store& store_;
  std::byte* slots_;
  int slot_count_;
  std::size_t words_, head_bytes_;
  before_copy before_;
  pinned_memory records_;
  device_memory state_;
  cudaStream_t stream_ = nullptr;
  int device_ = 0;
  std::atomic<bool> stopping_ = false;
  std::atomic<std::uint64_t> handled_ = 0;  ///< the last record whose copies were asked for
  std::thread thread_;
  std::mutex guard_;
  std::string failure_;
  // The thread's own.
  bool failed_ = false;
  idle_wait idle_;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<std::size_t> sizes_;
  // The launching thread's.
  std::array<event, 2> launched_;
  std::size_t layers_ = 0;
};

}  // namespace nibble::moe
