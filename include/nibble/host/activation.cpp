// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <cstddef>
#include <nibble/host/activation.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/activation.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

/// log(1 + e^x), x above 20. With u = e^x and w = fl(1 + u), log(w) · u / (w - 1) corrects the rounding of
/// the sum; log(w) by w = 2^e m, m in [sqrt(1/2), sqrt(2)), and the series of 2 atanh((m-1)/(m+1)).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V softplus_of(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V one = hn::Set(d, 1.0f), limit = hn::Set(d, 20.0f);
  const V u = exp_of(d, hn::IfThenElse(hn::Gt(x, limit), limit, x));
  const V w = hn::Add(one, u);
  // Adding 1 - sqrt(1/2) in bits puts the boundary between two exponents at sqrt(1/2).
  const auto bits = hn::Add(hn::BitCast(di, w), hn::Set(di, 0x3F800000 - 0x3F3504F3));
  const auto exponent = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(di, 127));
  const V m = hn::BitCast(d, hn::Add(hn::And(bits, hn::Set(di, 0x007FFFFF)), hn::Set(di, 0x3F3504F3)));
  const V t = hn::Div(hn::Sub(m, one), hn::Add(m, one)), t2 = hn::Mul(t, t);
  V p = hn::Set(d, 2.0f / 11);
  p = hn::MulAdd(p, t2, hn::Set(d, 2.0f / 9));
  p = hn::MulAdd(p, t2, hn::Set(d, 2.0f / 7));
  p = hn::MulAdd(p, t2, hn::Set(d, 2.0f / 5));
  p = hn::MulAdd(p, t2, hn::Set(d, 2.0f / 3));
  p = hn::MulAdd(hn::Mul(p, t2), t, hn::Add(t, t));
  const V log_w = hn::MulAdd(hn::ConvertTo(d, exponent), hn::Set(d, 0.693147181f), p);
  const V rounded = hn::Sub(w, one);
  const V exact = hn::Mul(log_w, hn::Div(u, rounded));
  const V small = hn::IfThenElse(hn::Eq(rounded, hn::Zero(d)), u, exact);  // 1 + u rounded to 1
  const V result = hn::IfThenElse(hn::Gt(x, limit), x, small);
  return hn::IfThenElse(hn::Eq(x, x), result, x);
}

void sigmoid_impl(const float* x, float* y, std::size_t n) {
  for_each_vector(
      n, [=](auto d, std::size_t i) HWY_ATTR { hn::StoreU(sigmoid_of(d, hn::LoadU(d, x + i)), d, y + i); });
}
void silu_impl(const float* x, float* y, std::size_t n) {
  for_each_vector(
      n, [=](auto d, std::size_t i) HWY_ATTR { hn::StoreU(silu_of(d, hn::LoadU(d, x + i)), d, y + i); });
}
void softplus_impl(const float* x, float* y, std::size_t n) {
  for_each_vector(
      n, [=](auto d, std::size_t i) HWY_ATTR { hn::StoreU(softplus_of(d, hn::LoadU(d, x + i)), d, y + i); });
}
void exponential_impl(const float* x, float* y, std::size_t n) {
  for_each_vector(
      n, [=](auto d, std::size_t i) HWY_ATTR { hn::StoreU(exp_of(d, hn::LoadU(d, x + i)), d, y + i); });
}
void swiglu_impl(const float* gate, const float* up, float* y, std::size_t n) {
  for_each_vector(n, [=](auto d, std::size_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(silu_of(d, hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, y + i);
  });
}
void sigmoid_gate_impl(const float* x, const float* gate, float* y, std::size_t n) {
  for_each_vector(n, [=](auto d, std::size_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), sigmoid_of(d, hn::LoadU(d, gate + i))), d, y + i);
  });
}
void add_impl(float* y, const float* x, std::size_t n) {
  for_each_vector(n, [=](auto d, std::size_t i) HWY_ATTR {
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  });
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(sigmoid_impl);
HWY_EXPORT(silu_impl);
HWY_EXPORT(softplus_impl);
HWY_EXPORT(exponential_impl);
HWY_EXPORT(swiglu_impl);
HWY_EXPORT(sigmoid_gate_impl);
HWY_EXPORT(add_impl);

void sigmoid(const float* x, float* y, std::size_t n) { HWY_DYNAMIC_DISPATCH(sigmoid_impl)(x, y, n); }
void silu(const float* x, float* y, std::size_t n) { HWY_DYNAMIC_DISPATCH(silu_impl)(x, y, n); }
void softplus(const float* x, float* y, std::size_t n) { HWY_DYNAMIC_DISPATCH(softplus_impl)(x, y, n); }
void exponential(const float* x, float* y, std::size_t n) { HWY_DYNAMIC_DISPATCH(exponential_impl)(x, y, n); }
void swiglu(const float* gate, const float* up, float* y, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(swiglu_impl)(gate, up, y, n);
}
void sigmoid_gate(const float* x, const float* gate, float* y, std::size_t n) {
  HWY_DYNAMIC_DISPATCH(sigmoid_gate_impl)(x, gate, y, n);
}
void add(float* y, const float* x, std::size_t n) { HWY_DYNAMIC_DISPATCH(add_impl)(y, x, n); }

}  // namespace nibble::host
#endif
