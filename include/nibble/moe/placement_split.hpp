// SPDX-License-Identifier: Apache-2.0
/// \file
/// How many missing experts are fetched and how many the CPU computes: arithmetic over latencies that were
/// measured at the start on this machine.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

/// Microseconds until k experts of one layer are done, for k = 0 … n: what a step waits for, hand-over
/// included. The last value is continued along its slope.
struct miss_latencies {
  std::span<const float> fetch;            ///< fetched, the CPU idle
  std::span<const float> fetch_contended;  ///< fetched while the CPU computes
  std::span<const float> host;             ///< computed, the link idle
  std::span<const float> host_contended;   ///< computed while the link is busy
};

/// A way that is not this much faster than fetching everything is not taken: measurements have noise, and
/// only what is fetched can hit later.
inline constexpr float split_gain_needed = 0.9f;

namespace detail {
[[nodiscard]] inline float latency_of(std::span<const float> measured, int k) {
  if (measured.empty()) return 3.0e38f;  // that way does not exist
  const int last = static_cast<int>(measured.size()) - 1;
  if (k <= last) return measured[static_cast<std::size_t>(k)];
  const float slope =
      last > 0 ? (measured[static_cast<std::size_t>(last)] - measured[0]) / static_cast<float>(last) : 0;
  return measured[static_cast<std::size_t>(last)] + slope * static_cast<float>(k - last);
}
}  // namespace detail

/// fetch_of of place_params: for each number of misses the split that is predicted fastest, fetching all and
/// computing all among them; fetching all wins what is close, and of equals the one that fetches more.
[[nodiscard]] inline std::array<std::int32_t, most_split_misses + 1> split_misses(
    const miss_latencies& measured) {
  std::array<std::int32_t, most_split_misses + 1> fetch_of{};
  for (int k = 1; k <= most_split_misses; ++k) {
    int best = k;
    float best_us = split_gain_needed * detail::latency_of(measured.fetch, k);
    for (int fetched = k - 1; fetched >= 0; --fetched) {
      const float us = fetched == 0 ? detail::latency_of(measured.host, k)
                                    : std::max(detail::latency_of(measured.fetch_contended, fetched),
                                               detail::latency_of(measured.host_contended, k - fetched));
      if (us < best_us) best = fetched, best_us = us;
    }
    fetch_of[static_cast<std::size_t>(k)] = best;
  }
  return fetch_of;
}

}  // namespace nibble::moe
