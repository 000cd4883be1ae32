// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which batch sizes are captured, and how a batch becomes one of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/error.hpp"

namespace nibble {

/// 1, 2, 4, … below `most_rows`, and `most_rows` itself, ascending.
[[nodiscard]] inline std::vector<int> default_captured_sizes(int most_rows) {
  std::vector<int> sizes;
  for (int rows = 1; rows < most_rows; rows *= 2) sizes.push_back(rows);
  if (most_rows >= 1) sizes.push_back(most_rows);
  return sizes;
}

/// The given sizes ascending, each once. Throws nibble::error for a size outside 1 … most_rows.
[[nodiscard]] inline std::vector<int> checked_captured_sizes(std::vector<int> sizes, int most_rows) {
  for (const int rows : sizes)
    if (rows < 1 || rows > most_rows)
      throw error("captured batch size " + std::to_string(rows) + ": expected 1 to " +
                  std::to_string(most_rows) + ", the sequences that run at once");
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

/// The smallest of the ascending `sizes` that holds `rows`, or 0 when none does.
[[nodiscard]] constexpr int captured_size_for(std::span<const int> sizes, int rows) {
  if (rows < 1) return 0;
  const auto at = std::lower_bound(sizes.begin(), sizes.end(), rows);
  return at == sizes.end() ? 0 : *at;
}

/// Where padding rows point: a state slot and a KV page that belong to no sequence, ever. The planner keeps
/// one of each (memory_plan::dummy_slot, dummy_page) where memory_model::padding_writes.
struct padding_target {
  std::int32_t slot = 0;
  std::int32_t page = 0;
  std::int32_t token = 0;  ///< any id of the vocabulary
};

/// The arrays of a decode step as the graph reads them: `captured` rows, of which the first `live` are given.
/// A padding row is a sequence of one token at position 0 in the dummy page and the dummy slot, so whatever
/// it writes lands there, and a kernel sees no length of zero and no index below zero.
/// \param tokens,positions,slots [captured]  \param pages [captured][page_stride]
inline void pad_decode_rows(int live, int captured, const padding_target& target,
                            std::span<std::int32_t> tokens, std::span<std::int32_t> positions,
                            std::span<std::int32_t> slots, std::span<std::int32_t> pages, int page_stride) {
  const auto rows = static_cast<std::size_t>(captured);
  if (live < 1 || captured < live || tokens.size() < rows || positions.size() < rows || slots.size() < rows ||
      page_stride < 1 || pages.size() < rows * static_cast<std::size_t>(page_stride))
    throw error("a decode batch of " + std::to_string(live) + " rows cannot be padded to " +
                std::to_string(captured) + " in arrays this small");
  for (auto row = static_cast<std::size_t>(live); row < rows; ++row) {
    tokens[row] = target.token;
    positions[row] = 0;
    slots[row] = target.slot;
    const auto first = static_cast<std::ptrdiff_t>(row * static_cast<std::size_t>(page_stride));
    std::fill(pages.begin() + first, pages.begin() + first + page_stride, target.page);
  }
}

}  // namespace nibble
