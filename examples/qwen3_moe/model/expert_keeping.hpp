// SPDX-License-Identifier: Apache-2.0
/// \file
/// How the experts of a model that does not fit are kept: what the options say.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

namespace qwen3_moe {

struct expert_keeping {
  std::filesystem::path
      checkpoint;  ///< its folder, what files are checked against; empty: there are no files
  /// Experts as they lie in host memory, so that the next start need not pack them; an empty path is beside
  /// the checkpoint. Nothing: no such file.
  std::optional<std::filesystem::path> cache_file;
  /// Which experts were in use is saved at the end and taken up at the next start.
  bool remember = false;
  std::uint64_t lock_limit_bytes = UINT64_MAX;  ///< page-locked at most; the others go through host threads
  /// For tests: called on a host thread before an expert that is not page-locked is read; what it throws
  /// fails the step.
  std::function<void(int number)> before_read;
};

}  // namespace qwen3_moe
