// SPDX-License-Identifier: Apache-2.0
/// \file
/// Byte-pair merges: which two tokens join, in which order, and the algorithm that applies them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace qwen3_moe {

struct merge_rule {
  std::uint32_t rank;   ///< lower joins first
  std::int32_t result;  ///< the joined token
};

/// A hash table from a pair of tokens to its rule. Open addressing, at most half full.
class merge_table {
 public:
  /// Room for `count` rules.
  explicit merge_table(std::size_t count = 0);
  /// A pair added twice keeps the later rule, as in the reference.
  void add(std::int32_t left, std::int32_t right, merge_rule rule);
  const merge_rule* find(std::int32_t left, std::int32_t right) const noexcept;

 private:
  struct slot {
    std::uint64_t key;
    merge_rule rule;
  };
  std::size_t place_of(std::uint64_t key) const noexcept;

  std::vector<slot> slots_;
  std::size_t mask_ = 0;
};

/// Memory that apply_merges() reuses from call to call. One per thread and call chain.
struct merge_scratch {
  struct candidate {
    std::uint32_t rank, at;
    std::int32_t left, right;
  };
  std::vector<std::uint32_t> ranks, previous, next;
  std::vector<candidate> heap;
};

/// Joins neighbours, lowest rank first and leftmost among equals, until no rule applies. O(n log n).
/// Returns how many tokens are left at the front of `tokens`, at most 2^32 - 2 of which may be given.
std::size_t apply_merges(std::span<std::int32_t> tokens, const merge_table& table, merge_scratch& scratch);

}  // namespace qwen3_moe
