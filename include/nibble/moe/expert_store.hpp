// SPDX-License-Identifier: Apache-2.0
/// \file
/// All routed experts in host memory, each as it lies in a slot on the device, page-locked as it fills.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/core/error.hpp"
#include "nibble/core/parallel.hpp"

namespace nibble::moe {

/// fp32 scales of an expert: gate, up, down.
using expert_scales = std::array<float, 3>;

/// Page-locks host memory for a device: cuda_page_locker, or a test's.
class page_locker {
 public:
  virtual ~page_locker() = default;
  /// Makes the calling thread able to lock; called once in each thread that does.
  virtual void enter_thread() {}
  /// Locks whole pages, from then on readable by kernels at the same address. \return "" or why not
  virtual std::string lock(std::byte* at, std::uint64_t bytes) = 0;
  virtual void unlock(std::byte* at) = 0;
};

/// What a device takes to address page-locked memory of the host: page tables of 8 bytes for every 4 KiB, in
/// pieces of 2 MiB, as measured on an H200 with driver 580 for 1, 2 and 4 GiB (device_host_map).
[[nodiscard]] constexpr std::uint64_t page_table_bytes_of(std::uint64_t locked_bytes) {
  return 8 * divide_up(locked_bytes, std::uint64_t{4} << 10);
}

struct expert_store_options {
  int count = 0;                                         ///< experts of all layers
  std::size_t slot_bytes = 0;                            ///< a multiple of 128
  page_locker* locker = nullptr;                         ///< null: nothing is locked. Must outlive the store
  std::uint64_t piece_bytes = std::uint64_t{256} << 20;  ///< filled, then locked, together
  std::uint64_t most_locked_bytes = UINT64_MAX;
  int numa_node = -1;  ///< where the pages should lie: the device's node; -1: wherever
  int threads = 0;     ///< that fill; 0: one per core
  std::function<void(std::string_view)> note;
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;  ///< bytes filled
};

/// Expert n at data() + n · slot_bytes. The experts 0 … locked() - 1 are page-locked; the others, if the
/// system refused, must be copied by the host.
class expert_store {
 public:
  /// Reserves address space. Throws out_of_memory or error.
  explicit expert_store(expert_store_options options) : options_(std::move(options)) {
    if (options_.count < 1 || options_.slot_bytes == 0 || options_.slot_bytes % 128 != 0)
      throw error("expert store: needs experts of a multiple of 128 bytes");
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    // Pieces end with an expert and with a page, so that no expert lies in two locked ranges.
    const std::uint64_t together = std::lcm(page, std::uint64_t{options_.slot_bytes}) / options_.slot_bytes;
    piece_experts_ =
        std::max<std::uint64_t>(1, options_.piece_bytes / options_.slot_bytes / together) * together;
    bytes_ = align_up(static_cast<std::uint64_t>(options_.count) * options_.slot_bytes, page);
    void* address =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
      throw out_of_memory("expert store: " + std::to_string(bytes_) +
                          " bytes refused: " + std::strerror(errno));
    data_ = static_cast<std::byte*>(address);
    ::madvise(data_, bytes_, MADV_HUGEPAGE);
    if (options_.numa_node >= 0 && options_.numa_node < 64) {
      const unsigned long nodes = 1ul << options_.numa_node;
      constexpr int preferred = 1;  // MPOL_PREFERRED; a system without nodes refuses, which changes nothing
      static_cast<void>(::syscall(SYS_mbind, data_, bytes_, preferred, &nodes, 65ul, 0u));
    }
    scales_.resize(static_cast<std::size_t>(options_.count));
  }
  expert_store(const expert_store&) = delete;
  expert_store& operator=(const expert_store&) = delete;
  ~expert_store() {
    for (std::byte* at : locked_ranges_) options_.locker->unlock(at);
    ::munmap(data_, bytes_);
  }

  /// Calls produce(number, bytes of the slot, scales) for every expert, in parallel; while a piece is
  /// produced the one before is page-locked. The first exception of `produce` is thrown again, and the store
  /// is then not to be used.
  void fill(const std::function<void(int, std::span<std::byte>, expert_scales&)>& produce) {
    lock_queue queue(*this);
    const int total = options_.count;
    for (int begin = 0; begin < total;) {
      const int end = static_cast<int>(std::min<std::uint64_t>(
          static_cast<std::uint64_t>(total), static_cast<std::uint64_t>(begin) + piece_experts_));
      std::atomic<int> next = begin;
      std::mutex guard;
      std::exception_ptr failure;
      const int workers = options_.threads > 0
                              ? options_.threads
                              : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
      parallel_ranges(workers, workers, [&](int, int) {
        for (int n; (n = next.fetch_add(1, std::memory_order_relaxed)) < end;) try {
            produce(n, slot(n), scales_[static_cast<std::size_t>(n)]);
          } catch (...) {
            const std::lock_guard hold(guard);
            if (!failure) failure = std::current_exception();
            next = end;
          }
      });
      if (failure) std::rethrow_exception(failure);
      queue.push(begin, end);
      begin = end;
      if (options_.progress)
        options_.progress(static_cast<std::uint64_t>(end) * options_.slot_bytes,
                          static_cast<std::uint64_t>(total) * options_.slot_bytes);
    }
    queue.finish();
    if (options_.locker != nullptr && locked_ < total && options_.note)
      options_.note(
          "expert store: " + std::to_string(static_cast<std::uint64_t>(locked_) * options_.slot_bytes >> 20) +
          " of " + std::to_string(static_cast<std::uint64_t>(total) * options_.slot_bytes >> 20) +
          " MiB could be page-locked (" + refusal_ +
          "); the other experts are copied by a CPU thread, which is slower. Raise the limit of "
          "locked memory (ulimit -l), or the memory of a container or virtual machine");
  }

  [[nodiscard]] int count() const { return options_.count; }
  [[nodiscard]] std::size_t slot_bytes() const { return options_.slot_bytes; }
  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] std::span<const std::byte> expert(int number) const {
    check(number);
    return {data_ + static_cast<std::size_t>(number) * options_.slot_bytes, options_.slot_bytes};
  }
  [[nodiscard]] std::span<const expert_scales> scales() const { return scales_; }
  /// Experts 0 … locked() - 1 are page-locked.
  [[nodiscard]] int locked() const { return locked_; }

 private:
  /// A thread that locks pieces in order, until one is refused.
  class lock_queue {
   public:
    explicit lock_queue(expert_store& store) : store_(store) {
      if (store_.options_.locker != nullptr) thread_ = std::thread([this] { work(); });
    }
    ~lock_queue() { finish(); }
    void push(int begin, int end) {
      if (!thread_.joinable()) return;
      const std::lock_guard hold(guard_);
      pieces_.emplace_back(begin, end);
      changed_.notify_one();
    }
    void finish() {
      if (!thread_.joinable()) return;
      {
        const std::lock_guard hold(guard_);
        done_ = true;
        changed_.notify_one();
      }
      thread_.join();
    }

   private:
    void work() {
      store_.options_.locker->enter_thread();
      for (std::size_t i = 0;; ++i) {
        std::unique_lock hold(guard_);
        changed_.wait(hold, [&] { return i < pieces_.size() || done_; });
        if (i >= pieces_.size()) return;
        const auto [begin, end] = pieces_[i];
        hold.unlock();
        if (store_.refusal_.empty()) store_.lock(begin, end);
      }
    }
    expert_store& store_;
    std::mutex guard_;
    std::condition_variable changed_;
    std::vector<std::pair<int, int>> pieces_;
    bool done_ = false;
    std::thread thread_;
  };

  void lock(int begin, int end) {
    std::byte* const from = data_ + static_cast<std::size_t>(begin) * options_.slot_bytes;
    const std::uint64_t bytes = end == options_.count
                                    ? bytes_ - static_cast<std::uint64_t>(from - data_)
                                    : static_cast<std::uint64_t>(end - begin) * options_.slot_bytes;
    if (locked_bytes_ + bytes > options_.most_locked_bytes) {
      refusal_ = "the budget for locked memory is spent";
      return;
    }
    refusal_ = options_.locker->lock(from, bytes);
    if (!refusal_.empty()) return;
    locked_ranges_.push_back(from);
    locked_bytes_ += bytes;
    locked_ = end;
  }
  [[nodiscard]] std::span<std::byte> slot(int number) {
    return {data_ + static_cast<std::size_t>(number) * options_.slot_bytes, options_.slot_bytes};
  }
  void check(int number) const {
    if (number < 0 || number >= options_.count)
      throw error("expert store: there is no expert " + std::to_string(number));
  }

  expert_store_options options_;
  std::uint64_t piece_experts_ = 0, bytes_ = 0, locked_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::vector<expert_scales> scales_;
  std::vector<std::byte*> locked_ranges_;
  std::string refusal_;
  int locked_ = 0;
};

}  // namespace nibble::moe
