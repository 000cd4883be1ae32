// SPDX-License-Identifier: Apache-2.0
/// \file
/// Fetching by the copy engine: a placement tells a host thread which experts are missing, the thread has
/// them copied, and a kernel waits for their arrival. What both sides share.
///
/// A copy engine asks the link for larger pieces than multiprocessors do and takes none of them away, but it
/// cannot be told on the device what to copy. So each placement that has something to bring publishes a
/// record in page-locked memory. Records are numbered from 1; number n lies at place n mod
/// engine_records. Every word says by itself which record it belongs to, so no order between words matters.
/// The copies of all records are one stream's: a slot that is filled twice holds what was asked for last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"
#include "nibble/moe/fetch_types.hpp"

namespace nibble::moe {

/// Records that can be under way. A layer waits for its own demand and for the guesses of the layer before
/// the last, so three are.
inline constexpr unsigned engine_records = 4;

/// What the copy engine brings arrives 9 µs later than its bytes alone would take (H200). While it begins, a
/// kernel brings the head of the first demanded expert, a quarter of it; but not while copies are under way
/// whose slots may have been given away since.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t engine_head_bytes(std::size_t slot_bytes) {
  return slot_bytes / 4 / 128 * 128;
}
/// Added to `guesses` in a record whose head a kernel brings.
inline constexpr unsigned engine_head_flag = 0x8000;

/// Words of 8 bytes of a record: first number << 32 | demanded << 16 | guesses, then, for each expert,
/// demanded ones first, number << 32 | expert << 16 | slot.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t engine_record_words(int layer_experts) {
  return (1 + 2 * static_cast<std::size_t>(layer_experts) + 15) / 16 * 16;
}

/// In device memory, zeroed at the start.
struct engine_state {
  /// Written by the stream of the copies: 2n when what record n demands has come, 2n + 1 when its guesses
  /// have.
  alignas(128) std::uint64_t done = 0;
  std::uint64_t failed = 0;                  ///< written by it before: something could not be copied
  alignas(128) std::uint64_t published = 0;  ///< the last record
  std::uint64_t needed = 0;         ///< what `done` must have come to before the layer's experts are used
  std::uint64_t guessed = 0;        ///< the last record with guesses …
  std::uint64_t guessed_older = 0;  ///< … and what that was a placement before
  std::uint32_t head = 0;           ///< a kernel brings the head of the first demanded expert
  std::uint32_t broken = 0;         ///< a wait was given up: nothing is waited for until it is reset
};
/// What `done` comes to when the guesses of a record have come; record 0 is none.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint64_t engine_guesses_done(std::uint64_t record) {
  return record == 0 ? 0 : 2 * record + 1;
}

/// Where a placement publishes. Null: it does not.
struct engine_link {
  std::uint64_t* records = nullptr;  ///< [engine_records][record_words], page-locked, at its device address
  engine_state* state = nullptr;
  int record_words = 0;
  std::size_t head_bytes = 0;  ///< of a demanded expert that a kernel may bring
};

/// What waits for the copies.
struct engine_wait_params {
  fetch_params fetch;          ///< of what is demanded
  std::size_t head_bytes = 0;  ///< a multiple of 128
  engine_state* state = nullptr;
  std::uint64_t* failures = nullptr;  ///< residency_counts::failed
};

}  // namespace nibble::moe
