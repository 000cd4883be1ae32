// SPDX-License-Identifier: Apache-2.0
/// \file
/// Bringing listed experts from host memory into their slots: what the kernel is asked, and its tuning
/// numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::moe {

/// How one launch copies.
enum class fetch_path : int {
  loads,  ///< 16-byte loads and stores of every thread; any device
  bulk,   ///< bulk copies through shared memory, one thread a block; sm_90 and later
};

struct fetch_policy {
  fetch_path path = fetch_path::loads;
  int blocks = 16;
  int warps = 8;           ///< loads
  int stages = 4;          ///< bulk: chunks in flight a block
  int chunk_bytes = 8192;  ///< bulk

  friend constexpr bool operator==(const fetch_policy&, const fetch_policy&) = default;
};

/// Copies, for each entry of `list`, bytes [first_byte, first_byte + bytes) of the expert into its slot.
/// Every thread reads host memory through PCIe, so what limits is the link, not the grid.
struct fetch_params {
  const std::int32_t* list = nullptr;  ///< see fetch_list_words; on the device
  const std::uint8_t* store =
      nullptr;  ///< expert n at store + n · slot_bytes: page-locked host memory at its device address
  std::uint8_t* slots = nullptr;  ///< slot s at slots + s · slot_bytes, 128-byte aligned
  std::size_t slot_bytes = 0;     ///< a multiple of 128
  std::size_t first_byte = 0;     ///< a multiple of 128
  std::size_t bytes = 0;          ///< a multiple of 16; first_byte + bytes ≤ slot_bytes
  int slot_count = 0;
  int expert_count = 0;  ///< of the store
};

}  // namespace nibble::moe
