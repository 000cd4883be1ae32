// SPDX-License-Identifier: Apache-2.0
// What does not fit: the arithmetic that is shown, and the changes that are named.
#include "example_model.hpp"
#include "nibble/plan/planner.hpp"
#include "support/catch.hpp"

using namespace nibble;
using namespace nibble::test;

namespace {

/// The number that a refusal names after `words`; 0 where it does not.
std::uint64_t number_after(const std::string& text, const std::string& words) {
  const auto at = text.find("\n  " + words);
  return at == std::string::npos ? 0 : std::stoull(text.substr(at + 3 + words.size()));
}

/// The number of the line that goes on with `words`; 0 where there is none.
std::uint64_t number_before(const std::string& text, const std::string& words) {
  const auto at = text.find(words);
  return at == std::string::npos ? 0 : std::stoull(text.substr(text.rfind('\n', at)));
}

}  // namespace

TEST_CASE("plan: contradictory wishes are refused with the arithmetic") {
  plan_request r;
  r.expert_slots = 5000;
  r.kv_bytes = 4 * gib;
  const auto text = refusal(card(12 * gib), large_moe(), r);
  CHECK(contains(text, "expert slots          8.27 GiB  5000 of 10240 experts"));
  CHECK(contains(text, "KV pages              4.00 GiB"));
  CHECK(contains(text, "too few"));
  CHECK(contains(text, "reserve: 1/64 of 15."));  // of the sum that would do, not of the card
  CHECK(number_after(text, "--expert-slots ") < 5000);
  CHECK(number_after(text, "--kv-bytes ") < 4096);
  r = {};
  r.expert_slots = 10241;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "the model has 10240 routed experts"));
  r.expert_slots = 7;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "asks for up to 8"));
  r = {};
  r.max_running = 16;
  r.expert_slots = 100;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "asks for up to 128"));
  r = {};
  r.context_tokens = 300'000;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "context 300000: expected 1 to 262144"));
  r = {};
  r.context_tokens = 65536;
  r.kv_bytes = 512 * mib;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r),
                 "kv-bytes 512.0 MiB are 1638 pages of 320.0 KiB; a context of 65536 tokens with 1 sequence "
                 "needs 4097"));
  r = {};
  r.vram_limit_bytes = 3 * gib;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "\n  --vram-limit "));
}

TEST_CASE("plan: a context shorter than what nobody asks less of has a largest number, too") {
  // What is there is a little less than the least plan takes for the wish, so a shorter context is enough.
  plan_request r;
  r.context_tokens = 2000;
  std::uint64_t missing = 0, named = 0;
  for (std::uint64_t total = 3 * gib; total < 4 * gib && named == 0; total += mib) {
    try {
      static_cast<void>(plan_memory(card(total), large_moe(), r));
      break;
    } catch (const plan_refused& problem) {
      missing = problem.missing_bytes();
      named = number_after(problem.what(), "--context ");
      if (named != 0) {
        plan_request shorter;
        shorter.context_tokens = static_cast<int>(named);
        CHECK(plan_memory(card(total), large_moe(), shorter).limits.context_tokens ==
              static_cast<int>(named));
        shorter.context_tokens = static_cast<int>(named) + 1;
        CHECK(!refusal(card(total), large_moe(), shorter).empty());
      }
    }
  }
  CHECK(missing > 0);
  CHECK(named > 0);
  CHECK(named < 2000);
}

TEST_CASE("plan: the --kv-bytes that a refusal asks for are enough") {
  plan_request r;
  r.max_running = 100;
  r.kv_bytes = mib;
  const auto text = refusal(card(20 * gib), large_moe(), r);
  const std::string words = "): ";  // behind how the pages come about
  const auto at = text.find(words);
  REQUIRE(at != std::string::npos);
  const auto end = text.find_first_not_of("0123456789", at + words.size());
  CHECK(text.compare(end, 3, "MiB") == 0);
  r.kv_bytes = std::stoull(text.substr(at + words.size())) * mib;
  CHECK(refusal(card(20 * gib), large_moe(), r).empty());
}

TEST_CASE("plan: where the sum overflows no memory is said to be enough") {
  memory_model m = large_moe();
  m.weight_bytes = UINT64_MAX - 1;
  const auto text = refusal(card(20 * gib), m, {});
  CHECK(contains(text, "No memory is enough"));
  CHECK(!contains(text, "any one of"));
}

TEST_CASE("plan: the memory a refusal asks for is enough, and a granule less is not") {
  for (const std::uint64_t total : {1 * mib, 300 * mib, 1 * gib, 2 * gib, 3 * gib}) {
    std::uint64_t missing = 0;
    try {
      static_cast<void>(plan_memory(card(total), large_moe(), {}));
    } catch (const plan_refused& problem) {
      missing = problem.missing_bytes();
      // The ledger that is shown is the one of that least memory.
      CHECK(problem.lines().planned_total() == problem.lines().budget_bytes + missing);
    }
    REQUIRE(missing > 0);
    CHECK(plan_memory(card(total + missing), large_moe(), {}).limits.running == 1);
    CHECK_THROWS_AS(plan_memory(card(total + missing - 1), large_moe(), {}), plan_refused);
  }
}

TEST_CASE("plan: a refusal names the largest wishes that fit, and the next ones do not") {
  const auto machine = card(6 * gib);
  const auto model = large_moe();
  plan_request r;
  const auto fits = [&] { return refusal(machine, model, r).empty(); };
  const auto largest_is = [&](auto& wish, auto value, auto step) {
    wish = value;
    CHECK(fits());
    wish = value + step;
    CHECK(!fits());
    r = {};
  };

  r.context_tokens = 262144;
  r.max_running = 4;
  const auto context = static_cast<int>(number_after(refusal(machine, model, r), "--context "));
  REQUIRE(context > 2048);
  largest_is(r.context_tokens, context, 1);

  r.context_tokens = 32768;
  r.max_running = 64;
  const auto running = static_cast<int>(number_after(refusal(machine, model, r), "--max-running "));
  REQUIRE(running > 1);
  largest_is(r.max_running, running, 1);

  r.expert_slots = 9000;
  const auto slots = number_after(refusal(machine, model, r), "--expert-slots ");
  REQUIRE(slots > 8);
  largest_is(r.expert_slots, slots, 1u);

  r.kv_bytes = 8 * gib;
  const auto text = refusal(machine, model, r);
  const auto mebibytes = number_after(text, "--kv-bytes ");
  REQUIRE(mebibytes > 0);
  CHECK(contains(text, "--kv-bytes " + std::to_string(mebibytes) + "MiB"));
  largest_is(r.kv_bytes, mebibytes * mib, mib);

  r.step_tokens = 100'000;
  const auto steps = static_cast<int>(number_after(refusal(machine, model, r), "steps of "));
  REQUIRE(steps > 64);
  largest_is(r.step_tokens, steps, 1);

  r.state_snapshots = 200;
  const auto snapshots = static_cast<int>(number_before(refusal(machine, model, r), " state snapshots\n"));
  REQUIRE(snapshots > 0);
  largest_is(r.state_snapshots, snapshots, 1);
}

TEST_CASE("plan: where no wish alone is too large, a refusal names all that would fit together") {
  plan_request r;
  r.context_tokens = 262144;
  r.max_running = 200;
  const auto text = refusal(card(6 * gib), large_moe(), r);
  CHECK(number_after(text, "--max-running ") == 0);  // not alone
  const auto context = number_after(text, "--context ");
  REQUIRE(context > 0);
  const std::string second = "--context " + std::to_string(context) + " --max-running ";
  REQUIRE(contains(text, second));
  r.context_tokens = static_cast<int>(context);
  r.max_running = std::stoi(text.substr(text.find(second) + second.size()));
  CHECK(refusal(card(6 * gib), large_moe(), r).empty());
  // Both are as large as the other lets them be.
  ++*r.context_tokens;
  CHECK(!refusal(card(6 * gib), large_moe(), r).empty());
  --*r.context_tokens, ++*r.max_running;
  CHECK(!refusal(card(6 * gib), large_moe(), r).empty());
}

TEST_CASE("plan: a wish that cannot be comes with wishes that can, where there are any") {
  const auto proposals = [](const memory_model& model, const plan_request& r, std::uint64_t memory) {
    std::string texts;
    try {
      static_cast<void>(plan_memory(card(memory), model, r));
    } catch (const wish_refused& refused) {
      for (const auto& p : refused.proposals()) texts += p.text + ";";
    }
    return texts;
  };
  const auto model = large_moe();
  plan_request r;
  r.expert_slots = 10241;
  CHECK(proposals(model, r, 64 * gib) == "--expert-slots 10240;");
  r.expert_slots = 100, r.max_running = 16;  // 8 experts a token
  CHECK(proposals(model, r, 12 * gib) == "--max-running 12;--expert-slots 128;");
  CHECK(proposals(model, r, 2 * gib).empty());  // the model does not fit, whatever is wished
  r = {};
  r.context_tokens = 300'000;
  CHECK(proposals(model, r, 64 * gib) == "--context 262144;");
  r.max_running = 2000;  // neither is enough alone
  CHECK(proposals(model, r, 1024 * gib) == "--context 262144 --max-running 1024;");
  r = {};
  r.context_tokens = 65536, r.kv_bytes = 512 * mib;
  const std::string text =
      proposals(model, r, 12 * gib);  // 1638 pages, the dummy among them; 4097 are needed
  CHECK(text == "--context 26192;--kv-bytes 1342504960;");
  r.context_tokens = -1;  // less than nothing is no number to start from
  CHECK(proposals(model, r, 12 * gib).empty());
  r = {};
  r.granule_bytes = 0;
  CHECK(proposals(model, r, 64 * gib).empty());
}

TEST_CASE("plan: proposals are for programs what their text is for people") {
  plan_request r;
  r.context_tokens = 262144, r.max_running = 200, r.vram_limit_bytes = 5 * gib;
  try {
    static_cast<void>(plan_memory(card(6 * gib), large_moe(), r));
    FAIL("not refused");
  } catch (const plan_refused& refused) {
    REQUIRE(refused.proposals().size() == 2);
    const auto& changes = refused.proposals()[0].changes;
    REQUIRE(changes.size() == 2);
    CHECK((changes[0].what == wish::context_tokens && changes[1].what == wish::max_running));
    CHECK(refused.proposals()[0].text == "--context " + std::to_string(*changes[0].value) +
                                             " --max-running " + std::to_string(*changes[1].value));
    const auto& budget = refused.proposals()[1];
    REQUIRE(budget.changes.size() == 2);
    CHECK((budget.changes[0].what == wish::more_memory_bytes &&
           budget.changes[1].what == wish::vram_limit_bytes));
    CHECK(budget.text == mebibytes_at_least(*budget.changes[0].value) + " more memory and --vram-limit " +
                             mebibytes_at_least(*budget.changes[1].value));
    for (const auto& p : refused.proposals()) CHECK(contains(refused.what(), "\n  " + p.text));
  }
}

TEST_CASE("plan: a refusal under a limit names the limit, and memory only where more is needed") {
  plan_request r;
  r.vram_limit_bytes = 300 * mib;  // less than the context alone
  auto text = refusal(card(12 * gib), large_moe(), r);
  CHECK(contains(text, "the driver's context alone takes 500.0 MiB, more than the 300.0 MiB there are"));
  CHECK(!contains(text, "more memory"));
  r.vram_limit_bytes = number_after(text, "--vram-limit ") * mib;
  CHECK(refusal(card(12 * gib), large_moe(), r).empty());
  *r.vram_limit_bytes -= 2 * mib;
  CHECK(!refusal(card(12 * gib), large_moe(), r).empty());
  r.vram_limit_bytes = 300 * mib;
  text = refusal(card(2 * gib), large_moe(), r);
  const auto more = number_before(text, "MiB more memory and --vram-limit ");
  REQUIRE(more > 0);
  r.vram_limit_bytes = 2 * gib + more * mib;
  CHECK(refusal(card(2 * gib + more * mib), large_moe(), r).empty());
  r.vram_limit_bytes = 2 * gib + (more - 1) * mib;
  CHECK(!refusal(card(2 * gib + (more - 1) * mib), large_moe(), r).empty());
}
