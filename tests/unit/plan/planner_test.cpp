// SPDX-License-Identifier: Apache-2.0
// The rule of the split and the user's wishes.
#include "nibble/plan/planner.hpp"

#include "example_model.hpp"
#include "nibble/plan/replan.hpp"
#include "support/catch.hpp"

using namespace nibble;
using namespace nibble::test;

namespace {

bool has_note(const memory_plan& plan, const std::string& part) {
  for (const auto& note : plan.notes)
    if (contains(note, part)) return true;
  return false;
}

}  // namespace

TEST_CASE("plan: preferred context and concurrency, then expert slots") {
  const auto p = plan_memory(card(12 * gib), large_moe(), {});
  CHECK(p.limits.running == 4);
  CHECK(p.limits.step_tokens == 1024);
  CHECK(p.limits.context_tokens == 32768);
  CHECK(p.kv_pages == 32768 / 16 + 3 + 1);
  CHECK(p.state_slots == 5);
  CHECK(p.captured_sizes == std::vector<int>{1, 2, 4});
  CHECK(p.expert_slots > 4000);
  CHECK(p.expert_slots < 5000);
  CHECK(p.residency == expert_residency::two_layers);
  // Less than one more slot is left over.
  CHECK(p.lines.planned_total() <= 12 * gib);
  CHECK(p.lines.planned_total() + 1'775'616 + 2 * mib > 12 * gib);
}

TEST_CASE("plan: what is left when all experts are resident goes to the KV cache") {
  const auto p = plan_memory(card(24 * gib), large_moe(), {});
  CHECK(p.expert_slots == 10240);
  CHECK(p.residency == expert_residency::all);
  CHECK(p.limits.context_tokens > 100'000);
  CHECK(p.limits.context_tokens == static_cast<int>(p.kv_pages - 4) * 16);
  const auto q = plan_memory(card(141 * gib), large_moe(), {});
  CHECK(q.limits.context_tokens == 262144);
  CHECK(q.kv_pages == 4 * 262144 / 16 + 1);  // nobody can use more
  CHECK(q.lines.planned_total() < 42 * gib);
}

TEST_CASE("plan: experts in host memory take addresses on the device, all experts on the device none") {
  auto m = large_moe();
  const auto without = plan_memory(card(12 * gib), m, {});
  m.expert_map_bytes = 34 * mib;
  const auto with = plan_memory(card(12 * gib), m, {});
  CHECK(with.lines[ledger_line::expert_slots].planned_bytes ==
        align_up(with.expert_slots * m.expert_slot_bytes, 2 * mib) + 34 * mib);
  CHECK(with.expert_slots < without.expert_slots);
  CHECK(with.expert_slots + 21 > without.expert_slots);
  CHECK(with.lines.planned_total() <= 12 * gib);
  // So do tables, more of them with more slots.
  auto tabled = m;
  tabled.expert_table_bytes = [](std::uint64_t slots) { return mib + 20 * 1024 * slots; };
  const auto fewer = plan_memory(card(12 * gib), tabled, {});
  CHECK(fewer.expert_slots < with.expert_slots);
  const std::uint64_t tables = tabled.expert_table_bytes(fewer.expert_slots);
  CHECK(fewer.lines[ledger_line::expert_slots].planned_bytes ==
        align_up(fewer.expert_slots * m.expert_slot_bytes, 2 * mib) + align_up(tables, 2 * mib) + 34 * mib);
  CHECK(fewer.lines.planned_total() <= 12 * gib);
  CHECK(contains(fewer.lines.text(), bytes_text(tables) + " of tables, 34.0 MiB of page tables"));
  // Room for all experts, but not for their addresses beside all but one of them.
  plan_request all;
  all.expert_slots = m.experts;
  all.kv_bytes = 256 * mib, all.reserve_bytes = 512 * mib;
  const std::uint64_t enough = plan_memory(card(24 * gib), m, all).lines.planned_total();
  plan_request free = all;
  free.expert_slots.reset();
  const auto resident = plan_memory(card(enough), m, free);
  CHECK(resident.expert_slots == m.experts);
  CHECK(resident.lines.planned_total() <= enough);
  CHECK(plan_memory(card(enough - 2 * mib), m, free).expert_slots < m.experts);
}

TEST_CASE(
    "plan: nothing is refused where all experts take no more than few and the addresses of the others") {
  auto m = large_moe();
  for (const auto& [layers, bytes] : {std::pair(4u, 19'968u), std::pair(1u, 1'775'616u)}) {
    // Small experts: rounded up, eight take as much as all. One layer: a step may ask for each of its
    // experts.
    m.layer_experts = bytes < mib ? 16 : 8, m.experts = layers * m.layer_experts, m.expert_slot_bytes = bytes;
    m.expert_map_bytes = m.experts * m.expert_slot_bytes / 512;
    plan_request least;
    least.reserve_bytes = 64 * mib, least.max_running = 1, least.context_tokens = 2048,
    least.step_tokens = 64;
    least.expert_slots = m.experts, least.kv_bytes = 129 * m.kv_page_bytes;
    const std::uint64_t enough = plan_memory(card(24 * gib), m, least).lines.planned_total();
    least.expert_slots.reset();
    CHECK(plan_memory(card(enough), m, least).expert_slots == m.experts);
  }
}

TEST_CASE("plan: nothing is kept for padding rows that write nowhere") {
  auto model = large_moe();
  const auto with = plan_memory(card(12 * gib), model, {});
  model.padding_writes = false;
  const auto without = plan_memory(card(12 * gib), model, {});
  CHECK(without.state_slots == with.state_slots - 1);
  CHECK(without.kv_pages == with.kv_pages - 1);
  CHECK(without.expert_slots >= with.expert_slots + 30);  // 62 MiB
  CHECK(without.limits.context_tokens == with.limits.context_tokens);
  CHECK(contains(with.lines.text(), "1 dummy"));
  CHECK(!contains(without.lines.text(), "dummy"));
  plan_request r;
  r.kv_bytes = 640 * mib;
  CHECK(plan_memory(card(12 * gib), model, r).limits.context_tokens == (2048 - 3) * 16);
}

TEST_CASE("plan: steps are larger where experts must be fetched and there is room for it") {
  plan_request r;
  r.preferred_step_tokens = 512;
  r.preferred_step_tokens_fetching = 4096;
  CHECK(plan_memory(card(24 * gib), large_moe(), r).limits.step_tokens == 512);  // all are resident
  // Twice the tokens while they take no more than an eighth of the slots.
  const auto slots_with = [](int tokens) {
    plan_request only;
    only.preferred_step_tokens = tokens;
    return plan_memory(card(12 * gib), large_moe(), only).expert_slots;
  };
  const auto least = slots_with(512) - slots_with(512) / 8;
  const auto fetching = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(fetching.limits.step_tokens == 2048);
  CHECK(fetching.expert_slots == slots_with(2048));
  CHECK(slots_with(2048) >= least);
  CHECK(slots_with(4096) < least);
  CHECK(fetching.residency == expert_residency::two_layers);
  CHECK(fetching.lines.planned_total() <= 12 * gib);
  r.step_tokens = 512;
  CHECK(plan_memory(card(12 * gib), large_moe(), r).limits.step_tokens == 512);  // a wish is kept
  r.step_tokens.reset();
  // A card on which larger steps would leave fewer slots than two layers keeps the smaller ones.
  for (std::uint64_t bytes = 4200 * mib; bytes < 7000 * mib; bytes += 50 * mib) {
    plan_request small;
    small.preferred_step_tokens = 512;
    memory_plan before;
    try {
      before = plan_memory(card(bytes), large_moe(), small);
    } catch (const plan_refused&) {
      continue;
    }
    const auto after = plan_memory(card(bytes), large_moe(), r);
    CHECK(after.residency == before.residency);
    CHECK(after.limits.running >= before.limits.running);
    CHECK(after.limits.context_tokens >= before.limits.context_tokens);
  }
}

TEST_CASE("plan: no card is refused for larger steps that are only preferred") {
  for (const int preferred : {8, 512}) {
    int planned = 0;
    for (std::uint64_t bytes = 4200 * mib; bytes < 5200 * mib; bytes += 1 * mib) {
      plan_request r;
      r.expert_slots = 600;  // named, so that the least plan may be all there is room for
      r.preferred_step_tokens = preferred;
      try {
        static_cast<void>(plan_memory(card(bytes), large_moe(), r));
      } catch (const plan_refused&) {
        continue;
      }
      ++planned;
      r.preferred_step_tokens_fetching = 4096;
      CHECK_NOTHROW(plan_memory(card(bytes), large_moe(), r));
    }
    CHECK(planned > 0);
  }
}

TEST_CASE("plan: every wish is kept to the letter") {
  plan_request r;
  r.context_tokens = 65536;
  r.max_running = 2;
  r.step_tokens = 512;
  r.expert_slots = 1000;
  r.state_snapshots = 3;
  r.vram_limit_bytes = 10 * gib;
  const auto p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(p.limits.context_tokens == 65536);
  CHECK(p.limits.running == 2);
  CHECK(p.limits.step_tokens == 512);
  CHECK(p.expert_slots == 1000);
  CHECK(p.state_slots == 2 + 3 + 1);
  CHECK(p.budget_bytes == 10 * gib);
  CHECK(p.kv_pages == 2 * 65536 / 16 + 1);  // all the slots asked for are there, so pages come next
  r.expert_slots.reset();
  r.kv_bytes = 2 * gib;
  const auto q = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(q.kv_pages == 2 * gib / (16 * 20480));
  CHECK(q.lines[ledger_line::kv_pages].planned_bytes <= 2 * gib);
}

TEST_CASE("plan: the context follows from the KV bytes when only those are named") {
  plan_request r;
  r.kv_bytes = 640 * mib;  // 2048 pages: three for further sequences, one dummy
  const auto p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(p.kv_pages == 2048);
  CHECK(p.limits.running == 4);
  CHECK(p.limits.context_tokens == (2048 - 4) * 16);
  CHECK(p.expert_slots > 4000);
}

TEST_CASE("plan: few pages or slots leave room for fewer sequences") {
  plan_request r;
  r.kv_bytes = 131 * 16 * 20480;  // a context of 2048 is 128 pages, so two more sequences
  auto p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(p.limits.running == 3);
  CHECK(p.limits.context_tokens == 2048);
  r = {};
  r.expert_slots = 20;  // two tokens' worth
  p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(p.limits.running == 2);
  CHECK(p.expert_slots == 20);
  CHECK(p.residency == expert_residency::part_of_layer);
}

TEST_CASE("plan: without graphs nothing is captured and nothing is counted for them") {
  plan_request r;
  r.graphs = false;
  const auto p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(p.captured_sizes.empty());
  CHECK(p.lines[ledger_line::graphs].planned_bytes == 0);
}

TEST_CASE("plan: captured sizes of one's own") {
  plan_request r;
  r.captured_sizes = {3, 1, 3, 64};  // more than can run are left out
  const auto p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(p.captured_sizes == std::vector<int>{1, 3});
  CHECK(p.lines[ledger_line::graphs].planned_bytes == 2 * 4 * mib);
}

TEST_CASE("plan: batches beyond the largest captured one have no graph") {
  plan_request r;
  r.max_running = 32;
  r.most_captured_rows = 6;
  const auto p = plan_memory(card(24 * gib), large_moe(), r);
  CHECK(p.captured_sizes == std::vector<int>{1, 2, 4, 6});
  CHECK(p.lines[ledger_line::graphs].planned_bytes == 4 * 4 * mib);
}

TEST_CASE("plan: what a wish takes from what is preferred is told") {
  plan_request r;
  auto p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(!has_note(p, "instead of"));
  r.kv_bytes = 131 * 16 * 20480 + 1000;
  p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(has_note(p, "sequences at once 3 instead of 4: --kv-bytes has no more pages"));
  CHECK(has_note(p, "context 2048 instead of 32768: --kv-bytes has no more pages"));
  CHECK(has_note(p, "--kv-bytes is 131 pages of 320.0 KiB and 1000 B that are not used"));
  r = {};
  r.context_tokens = 2048;
  r.max_running = 1;
  r.kv_bytes = 512 * mib;
  p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(has_note(p, "--kv-bytes is 1638 pages: 1 sequence at once can use 129"));
  r = {};
  r.expert_slots = 20;
  p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(has_note(p, "sequences at once 2 instead of 4: --expert-slots 20"));
  r = {};
  r.vram_limit_bytes = 3500 * mib;
  p = plan_memory(card(12 * gib), large_moe(), r);
  CHECK(has_note(p, "instead of 4: --vram-limit leaves no more"));
  CHECK(has_note(plan_memory(card(3500 * mib), large_moe(), {}), "instead of 4: memory is short"));
}

TEST_CASE("plan: one of a thing is not many") {
  plan_request r;
  r.max_running = 1;
  r.step_tokens = 1;
  r.state_snapshots = 1;
  const auto lines = plan_memory(card(12 * gib), large_moe(), r).lines;
  CHECK(lines[ledger_line::graphs].note == "1 size");
  CHECK(lines[ledger_line::workspace].note == "1 token a step");
  CHECK(contains(lines[ledger_line::states].note, "1 running, 1 snapshot, 1 dummy"));
  r.expert_slots = 7;
  CHECK(
      contains(refusal(card(12 * gib), large_moe(), r), "a step of 1 sequence asks for up to 8 (8 experts"));
  r = {};
  r.max_running = 16;
  r.expert_slots = 100;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "100 do for 12 sequences"));
  r = {};
  r.context_tokens = 65536;
  r.kv_bytes = 512 * mib;
  CHECK(contains(refusal(card(12 * gib), large_moe(), r), "1638 pages hold a context of 26192 tokens"));
}

TEST_CASE("plan: a model without experts, states or KV cache") {
  memory_model m = large_moe();
  m.expert_slot_bytes = 0;
  auto p = plan_memory(card(12 * gib), m, {});
  CHECK(p.expert_slots == 0);
  CHECK(p.residency == expert_residency::none);
  CHECK(p.limits.context_tokens > 32768);
  m.state_slot_bytes = 0;
  m.kv_page_bytes = 0;
  p = plan_memory(card(12 * gib), m, {});
  CHECK(p.limits.context_tokens == 262144);
  plan_request r;
  r.expert_slots = 8;
  CHECK(contains(refusal(card(12 * gib), m, r), "0 routed experts that could be swapped"));
}

TEST_CASE("replan: memory is given up in the reverse order and comes back no further than before") {
  const memory_model model = large_moe();
  const machine_memory start = card(24 * gib);
  const auto first = plan_memory(start, model, {});
  const auto machine_with = [&](std::uint64_t taken_by_others) {
    machine_memory m = start;
    const std::uint64_t held = first.lines.planned_total() - first.lines[ledger_line::context].planned_bytes -
                               first.lines[ledger_line::reserve].planned_bytes;
    m.held_bytes = held;
    m.free_now_bytes = m.free_bytes - held - std::min(m.free_bytes - held, taken_by_others);
    return m;
  };
  // The reserve is 384 MiB. Memory that others took comes from pages first, then from slots.
  auto p = replan_memory(machine_with(300 * mib), model, {}, first, 0);
  CHECK(p.expert_slots == first.expert_slots);
  CHECK(p.kv_pages < first.kv_pages);
  CHECK(p.lines[ledger_line::reserve].planned_bytes == first.lines[ledger_line::reserve].planned_bytes);
  CHECK(p.limits.running == first.limits.running);
  CHECK(p.lines[ledger_line::workspace].planned_bytes == first.lines[ledger_line::workspace].planned_bytes);

  machine_memory other = start;  // the other program takes 8 GiB in the end
  other.held_bytes = 12 * gib;
  other.free_now_bytes = start.free_bytes - 12 * gib - 8 * gib;
  p = replan_memory(other, model, {}, first, 0);
  CHECK(p.expert_slots < first.expert_slots);
  CHECK(p.limits.context_tokens == 32768);
  // Experts of which there is no other copy stay: then pages are all there is to give up.
  memory_model staying = model;
  staying.all_experts_stay = true;
  const auto kept = replan_memory(machine_with(300 * mib), staying, {}, first, 0);
  CHECK(kept.expert_slots == first.expert_slots);
  CHECK(kept.kv_pages == replan_memory(machine_with(300 * mib), model, {}, first, 0).kv_pages);
  CHECK_THROWS_AS(replan_memory(other, staying, {}, first, 0), plan_refused);
  // Pages that hold something stay: no fewer, and no other one for the dummy, which is page 0 of them.
  for (const bool dummy : {true, false}) {
    memory_model padded = model;
    padded.padding_writes = dummy;
    const auto pinned = replan_memory(other, padded, {}, first, 5000);
    CHECK(pinned.kv_pages == 5000);
    CHECK(pinned.expert_slots < p.expert_slots);
    CHECK(replan_memory(other, padded, {}, first, first.kv_pages).kv_pages == first.kv_pages);
  }

  other.free_now_bytes = start.free_bytes - 12 * gib;
  p = replan_memory(other, model, {}, first, 0);
  CHECK(p.expert_slots == first.expert_slots);
  CHECK(p.kv_pages == first.kv_pages);
  CHECK(p.limits.context_tokens == first.limits.context_tokens);

  // What the user asked for gives way when memory vanishes.
  plan_request r;
  r.expert_slots = 8000;
  const auto asked = plan_memory(start, model, r);
  other.free_now_bytes = start.free_bytes - 12 * gib - 11 * gib;
  CHECK(replan_memory(other, model, r, asked, 0).expert_slots < 8000);
}
