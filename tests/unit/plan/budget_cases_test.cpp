// SPDX-License-Identifier: Apache-2.0
// Field cases of memory budgets, by their number. Those about a model's byte counts are in
// model_plan_test.cpp.
#include "example_model.hpp"
#include "nibble/plan/planner.hpp"
#include "support/catch.hpp"

using namespace nibble;
using namespace nibble::test;

namespace {

std::string note_with(const memory_plan& p, const std::string& part) {
  for (const auto& note : p.notes)
    if (contains(note, part)) return note;
  return "";
}

}  // namespace

TEST_CASE("C058: weights, then what must be, then the workspace wish, then KV, which shrinks") {
  memory_model m;
  m.weight_bytes = 23 * gib;
  m.state_slot_bytes = 400 * mib;  // four running and the dummy: 2 GiB that must be
  m.workspace_bytes = [](const step_limits& l) {
    return static_cast<std::uint64_t>(l.step_tokens) * 4 * mib;
  };
  m.kv_page_bytes = mib;
  m.page_tokens = 16;
  m.max_context_tokens = 12 * 1024 * 16;  // 12 GiB of pages
  plan_request r;
  r.max_running = 4;
  auto p = plan_memory(card(32 * gib), m, r);
  CHECK(p.limits.step_tokens == 1024);  // the wish of 4 GiB is met
  CHECK(p.lines[ledger_line::workspace].planned_bytes == 4 * gib);
  CHECK(p.lines[ledger_line::states].planned_bytes == 2000 * mib);
  CHECK(p.kv_pages > 1024);
  CHECK(p.kv_pages < 12 * 1024);  // KV got what was left
  CHECK(p.lines.planned_total() <= 32 * gib);
  // Not even the least KV cache beside the weights: refused, with a line for each item.
  try {
    static_cast<void>(plan_memory(card(25 * gib), m, r));
    FAIL("not refused");
  } catch (const plan_refused& problem) {
    for (const char* line : {"weights", "workspace", "recurrent states", "KV pages", "reserve", "total"})
      CHECK(contains(problem.what(), line));
  }
}

TEST_CASE("C060: a draft part with weights and a cache of its own differs in just those") {
  const memory_model without = large_moe();
  memory_model with = without;
  const std::uint64_t draft_weights = 800 * mib, draft_page = without.kv_page_bytes / 10;
  with.weight_bytes += draft_weights;
  with.kv_page_bytes += draft_page;
  plan_request r;
  r.context_tokens = 262144;
  const auto machine = card(48 * gib);
  const auto p = plan_memory(machine, without, r), q = plan_memory(machine, with, r);
  CHECK(q.lines[ledger_line::weights].planned_bytes - p.lines[ledger_line::weights].planned_bytes ==
        draft_weights);
  CHECK(q.kv_pages == p.kv_pages);
  CHECK(q.lines[ledger_line::kv_pages].planned_bytes - p.lines[ledger_line::kv_pages].planned_bytes ==
        align_up(with.kv_page_bytes * q.kv_pages, 2 * mib) -
            align_up(without.kv_page_bytes * p.kv_pages, 2 * mib));
  // On a small card it costs slots or context, never a failure.
  for (std::uint64_t total = 5 * gib; total < 16 * gib; total += gib) {
    const auto s = plan_memory(card(total), without, {}), t = plan_memory(card(total), with, {});
    CHECK(t.expert_slots <= s.expert_slots);
    CHECK(t.lines.planned_total() <= total);
  }
}

TEST_CASE("C061: memory that comes and goes while it is measured") {
  const memory_model model = large_moe();
  machine_memory m = card(96 * gib);
  m.free_bytes = 82 * gib + 963 * mib;
  m.held_bytes = m.resident_bytes = 2506 * mib;
  m.free_now_bytes = 90 * gib + 174 * mib;
  const auto rise = plan_memory(m, model, {});
  CHECK(rise.budget_bytes == m.context_bytes + m.free_bytes);  // the lower reading
  m.free_now_bytes = m.free_bytes - m.held_bytes - 10 * gib;   // another process took 10 GiB half-way
  const auto fall = plan_memory(m, model, {});
  CHECK(fall.budget_bytes == rise.budget_bytes - 10 * gib);
  CHECK(!note_with(fall, "others took 10.00 GiB since the start").empty());
  m.free_now_bytes = 0;
  m.held_bytes = m.resident_bytes = 0;
  CHECK_THROWS_AS(plan_memory(m, model, {}), plan_refused);
  m = card(96 * gib);
  m.free_bytes = 97 * gib;  // more free than there is
  CHECK(contains(refusal(m, model), "the reading is wrong"));
  m = {};
  CHECK(contains(refusal(m, model), "no memory at all"));
}

TEST_CASE("C063: dense weights that leave no room are refused from byte counts alone") {
  memory_model m = large_moe();
  m.weight_bytes = static_cast<std::uint64_t>(9.9 * static_cast<double>(gib));
  plan_request r;
  r.expert_slots = 8 * 40;
  r.context_tokens = 65536;
  try {
    static_cast<void>(plan_memory(card(12 * gib), m, r));
    FAIL("not refused");
  } catch (const plan_refused& problem) {
    const std::string text = problem.what();
    CHECK(contains(text, "weights               9.90 GiB"));
    CHECK(contains(text, "320 of 10240 experts, 1.7 MiB each"));
    CHECK(contains(text, "\n  --context "));
    CHECK(problem.missing_bytes() > 0);
    CHECK(problem.lines()[ledger_line::expert_slots].planned_bytes == align_up(320 * 1'775'616, 2 * mib));
  }
  r.context_tokens.reset();
  r.expert_slots.reset();
  CHECK(plan_memory(card(12 * gib), m, r).expert_slots >= 8);
}

TEST_CASE("C064: the budget steps down from two layers of slots to a token's, and then refuses") {
  memory_model m = large_moe();
  m.kernel_bytes = m.graph_bytes = m.state_slot_bytes = 0;
  m.workspace_bytes = nullptr;
  m.weight_bytes = 2 * gib;
  m.kv_page_bytes = 0;
  plan_request r;
  r.max_running = 1;
  r.granule_bytes = 1;
  r.reserve_bytes = 0;
  const auto with_slots = [&](std::uint64_t slots) {
    return plan_memory(card(500 * mib + 2 * gib + slots * m.expert_slot_bytes), m, r);
  };
  struct step {
    std::uint64_t slots;
    expert_residency residency;
    const char* note;
  };
  for (const step s : {step{512, expert_residency::two_layers, ""},
                       step{511, expert_residency::one_layer, "does not overlap"},
                       step{256, expert_residency::one_layer, "does not overlap"},
                       step{255, expert_residency::part_of_layer, "in pieces"},
                       step{8, expert_residency::part_of_layer, "in pieces"}}) {
    const auto p = with_slots(s.slots);
    CHECK(p.expert_slots == s.slots);
    CHECK(p.residency == s.residency);
    CHECK((s.note[0] == '\0' || !note_with(p, s.note).empty()));
  }
  CHECK_THROWS_AS(with_slots(7), plan_refused);
}

TEST_CASE("C065: what others and the operating system hold is not ours") {
  const memory_model model = large_moe();
  machine_memory m;
  m.total_bytes = 8 * gib;
  m.free_bytes = static_cast<std::uint64_t>(5.4 * static_cast<double>(gib));
  auto p = plan_memory(m, model, {});
  CHECK(p.budget_bytes == m.free_bytes);
  CHECK(p.lines.planned_total() <= m.free_bytes);
  CHECK(note_with(p, "reserve") == "reserve: 1/64 of 5.40 GiB, within 64 and 512 MiB");
  CHECK(p.lines[ledger_line::reserve].planned_bytes == m.free_bytes / 64);
  m.total_bytes = 24 * gib;
  m.free_bytes = 23 * gib + gib / 2;
  p = plan_memory(m, model, {});
  CHECK(p.lines[ledger_line::reserve].planned_bytes == m.free_bytes / 64);
  m.total_bytes = 8 * gib;
  m.free_bytes = 8 * gib - 100 * mib;
  m.os_budget_bytes = 7600 * mib;
  m.os_used_bytes = 140 * mib;
  p = plan_memory(m, model, {});
  CHECK(p.budget_bytes == 7460 * mib);
  CHECK(!note_with(p, "the operating system leaves 7.29 GiB").empty());
  m.os_used_bytes = 8 * gib;  // over its budget already
  CHECK_THROWS_AS(plan_memory(m, model, {}), plan_refused);
}

TEST_CASE("C067: snapshots of recurrent states are on the ledger, at full size") {
  plan_request none, some;
  some.state_snapshots = 20;
  const auto p = plan_memory(card(12 * gib), large_moe(), none),
             q = plan_memory(card(12 * gib), large_moe(), some);
  CHECK(q.state_slots == p.state_slots + 20);
  CHECK(q.lines[ledger_line::states].planned_bytes - p.lines[ledger_line::states].planned_bytes >=
        20 * large_moe().state_slot_bytes - 2 * mib);
  CHECK(q.expert_slots < p.expert_slots);
  CHECK(q.lines.planned_total() <= 12 * gib);
}
