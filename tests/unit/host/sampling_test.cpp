// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/sampling.hpp>
#include <nibble/ref/sampling.hpp>
#include <numeric>

#include "kernel_test.hpp"

using namespace kernel_test;
using namespace nibble::host;
using nibble::ref::widen;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

sampling_params params_of(float temperature, int top_k, float top_p, float min_p, std::uint64_t seed = 1) {
  return {temperature, top_k, top_p, min_p, seed};
}

/// The candidates as a dense vector of probabilities.
floats dense(const floats& logits, const sampling_params& params) {
  sampling_workspace workspace;
  REQUIRE(sampling_candidates(logits, params, workspace) == sample_status::ok);
  REQUIRE_FALSE(workspace.candidates.empty());
  floats out(logits.size(), 0.0f);
  float last = infinity;
  for (const candidate& c : workspace.candidates) {
    CHECK(c.probability <= last);
    last = c.probability;
    out[static_cast<std::size_t>(c.token)] = c.probability;
  }
  return out;
}

}  // namespace

TEST_CASE("sampling: the distribution after all filters against fp64") {
  random_source random;
  INFO(random.seed_text());
  on_every_target([&](const std::string&) {
    for (const int vocab : {1, 5, 300, 5000})
      for (const float temperature : {0.0f, 0.3f, 1.0f, 2.0f})
        for (const int top_k : {0, 1, 20, 400})
          for (const float top_p : {0.0f, 0.55f, 0.95f, 1.0f})
            for (const float min_p : {0.0f, 0.05f, 1.0f}) {
              const floats logits = random.normals(static_cast<std::size_t>(vocab), 3);
              const floats got = dense(logits, params_of(temperature, top_k, top_p, min_p));
              const doubles expected =
                  nibble::ref::sampling_probabilities(widen(logits), temperature, top_k, top_p, min_p);
              // A token on a filter's edge may fall on either side in fp32: it must then be a small one.
              if (largest_error(got, expected) > 2e-6) {
                INFO("vocab " << vocab << ", T " << temperature << ", k " << top_k << ", p " << top_p
                              << ", min_p " << min_p);
                int edges = 0;
                for (std::size_t i = 0; i < got.size(); ++i) edges += (got[i] > 0) != (expected[i] > 0);
                CHECK(edges == 1);
                CHECK(largest_error(got, expected) <= 2e-2);
              }
            }
  });
}

TEST_CASE("sampling: edges of the filters keep at least one token, ties go to the lower id") {
  const floats ties{1, 5, 5, 0, 5, 5};
  CHECK(dense(ties, params_of(1, 2, 1, 0)) == floats{0, 0.5f, 0.5f, 0, 0, 0});
  CHECK(dense(ties, params_of(1, 1, 1, 0)) == floats{0, 1, 0, 0, 0, 0});
  CHECK(dense(ties, params_of(1, 0, 0, 0)) == floats{0, 1, 0, 0, 0, 0});
  CHECK(dense(ties, params_of(1, 0, 1e-10f, 0)) == floats{0, 1, 0, 0, 0, 0});
  CHECK(dense(ties, params_of(1, 0, 1, 1)) == floats{0, 0.25f, 0.25f, 0, 0.25f, 0.25f});
  CHECK(dense(ties, params_of(1, 0, 1, 2)) == floats{0, 0.25f, 0.25f, 0, 0.25f, 0.25f});
  CHECK(dense(ties, params_of(1, 1, 0, 1)) == floats{0, 1, 0, 0, 0, 0});
  CHECK(dense(ties, params_of(1, 0, 0.3f, 0)) == floats{0, 0.5f, 0.5f, 0, 0, 0});
  CHECK(dense(floats(4, 0.0f), params_of(1, 0, 0.5f, 0)) ==
        floats{0.5f, 0.5f, 0, 0});  // reached exactly: enough
  for (const int off : {0, -1, 6, 7}) CHECK(dense(ties, params_of(1, off, 1, 0))[3] > 0);
  CHECK(argmax(ties).token == 1);
  CHECK(dense({-infinity, 2, -infinity}, params_of(1, 0, 1, 0)) == floats{0, 1, 0});
}

TEST_CASE("C016: sampling: rows without a distribution are errors, never a token") {
  sampling_workspace workspace;
  for (const floats& row : {floats(5, quiet_nan), floats{1, 2, quiet_nan, 3}, floats(4, -infinity),
                            floats(4, infinity), floats{1, infinity}, floats{}})
    for (const float temperature : {0.0f, 1.0f})
      for (const int top_k : {0, 2}) {
        const sample_result r = sample(row, params_of(temperature, top_k, 1, 0), 0, workspace);
        CHECK(r.status == sample_status::not_finite);
        CHECK(r.token == -1);
        CHECK(argmax(row).status == sample_status::not_finite);
        CHECK(logprobs(row, 0, 2).status == sample_status::not_finite);
      }
}

TEST_CASE("sampling: tiny temperatures act as greedy, large logits do not overflow") {
  sampling_workspace workspace;
  const floats row{-infinity, 3e4f, 2.9e4f, -3e4f};
  for (const float temperature : {0.0f, 1e-38f, 1e-5f, 1e-3f, 1.0f})
    for (std::uint64_t step = 0; step < 50; ++step) {
      const sample_result r = sample(row, params_of(temperature, 0, 1, 0), step, workspace);
      CHECK(r.status == sample_status::ok);
      CHECK(r.token == 1);
    }
}

TEST_CASE("sampling: draws follow the distribution and depend on seed and step alone") {
  sampling_workspace workspace, other;
  const floats row{std::log(1.0f), std::log(2.0f), std::log(4.0f), std::log(1.0f)};
  const double share[4] = {0.125, 0.25, 0.5, 0.125};
  for (const bool filtered : {false, true}) {
    const sampling_params params = params_of(1, 0, filtered ? 0.999f : 1.0f, 0, 42);
    std::vector<int> counts(4);
    const int draws = 20000;
    for (std::uint64_t step = 0; step < draws; ++step) {
      const sample_result r = sample(row, params, step, workspace);
      REQUIRE(r.status == sample_status::ok);
      ++counts[static_cast<std::size_t>(r.token)];
      if (step % 1000 == 0) CHECK(sample(row, params, step, other).token == r.token);
    }
    double chi = 0;
    for (std::size_t i = 0; i < 4; ++i) chi += std::pow(counts[i] - draws * share[i], 2) / (draws * share[i]);
    CHECK(chi < 25);  // 3 degrees of freedom; the draws are fixed, so this never varies
  }
  int same = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed)
    same += sample(row, params_of(1, 0, 1, 0, seed), 0, workspace).token ==
            sample(row, params_of(1, 0, 1, 0, seed + 1), 0, workspace).token;
  CHECK(same < 500);  // Σ share² = 0.34: neighbouring seeds are unrelated
}

TEST_CASE("sampling: uniform draws cover the unit interval") {
  double sum = 0, low = 1, high = 0;
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const double u = uniform_draw(7, i);
    sum += u;
    low = std::min(low, u);
    high = std::max(high, u);
  }
  CHECK(low >= 0);
  CHECK(low < 0.001);
  CHECK(high < 1);
  CHECK(high > 0.999);
  CHECK(sum / 10000 == Approx(0.5).epsilon(0.02));
  CHECK(uniform_draw(1, 2) == uniform_draw(1, 2));
  CHECK(uniform_draw(1, 2) != uniform_draw(2, 1));
}

TEST_CASE("sampling: a large vocabulary with a flat distribution") {
  floats row(100000, 0.0f);
  row[77777] = 0.5f;
  sampling_workspace workspace;
  REQUIRE(sampling_candidates(row, params_of(1, 0, 0.5f, 0), workspace) == sample_status::ok);
  CHECK(workspace.candidates.size() >= 49990);
  CHECK(workspace.candidates.size() <= 50010);
  CHECK(workspace.candidates[0].token == 77777);
  CHECK(workspace.candidates[1].token == 0);
  CHECK(workspace.candidates[1000].token == 999);
}

TEST_CASE("sampling: penalties and bias") {
  token_counter counter;
  counter.add_prompt(std::vector<std::int32_t>{0, 1, 1, 50});
  counter.add_generated(1);
  counter.add_generated(3);
  counter.add_generated(3);
  floats row{2, -2, 1, 4, 1};
  apply_penalties(row, counter.seen(), {2, 0.5f, 0.25f});
  CHECK(row == floats{1, -4.75f, 1, 1, 1});
  floats unchanged{2, -2, 1, 4, 1};
  apply_penalties(unchanged, counter.seen(), {});
  CHECK(unchanged == floats{2, -2, 1, 4, 1});
  apply_logit_bias(unchanged, std::vector<token_bias>{{0, 1}, {4, -infinity}, {5, 1}, {-1, 1}});
  CHECK(unchanged == floats{3, -2, 1, 4, -infinity});
}

TEST_CASE("sampling: log probabilities") {
  const floats row{std::log(1.0f), std::log(4.0f), std::log(2.0f), std::log(1.0f), -infinity};
  const logprobs_result r = logprobs(row, 2, 3);
  CHECK(r.status == sample_status::ok);
  CHECK(r.chosen.token == 2);
  CHECK(r.chosen.logprob == Approx(std::log(0.25)));
  REQUIRE(r.top.size() == 3);
  CHECK(r.top[0].token == 1);
  CHECK(r.top[0].logprob == Approx(std::log(0.5)));
  CHECK(r.top[1].token == 2);
  CHECK(r.top[2].token == 0);
  CHECK(logprobs(row, 4, 0).chosen.logprob == -infinity);
  CHECK(logprobs(row, 0, 100).top.size() == 5);
}
