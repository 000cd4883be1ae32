// SPDX-License-Identifier: Apache-2.0
/// \file
/// Fetching experts that are not page-locked, or not in memory at all: host threads bring them into a locked
/// ring, the kernel takes them from there. What both sides share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/moe/fetch_types.hpp"

namespace nibble::moe {

/// Places of the ring, each of one expert.
inline constexpr int fetch_ring_places = 16;
/// How long a kernel waits for one expert before it gives up: the step then fails, the device goes on.
inline constexpr std::uint64_t fetch_patience_ns = 5'000'000'000ull;

/// In locked host memory. Experts that go through the ring carry a tag: their running number since the start,
/// from 1, modulo 2^32. Tag t uses place t mod fetch_ring_places and question t mod 1024. Every word has one
/// writer and says by itself which tag it is about, so no order between words matters.
struct fetch_mail {
  alignas(128) std::uint64_t asked[1024] = {};               ///< device: tag << 32 | expert number
  alignas(128) std::uint32_t taken[fetch_ring_places] = {};  ///< device: the last tag read out of the place
  alignas(
      128) std::uint64_t answers[fetch_ring_places] = {};  ///< host: tag << 32 | 1 it is there, 2 it failed

  /// As if each place had been used before.
  constexpr fetch_mail() {
    for (std::uint32_t tag = 1; tag <= fetch_ring_places; ++tag)
      taken[tag % fetch_ring_places] = tag - fetch_ring_places;
  }
};
inline constexpr std::uint64_t fetch_answer_good = 1, fetch_answer_failed = 2;

/// In device memory, zeroed at the start.
struct fetch_state {
  std::uint32_t last_tag = 0;
  std::uint32_t blocks_done = 0;
  std::uint32_t broken = 0;  ///< a wait was given up: nothing goes through the ring until it is reset
  std::uint32_t consumed[fetch_ring_places] = {};
};

struct staged_fetch_params {
  fetch_params fetch;  ///< whole slots only: first_byte 0, bytes slot_bytes
  int locked = 0;      ///< experts 0 … locked - 1 are read directly
  fetch_mail* mail = nullptr;
  const std::uint8_t* ring = nullptr;  ///< [fetch_ring_places][slot_bytes], locked
  fetch_state* state = nullptr;
  std::uint64_t* failures = nullptr;  ///< residency_counts::failed
};

}  // namespace nibble::moe
