// SPDX-License-Identifier: Apache-2.0
/// \file
/// All routed experts in host memory, page-locked as far as the system lets it, and a second stream to fetch
/// them on.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "model/expert_files.hpp"
#include "nibble/core/driver.cuh"
#include "nibble/core/driver_error.hpp"
#include "nibble/moe/fetch_server.cuh"
#include "nibble/moe/residency_device.cuh"

namespace qwen3_moe {

/// Filled once; slots may come and go meanwhile. Cost: slot_bytes of host memory for each expert.
class kept_experts {
 public:
  /// \param threads that fill, 0: one per core. Throws nibble::error and what `pack` throws.
  kept_experts(const expert_keeping& keeping, int count, std::size_t slot_bytes, const expert_packer& pack,
               std::span<const nibble::moe::expert_scales> scales, int device, int threads,
               const expert_files::note_taker& note)
      : before_read_(keeping.before_read),
        files_(keeping, count, slot_bytes, note),
        locker_(device),
        store_({.count = count,
                .slot_bytes = slot_bytes,
                .locker = &locker_,
                // A few pieces even of a small model, so that locking goes along with packing.
                .piece_bytes = std::clamp(static_cast<std::uint64_t>(count) * slot_bytes / 8,
                                          std::uint64_t{1} << 16, std::uint64_t{256} << 20),
                .most_locked_bytes = keeping.lock_limit_bytes,
                .numa_node = nibble::moe::numa_node_of_device(device),
                .threads = threads,
                .note = note,
                .progress = {}}) {
    nibble::require(nibble::runtime_status(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking),
                                           "qwen3_moe::kept_experts", "no second stream could be made"));
    try {
      files_.fill(store_, pack, scales);
    } catch (...) {
      static_cast<void>(cudaStreamDestroy(side_));
      throw;
    }
  }
  kept_experts(const kept_experts&) = delete;
  kept_experts& operator=(const kept_experts&) = delete;
  ~kept_experts() { static_cast<void>(cudaStreamDestroy(side_)); }

  [[nodiscard]] const nibble::moe::expert_store& store() const { return store_; }
  [[nodiscard]] const expert_files& files() const { return files_; }
  /// Idle outside of steps.
  [[nodiscard]] cudaStream_t side() const { return side_; }
  /// Whether kernels and the copy engine can have all of them.
  [[nodiscard]] bool all_locked() const { return store_.locked() == store_.count(); }
  [[nodiscard]] const std::function<void(int)>& before_read() const { return before_read_; }
  /// Reads experts that are not page-locked.
  [[nodiscard]] nibble::moe::fetch_server::reader reader() const {
    return [this](int number, std::span<std::byte> out) {
      if (before_read_) before_read_(number);
      std::memcpy(out.data(), store_.expert(number).data(), out.size());
    };
  }

 private:
  std::function<void(int)> before_read_;
  expert_files files_;
  nibble::moe::cuda_page_locker locker_;
  nibble::moe::expert_store store_;
  cudaStream_t side_ = nullptr;
};

}  // namespace qwen3_moe
