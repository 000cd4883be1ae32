// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cmath>
#include <nibble/host/rope.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/rope.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

void rotate_impl(float* x, const float* cosine, const float* sine, int half) {
  for_each_vector(static_cast<std::size_t>(half), [=](auto d, std::size_t i) HWY_ATTR {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + half + i);
    const auto c = hn::LoadU(d, cosine + i), s = hn::LoadU(d, sine + i);
    hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, x + i);
    hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, x + half + i);
  });
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(rotate_impl);

std::vector<float> rope_frequencies(double theta, int rotary_dim) {
  std::vector<float> frequencies(static_cast<std::size_t>(rotary_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = static_cast<float>(std::pow(theta, -2.0 * static_cast<double>(i) / rotary_dim));
  return frequencies;
}

void rope_angles(std::span<const sequence_span> spans, std::span<const float> frequencies, float* cosine,
                 float* sine) {
  for (const sequence_span& span : spans)
    for (int i = 0; i < span.rows; ++i) {
      const std::size_t at = static_cast<std::size_t>(span.first_row + i) * frequencies.size();
      for (std::size_t j = 0; j < frequencies.size(); ++j) {
        const float angle = static_cast<float>(span.position + i) * frequencies[j];
        cosine[at + j] = std::cos(angle);
        sine[at + j] = std::sin(angle);
      }
    }
}

void rope(thread_pool& pool, float* x, std::ptrdiff_t row_stride, std::ptrdiff_t head_stride, int rows,
          int heads, int half, const float* cosine, const float* sine) {
  const std::int64_t grain = std::max<std::int64_t>(16384 / std::max(heads * half, 1), 1);
  pool.parallel_for(rows, grain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      for (int h = 0; h < heads; ++h) HWY_DYNAMIC_DISPATCH(rotate_impl)
    (x + r * row_stride + h * head_stride, cosine + r * half, sine + r * half, half);
  });
}

}  // namespace nibble::host
#endif
