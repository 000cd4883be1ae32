// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cassert>
#include <nibble/host/conv.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/conv.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

/// One row over `count` channels: y = silu(Σ_j weight[j] ⊙ input[j]).
void conv_row_impl(const float* const* input, const float* weight, std::ptrdiff_t weight_stride, int width,
                   int count, float* y) {
  for_each_vector(static_cast<std::size_t>(count), [=](auto d, std::size_t i) HWY_ATTR {
    auto sum = hn::Mul(hn::LoadU(d, input[0] + i), hn::LoadU(d, weight + i));
    for (int j = 1; j < width; ++j)
      sum = hn::MulAdd(hn::LoadU(d, input[j] + i), hn::LoadU(d, weight + j * weight_stride + i), sum);
    hn::StoreU(silu_of(d, sum), d, y + i);
  });
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(conv_row_impl);

namespace {

constexpr int max_width = 8;
constexpr int channels_per_task = 512;

void conv_span(const sequence_span& span, const float* x, std::ptrdiff_t ldx, const float* weight, int width,
               int channels, int begin, int count, float* state, float* y, std::ptrdiff_t ldy) {
  const int taps = width - 1;
  const float* first = x + span.first_row * ldx + begin;
  float* slot = state + static_cast<std::ptrdiff_t>(span.slot) * taps * channels + begin;
  // Input t of the sequence's history, t = 0 … taps + rows - 1: the state first, then the rows.
  const auto history = [&](int t) -> const float* {
    return t < taps ? slot + static_cast<std::ptrdiff_t>(t) * channels : first + (t - taps) * ldx;
  };
  for (int r = 0; r < span.rows; ++r) {
    const float* input[max_width];
    for (int j = 0; j < width; ++j) input[j] = history(r + j);
    HWY_DYNAMIC_DISPATCH(conv_row_impl)
    (input, weight + begin, channels, width, count, y + (span.first_row + r) * ldy + begin);
  }
  // Ascending, so that a short span shifts the state without reading what it has overwritten.
  for (int t = 0; t < taps; ++t) {
    const float* from = history(t + span.rows);
    float* to = slot + static_cast<std::ptrdiff_t>(t) * channels;
    if (from != to) std::copy(from, from + count, to);
  }
}

}  // namespace

void causal_conv_silu(thread_pool& pool, std::span<const sequence_span> spans, const float* x,
                      std::ptrdiff_t ldx, const float* weight, int width, int channels, float* state,
                      float* y, std::ptrdiff_t ldy) {
  assert(width >= 1 && width <= max_width);
  const int blocks = (channels + channels_per_task - 1) / channels_per_task;
  const auto tasks = static_cast<std::int64_t>(spans.size()) * blocks;
  std::int64_t rows = 0;
  for (const sequence_span& span : spans) rows += span.rows;
  // Decoding a few sequences is less work than waking a thread.
  const std::int64_t grain = rows * channels < 16384 ? tasks : 1;
  pool.parallel_for(tasks, grain, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t task = from; task < to; ++task) {
      const int begin = static_cast<int>(task % blocks) * channels_per_task;
      conv_span(spans[static_cast<std::size_t>(task / blocks)], x, ldx, weight, width, channels, begin,
                std::min(channels_per_task, channels - begin), state, y, ldy);
    }
  });
}

}  // namespace nibble::host
#endif
