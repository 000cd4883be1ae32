// SPDX-License-Identifier: Apache-2.0
/// \file
/// Routed experts of which only some are on the device: all of them in host memory, tables of who is where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/driver_error.hpp"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/residency_device.cuh"

namespace qwen3_moe {

/// Packs one expert, numbered over all layers, into the form of its slot.
using expert_packer = std::function<void(int number, std::span<std::uint8_t> slot)>;

/// What the kernels of a step need of it.
struct device_offload {
  nibble::moe::residency_view state{};
  const std::uint8_t* store = nullptr;  ///< null: every expert is resident, nothing is placed or fetched
};

class offloaded_experts {
 public:
  /// Fills host memory, page-locked, and the slots: with as many experts as there are slots, evenly over the
  /// layers. Cost: slot_bytes for each expert of host memory. Throws nibble::out_of_memory where the system
  /// lets too little be locked.
  offloaded_experts(const nibble::moe::residency_shape& shape, std::size_t slot_bytes,
                    const expert_packer& pack, std::span<const nibble::moe::expert_scales> scales,
                    int slot_count, std::byte* slots, int device, int threads, cudaStream_t stream,
                    std::function<void(std::string_view)> note)
      : locker_(device),
        store_({.count = shape.total(),
                .slot_bytes = slot_bytes,
                .locker = &locker_,
                .threads = threads,
                .note = std::move(note),
                .progress = {}}),
        tables_(shape, slot_count, scales) {
    store_.fill([&](int number, std::span<std::byte> slot, nibble::moe::expert_scales& to) {
      pack(number, {reinterpret_cast<std::uint8_t*>(slot.data()), slot.size()});
      to = scales[static_cast<std::size_t>(number)];
    });
    if (store_.locked() < store_.count())
      throw nibble::out_of_memory(
          "experts in host memory: " + std::to_string(store_.locked()) + " of " +
          std::to_string(store_.count()) +
          " could be page-locked; raise the limit of locked memory (ulimit -l) or give the machine more");
    nibble::moe::host_residency start(shape, slot_count);
    const std::vector<std::uint32_t> unknown(static_cast<std::size_t>(shape.total()),
                                             nibble::moe::worth_never);
    const auto entries = start.warm(unknown);
    nibble::require(nibble::moe::bring_experts(store_, entries, slots, stream));
    start.set_clock(nibble::moe::clock_start);
    tables_.set(start, stream);
  }

  /// Another number of slots, at most as many as at the start. Waits for the stream.
  void resize(int slot_count, cudaStream_t stream) {
    nibble::moe::host_residency now = tables_.get(stream);
    now.resize(slot_count);
    tables_.set(now, stream);
  }

  [[nodiscard]] device_offload view() const {
    return {tables_.view(), reinterpret_cast<const std::uint8_t*>(store_.data())};
  }
  [[nodiscard]] nibble::moe::residency_counts counts(cudaStream_t stream) const {
    return tables_.counts(stream);
  }

 private:
  nibble::moe::cuda_page_locker locker_;
  nibble::moe::expert_store store_;
  nibble::moe::device_residency tables_;
};

}  // namespace qwen3_moe
