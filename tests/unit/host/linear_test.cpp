// SPDX-License-Identifier: Apache-2.0
#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::weight_format;
using nibble::host::thread_pool;

namespace {

struct geometry {
  int n, k;
};

std::vector<geometry> geometries(weight_format format) {
  std::vector<geometry> out;
  for (const int n : {1, 2, 31, 33, 257})
    for (const int k : {16, 48, 464, 2880}) out.push_back({n, k});
  if (format != weight_format::nvfp4)
    for (const int k : {1, 3, 17, 65, 100}) out.push_back({5, k});
  return out;
}

/// Σ|w·x| of one output: what the error of its sum is measured by.
double magnitude(const nibble::ref::matrix& w, int row, const float* x) {
  double sum = 0;
  for (int j = 0; j < w.k; ++j) sum += std::abs(w.at(row, j) * x[j]);
  return sum;
}

}  // namespace

TEST_CASE("linear: every format and shape against fp64, and a row's bits do not depend on its batch") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const auto format : {weight_format::nvfp4, weight_format::fp8, weight_format::bf16})
      for (const geometry g : geometries(format)) {
        INFO(format_name(format) << " " << g.n << " x " << g.k);
        const random_weight w = make_weight(random, format, g.n, g.k, 0.05f);
        const int m = 16, ldx = g.k + 3, ldy = g.n + 2;
        // Rows end where the last one ends: reading past it is out of bounds.
        const floats x = random.normals(static_cast<std::size_t>((m - 1) * ldx + g.k));
        const floats poison(static_cast<std::size_t>((m - 1) * ldy + g.n), quiet_nan);
        floats y = poison;
        linear(pool, w.view, x.data(), ldx, m, y.data(), ldy);
        int wrong = 0, spilled = 0;
        for (int r = 0; r < m; ++r) {
          const float* row = x.data() + r * ldx;
          const doubles expected = nibble::ref::linear(w.exact, doubles(row, row + g.k), 1);
          for (int i = 0; i < g.n; ++i) {
            const double error =
                std::abs(y[static_cast<std::size_t>(r * ldy + i)] - expected[static_cast<std::size_t>(i)]);
            if (!(error <= 2e-6 * magnitude(w.exact, i, row) + 1e-30)) ++wrong;
          }
          for (int i = g.n; i < ldy && r + 1 < m; ++i)
            spilled += !std::isnan(y[static_cast<std::size_t>(r * ldy + i)]);
        }
        CHECK(wrong == 0);
        CHECK(spilled == 0);
        for (const int batch : {1, 2, 3, 5, 7}) {
          floats part(static_cast<std::size_t>(g.n * batch), quiet_nan);
          const int first = random.integer(0, m - batch);
          linear(pool, w.view, x.data() + first * ldx, ldx, batch, part.data(), g.n);
          int different = 0;
          for (int r = 0; r < batch; ++r)
            for (int i = 0; i < g.n; ++i)
              different += !same_bits(part[static_cast<std::size_t>(r * g.n + i)],
                                      y[static_cast<std::size_t>((first + r) * ldy + i)]);
          INFO("batch of " << batch);
          CHECK(different == 0);
        }
      }
  });
}

TEST_CASE("linear: the same bits with one thread and with all") {
  random_source random;
  INFO(random.seed_text());
  thread_pool one(1), all;
  on_every_target([&](const std::string&) {
    for (const auto format : {weight_format::nvfp4, weight_format::fp8, weight_format::bf16}) {
      const random_weight w = make_weight(random, format, 1001, 256, 0.05f);
      const floats x = random.normals(9 * 256);
      floats a(9 * 1001, quiet_nan), b = a;
      linear(one, w.view, x.data(), 9, a.data());
      linear(all, w.view, x.data(), 9, b.data());
      INFO(format_name(format));
      CHECK(same_bits(a, b));
    }
  });
}

TEST_CASE("linear: weights at odd addresses, as a mapped file has them") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const auto format : {weight_format::nvfp4, weight_format::fp8, weight_format::bf16}) {
      const random_weight w = make_weight(random, format, 7, 144, 0.05f);
      const floats x = random.normals(144);
      floats expected(7, quiet_nan), got = expected;
      linear(pool, w.view, x.data(), 1, expected.data());
      std::vector<std::uint8_t> moved(w.data.size() + 1), moved_scales(w.scales.size() + 3);
      std::copy(w.data.begin(), w.data.end(), moved.begin() + 1);
      std::copy(w.scales.begin(), w.scales.end(), moved_scales.begin() + 3);
      nibble::host::weight_view view = w.view;
      view.data = moved.data() + 1;
      view.block_scales = moved_scales.data() + 3;
      linear(pool, view, x.data(), 1, got.data());
      INFO(format_name(format));
      CHECK(same_bits(got, expected));
      floats row(144), moved_row(144);
      dequantize_row(w.view, 3, row.data());
      dequantize_row(view, 3, moved_row.data());
      CHECK(same_bits(row, moved_row));
      CHECK(largest_error(row, doubles(w.exact.values.begin() + 3 * 144, w.exact.values.begin() + 4 * 144)) <=
            1e-7);
    }
  });
}

TEST_CASE("linear: all 256 code pairs and all finite scale bytes, exactly") {
  thread_pool pool;
  on_every_target([&](const std::string&) {
    // One row for each scale byte; x picks one column, so the result is one product, exact in fp32.
    std::vector<std::uint8_t> codes, scales;
    for (int s = 0; s < 256; ++s) {
      scales.push_back(static_cast<std::uint8_t>((s & 0x7F) == 0x7F ? 0x38 : s));
      for (int i = 0; i < 8; ++i) codes.push_back(static_cast<std::uint8_t>(s + 32 * i));
    }
    const nibble::ref::matrix exact = nibble::ref::decode_nvfp4(codes, scales, 1.0f, 256, 16);
    int wrong = 0;
    for (int column = 0; column < 16; ++column) {
      floats x(16, 0.0f), y(256, quiet_nan);
      x[static_cast<std::size_t>(column)] = 1.0f;
      linear(pool, nibble::host::nvfp4_view{codes.data(), scales.data(), 1.0f, 256, 16}, x.data(), 1,
             y.data());
      for (int row = 0; row < 256; ++row) wrong += y[static_cast<std::size_t>(row)] != exact.at(row, column);
    }
    CHECK(wrong == 0);
    // The same for FP8: byte b in column b.
    std::vector<std::uint8_t> bytes(256);
    for (int b = 0; b < 256; ++b)
      bytes[static_cast<std::size_t>(b)] = static_cast<std::uint8_t>((b & 0x7F) == 0x7F ? 0 : b);
    const nibble::ref::matrix row = nibble::ref::decode_fp8(bytes, 1.0f, 1, 256);
    wrong = 0;
    for (int b = 0; b < 256; ++b) {
      floats x(256, 0.0f), y(1, quiet_nan);
      x[static_cast<std::size_t>(b)] = 1.0f;
      linear(pool, nibble::host::fp8_view{bytes.data(), 1.0f, 1, 256}, x.data(), 1, y.data());
      wrong += y[0] != row.at(0, b);
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("linear: products that field reports got wrong") {
  thread_pool pool;
  const auto product = [&](unsigned code, std::uint8_t scale, float global, float x_value) {
    const std::vector<std::uint8_t> codes(8, static_cast<std::uint8_t>(code * 17)), scales(1, scale);
    const floats x(16, x_value);
    float y = quiet_nan;
    linear(pool, nibble::host::nvfp4_view{codes.data(), scales.data(), global, 1, 16}, x.data(), 1, &y);
    return y;
  };
  on_every_target([&](const std::string&) {
    CHECK(product(2, 0x38, 0.5f, 1) == 8.0f);
    CHECK(product(2, 0x38, 1.0f / 2.0f, 1) == 8.0f);
    CHECK(product(2, 0x01, 1.0f, 1) == 0.03125f);
    CHECK(product(7, 0x01, 1e-5f, 1e4f) == Approx(0.01875f).epsilon(1e-6));
    CHECK(product(2, 0x7E, 1.0f, 1) == 7168.0f);
    CHECK(product(2, 0xB8, 1.0f, 1) == -16.0f);
    CHECK(product(10, 0x81, 1.0f, 1) == 0.03125f);
  });
}

TEST_CASE("C013: activations stay what they are: an outlier does not swallow its block") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const weight_format format : {weight_format::nvfp4, weight_format::fp8, weight_format::bf16}) {
      const int n = 24, k = 256;
      const random_weight w = make_weight(random, format, n, k, 1.0f);
      floats x(static_cast<std::size_t>(k), 1e-2f);
      for (int block = 0; block < k; block += 16) x[static_cast<std::size_t>(block + block / 16 % 16)] = 1e4f;
      floats y(static_cast<std::size_t>(n), quiet_nan), small_y = y;
      linear(pool, w.view, x.data(), 1, y.data());
      // With the outliers at weights of zero only the small values count.
      floats small_x = x;
      for (auto& v : small_x) v = v > 1 ? 0.0f : v;
      linear(pool, w.view, small_x.data(), 1, small_y.data());
      // Products of either sign cancel, so a sum in fp32 is held against the sum of their sizes.
      const auto check = [&](const floats& got, const floats& from) {
        auto sizes = w.exact;
        for (auto& v : sizes.values) v = std::fabs(v);
        const auto exact = nibble::ref::linear(w.exact, nibble::ref::widen(from), 1);
        const auto most = nibble::ref::linear(sizes, nibble::ref::widen(from), 1);
        for (std::size_t i = 0; i < exact.size(); ++i)
          CHECK(std::fabs(static_cast<double>(got[i]) - exact[i]) <= 3e-6 * most[i]);
      };
      check(y, x);
      check(small_y, small_x);
    }
  });
}

TEST_CASE("linear: no rows, and NaN in one row stays in that row") {
  random_source random;
  thread_pool pool;
  on_every_target([&](const std::string&) {
    const random_weight w = make_weight(random, weight_format::nvfp4, 5, 32, 1.0f);
    float untouched = 7;
    linear(pool, w.view, nullptr, 0, &untouched);
    CHECK(untouched == 7);
    floats x = random.normals(3 * 32), clean(15), y(15);
    linear(pool, w.view, x.data(), 3, clean.data());
    x[32 + 4] = quiet_nan;
    linear(pool, w.view, x.data(), 3, y.data());
    CHECK(same_bits(std::span(y).first(5), std::span(clean).first(5)));
    CHECK(same_bits(std::span(y).last(5), std::span(clean).last(5)));
    for (std::size_t i = 5; i < 10; ++i) CHECK(std::isnan(y[i]));
  });
}
