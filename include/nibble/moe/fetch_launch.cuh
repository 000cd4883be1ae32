// SPDX-License-Identifier: Apache-2.0
/// \file
/// Validate and launch a fetch.
#pragma once

#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_kernel.cuh"

namespace nibble::moe {

template <fetch_policy P>
inline constexpr auto fetch_kernel_of = &fetch_experts<P.warps, P.wide>;

/// What any fetch refuses.
[[nodiscard]] inline status check_fetch(const fetch_params& p, const char* where) {
  const auto aligned = [](const void* a, std::uintptr_t to) {
    return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % to == 0;
  };
  if (!aligned(p.list, 4) || !aligned(p.store, 16) || !aligned(p.slots, 128))
    return status::invalid(where,
                           "the list, the store (16-byte) or the slots (128-byte) are missing or unaligned");
  if (p.slot_bytes == 0 || p.slot_bytes % 128 != 0 || p.first_byte % 128 != 0 || p.bytes == 0 ||
      p.bytes % 16 != 0 || p.first_byte > p.slot_bytes || p.bytes > p.slot_bytes - p.first_byte)
    return status::invalid(where, "the piece of a slot is not within it or not aligned");
  return status::success();
}

/// Copies what the list names. The list may come from the kernel just before; the slots must not be in use by
/// anything that runs beside it. Costs a chained launch when the list is empty.
template <fetch_policy P>
status launch_fetch_with(const fetch_params& p, const launch_options& options) {
  static constexpr const char* where = "nibble::moe::fetch_experts";
  if (const status s = check_fetch(p, where); !s.ok()) return s;
  return launch(fetch_kernel_of<P>, dim3(static_cast<unsigned>(P.blocks)), 32 * P.warps, 0, options, where,
                p);
}

/// The policy that measured best.
[[nodiscard]] constexpr fetch_policy select_fetch() { return {}; }

/// Fetching as a kernel family; one for all models.
struct fetch_family {
  using params = fetch_params;
  static constexpr const char* name = "fetch";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    constexpr fetch_policy p = select_fetch();
    return visit(fetch_kernel_of<p>, 32 * p.warps, std::size_t{0}, "fetch_experts");
  }
  static status launch(const params& p, const launch_options& options) {
    return launch_fetch_with<select_fetch()>(p, options);
  }
};

}  // namespace nibble::moe
