// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <set>

#include "engine/id_pool.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;

TEST_CASE("a pool hands out each id once") {
  kv_page_pool pool(5);
  std::set<int> seen;
  while (const auto id = pool.take()) {
    REQUIRE(*id >= 0);
    REQUIRE(*id < 5);
    REQUIRE(seen.insert(*id).second);
  }
  CHECK(seen.size() == 5);
  CHECK(pool.free() == 0);
  CHECK(pool.used() == 5);
}

TEST_CASE("releasing twice puts an id back once, in every order of the racing paths") {
  std::array<int, 3> order{0, 1, 2};
  do {
    slot_pool pool(2);
    const int mine = *pool.take();
    int released = 0;
    for ([[maybe_unused]] const int path : order) released += pool.release(mine) ? 1 : 0;
    CHECK(released == 1);
    CHECK(pool.free() == 2);
    const auto a = pool.take();
    const auto b = pool.take();
    REQUIRE((a && b));
    CHECK(*a != *b);
    CHECK_FALSE(pool.take());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("foreign ids change nothing") {
  kv_page_pool pool(3);
  for (const int id : {-1, 3, 1'000'000, 0}) CHECK_FALSE(pool.release(id));
  CHECK(pool.free() == 3);
}

TEST_CASE("taking several is all or nothing") {
  kv_page_pool pool(4);
  std::vector<std::int32_t> pages{77};
  CHECK_FALSE(pool.take(5, pages));
  CHECK(pages.size() == 1);
  CHECK(pool.free() == 4);
  REQUIRE(pool.take(3, pages));
  CHECK(pages.size() == 4);
  CHECK(pool.free() == 1);
  pool.release(pages);  // 77 is foreign
  CHECK(pool.free() == 4);
  CHECK(pages.empty());
}

TEST_CASE("a pool of nothing") {
  slot_pool none(0);
  CHECK(none.size() == 0);
  CHECK_FALSE(none.take());
  slot_pool negative(-3);
  CHECK(negative.size() == 0);
}

TEST_CASE("the lowest free id comes first, so that the end stays free") {
  kv_page_pool pool(6);
  std::vector<std::int32_t> pages;
  REQUIRE(pool.take(4, pages));
  CHECK(pages == std::vector<std::int32_t>{0, 1, 2, 3});
  CHECK(pool.used_end() == 4);
  pool.release(2), pool.release(0);
  CHECK(*pool.take() == 0);
  CHECK(*pool.take() == 2);
  CHECK(*pool.take() == 4);
  CHECK(pool.used_end() == 5);
}

TEST_CASE("a pool shrinks down to what is taken, and grows again") {
  kv_page_pool pool(8);
  std::vector<std::int32_t> pages;
  REQUIRE(pool.take(3, pages));
  pool.resize(5);
  CHECK(pool.size() == 5);
  CHECK(pool.free() == 2);
  pool.resize(1);  // ids 0 … 2 are taken
  CHECK(pool.size() == 3);
  CHECK(pool.free() == 0);
  CHECK_FALSE(pool.take());
  pool.release(1);
  CHECK(*pool.take() == 1);
  pool.resize(8);
  CHECK(pool.size() == 8);
  CHECK(pool.free() == 5);
  std::set<int> all(pages.begin(), pages.end());
  while (const auto id = pool.take()) REQUIRE(all.insert(*id).second);
  CHECK(all.size() == 8);
}
