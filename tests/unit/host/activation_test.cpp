// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/activation.hpp>
#include <nibble/ref/activation.hpp>

#include "kernel_test.hpp"

using namespace kernel_test;
namespace host = nibble::host;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

using function = void (*)(const float*, float*, std::size_t);

/// The error in units of the last place of the true value; subnormal results count their own spacing.
double ulps(float got, double expected) {
  if (std::isnan(got)) return 1e9;
  const auto rounded = static_cast<float>(expected);
  const double spacing = std::max(
      static_cast<double>(std::nextafter(std::abs(rounded), infinity)) - std::abs(rounded), 0x1p-149);
  return std::abs(got - expected) / spacing;
}

floats grid() {
  floats x;
  for (float v = -87.0f; v < 88.0f; v += 0.0137f) x.push_back(v);
  for (float v = 1e-30f; v < 1; v *= 3) {
    x.push_back(v);
    x.push_back(-v);
  }
  x.push_back(0.0f);
  x.push_back(-0.0f);
  return x;
}

double worst_ulps(function f, double (*exact)(double)) {
  const floats x = grid();
  floats y(x.size(), quiet_nan);
  f(x.data(), y.data(), x.size());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], exact(x[i])));
  return worst;
}

float of(function f, float x) {
  float y = 12345;
  f(&x, &y, 1);
  return y;
}

}  // namespace

TEST_CASE("activations: a few ulp over the whole range") {
  on_every_target([](const std::string&) {
    CHECK(worst_ulps(host::exponential, [](double x) { return std::exp(x); }) <= 3);
    CHECK(worst_ulps(host::sigmoid, nibble::ref::sigmoid) <= 5);
    CHECK(worst_ulps(host::silu, nibble::ref::silu) <= 5);
    CHECK(worst_ulps(host::softplus, nibble::ref::softplus) <= 6);
  });
}

TEST_CASE("activations: the ends of the range") {
  on_every_target([](const std::string&) {
    CHECK(of(host::exponential, -infinity) == 0.0f);
    CHECK(of(host::exponential, -200.0f) == 0.0f);
    CHECK(of(host::exponential, 100.0f) == infinity);
    CHECK(of(host::exponential, infinity) == infinity);
    CHECK(of(host::exponential, -90.0f) == Approx(8.19401e-40).epsilon(1e-4));
    CHECK(of(host::sigmoid, -infinity) == 0.0f);
    CHECK(of(host::sigmoid, infinity) == 1.0f);
    CHECK(of(host::sigmoid, -1e30f) == 0.0f);
    CHECK(of(host::sigmoid, 1e30f) == 1.0f);
    CHECK(of(host::silu, -1e30f) == 0.0f);
    CHECK(of(host::silu, 1e30f) == 1e30f);
    CHECK(of(host::softplus, -1e30f) == 0.0f);
    CHECK(of(host::softplus, 1e30f) == 1e30f);
    CHECK(of(host::softplus, 20.5f) == 20.5f);
    for (const function f : {host::exponential, host::sigmoid, host::silu, host::softplus})
      CHECK(std::isnan(of(f, quiet_nan)));
  });
}

TEST_CASE("activations: an element's bits do not depend on its place, and nothing past the end is written") {
  random_source random;
  INFO(random.seed_text());
  on_every_target([&](const std::string&) {
    for (const function f : {host::exponential, host::sigmoid, host::silu, host::softplus})
      for (const std::size_t n : {1, 2, 15, 16, 17, 33, 100}) {
        const floats x = random.normals(n, 5);
        floats y(n + 1, quiet_nan), in_place = x;
        f(x.data(), y.data(), n);
        f(in_place.data(), in_place.data(), n);
        CHECK(same_bits(in_place, std::span(y).first(n)));
        CHECK(std::isnan(y[n]));
        int different = 0;
        for (std::size_t i = 0; i < n; ++i) different += !same_bits(of(f, x[i]), y[i]);
        CHECK(different == 0);
      }
  });
}

TEST_CASE("activations: products and sums") {
  random_source random;
  INFO(random.seed_text());
  on_every_target([&](const std::string&) {
    const std::size_t n = 77;
    const floats a = random.normals(n, 2), b = random.normals(n, 2);
    floats product(n, quiet_nan), gated(n, quiet_nan), sum = a;
    host::swiglu(a.data(), b.data(), product.data(), n);
    host::sigmoid_gate(a.data(), b.data(), gated.data(), n);
    host::add(sum.data(), b.data(), n);
    doubles expected_product, expected_gated;
    int wrong = 0;
    for (std::size_t i = 0; i < n; ++i) {
      expected_product.push_back(nibble::ref::silu(a[i]) * b[i]);
      expected_gated.push_back(a[i] * nibble::ref::sigmoid(b[i]));
      wrong += sum[i] != a[i] + b[i];
    }
    CHECK(largest_error(product, expected_product) <= 1e-6);
    CHECK(largest_error(gated, expected_gated) <= 1e-6);
    CHECK(wrong == 0);
  });
}
