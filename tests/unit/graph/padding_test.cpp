// SPDX-License-Identifier: Apache-2.0
// Padding a batch to a captured size.
#include <algorithm>
#include <vector>

#include "nibble/graph/captured_sizes.hpp"
#include "support/catch.hpp"

using namespace nibble;

TEST_CASE("captured sizes: powers of two and the limit") {
  CHECK(default_captured_sizes(1) == std::vector<int>{1});
  CHECK(default_captured_sizes(4) == std::vector<int>{1, 2, 4});
  CHECK(default_captured_sizes(6) == std::vector<int>{1, 2, 4, 6});
  CHECK(default_captured_sizes(0).empty());
  CHECK(checked_captured_sizes({4, 1, 4}, 4) == std::vector<int>{1, 4});
  CHECK_THROWS_AS(checked_captured_sizes({0}, 4), error);
  CHECK_THROWS_AS(checked_captured_sizes({5}, 4), error);
  const std::vector<int> sizes = {1, 2, 4, 6};
  CHECK(captured_size_for(sizes, 3) == 4);
  CHECK(captured_size_for(sizes, 6) == 6);
  CHECK(captured_size_for(sizes, 7) == 0);
  CHECK(captured_size_for(sizes, 0) == 0);
}

TEST_CASE(
    "C079: padding rows are whole sequences of one token; nothing beyond the captured rows is touched") {
  constexpr std::int32_t canary = -77;
  constexpr int stride = 3;
  const std::vector<int> sizes = {1, 2, 4, 8};
  for (const int live : {1, 3, 5, 6, 7, 8}) {
    const int captured = captured_size_for(sizes, live);
    const auto rows = static_cast<std::size_t>(captured);
    std::vector<std::int32_t> tokens(rows + 1, canary), positions(rows + 1, canary), slots(rows + 1, canary),
        pages((rows + 1) * stride, canary);
    for (std::size_t row = 0; row < static_cast<std::size_t>(live); ++row) {
      tokens[row] = 10 + static_cast<std::int32_t>(row);
      positions[row] = 100;
      slots[row] = 5;
      std::fill_n(pages.begin() + static_cast<std::ptrdiff_t>(row * stride), stride, 9);
    }
    const auto all = [&](std::vector<std::int32_t>& v, std::size_t n) { return std::span(v.data(), n); };
    pad_decode_rows(live, captured, {.slot = 0, .page = 0, .token = 2}, all(tokens, rows),
                    all(positions, rows), all(slots, rows), all(pages, rows * stride), stride);
    for (std::size_t row = 0; row < rows; ++row) {
      const bool real = row < static_cast<std::size_t>(live);
      CHECK(tokens[row] == (real ? 10 + static_cast<std::int32_t>(row) : 2));
      CHECK(positions[row] == (real ? 100 : 0));
      CHECK(slots[row] == (real ? 5 : 0));
      for (std::size_t i = 0; i < stride; ++i) CHECK(pages[row * stride + i] == (real ? 9 : 0));
    }
    CHECK(tokens[rows] == canary);
    CHECK(positions[rows] == canary);
    CHECK(slots[rows] == canary);
    CHECK(std::count(pages.end() - stride, pages.end(), canary) == stride);
  }
}

TEST_CASE("C080: no padding row points at anything that lives, and no index is below zero") {
  // A full pool: pages 1 … 8 and slots 1 … 3 belong to sequences, 0 to nobody.
  std::vector<std::int32_t> tokens = {1, 2, 3, -1}, positions = {5, 9, 2, -1}, slots = {1, 2, 3, -1},
                            pages = {1, 2, 3, 4, 5, 6, -1, -1};
  pad_decode_rows(3, 4, {.slot = 0, .page = 0, .token = 0}, tokens, positions, slots, pages, 2);
  for (const auto* v : {&tokens, &positions, &slots, &pages})
    CHECK(std::none_of(v->begin(), v->end(), [](std::int32_t i) { return i < 0; }));
  CHECK(slots == std::vector<std::int32_t>{1, 2, 3, 0});
  CHECK(pages == std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 0, 0});
}

TEST_CASE("padding: arrays that are too small are refused") {
  std::vector<std::int32_t> four(4), three(3);
  CHECK_THROWS_AS(pad_decode_rows(3, 4, {}, four, four, four, three, 1), error);
  CHECK_THROWS_AS(pad_decode_rows(3, 4, {}, three, four, four, four, 1), error);
  CHECK_THROWS_AS(pad_decode_rows(0, 4, {}, four, four, four, four, 1), error);
  CHECK_THROWS_AS(pad_decode_rows(5, 4, {}, four, four, four, four, 1), error);
  CHECK_THROWS_AS(pad_decode_rows(3, 4, {}, four, four, four, four, 0), error);
}
