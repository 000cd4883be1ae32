// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the experts of a model that does not fit are kept: what the options say.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

#include "nibble/core/device_class.hpp"

namespace qwen3_moe {

/// Whether the CPU computes some of the experts that are missing, instead of having them fetched.
enum class cpu_share : std::uint8_t {
  off,
  measured,  ///< as many as pays, by what both take at the start; none where a step may take longer by it
  split,     ///< the fastest split of so many misses, whether steps gain by it or not: for measurements
  always,    ///< half of them, whatever it takes: for tests
};

/// What brings missing experts.
enum class expert_fetch : std::uint8_t {
  measured,  ///< the copy engine, unless it takes over 5 % longer at the start
  kernel,    ///< multiprocessors that read host memory
  engine,    ///< the copy engine, whatever it takes; still a kernel for experts that are not page-locked
};

/// As options name it; nothing for another word.
[[nodiscard]] constexpr std::optional<expert_fetch> expert_fetch_of(std::string_view word) {
  if (word == "auto") return expert_fetch::measured;
  if (word == "kernel") return expert_fetch::kernel;
  if (word == "engine") return expert_fetch::engine;
  return {};
}

/// What measured best: more keep the link from what is demanded. By a kernel without bulk copies nothing was
/// measured.
[[nodiscard]] constexpr int usual_ahead(nibble::device_class device, expert_fetch fetch) {
  return device.has_bulk_copies() || fetch != expert_fetch::kernel ? 1 : 0;
}
inline constexpr int most_ahead = 4;

struct expert_keeping {
  std::filesystem::path
      checkpoint;  ///< its folder, what files are checked against; empty: there are no files
  /// Experts as they lie in host memory, so that the next start need not pack them; an empty path is beside
  /// the checkpoint. Nothing: no such file.
  std::optional<std::filesystem::path> cache_file;
  /// Which experts were in use is saved at the end and taken up at the next start.
  bool remember = false;
  std::uint64_t lock_limit_bytes = UINT64_MAX;  ///< page-locked at most; the others go through host threads
  /// With this, logits depend in their last bits on which experts happened to be missing: the CPU's share is
  /// summed in another order.
  cpu_share cpu = cpu_share::off;
  expert_fetch fetch = expert_fetch::measured;
  /// Experts of the next layer that steps of few tokens may fetch while a layer computes, by what its router
  /// would choose of the rows as they are: 0 … 4. Other than 0: prompts fetch all that it would choose.
  /// Nothing: usual_ahead.
  std::optional<int> ahead;
  /// What `ahead` comes to on a device. \param by what fetches; before that is measured, `fetch`
  [[nodiscard]] int ahead_on(nibble::device_class device, expert_fetch by) const {
    return std::clamp(ahead.value_or(usual_ahead(device, by)), 0, most_ahead);
  }
  /// For tests: called on a host thread before an expert that is not page-locked is read, or the copy engine
  /// is asked for one; what it throws fails the step.
  std::function<void(int number)> before_read;
};

}  // namespace qwen3_moe
