// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cassert>
#include <nibble/host/activation.hpp>
#include <nibble/host/delta_rule.hpp>
#include <nibble/host/detail/scratch.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/delta_rule.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

/// One token on N·(lanes of D) columns of one head's state: rows `ld` floats apart, `k_dim` of them.
///     u = Sᵀk;   δ = β (v − e^g u);   S ← e^g S + k δᵀ;   o = Sᵀq
/// Two accumulators over even and odd rows. A column's result does not depend on the columns beside it.
template <int N, class D>
HWY_INLINE void delta_step(D d, float* state, std::ptrdiff_t ld, const float* q, const float* k,
                           const float* v, float decay, float beta, int k_dim, float* out) {
  using V = hn::Vec<D>;
  constexpr int width = static_cast<int>(hn::MaxLanes(D()));
  V even[N], odd[N];
  for (int c = 0; c < N; ++c) even[c] = odd[c] = hn::Zero(d);
  int i = 0;
  for (; i + 2 <= k_dim; i += 2) {
    const V k0 = hn::Set(d, k[i]), k1 = hn::Set(d, k[i + 1]);
    const float* s = state + i * ld;
    for (int c = 0; c < N; ++c) {
      even[c] = hn::MulAdd(hn::LoadU(d, s + c * width), k0, even[c]);
      odd[c] = hn::MulAdd(hn::LoadU(d, s + ld + c * width), k1, odd[c]);
    }
  }
  if (i < k_dim)
    for (int c = 0; c < N; ++c)
      even[c] = hn::MulAdd(hn::LoadU(d, state + i * ld + c * width), hn::Set(d, k[i]), even[c]);
  const V fade = hn::Set(d, decay);
  V delta[N];
  for (int c = 0; c < N; ++c) {
    const V seen = hn::Add(even[c], odd[c]);
    delta[c] = hn::Mul(hn::Set(d, beta), hn::NegMulAdd(fade, seen, hn::LoadU(d, v + c * width)));
    even[c] = odd[c] = hn::Zero(d);
  }
  const auto update = [&](int row, V* sums) HWY_ATTR {
    float* s = state + row * ld;
    const V kk = hn::Set(d, k[row]), qq = hn::Set(d, q[row]);
    for (int c = 0; c < N; ++c) {
      const V now = hn::MulAdd(kk, delta[c], hn::Mul(fade, hn::LoadU(d, s + c * width)));
      hn::StoreU(now, d, s + c * width);
      sums[c] = hn::MulAdd(now, qq, sums[c]);
    }
  };
  for (i = 0; i + 2 <= k_dim; i += 2) {
    update(i, even);
    update(i + 1, odd);
  }
  if (i < k_dim) update(i, even);
  for (int c = 0; c < N; ++c) hn::StoreU(hn::Add(even[c], odd[c]), d, out + c * width);
}

constexpr int wide = 4;  // vectors of columns that share the broadcasts of k and q

int tile_columns_impl() { return wide * lanes; }

/// All rows of a span on `columns` columns of one head. Strides are between rows of the step.
void delta_columns_impl(float* state, int v_dim, const float* q, const float* k, const float* v,
                        std::ptrdiff_t row_stride, const float* decay, const float* beta,
                        std::ptrdiff_t gate_stride, int rows, int k_dim, int columns, float* out,
                        std::ptrdiff_t ldo) {
  const f32_tag d;
  const one_tag one;
  for (std::ptrdiff_t r = 0; r < rows; ++r) {
    const float* qr = q + r * row_stride;
    const float* kr = k + r * row_stride;
    const float* vr = v + r * row_stride;
    float* to = out + r * ldo;
    const float e = decay[r * gate_stride], b = beta[r * gate_stride];
    int c = 0;
    for (; c + wide * lanes <= columns; c += wide * lanes)
      delta_step<wide>(d, state + c, v_dim, qr, kr, vr + c, e, b, k_dim, to + c);
    for (; c + lanes <= columns; c += lanes)
      delta_step<1>(d, state + c, v_dim, qr, kr, vr + c, e, b, k_dim, to + c);
    for (; c < columns; ++c) delta_step<1>(one, state + c, v_dim, qr, kr, vr + c, e, b, k_dim, to + c);
  }
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(tile_columns_impl);
HWY_EXPORT(delta_columns_impl);

void delta_rule_gates(const float* a, std::ptrdiff_t lda, const float* b, std::ptrdiff_t ldb,
                      const float* a_log, const float* dt_bias, int rows, int heads, float* log_decay,
                      float* beta) {
  const auto count = static_cast<std::size_t>(heads);
  thread_local detail::scratch memory;
  float* rate = memory.take(count);
  exponential(a_log, rate, count);
  for (std::ptrdiff_t r = 0; r < rows; ++r) {
    float* g = log_decay + r * heads;
    for (int h = 0; h < heads; ++h) g[h] = a[r * lda + h] + dt_bias[h];
    softplus(g, g, count);
    for (int h = 0; h < heads; ++h) g[h] = -rate[h] * g[h];
    sigmoid(b + r * ldb, beta + r * heads, count);
  }
}

void delta_rule_recurrent(thread_pool& pool, std::span<const sequence_span> spans,
                          const delta_rule_shape& shape, const delta_rule_input& input, float* state,
                          float* out, std::ptrdiff_t ldo) {
  assert(shape.k_heads > 0 && shape.v_heads % shape.k_heads == 0);
  int rows = 0;
  for (const sequence_span& span : spans) rows = std::max(rows, span.first_row + span.rows);
  const std::size_t gates = static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.v_heads);
  thread_local detail::scratch memory;
  float* decay = memory.take(gates);
  exponential(input.log_decay, decay, gates);
  const int tile = HWY_DYNAMIC_DISPATCH(tile_columns_impl)();
  const int tiles = (shape.v_dim + tile - 1) / tile;
  const int group = shape.v_heads / shape.k_heads;
  const std::int64_t per_span = static_cast<std::int64_t>(shape.v_heads) * tiles;
  const std::int64_t work = static_cast<std::int64_t>(std::max(shape.k_dim, 1)) * tile;
  const std::int64_t grain = std::max<std::int64_t>(8192 / work, 1);
  pool.parallel_for(static_cast<std::int64_t>(spans.size()) * per_span, grain,
                    [&, decay](std::int64_t begin, std::int64_t end) {
                      for (std::int64_t task = begin; task < end; ++task) {
                        const sequence_span& span = spans[static_cast<std::size_t>(task / per_span)];
                        const std::ptrdiff_t head = task % per_span / tiles;
                        const int column = static_cast<int>(task % tiles) * tile;
                        const std::ptrdiff_t row = span.first_row;
                        float* s = state + (static_cast<std::ptrdiff_t>(span.slot) * shape.v_heads + head) *
                                               shape.k_dim * shape.v_dim;
                        const std::ptrdiff_t key = row * input.row_stride + head / group * shape.k_dim;
                        HWY_DYNAMIC_DISPATCH(delta_columns_impl)
                        (s + column, shape.v_dim, input.q + key, input.k + key,
                         input.v + row * input.row_stride + head * shape.v_dim + column, input.row_stride,
                         decay + row * shape.v_heads + head, input.beta + row * shape.v_heads + head,
                         shape.v_heads, span.rows, shape.k_dim, std::min(tile, shape.v_dim - column),
                         out + row * ldo + head * shape.v_dim + column, ldo);
                      }
                    });
}

}  // namespace nibble::host
#endif
