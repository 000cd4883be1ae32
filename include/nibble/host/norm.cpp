// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cmath>
#include <nibble/host/activation.hpp>
#include <nibble/host/norm.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/norm.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

float squares_impl(const float* x, int dim) { return dot_of(x, x, dim); }

/// y = x · factor ⊙ (offset + w)
void scale_impl(const float* x, const float* weight, float offset, float factor, int dim, float* y) {
  for_each_vector(static_cast<std::size_t>(dim), [=](auto d, std::size_t i) HWY_ATTR {
    const auto scaled = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor));
    hn::StoreU(hn::Mul(scaled, hn::Add(hn::LoadU(d, weight + i), hn::Set(d, offset))), d, y + i);
  });
}

/// y = x · factor ⊙ w ⊙ silu(z)
void gated_scale_impl(const float* x, const float* z, const float* weight, float factor, int dim, float* y) {
  for_each_vector(static_cast<std::size_t>(dim), [=](auto d, std::size_t i) HWY_ATTR {
    const auto scaled = hn::Mul(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), hn::LoadU(d, weight + i));
    hn::StoreU(hn::Mul(scaled, silu_of(d, hn::LoadU(d, z + i))), d, y + i);
  });
}

void multiply_impl(float* x, float factor, int dim) {
  for_each_vector(static_cast<std::size_t>(dim), [=](auto d, std::size_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), d, x + i);
  });
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(squares_impl);
HWY_EXPORT(scale_impl);
HWY_EXPORT(gated_scale_impl);
HWY_EXPORT(multiply_impl);

namespace {

/// Rows for one task: about 32 Ki elements.
std::int64_t rows_per_task(int dim) { return std::max<std::int64_t>(32768 / std::max(dim, 1), 1); }

float rms_factor(const float* x, int dim, float eps) {
  return 1.0f / std::sqrt(HWY_DYNAMIC_DISPATCH(squares_impl)(x, dim) / static_cast<float>(dim) + eps);
}

void rms_norm_row(const float* x, const float* weight, norm_weight kind, float eps, int dim, float* y) {
  HWY_DYNAMIC_DISPATCH(scale_impl)
  (x, weight, kind == norm_weight::zero_centred ? 1.0f : 0.0f, rms_factor(x, dim, eps), dim, y);
}

}  // namespace

void rms_norm(thread_pool& pool, const float* x, std::ptrdiff_t ldx, const float* weight, norm_weight kind,
              float eps, int rows, int dim, float* y, std::ptrdiff_t ldy) {
  pool.parallel_for(rows, rows_per_task(dim), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) rms_norm_row(x + r * ldx, weight, kind, eps, dim, y + r * ldy);
  });
}

void add_rms_norm(thread_pool& pool, float* residual, std::ptrdiff_t ld_residual, const float* delta,
                  std::ptrdiff_t ld_delta, const float* weight, norm_weight kind, float eps, int rows,
                  int dim, float* y, std::ptrdiff_t ldy) {
  pool.parallel_for(rows, rows_per_task(dim), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      add(residual + r * ld_residual, delta + r * ld_delta, static_cast<std::size_t>(dim));
      rms_norm_row(residual + r * ld_residual, weight, kind, eps, dim, y + r * ldy);
    }
  });
}

void head_rms_norm(thread_pool& pool, float* x, std::ptrdiff_t row_stride, std::ptrdiff_t head_stride,
                   const float* weight, norm_weight kind, float eps, int rows, int heads, int dim) {
  pool.parallel_for(rows, rows_per_task(dim * heads), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      for (int h = 0; h < heads; ++h) {
        float* at = x + r * row_stride + h * head_stride;
        rms_norm_row(at, weight, kind, eps, dim, at);
      }
  });
}

void gated_rms_norm(thread_pool& pool, const float* x, std::ptrdiff_t ldx, const float* z, std::ptrdiff_t ldz,
                    const float* weight, float eps, int rows, int heads, int dim, float* y,
                    std::ptrdiff_t ldy) {
  pool.parallel_for(rows, rows_per_task(dim * heads), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      for (std::ptrdiff_t h = 0; h < heads; ++h) {
        const float* at = x + r * ldx + h * dim;
        HWY_DYNAMIC_DISPATCH(gated_scale_impl)
        (at, z + r * ldz + h * dim, weight, rms_factor(at, dim, eps), dim, y + r * ldy + h * dim);
      }
  });
}

void l2_norm(thread_pool& pool, float* x, std::ptrdiff_t ldx, float eps, float scale, int rows, int heads,
             int dim) {
  pool.parallel_for(rows, rows_per_task(dim * heads), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      for (std::ptrdiff_t h = 0; h < heads; ++h) {
        float* at = x + r * ldx + h * dim;
        const float factor = scale / std::sqrt(HWY_DYNAMIC_DISPATCH(squares_impl)(at, dim) + eps);
        HWY_DYNAMIC_DISPATCH(multiply_impl)(at, factor, dim);
      }
  });
}

}  // namespace nibble::host
#endif
