// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/delta_rule.hpp>
#include <nibble/host/norm.hpp>
#include <nibble/ref/delta_rule.hpp>
#include <nibble/ref/norm.hpp>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::host::delta_rule_input;
using nibble::host::delta_rule_shape;
using nibble::host::sequence_span;
using nibble::host::thread_pool;
using nibble::ref::widen;

namespace {

constexpr int slots = 3;

/// Normalised inputs of one sequence in the layout of the model: [q | k | v] per row.
struct problem {
  delta_rule_shape shape;
  int rows;
  floats qkv, log_decay, beta, state;

  int key() const { return shape.k_heads * shape.k_dim; }
  int value() const { return shape.v_heads * shape.v_dim; }
  int stride() const { return 2 * key() + value(); }
  delta_rule_input input() const {
    return {qkv.data(), qkv.data() + key(), qkv.data() + 2 * key(), stride(), log_decay.data(), beta.data()};
  }
};

problem make_problem(random_source& random, thread_pool& pool, const delta_rule_shape& shape, int rows) {
  problem p{shape, rows, {}, {}, {}, {}};
  p.qkv = random.normals(static_cast<std::size_t>(rows * p.stride()));
  for (const int part : {0, p.key()})
    l2_norm(pool, p.qkv.data() + part, p.stride(), 1e-6f,
            part == 0 ? 1.0f / std::sqrt(static_cast<float>(shape.k_dim)) : 1.0f, rows, shape.k_heads,
            shape.k_dim);
  for (int i = 0; i < rows * shape.v_heads; ++i) {
    p.log_decay.push_back(-std::exp(random.normal(2) - 2));  // from almost none to almost all forgotten
    p.beta.push_back(1 / (1 + std::exp(-random.normal())));
  }
  p.state = random.normals(static_cast<std::size_t>(slots * shape.v_heads * shape.k_dim * shape.v_dim));
  return p;
}

struct exact_result {
  doubles out, state;
};

exact_result exact(const problem& p, int slot) {
  doubles q, k, v;
  for (int r = 0; r < p.rows; ++r) {
    const float* row = p.qkv.data() + r * p.stride();
    q.insert(q.end(), row, row + p.key());
    k.insert(k.end(), row + p.key(), row + 2 * p.key());
    v.insert(v.end(), row + 2 * p.key(), row + p.stride());
  }
  const auto size = static_cast<std::ptrdiff_t>(p.state.size()) / slots;
  exact_result e;
  e.state.assign(p.state.begin() + slot * size, p.state.begin() + (slot + 1) * size);
  e.out = nibble::ref::delta_rule(q, k, v, widen(p.log_decay), widen(p.beta),
                                  {p.shape.k_heads, p.shape.v_heads, p.shape.k_dim, p.shape.v_dim}, e.state);
  return e;
}

std::span<const float> slot_of(const floats& state, int slot) {
  const std::size_t size = state.size() / slots;
  return std::span(state).subspan(size * static_cast<std::size_t>(slot), size);
}

const delta_rule_shape shapes[] = {{2, 2, 16, 16},   {1, 2, 64, 64}, {2, 6, 31, 33},
                                   {1, 4, 128, 100}, {3, 3, 1, 1},   {1, 3, 8, 5}};

}  // namespace

TEST_CASE("delta rule: recurrent against fp64; any cut and any threads give the same bits") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool, one(1);
  on_every_target([&](const std::string&) {
    for (const delta_rule_shape& shape : shapes) {
      INFO(shape.k_heads << ":" << shape.v_heads << " heads, " << shape.k_dim << " x " << shape.v_dim);
      const problem p = make_problem(random, pool, shape, 37);
      const exact_result e = exact(p, 2);
      floats state = p.state, out(static_cast<std::size_t>(p.rows * p.value()), quiet_nan);
      const std::vector<sequence_span> whole{{0, p.rows, 0, 2, nullptr}};
      delta_rule_recurrent(pool, whole, shape, p.input(), state.data(), out.data(), p.value());
      CHECK(largest_error(out, e.out) <= 3e-6);
      CHECK(largest_error(slot_of(state, 2), e.state) <= 3e-6);
      CHECK(same_bits(slot_of(state, 0), slot_of(p.state, 0)));
      CHECK(same_bits(slot_of(state, 1), slot_of(p.state, 1)));

      floats cut_state = p.state, cut(out.size(), quiet_nan);
      for (int at = 0; at < p.rows;) {
        const int count = std::min(p.rows - at, random.integer(1, 9));
        const std::vector<sequence_span> spans{{at, count, at, 2, nullptr}};
        delta_rule_recurrent(one, spans, shape, p.input(), cut_state.data(), cut.data(), p.value());
        at += count;
      }
      CHECK(same_bits(cut, out));
      CHECK(same_bits(cut_state, state));
    }
  });
}

TEST_CASE("delta rule: two sequences in one step are two sequences") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  const delta_rule_shape shape{1, 2, 16, 24};
  const problem p = make_problem(random, pool, shape, 12);
  floats together = p.state, apart = p.state;
  floats out(static_cast<std::size_t>(12 * p.value()), quiet_nan), out_apart = out;
  const sequence_span first{0, 7, 0, 0, nullptr}, second{7, 5, 3, 1, nullptr};
  delta_rule_recurrent(pool, std::vector{first, second}, shape, p.input(), together.data(), out.data(),
                       p.value());
  delta_rule_recurrent(pool, std::vector{second}, shape, p.input(), apart.data(), out_apart.data(),
                       p.value());
  delta_rule_recurrent(pool, std::vector{first}, shape, p.input(), apart.data(), out_apart.data(), p.value());
  CHECK(same_bits(out, out_apart));
  CHECK(same_bits(together, apart));
}

TEST_CASE("delta rule: chunked against fp64 and against recurrent") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const delta_rule_shape& shape : shapes)
      for (const int chunk : {1, 5, 32, 64}) {
        INFO(shape.k_heads << ":" << shape.v_heads << " heads, " << shape.k_dim << " x " << shape.v_dim
                           << ", chunk " << chunk);
        const problem p = make_problem(random, pool, shape, 75);
        const exact_result e = exact(p, 1);
        floats state = p.state, out(static_cast<std::size_t>(p.rows * p.value()), quiet_nan);
        const std::vector<sequence_span> whole{{0, p.rows, 0, 1, nullptr}};
        delta_rule_chunked(pool, whole, shape, p.input(), state.data(), out.data(), p.value(), chunk);
        CHECK(largest_error(out, e.out) <= 5e-6);
        CHECK(largest_error(slot_of(state, 1), e.state) <= 5e-6);
        CHECK(same_bits(slot_of(state, 0), slot_of(p.state, 0)));
        CHECK(same_bits(slot_of(state, 2), slot_of(p.state, 2)));
      }
  });
}

TEST_CASE("C093: delta rule: the last chunk of every length, with decays that show a mistake") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  const delta_rule_shape shape{1, 2, 16, 24};
  on_every_target([&](const std::string&) {
    for (const int rows : {1, 2, 3, 4, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129}) {
      INFO(rows << " rows");
      problem p = make_problem(random, pool, shape, rows);
      for (std::size_t i = 0; i < p.log_decay.size(); ++i) p.log_decay[i] = i % 3 == 0 ? -5.0f : -0.05f;
      const exact_result e = exact(p, 1);
      for (const int chunk : {32, 64}) {
        floats state = p.state, out(static_cast<std::size_t>(p.rows * p.value()), quiet_nan);
        const std::vector<sequence_span> whole{{0, p.rows, 0, 1, nullptr}};
        delta_rule_chunked(pool, whole, shape, p.input(), state.data(), out.data(), p.value(), chunk);
        CHECK(largest_error(out, e.out) <= 5e-6);
        CHECK(largest_error(slot_of(state, 1), e.state) <= 5e-6);
      }
    }
  });
}

TEST_CASE("delta rule: gates") {
  random_source random;
  INFO(random.seed_text());
  on_every_target([&](const std::string&) {
    const int rows = 7, heads = 5;
    const floats a = random.normals(rows * heads, 8), b = random.normals(rows * heads, 3);
    const floats a_log = random.normals(heads), dt_bias = random.normals(heads);
    floats log_decay(rows * heads, quiet_nan), beta = log_decay;
    nibble::host::delta_rule_gates(a.data(), heads, b.data(), heads, a_log.data(), dt_bias.data(), rows,
                                   heads, log_decay.data(), beta.data());
    CHECK(largest_error(log_decay,
                        nibble::ref::delta_rule_log_decay(widen(a), widen(a_log), widen(dt_bias))) <= 2e-6);
    doubles expected;
    for (const float v : b) expected.push_back(nibble::ref::sigmoid(v));
    CHECK(largest_error(beta, expected) <= 1e-6);
  });
}
