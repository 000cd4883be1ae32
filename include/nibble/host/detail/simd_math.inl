// SPDX-License-Identifier: Apache-2.0
// Elementary functions on vectors of fp32. Included after Highway's headers, once for each instruction set.
//
// Every function works on any tag of float, so the last few elements of an array go through one-lane vectors
// and get the same bits as in the middle of it.
#if defined(NIBBLE_HOST_SIMD_MATH_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef NIBBLE_HOST_SIMD_MATH_INL
#undef NIBBLE_HOST_SIMD_MATH_INL
#else
#define NIBBLE_HOST_SIMD_MATH_INL
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using f32_tag = hn::ScalableTag<float>;
using vec = hn::Vec<f32_tag>;
using one_tag = hn::CappedTag<float, 1>;
constexpr int lanes = static_cast<int>(hn::MaxLanes(f32_tag()));

/// e^x within 2 ulp; 0 below -104, infinity above 89, NaN stays NaN. Subnormal results are rounded once more.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, the first exact in 9 bits), e^r by its Taylor
/// polynomial of degree 7 (remainder below 2^-28), then two multiplications by powers of two.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_of(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V low = hn::Set(d, -104.0f), high = hn::Set(d, 90.0f);
  V bounded = hn::IfThenElse(hn::Lt(x, low), low, x);
  bounded = hn::IfThenElse(hn::Gt(bounded, high), high, bounded);
  const V n = hn::Round(hn::Mul(bounded, hn::Set(d, 1.44269504f)));
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), bounded);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::Add(hn::MulAdd(hn::Mul(r, r), p, r), hn::Set(d, 1.0f));
  // NaN has no integer: it takes 0 and comes back through p.
  const auto whole = hn::ConvertTo(di, hn::IfThenElse(hn::Eq(n, n), n, hn::Zero(d)));
  const auto first = hn::ShiftRight<1>(whole), second = hn::Sub(whole, first);
  const auto bias = hn::Set(di, 127);
  return hn::Mul(hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(first, bias)))),
                 hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(second, bias))));
}

/// 1 / (1 + e^-x)
template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid_of(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_of(d, hn::Neg(x))));
}

/// x / (1 + e^-x)
template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu_of(D d, V x) {
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), exp_of(d, hn::Neg(x))));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE float sum_of(D d, V v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

/// Σ a_i b_i, four accumulators, then the rest one by one.
HWY_INLINE float dot_of(const float* a, const float* b, int n) {
  const f32_tag d;
  vec s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
    s1 = hn::MulAdd(hn::LoadU(d, a + i + lanes), hn::LoadU(d, b + i + lanes), s1);
    s2 = hn::MulAdd(hn::LoadU(d, a + i + 2 * lanes), hn::LoadU(d, b + i + 2 * lanes), s2);
    s3 = hn::MulAdd(hn::LoadU(d, a + i + 3 * lanes), hn::LoadU(d, b + i + 3 * lanes), s3);
  }
  for (; i + lanes <= n; i += lanes) s0 = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
  float sum = sum_of(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// Calls f(tag, index) over [0, n): whole vectors first, then one-lane vectors.
template <class Function>
HWY_INLINE void for_each_vector(std::size_t n, const Function& f) {
  const f32_tag d;
  const one_tag one;
  std::size_t i = 0;
  for (; i + static_cast<std::size_t>(lanes) <= n; i += static_cast<std::size_t>(lanes)) f(d, i);
  for (; i < n; ++i) f(one, i);
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
