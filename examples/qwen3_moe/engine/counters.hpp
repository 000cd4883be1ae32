// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the engine counts. Written by its thread, read by any.
#pragma once

#include <atomic>
#include <cstdint>

namespace qwen3_moe {

struct engine_counters {
  std::atomic<int> running{0};  ///< sequences that hold a slot
  std::atomic<int> queued{0};   ///< accepted, without a slot
  std::atomic<int> free_pages{0};
  std::atomic<int> free_slots{0};
  std::atomic<std::uint64_t> steps{0};
  std::atomic<std::uint64_t> prompt_tokens{0};      ///< prompt tokens computed, those computed again included
  std::atomic<std::uint64_t> completion_tokens{0};  ///< tokens chosen
  std::atomic<std::uint64_t> finished_stop{0};
  std::atomic<std::uint64_t> finished_length{0};
  std::atomic<std::uint64_t> finished_error{0};
  std::atomic<std::uint64_t> aborted{0};    ///< cancelled, wherever they were
  std::atomic<std::uint64_t> preempted{0};  ///< times a request gave its pages back and began again
  std::atomic<std::uint64_t> rejected{0};   ///< refused because the queue was full
  /// Distinct routed experts of a layer's call that were on the device, and that had to be brought.
  std::atomic<std::uint64_t> expert_hits{0}, expert_misses{0};
};

}  // namespace qwen3_moe
