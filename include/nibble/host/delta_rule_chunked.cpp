// SPDX-License-Identifier: Apache-2.0
// The gated delta rule in chunks of C tokens. With G_i = Σ_{j<=i} g_j inside the chunk and S the state before
// it:
//     A_ij = β_i (k_i·k_j) e^{G_i − G_j}                     j < i
//     R_i  = β_i (v_i − e^{G_i} Sᵀk_i)
//     V'   = (I + A)⁻¹ R                                      forward substitution
//     o_i  = e^{G_i} Sᵀq_i + Σ_{j<=i} (q_i·k_j) e^{G_i − G_j} V'_j
//     S    ← e^{G_C} S + Σ_i e^{G_C − G_i} k_i V'_iᵀ
// Applying the inverse to R gives U − W S of the usual writing, with U = T(βV) and W = T(βK ⊙ e^G), without
// building either. g <= 0, so no exponential here exceeds 1.
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cassert>
#include <nibble/host/activation.hpp>
#include <nibble/host/delta_rule.hpp>
#include <nibble/host/detail/scratch.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/delta_rule_chunked.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

/// C[i][c] = Σ_p a[i][p] · b[p][c] for M rows of a; b and C have `columns` columns.
template <int M>
HWY_INLINE void product_rows(const float* a, std::ptrdiff_t lda, const float* b, std::ptrdiff_t ldb,
                             int inner, int columns, float* c, std::ptrdiff_t ldc) {
  for_each_vector(static_cast<std::size_t>(columns), [=](auto d, std::size_t at) HWY_ATTR {
    hn::Vec<decltype(d)> sum[M];
    for (int i = 0; i < M; ++i) sum[i] = hn::Zero(d);
    for (std::ptrdiff_t p = 0; p < inner; ++p) {
      const auto right = hn::LoadU(d, b + p * ldb + at);
      for (int i = 0; i < M; ++i) sum[i] = hn::MulAdd(hn::Set(d, a[i * lda + p]), right, sum[i]);
    }
    for (int i = 0; i < M; ++i) hn::StoreU(sum[i], d, c + i * ldc + at);
  });
}

void product_impl(const float* a, std::ptrdiff_t lda, int rows, const float* b, std::ptrdiff_t ldb, int inner,
                  int columns, float* c, std::ptrdiff_t ldc) {
  std::ptrdiff_t i = 0;
  for (; i + 4 <= rows; i += 4) product_rows<4>(a + i * lda, lda, b, ldb, inner, columns, c + i * ldc, ldc);
  for (; i < rows; ++i) product_rows<1>(a + i * lda, lda, b, ldb, inner, columns, c + i * ldc, ldc);
}

float dot_impl(const float* a, const float* b, int n) { return dot_of(a, b, n); }

/// y = y · scale + factor · x
void scale_add_impl(float* y, float scale, const float* x, float factor, int n) {
  for_each_vector(static_cast<std::size_t>(n), [=](auto d, std::size_t i) HWY_ATTR {
    const auto scaled = hn::Mul(hn::LoadU(d, y + i), hn::Set(d, scale));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), hn::Set(d, factor), scaled), d, y + i);
  });
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(product_impl);
HWY_EXPORT(dot_impl);
HWY_EXPORT(scale_add_impl);

namespace {

/// One chunk of one head; q, k, v, out point at its first row.
struct chunk_view {
  const float* q;
  const float* k;
  const float* v;
  std::ptrdiff_t row_stride;
  const float* log_decay;
  const float* beta;
  std::ptrdiff_t gate_stride;
  float* out;
  std::ptrdiff_t ldo;
  int rows;
};

void run_chunk(const chunk_view& chunk, const delta_rule_shape& shape, float* state, float* memory) {
  const int rows = chunk.rows;
  const std::ptrdiff_t v_dim = shape.v_dim;
  float* solved = memory;                 // [rows][v_dim]: R, then V'
  float* weight = solved + rows * v_dim;  // [rows]: e^{G_i - G_j} of one row i
  const auto dot = HWY_DYNAMIC_DISPATCH(dot_impl);
  const auto scale_add = HWY_DYNAMIC_DISPATCH(scale_add_impl);
  // Fills weight[0 … i] and returns e^{G_i}. Each exponent is summed from the row backwards: a difference of
  // two long running sums would have lost its digits.
  const auto decays_of = [&](std::ptrdiff_t i) {
    float since = 0;
    for (std::ptrdiff_t j = i; j >= 0; --j) {
      weight[j] = since;
      since += chunk.log_decay[j * chunk.gate_stride];
    }
    exponential(weight, weight, static_cast<std::size_t>(i) + 1);
    exponential(&since, &since, 1);
    return since;
  };

  // What the state contributes to every row, before it changes.
  const auto product = HWY_DYNAMIC_DISPATCH(product_impl);
  product(chunk.k, chunk.row_stride, rows, state, v_dim, shape.k_dim, shape.v_dim, solved, v_dim);
  product(chunk.q, chunk.row_stride, rows, state, v_dim, shape.k_dim, shape.v_dim, chunk.out, chunk.ldo);

  for (std::ptrdiff_t i = 0; i < rows; ++i) {
    const float beta = chunk.beta[i * chunk.gate_stride];
    const float since_begin = decays_of(i);
    float* row = solved + i * v_dim;
    scale_add(row, -beta * since_begin, chunk.v + i * chunk.row_stride, beta, shape.v_dim);
    float* o = chunk.out + i * chunk.ldo;
    const float* ki = chunk.k + i * chunk.row_stride;
    const float* qi = chunk.q + i * chunk.row_stride;
    for (std::ptrdiff_t j = 0; j < i; ++j)
      scale_add(row, 1.0f, solved + j * v_dim,
                -beta * weight[j] * dot(ki, chunk.k + j * chunk.row_stride, shape.k_dim), shape.v_dim);
    for (std::ptrdiff_t j = 0; j <= i; ++j)
      scale_add(o, j == 0 ? since_begin : 1.0f, solved + j * v_dim,
                weight[j] * dot(qi, chunk.k + j * chunk.row_stride, shape.k_dim), shape.v_dim);
  }

  const float whole = decays_of(rows - 1);
  for (std::ptrdiff_t p = 0; p < shape.k_dim; ++p)
    for (std::ptrdiff_t j = 0; j < rows; ++j)
      scale_add(state + p * v_dim, j == 0 ? whole : 1.0f, solved + j * v_dim,
                weight[j] * chunk.k[j * chunk.row_stride + p], shape.v_dim);
}

}  // namespace

void delta_rule_chunked(thread_pool& pool, std::span<const sequence_span> spans,
                        const delta_rule_shape& shape, const delta_rule_input& input, float* state,
                        float* out, std::ptrdiff_t ldo, int chunk) {
  assert(shape.k_heads > 0 && shape.v_heads % shape.k_heads == 0 && chunk >= 1 && chunk <= 128);
  const int group = shape.v_heads / shape.k_heads;
  const auto heads = static_cast<std::int64_t>(shape.v_heads);
  pool.parallel_for(
      static_cast<std::int64_t>(spans.size()) * heads, 1, [&](std::int64_t begin, std::int64_t end) {
        thread_local detail::scratch memory;
        float* work =
            memory.take(static_cast<std::size_t>(chunk) * (static_cast<std::size_t>(shape.v_dim) + 1));
        for (std::int64_t task = begin; task < end; ++task) {
          const sequence_span& span = spans[static_cast<std::size_t>(task / heads)];
          const std::ptrdiff_t head = task % heads;
          float* s =
              state + (static_cast<std::ptrdiff_t>(span.slot) * heads + head) * shape.k_dim * shape.v_dim;
          for (int done = 0; done < span.rows; done += chunk) {
            const std::ptrdiff_t row = span.first_row + done;
            const std::ptrdiff_t key = row * input.row_stride + head / group * shape.k_dim;
            run_chunk(
                {input.q + key, input.k + key, input.v + row * input.row_stride + head * shape.v_dim,
                 input.row_stride, input.log_decay + row * heads + head, input.beta + row * heads + head,
                 heads, out + row * ldo + head * shape.v_dim, ldo, std::min(chunk, span.rows - done)},
                shape, s, work);
          }
        }
      });
}

}  // namespace nibble::host
#endif
