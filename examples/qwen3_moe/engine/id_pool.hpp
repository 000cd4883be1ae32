// SPDX-License-Identifier: Apache-2.0
/// \file
/// Pools of small ids: KV pages and recurrent-state slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace qwen3_moe {

/// The ids 0 … count-1, each either free or taken; the lowest free one is taken first, so that the high ones
/// are the first that can be given up. Releasing a free or foreign id changes nothing, so a second release
/// from a racing path can never put an id on the free list twice. Not thread-safe.
class id_pool {
 public:
  explicit id_pool(int count) { resize(count); }

  int size() const { return static_cast<int>(taken_.size()); }
  int free() const { return static_cast<int>(free_.size()); }
  int used() const { return size() - free(); }

  /// One id, or nothing when all are taken.
  std::optional<int> take() {
    if (free_.empty()) return std::nullopt;
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
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
    add_free(id);
    return true;
  }

  void release(std::vector<std::int32_t>& ids) {
    for (const auto id : ids) release(static_cast<int>(id));
    ids.clear();
  }

  /// One more than the highest id that is taken; 0 when none is.
  int used_end() const {
    int end = size();
    while (end > 0 && !taken_[static_cast<std::size_t>(end - 1)]) --end;
    return end;
  }

  /// Another number of ids, but none less than used_end().
  void resize(int count) {
    const int before = size(), after = std::max(count, used_end());
    taken_.resize(static_cast<std::size_t>(after), false);
    for (int id = before; id < after; ++id) add_free(id);
    if (after < before) {
      std::erase_if(free_, [after](int id) { return id >= after; });
      std::make_heap(free_.begin(), free_.end(), std::greater<>());
    }
  }

 private:
  void add_free(int id) {
    free_.push_back(id);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }

  std::vector<bool> taken_;
  std::vector<int> free_;  ///< a heap, the lowest id on top
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
