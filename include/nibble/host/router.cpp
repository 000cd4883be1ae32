// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <nibble/host/activation.hpp>
#include <nibble/host/detail/scratch.hpp>
#include <nibble/host/router.hpp>
#include <vector>

namespace nibble::host {
namespace {

void route_row(const float* logits, int experts, int top_k, bool renormalise, std::int32_t* ids,
               float* weights) {
  // The best ones so far, descending, by insertion. A later equal logit stays behind an earlier one, so ties
  // go to the lower id.
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  thread_local std::vector<float> best;
  best.resize(static_cast<std::size_t>(top_k));
  bool nan = false;
  int kept = 0;
  for (int id = 0; id < experts; ++id) {
    nan = nan || std::isnan(logits[id]);
    const float value = std::isnan(logits[id]) ? lowest : logits[id];
    if (kept == top_k && !(value > best[static_cast<std::size_t>(kept - 1)])) continue;
    int at = kept < top_k ? kept++ : kept - 1;
    for (; at > 0 && value > best[static_cast<std::size_t>(at - 1)]; --at) {
      best[static_cast<std::size_t>(at)] = best[static_cast<std::size_t>(at - 1)];
      ids[at] = ids[at - 1];
    }
    best[static_cast<std::size_t>(at)] = value;
    ids[at] = id;
  }
  if (nan) {
    std::fill(weights, weights + top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const float largest = best[0];
  float sum = 0;
  if (!renormalise) {
    thread_local detail::scratch memory;
    float* p = memory.take(static_cast<std::size_t>(experts));
    for (int id = 0; id < experts; ++id) p[id] = logits[id] - largest;
    exponential(p, p, static_cast<std::size_t>(experts));
    for (int id = 0; id < experts; ++id) sum += p[id];
  }
  for (int s = 0; s < top_k; ++s) weights[s] = best[static_cast<std::size_t>(s)] - largest;
  exponential(weights, weights, static_cast<std::size_t>(top_k));
  // The softmax's own denominator cancels when the weights are divided by their sum.
  if (renormalise)
    for (int s = 0; s < top_k; ++s) sum += weights[s];
  for (int s = 0; s < top_k; ++s) weights[s] /= sum;
}

}  // namespace

void route(thread_pool& pool, const float* logits, std::ptrdiff_t ldl, int rows, int experts, int top_k,
           bool renormalise, std::int32_t* ids, float* weights) {
  assert(top_k >= 1 && top_k <= experts);
  const std::int64_t grain = std::max<std::int64_t>(8192 / std::max(experts, 1), 1);
  pool.parallel_for(rows, grain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      route_row(logits + r * ldl, experts, top_k, renormalise, ids + r * top_k, weights + r * top_k);
  });
}

}  // namespace nibble::host
