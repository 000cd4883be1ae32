// SPDX-License-Identifier: Apache-2.0
/// \file
/// A step as the device sees it: which row belongs to whom, in arrays that one copy brings over. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "engine/model_runner.hpp"

namespace qwen3_moe {

/// Where the arrays of a step lie, as offsets in 32-bit words.
struct device_step_layout {
  int rows = 0;       ///< most tokens of a step
  int sequences = 0;  ///< most sequences

  [[nodiscard]] constexpr int tokens_at() const { return 0; }
  [[nodiscard]] constexpr int first_row_at() const { return rows; }
  [[nodiscard]] constexpr int position_at() const { return first_row_at() + sequences + 1; }
  [[nodiscard]] constexpr int slot_at() const { return position_at() + sequences; }
  [[nodiscard]] constexpr int wanted_at() const { return slot_at() + sequences; }
  /// Slots whose draws the wanted rows are, for steps that draw: at most one a sequence.
  [[nodiscard]] constexpr int drawing_slot_at() const { return wanted_at() + rows; }
  [[nodiscard]] constexpr int words() const { return drawing_slot_at() + sequences; }
};

/// The rows of one step: sequences with a single token come first (the decode kernels take them), the others
/// after them in their order.
class device_step {
 public:
  explicit device_step(const device_step_layout& layout, std::int32_t* words)
      : layout_(layout), words_(words) {}

  /// Writes the arrays. `padded` sequences of one row in all where every sequence has one token: the ones
  /// added have position -1, which kernels pass over. \pre check_step has passed
  void compose(std::span<const step_sequence> sequences, int padded = 0) {
    order_.clear();
    for (int pass = 0; pass < 2; ++pass)
      for (std::size_t i = 0; i < sequences.size(); ++i)
        if ((sequences[i].tokens.size() == 1) == (pass == 0)) order_.push_back(static_cast<int>(i));
    decodes_ = static_cast<int>(std::count_if(sequences.begin(), sequences.end(),
                                              [](const auto& s) { return s.tokens.size() == 1; }));
    first_row_of_.assign(sequences.size(), 0);
    rows_ = 0;
    std::int32_t* first_row = words_ + layout_.first_row_at();
    std::int32_t* position = words_ + layout_.position_at();
    std::int32_t* slot = words_ + layout_.slot_at();
    std::int32_t* token = words_ + layout_.tokens_at();
    int count = 0;
    for (const int i : order_) {
      const step_sequence& s = sequences[static_cast<std::size_t>(i)];
      first_row[count] = rows_;
      position[count] = s.position;
      slot[count] = s.slot;
      std::memcpy(token + rows_, s.tokens.data(), 4 * s.tokens.size());
      first_row_of_[static_cast<std::size_t>(i)] = rows_;
      rows_ += static_cast<int>(s.tokens.size());
      ++count;
    }
    for (; count < padded; ++count, ++rows_)
      first_row[count] = rows_, position[count] = -1, slot[count] = 0, token[rows_] = 0;
    if (padded > decodes_) decodes_ = padded;
    first_row[count] = rows_;
    sequences_ = count;
    wanted_ = 0;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const int rows = static_cast<int>(sequences[i].tokens.size()), first = first_row_of_[i];
      const int from = sequences[i].logits == wanted_logits::all    ? 0
                       : sequences[i].logits == wanted_logits::last ? rows - 1
                                                                    : rows;
      if (sequences[i].logits == wanted_logits::last && wanted_ < layout_.sequences)
        words_[layout_.drawing_slot_at() + wanted_] = sequences[i].slot;
      for (int r = from; r < rows; ++r) words_[layout_.wanted_at() + wanted_++] = first + r;
    }
  }

  [[nodiscard]] int rows() const { return rows_; }
  [[nodiscard]] int sequences() const { return sequences_; }
  [[nodiscard]] int decodes() const { return decodes_; }  ///< sequences of one row, the first ones
  [[nodiscard]] int wanted() const { return wanted_; }
  /// Rows whose logits are wanted, in the order of the caller's sequences.
  [[nodiscard]] std::span<const std::int32_t> wanted_rows() const {
    return {words_ + layout_.wanted_at(), static_cast<std::size_t>(wanted_)};
  }
  /// The caller's index of the i-th sequence on the device (not of padding).
  [[nodiscard]] std::span<const int> order() const { return order_; }

 private:
  device_step_layout layout_;
  std::int32_t* words_;
  std::vector<int> order_, first_row_of_;
  int rows_ = 0, sequences_ = 0, decodes_ = 0, wanted_ = 0;
};

/// Knows what the page table on the device holds, so that only what changed is sent.
class page_table_shadow {
 public:
  page_table_shadow(int sequences, int stride)
      : stride_(stride), held_(static_cast<std::size_t>(sequences) * static_cast<std::size_t>(stride), -1) {}

  /// Makes row `sequence` begin with `pages`; calls send(offset in words, changed pages) where it does not.
  template <class Send>
  void update(int sequence, std::span<const std::int32_t> pages, Send&& send) {
    std::int32_t* row = held_.data() + static_cast<std::size_t>(sequence) * static_cast<std::size_t>(stride_);
    const auto differs = std::mismatch(pages.begin(), pages.end(), row).first - pages.begin();
    if (differs == static_cast<std::ptrdiff_t>(pages.size())) return;
    const auto changed = pages.subspan(static_cast<std::size_t>(differs));
    std::copy(changed.begin(), changed.end(), row + differs);
    send(static_cast<std::size_t>(sequence) * static_cast<std::size_t>(stride_) +
             static_cast<std::size_t>(differs),
         std::span<const std::int32_t>(row + differs, changed.size()));
  }

 private:
  int stride_;
  std::vector<std::int32_t> held_;
};

}  // namespace qwen3_moe
