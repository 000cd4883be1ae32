// SPDX-License-Identifier: Apache-2.0
#include <nibble/core/bf16.hpp>
#include <nibble/host/attention.hpp>
#include <nibble/ref/attention.hpp>
#include <numeric>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::host::kv_format;
using nibble::host::sequence_span;
using nibble::host::thread_pool;
using nibble::ref::widen;

namespace {

struct setup {
  int kv_heads, group, head_dim, page_tokens;
  kv_format format;
};

/// A cache whose memory is NaN until it is written, with pages handed out in random order.
struct cache_fixture {
  std::vector<float> wide_keys, wide_values;
  std::vector<std::uint16_t> narrow_keys, narrow_values;
  nibble::host::kv_cache_view view;

  cache_fixture(const setup& s, int pages) {
    view.format = s.format;
    view.pages = pages;
    view.kv_heads = s.kv_heads;
    view.page_tokens = s.page_tokens;
    view.head_dim = s.head_dim;
    if (s.format == kv_format::f32) {
      wide_keys.assign(view.elements(), quiet_nan);
      wide_values = wide_keys;
      view.keys = wide_keys.data();
      view.values = wide_values.data();
    } else {
      narrow_keys.assign(view.elements(), 0x7FC0);
      narrow_values = narrow_keys;
      view.keys = narrow_keys.data();
      view.values = narrow_values.data();
    }
  }
};

/// What one sequence feeds: projections of all its tokens, [q | gate] interleaved per head.
struct sequence_data {
  int tokens;
  floats qg, k, v;
  std::vector<std::int32_t> pages;
};

struct model {
  setup s;
  int heads() const { return s.kv_heads * s.group; }
  int q_stride() const { return heads() * 2 * s.head_dim; }
  int kv_stride() const { return s.kv_heads * s.head_dim; }
  int out_stride() const { return heads() * s.head_dim; }
};

sequence_data make_sequence(random_source& random, const model& m, int tokens) {
  sequence_data d{tokens,
                  random.normals(static_cast<std::size_t>(tokens * m.q_stride())),
                  random.normals(static_cast<std::size_t>(tokens * m.kv_stride())),
                  random.normals(static_cast<std::size_t>(tokens * m.kv_stride())),
                  {}};
  return d;
}

doubles rounded(const floats& x, kv_format format) {
  doubles out;
  for (const float v : x)
    out.push_back(format == kv_format::f32 ? v : nibble::bf16::decode(nibble::bf16::encode(v)));
  return out;
}

doubles expected_output(const model& m, const sequence_data& d, double scale) {
  doubles q, gate;
  for (int i = 0; i < d.tokens * m.heads(); ++i)
    for (int j = 0; j < 2 * m.s.head_dim; ++j)
      (j < m.s.head_dim ? q : gate).push_back(d.qg[static_cast<std::size_t>(i * 2 * m.s.head_dim + j)]);
  return nibble::ref::attention(q, gate, rounded(d.k, m.s.format), rounded(d.v, m.s.format),
                                {m.heads(), m.s.kv_heads, m.s.head_dim}, scale);
}

/// One step over parts of several sequences: tokens [from, from + rows) of each.
struct part {
  const sequence_data* data;
  int from, rows;
};

std::vector<floats> run_step(thread_pool& pool, const model& m, const nibble::host::kv_cache_view& cache,
                             const std::vector<part>& parts, float scale) {
  floats qg, k, v;
  std::vector<sequence_span> spans;
  int rows = 0;
  const auto take = [](floats& to, const floats& from, int first, int count, int stride) {
    to.insert(to.end(), from.begin() + first * stride, from.begin() + (first + count) * stride);
  };
  for (const part& p : parts) {
    spans.push_back({rows, p.rows, p.from, 0, p.data->pages.data()});
    take(qg, p.data->qg, p.from, p.rows, m.q_stride());
    take(k, p.data->k, p.from, p.rows, m.kv_stride());
    take(v, p.data->v, p.from, p.rows, m.kv_stride());
    rows += p.rows;
  }
  append_kv(pool, cache, spans, k.data(), m.kv_stride(), v.data(), m.kv_stride());
  nibble::host::attention_input input;
  input.q = qg.data();
  input.gate = qg.data() + m.s.head_dim;
  input.q_row_stride = input.gate_row_stride = m.q_stride();
  input.q_head_stride = input.gate_head_stride = 2 * m.s.head_dim;
  input.heads = m.heads();
  input.scale = scale;
  floats out(static_cast<std::size_t>(rows * m.out_stride()), quiet_nan);
  attention(pool, cache, spans, input, out.data(), m.out_stride());
  std::vector<floats> parts_out;
  for (const sequence_span& s : spans)
    parts_out.emplace_back(out.begin() + s.first_row * m.out_stride(),
                           out.begin() + (s.first_row + s.rows) * m.out_stride());
  return parts_out;
}

}  // namespace

TEST_CASE("attention: pages, groups and formats against fp64; any cut of a prompt gives the same bits") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool, one(1);
  const setup setups[] = {
      {2, 1, 64, 16, kv_format::f32}, {1, 2, 16, 7, kv_format::f32},   {2, 4, 40, 1, kv_format::f32},
      {1, 3, 5, 64, kv_format::f32},  {2, 2, 64, 16, kv_format::bf16}, {1, 8, 24, 5, kv_format::bf16},
  };
  on_every_target([&](const std::string&) {
    for (const setup& s : setups) {
      const model m{s};
      INFO(s.kv_heads << " kv heads, group " << s.group << ", head_dim " << s.head_dim << ", pages of "
                      << s.page_tokens << (s.format == kv_format::f32 ? ", f32" : ", bf16"));
      const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
      sequence_data a = make_sequence(random, m, 45), b = make_sequence(random, m, 19);
      const int pages_a = (45 + s.page_tokens - 1) / s.page_tokens,
                pages_b = (19 + s.page_tokens - 1) / s.page_tokens;
      std::vector<std::int32_t> ids(static_cast<std::size_t>(pages_a + pages_b + 1));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random.engine());
      a.pages.assign(ids.begin(), ids.begin() + pages_a);
      b.pages.assign(ids.begin() + pages_a, ids.begin() + pages_a + pages_b);

      cache_fixture whole(s, static_cast<int>(ids.size()));
      const std::vector<floats> out = run_step(pool, m, whole.view, {{&a, 0, 45}, {&b, 0, 19}}, scale);
      CHECK(largest_error(out[0], expected_output(m, a, scale)) <= 2e-6);
      CHECK(largest_error(out[1], expected_output(m, b, scale)) <= 2e-6);

      // The same sequences in random cuts, mixed and alone, with one thread.
      cache_fixture cut(s, static_cast<int>(ids.size()));
      floats cut_a, cut_b;
      int at_a = 0, at_b = 0;
      while (at_a < 45 || at_b < 19) {
        const int rows_a = std::min(45 - at_a, random.integer(0, 9)),
                  rows_b = std::min(19 - at_b, random.integer(0, 2));
        const std::vector<floats> step =
            run_step(one, m, cut.view, {{&b, at_b, rows_b}, {&a, at_a, rows_a}}, scale);
        cut_b.insert(cut_b.end(), step[0].begin(), step[0].end());
        cut_a.insert(cut_a.end(), step[1].begin(), step[1].end());
        at_a += rows_a;
        at_b += rows_b;
      }
      CHECK(same_bits(cut_a, out[0]));
      CHECK(same_bits(cut_b, out[1]));
    }
  });
}

TEST_CASE("attention: without a gate, and scores far apart do not overflow") {
  thread_pool pool;
  on_every_target([&](const std::string&) {
    const setup s{1, 1, 16, 4, kv_format::f32};
    cache_fixture cache(s, 1);
    const std::vector<std::int32_t> pages{0};
    floats q(16, 100.0f), k(48, 0.0f), v(48, 0.0f);
    for (std::size_t i = 0; i < 16; ++i) {
      k[i] = -100.0f;
      k[16 + i] = 100.0f;
      v[i] = 3;
      v[16 + i] = 5;
      v[32 + i] = 7;
    }
    const std::vector<sequence_span> fill{{0, 3, 0, 0, pages.data()}}, last{{0, 1, 2, 0, pages.data()}};
    append_kv(pool, cache.view, fill, k.data(), 16, v.data(), 16);
    nibble::host::attention_input input;
    input.q = q.data();
    input.q_row_stride = input.q_head_stride = 16;
    input.heads = 1;
    floats out(16, quiet_nan);
    attention(pool, cache.view, last, input, out.data(), 16);
    for (const float x : out) CHECK(x == 5.0f);
  });
}
