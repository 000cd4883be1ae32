// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/norm.hpp>
#include <nibble/host/rope.hpp>
#include <nibble/ref/norm.hpp>
#include <nibble/ref/rope.hpp>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::host::norm_weight;
using nibble::host::thread_pool;
using nibble::ref::widen;

TEST_CASE("norm: RMSNorm, both kinds, strided, in place, and fused with the residual") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool, one(1);
  on_every_target([&](const std::string&) {
    for (const int dim : {1, 3, 16, 31, 64, 257, 2048})
      for (const auto kind : {norm_weight::plain, norm_weight::zero_centred}) {
        INFO("dim " << dim);
        const int rows = 5, ldx = dim + 2, ldy = dim + 1;
        const floats weight = random.normals(static_cast<std::size_t>(dim), 0.3f);
        floats x = random.normals(static_cast<std::size_t>((rows - 1) * ldx + dim), 3);
        floats y(static_cast<std::size_t>((rows - 1) * ldy + dim), quiet_nan), single = y;
        rms_norm(pool, x.data(), ldx, weight.data(), kind, 1e-6f, rows, dim, y.data(), ldy);
        rms_norm(one, x.data(), ldx, weight.data(), kind, 1e-6f, rows, dim, single.data(), ldy);
        doubles dense;
        for (int r = 0; r < rows; ++r)
          dense.insert(dense.end(), x.begin() + r * ldx, x.begin() + r * ldx + dim);
        const doubles expected =
            nibble::ref::rms_norm(dense, widen(weight), kind == norm_weight::zero_centred, 1e-6);
        floats got;
        int different = 0;
        for (int r = 0; r < rows; ++r) {
          got.insert(got.end(), y.begin() + r * ldy, y.begin() + r * ldy + dim);
          for (int i = 0; i < dim; ++i)
            different += !same_bits(y[static_cast<std::size_t>(r * ldy + i)],
                                    single[static_cast<std::size_t>(r * ldy + i)]);
          if (r + 1 < rows) CHECK(std::isnan(y[static_cast<std::size_t>(r * ldy + dim)]));
        }
        CHECK(largest_error(got, expected) <= 1e-6);
        CHECK(different == 0);
        floats in_place = x;
        rms_norm(pool, in_place.data(), ldx, weight.data(), kind, 1e-6f, rows, dim, in_place.data(), ldx);
        CHECK(same_bits(std::span(in_place).first(static_cast<std::size_t>(dim)),
                        std::span(y).first(static_cast<std::size_t>(dim))));

        // residual + delta, rounded to fp32, then the norm of that sum
        floats residual = random.normals(static_cast<std::size_t>(rows * dim)),
               delta = random.normals(static_cast<std::size_t>(rows * dim));
        floats sum = residual, fused(residual.size(), quiet_nan), apart = fused;
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += delta[i];
        add_rms_norm(pool, residual.data(), dim, delta.data(), dim, weight.data(), kind, 1e-6f, rows, dim,
                     fused.data(), dim);
        rms_norm(pool, sum.data(), dim, weight.data(), kind, 1e-6f, rows, dim, apart.data(), dim);
        CHECK(same_bits(residual, sum));
        CHECK(same_bits(fused, apart));
      }
  });
}

TEST_CASE("norm: heads between other data, gated, and L2") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const int dim : {2, 16, 33, 64, 128}) {
      INFO("dim " << dim);
      const int rows = 4, heads = 3;
      const auto count = static_cast<std::size_t>(rows * heads * dim);
      const floats weight = random.normals(static_cast<std::size_t>(dim));
      // [q | gate] per head: only q may change.
      floats mixed = random.normals(2 * count);
      const floats before = mixed;
      head_rms_norm(pool, mixed.data(), 2 * heads * dim, 2 * dim, weight.data(), norm_weight::zero_centred,
                    1e-6f, rows, heads, dim);
      doubles q;
      floats got;
      int changed = 0;
      for (int i = 0; i < rows * heads; ++i)
        for (int d = 0; d < 2 * dim; ++d) {
          const auto at = static_cast<std::size_t>(i * 2 * dim + d);
          if (d < dim) {
            q.push_back(before[at]);
            got.push_back(mixed[at]);
          } else {
            changed += !same_bits(mixed[at], before[at]);
          }
        }
      CHECK(changed == 0);
      CHECK(largest_error(got, nibble::ref::rms_norm(q, widen(weight), true, 1e-6)) <= 1e-6);

      const floats x = random.normals(count), z = random.normals(count, 3);
      floats y(count, quiet_nan);
      gated_rms_norm(pool, x.data(), heads * dim, z.data(), heads * dim, weight.data(), 1e-6f, rows, heads,
                     dim, y.data(), heads * dim);
      CHECK(largest_error(y, nibble::ref::gated_rms_norm(widen(x), widen(z), widen(weight), 1e-6)) <= 1e-6);

      floats l2 = x;
      l2_norm(pool, l2.data(), heads * dim, 1e-6f, 0.125f, rows, heads, dim);
      CHECK(largest_error(l2, nibble::ref::l2_norm(widen(x), dim, 1e-6, 0.125)) <= 1e-6);
    }
  });
}

TEST_CASE("rope: partial rotation over spans, other dimensions and gates untouched") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const int rotary_dim : {2, 16, 34, 64}) {
      const int heads = 3, head_dim = 64, rows = 6;
      const double theta = 1e4;
      const floats frequencies = nibble::host::rope_frequencies(theta, rotary_dim);
      REQUIRE(frequencies.size() == static_cast<std::size_t>(rotary_dim / 2));
      CHECK(frequencies[0] == 1.0f);
      const std::vector<nibble::host::sequence_span> spans{
          {0, 4, 100, 0, nullptr}, {4, 0, 9, 0, nullptr}, {4, 2, 0, 0, nullptr}};
      const std::vector<int> positions{100, 101, 102, 103, 0, 1};
      floats cosine(static_cast<std::size_t>(rows * rotary_dim / 2), quiet_nan), sine = cosine;
      rope_angles(spans, frequencies, cosine.data(), sine.data());
      floats x = random.normals(static_cast<std::size_t>(rows * heads * head_dim));
      const doubles expected = nibble::ref::rope(widen(x), positions, heads, head_dim, rotary_dim, theta);
      const floats before = x;
      rope(pool, x.data(), heads * head_dim, head_dim, rows, heads, rotary_dim / 2, cosine.data(),
           sine.data());
      INFO("rotary_dim " << rotary_dim);
      CHECK(largest_error(x, expected) <= 1e-6);
      int changed = 0;
      for (std::size_t i = 0; i < x.size(); ++i)
        if (static_cast<int>(i % 64) >= rotary_dim) changed += !same_bits(x[i], before[i]);
      CHECK(changed == 0);
    }
  });
}
