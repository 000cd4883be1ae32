// SPDX-License-Identifier: Apache-2.0
/// \file
/// How many missing experts are fetched and how many the CPU computes: arithmetic over latencies that were
/// measured at the start on this machine.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
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
/// Until k misses are done of which so many are fetched.
[[nodiscard]] inline float split_latency(const miss_latencies& measured, int fetched, int k) {
  if (fetched == k) return latency_of(measured.fetch, k);
  if (fetched == 0) return latency_of(measured.host, k);
  return std::max(latency_of(measured.fetch_contended, fetched),
                  latency_of(measured.host_contended, k - fetched));
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
      const float us = detail::split_latency(measured, fetched, k);
      if (us < best_us) best = fetched, best_us = us;
    }
    fetch_of[static_cast<std::size_t>(k)] = best;
  }
  return fetch_of;
}

/// What is allowed for the hand-over in every layer of a step, beyond what misses measured alone take: two
/// kernels, one of them in front of the fetch. A choice, not a measurement.
inline constexpr float share_overhead_us = 4.0f;

/// Whether a step is predicted to take less with the splits than with fetching all, both where routing is
/// uniform and where it is so skewed, and so well foreseen, that a sixth as many are missing. \param
/// miss_rate at uniform routing, of a token's top_k experts
[[nodiscard]] inline bool split_pays(const miss_latencies& measured,
                                     const std::array<std::int32_t, most_split_misses + 1>& fetch_of,
                                     int top_k, double miss_rate) {
  const auto gain = [&](double rate) {
    // Of a token's experts k are missing: a binomial distribution, from k = 0 on.
    double chance = std::pow(1.0 - rate, top_k), us = -static_cast<double>(share_overhead_us);
    for (int k = 0; k <= std::min(top_k, most_split_misses); ++k) {
      const int fetched = fetch_of[static_cast<std::size_t>(k)];
      if (fetched < k)
        us += chance * (detail::latency_of(measured.fetch, k) - detail::split_latency(measured, fetched, k));
      chance *= rate / (1.0 - rate) * (top_k - k) / (k + 1);
    }
    return us;
  };
  const double rate = std::clamp(miss_rate, 0.0, 0.999);
  return gain(rate) > 0 && gain(rate / 6) > 0;
}

}  // namespace nibble::moe
