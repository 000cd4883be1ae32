// SPDX-License-Identifier: Apache-2.0
/// \file
/// Bringing listed experts from host memory into their slots: what the kernel is asked, and its tuning
/// numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::moe {

/// Warps in all, each with 4 KiB under way: more of them fill the link sooner, and take more of the
/// multiprocessors from whatever runs beside.
struct fetch_policy {
  int blocks = 32;
  int warps = 8;
  bool wide = false;  ///< asks the L2 cache to read ahead to 256 bytes

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
