// SPDX-License-Identifier: Apache-2.0
/// \file
/// Pools of small ids: KV pages and recurrent-state slots.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace qwen3_moe {

/// The ids 0 … count-1, each either free or taken. Releasing a free or foreign id changes nothing, so
/// a second release from a racing path can never put an id on the free list twice. Not thread-safe.
class id_pool {
 public:
  explicit id_pool(int count) : taken_(static_cast<std::size_t>(count < 0 ? 0 : count), false) {
    free_.reserve(taken_.size());
    for (int id = static_cast<int>(taken_.size()) - 1; id >= 0; --id) free_.push_back(id);
  }

  int size() const { return static_cast<int>(taken_.size()); }
  int free() const { return static_cast<int>(free_.size()); }
  int used() const { return size() - free(); }

  /// One id, or nothing when all are taken.
  std::optional<int> take() {
    if (free_.empty()) return std::nullopt;
    const int id = free_.back();
    free_.pop_back();
    taken_[static_cast<std::size_t>(id)] = true;
    return id;
  }

  /// Appends `count` ids to `out`, or leaves both untouched and returns false.
  bool take(int count, std::vector<std::int32_t>& out) {
    if (count > free()) return false;
    for (int i = 0; i < count; ++i) out.push_back(*take());
    return true;
  }

  /// True when `id` was taken and is free now; false when there was nothing to do.
  bool release(int id) {
    if (id < 0 || id >= size() || !taken_[static_cast<std::size_t>(id)]) return false;
    taken_[static_cast<std::size_t>(id)] = false;
    free_.push_back(id);
    return true;
  }

  void release(std::vector<std::int32_t>& ids) {
    for (const auto id : ids) release(static_cast<int>(id));
    ids.clear();
  }

 private:
  std::vector<bool> taken_;
  std::vector<int> free_;
};

/// Ids of the KV pages of a model_runner.
class kv_page_pool : public id_pool {
 public:
  using id_pool::id_pool;
};

/// Ids of the recurrent-state slots of a model_runner.
class slot_pool : public id_pool {
 public:
  using id_pool::id_pool;
};

}  // namespace qwen3_moe
