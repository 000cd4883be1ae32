// SPDX-License-Identifier: Apache-2.0
/// \file
/// Normalisations over the last dimension, in fp32. Rows are independent of each other.
#pragma once

#include <cstddef>
#include <nibble/host/thread_pool.hpp>

namespace nibble::host {

/// How an RMSNorm weight enters: as w, or as 1 + w ("zero-centred").
enum class norm_weight { plain, zero_centred };

/// y[r] = x[r] · rsqrt(mean(x[r]²) + eps) ⊙ (w or 1+w). y may be x.
/// \param x,y [rows][dim], rows `ldx`, `ldy` floats apart
void rms_norm(thread_pool& pool, const float* x, std::ptrdiff_t ldx, const float* weight, norm_weight kind,
              float eps, int rows, int dim, float* y, std::ptrdiff_t ldy);

/// residual[r] += delta[r], then y[r] = rms_norm(residual[r]): the sum of a layer and the next layer's norm.
void add_rms_norm(thread_pool& pool, float* residual, std::ptrdiff_t ld_residual, const float* delta,
                  std::ptrdiff_t ld_delta, const float* weight, norm_weight kind, float eps, int rows,
                  int dim, float* y, std::ptrdiff_t ldy);

/// In place over heads: x at row·row_stride + head·head_stride, `dim` floats each, one weight for all heads.
void head_rms_norm(thread_pool& pool, float* x, std::ptrdiff_t row_stride, std::ptrdiff_t head_stride,
                   const float* weight, norm_weight kind, float eps, int rows, int heads, int dim);

/// y = (w ⊙ x · rsqrt(mean x² + eps)) ⊙ silu(z), per head. y may be x.
/// \param x,z,y [rows][heads][dim], rows `ldx`, `ldz`, `ldy` apart, heads dense
/// \param weight [dim], used as it is
void gated_rms_norm(thread_pool& pool, const float* x, std::ptrdiff_t ldx, const float* z, std::ptrdiff_t ldz,
                    const float* weight, float eps, int rows, int heads, int dim, float* y,
                    std::ptrdiff_t ldy);

/// In place: x = x · rsqrt(Σx² + eps) · scale, per head.
/// \param x [rows][heads][dim], rows `ldx` apart, heads dense
void l2_norm(thread_pool& pool, float* x, std::ptrdiff_t ldx, float eps, float scale, int rows, int heads,
             int dim);

}  // namespace nibble::host
