// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/router.hpp>
#include <nibble/ref/router.hpp>
#include <set>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::host::thread_pool;
using nibble::ref::widen;

namespace {

struct routed {
  std::vector<std::int32_t> ids;
  floats weights;
};

routed run(thread_pool& pool, const floats& logits, int experts, int top_k, bool renormalise = true) {
  const int rows = static_cast<int>(logits.size()) / experts;
  routed r{std::vector<std::int32_t>(static_cast<std::size_t>(rows * top_k), -7),
           floats(static_cast<std::size_t>(rows * top_k), quiet_nan)};
  route(pool, logits.data(), experts, rows, experts, top_k, renormalise, r.ids.data(), r.weights.data());
  return r;
}

}  // namespace

TEST_CASE("router: choice and weights against fp64") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    for (const int experts : {1, 2, 16, 128, 256, 512})
      for (const int top_k : {1, 2, 8, 10})
        for (const bool renormalise : {true, false}) {
          if (top_k > experts) continue;
          const floats logits = random.normals(static_cast<std::size_t>(experts * 33), 2);
          const routed got = run(pool, logits, experts, top_k, renormalise);
          const nibble::ref::routing expected =
              nibble::ref::route(widen(logits), experts, top_k, renormalise);
          INFO(experts << " experts, top " << top_k);
          CHECK(std::equal(got.ids.begin(), got.ids.end(), expected.ids.begin(), expected.ids.end()));
          CHECK(largest_error(got.weights, expected.weights) <= 1e-6);
        }
  });
}

TEST_CASE("router: ties go to the lower id") {
  thread_pool pool;
  CHECK(run(pool, floats(8, 1.5f), 8, 3).ids == std::vector<std::int32_t>{0, 1, 2});
  const routed r = run(pool, floats{0, 2, 1, 2, 1, 1}, 6, 4);
  CHECK(r.ids == std::vector<std::int32_t>{1, 3, 2, 4});
  CHECK(r.weights[0] == r.weights[1]);
}

TEST_CASE("C018: router: negative logits, equal ones and huge ones choose like a sort") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool;
  on_every_target([&](const std::string&) {
    floats negative;
    for (int i = 0; i < 256; ++i) negative.push_back(-5.0f - 1e-3f * static_cast<float>(i));
    std::shuffle(negative.begin(), negative.end(), random.engine());
    floats huge = negative;
    for (auto& v : huge) v = 2e3f * v;
    for (const floats& logits : {negative, huge, floats(256, -7.0f), floats(256, -1e4f)}) {
      // The row's memory ends with the row.
      const routed got = run(pool, logits, 256, 8);
      const auto expected = nibble::ref::route(widen(logits), 256, 8, true);
      CHECK(std::equal(got.ids.begin(), got.ids.end(), expected.ids.begin(), expected.ids.end()));
      float sum = 0;
      for (const float w : got.weights) sum += w;
      CHECK(std::fabs(sum - 1) < 1e-6f);
    }
  });
}

TEST_CASE("router: numbers that are none keep ids valid and distinct") {
  thread_pool pool;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const floats& logits :
       {floats(6, quiet_nan), floats{1, quiet_nan, 3, 2, 0, 0}, floats(6, -infinity)}) {
    const routed r = run(pool, logits, 6, 4);
    CHECK(std::set<std::int32_t>(r.ids.begin(), r.ids.end()).size() == 4);
    for (const std::int32_t id : r.ids) CHECK((id >= 0 && id < 6));
    for (const float w : r.weights) CHECK(std::isnan(w));
  }
  CHECK(run(pool, floats{1, quiet_nan, 3, 2}, 4, 3).ids == std::vector<std::int32_t>{2, 3, 0});
}
