// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "model/step_check.hpp"
#include "nibble/core/error.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace qwen3_moe;
using nibble::test::has;
using nibble::test::message_of;

TEST_CASE("a step that breaks the contract is refused before it runs") {
  const runner_limits limits{10, 20, 4, 6, 2, 8};
  const std::vector<std::int32_t> tokens{1, 2, 3}, bad_tokens{1, 10}, negative{-1}, many(9, 1),
      pages{0, 1, 2, 3, 4}, bad_pages{6}, few{0};
  const auto complaint = [&](std::vector<step_sequence> sequences, std::size_t floats = 1000) {
    return message_of<nibble::error>([&] { check_step(limits, sequences, floats); });
  };
  const step_sequence good{tokens, 0, 0, pages, wanted_logits::last};
  CHECK(complaint({good}) == "");
  CHECK(complaint({}) == "");
  CHECK(complaint({{tokens, 17, 1, pages, wanted_logits::all}}, 30) == "");
  CHECK(has(complaint({{tokens, 18, 1, pages, wanted_logits::all}}), "sequence length 21"));
  CHECK(has(complaint({good}, 9), "logits buffer 9"));
  CHECK(has(complaint({{bad_tokens, 0, 0, pages, wanted_logits::none}}), "token 10"));
  CHECK(has(complaint({{negative, 0, 0, pages, wanted_logits::none}}), "token -1"));
  CHECK(has(complaint({{{}, 0, 0, pages, wanted_logits::none}}), "token count 0"));
  CHECK(has(complaint({{tokens, -1, 0, pages, wanted_logits::none}}), "position -1"));
  CHECK(has(complaint({{tokens, 0, 2, pages, wanted_logits::none}}), "slot 2"));
  CHECK(has(complaint({{tokens, 0, -1, pages, wanted_logits::none}}), "slot -1"));
  CHECK(has(complaint({{tokens, 0, 0, bad_pages, wanted_logits::none}}), "page 6"));
  CHECK(has(complaint({{tokens, 2, 0, few, wanted_logits::none}}), "page count 1"));
  CHECK(has(complaint({{many, 0, 0, pages, wanted_logits::none}}), "tokens of the step 9"));
  CHECK(has(complaint({good, good}), "slot 0 is given to two sequences"));
}
