// SPDX-License-Identifier: Apache-2.0
// 100,000 random machines and models: never over budget, monotone, and refusals that are right.
#include <algorithm>
#include <cmath>
#include <optional>
#include <random>

#include "example_model.hpp"
#include "nibble/plan/planner.hpp"
#include "support/catch.hpp"

using namespace nibble;
using namespace nibble::test;

namespace {

struct world {
  machine_memory machine;
  memory_model model;
  plan_request request;
};

class generator {
 public:
  explicit generator(std::uint64_t seed) : random_(seed) {}

  /// Log-uniform, so that small and large are equally likely; 0 now and then.
  std::uint64_t size(std::uint64_t most) {
    if (chance(12)) return 0;
    const double top = std::log2(static_cast<double>(most));
    const auto value =
        static_cast<std::uint64_t>(std::exp2(std::uniform_real_distribution<double>(0, top)(random_)));
    return std::min(value, most);
  }
  /// Between a quarter GiB and 192 GiB, log-uniform; 0 or a few bytes now and then.
  std::uint64_t memory() {
    if (chance(20)) return size(gib);
    return static_cast<std::uint64_t>(std::exp2(std::uniform_real_distribution<double>(28, 37.6)(random_)));
  }
  std::uint64_t share_of(std::uint64_t bytes) { return bytes - size(std::max<std::uint64_t>(bytes, 1)); }
  int number(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }
  bool chance(int one_in) { return number(1, one_in) == 1; }

  world make() {
    world w;
    auto& m = w.model;
    const bool extreme = chance(40);  // byte counts near the end of 64 bits
    const std::uint64_t top = extreme ? UINT64_MAX : 32 * gib;
    m.weight_bytes = size(top / 4);
    m.kernel_bytes = size(64 * mib);
    m.graph_bytes = size(32 * mib);
    m.max_context_tokens = number(1, chance(3) ? 1 << 20 : 40000);
    m.page_tokens = number(1, 64);
    m.state_slot_bytes = size(extreme ? top / 2 : 128 * mib);
    m.kv_page_bytes = size(extreme ? top / 2 : 4 * mib);
    m.expert_slot_bytes = size(extreme ? top / 2 : 16 * mib);
    m.layer_experts = static_cast<std::uint64_t>(number(1, 512));
    m.experts = m.layer_experts * static_cast<std::uint64_t>(number(1, 96));
    m.experts_per_token = static_cast<std::uint64_t>(number(1, 16));
    m.expert_map_bytes = chance(2) ? 0 : size(extreme ? top / 2 : 256 * mib);
    if (chance(2))
      m.expert_table_bytes = [fixed = size(extreme ? top / 2 : 4 * mib),
                              each = size(4096)](std::uint64_t slots) {
        return saturating_add(fixed, saturating_multiply(each, slots));
      };
    const std::uint64_t token = size(extreme ? top : 2 * mib), row = size(4 * mib), entry = size(64);
    m.workspace_bytes = [=](const step_limits& l) {
      const auto of = [](std::uint64_t a, int b) {
        return saturating_multiply(a, static_cast<std::uint64_t>(b));
      };
      return saturating_add(of(token, l.step_tokens),
                            saturating_add(of(row, l.running), of(of(entry, l.running), l.context_tokens)));
    };
    auto& c = w.machine;
    c.total_bytes = memory() + 1;
    c.context_bytes = std::min(c.total_bytes, size(gib));
    c.free_bytes = share_of(c.total_bytes - c.context_bytes);
    if (chance(4)) {
      c.free_now_bytes = share_of(c.total_bytes);
      c.held_bytes = size(8 * gib);
      c.resident_bytes = std::min(c.held_bytes, size(8 * gib));
    }
    if (chance(8)) {
      c.os_budget_bytes = memory();
      c.os_used_bytes = size(2 * gib);
    }
    auto& r = w.request;
    if (chance(4)) r.vram_limit_bytes = memory();
    if (chance(6)) r.context_tokens = number(1, m.max_context_tokens + (chance(4) ? 100 : 0));
    if (chance(6)) r.max_running = number(1, 64);
    if (chance(4)) r.step_tokens = number(1, 8192);
    if (chance(6)) r.expert_slots = size(m.experts + 1);
    if (chance(6)) r.kv_bytes = size(16 * gib);
    if (chance(8)) r.reserve_bytes = size(gib);
    if (chance(6)) r.state_snapshots = number(0, 40);
    if (chance(6)) r.graphs = false;
    if (chance(6)) r.pinned_pages = size(5000);
    if (chance(8)) r.captured_sizes = {number(1, 4), number(1, 64)};
    if (chance(4)) r.granule_bytes = std::uint64_t{1} << number(0, 25);
    if (chance(6)) r.most_captured_rows = number(1, 32);
    r.preferred_running = number(1, 16);
    r.preferred_step_tokens = number(1, 4096);
    m.padding_writes = !chance(3);
    if (chance(6)) {  // much is wished for at once
      if (!chance(3)) r.context_tokens = number(std::max(1, m.max_context_tokens / 2), m.max_context_tokens);
      if (!chance(3)) r.max_running = number(16, 1024);
      if (!chance(3)) r.step_tokens = number(1024, 65536);
      if (!chance(3)) r.expert_slots = m.experts - size(m.experts);
      if (!chance(3)) r.kv_bytes = size(64 * gib);
    }
    return w;
  }

 private:
  std::mt19937_64 random_;
};

struct refusal_seen {
  std::uint64_t missing = 0;
  std::string text;
  std::vector<plan_proposal> proposals;
};

std::optional<memory_plan> attempt(const world& w, refusal_seen* refusal = nullptr) {
  try {
    return plan_memory(w.machine, w.model, w.request);
  } catch (const plan_refused& problem) {
    if (refusal != nullptr) *refusal = {problem.missing_bytes(), problem.what(), problem.proposals()};
    return std::nullopt;
  } catch (const wish_refused& problem) {
    if (refusal != nullptr) *refusal = {0, problem.what(), problem.proposals()};
    return std::nullopt;
  }
}

/// Bytes of the plan worked out again from its counts.
std::uint64_t recount(const world& w, const memory_plan& p) {
  const std::uint64_t granule = w.request.granule_bytes;
  std::uint64_t sum = w.machine.context_bytes + p.lines[ledger_line::reserve].planned_bytes;
  const auto add = [&](std::uint64_t count, std::uint64_t bytes) {
    const auto product = checked_multiply(count, bytes);
    sum = product ? saturating_add(sum, align_up(*product, granule)) : UINT64_MAX;
  };
  add(1, w.model.kernel_bytes);
  add(1, w.model.weight_bytes);
  add(1, w.model.workspace_bytes(p.limits));
  add(p.captured_sizes.size(), w.model.graph_bytes);
  add(p.state_slots, w.model.state_slot_bytes);
  add(p.kv_pages, w.model.kv_page_bytes);
  add(p.expert_slots, w.model.expert_slot_bytes);
  if (w.model.expert_slot_bytes > 0 && p.expert_slots < w.model.experts) {
    const std::uint64_t tables = w.model.expert_table_bytes ? w.model.expert_table_bytes(p.expert_slots) : 0;
    add(1, saturating_add(w.model.expert_map_bytes, tables));
  }
  return sum;
}

/// The first rule that `p` breaks, or "".
std::string broken_rule(const world& w, const memory_plan& p) {
  const auto& r = w.request;
  std::uint64_t budget = w.machine.context_bytes + w.machine.free_bytes;
  if (r.vram_limit_bytes) budget = std::min(budget, *r.vram_limit_bytes);
  if (p.budget_bytes > budget) return "the budget is more than there is";
  if (p.lines.planned_total() > p.budget_bytes) return "over budget";
  if (recount(w, p) != p.lines.planned_total()) return "the lines are not the counts";
  const auto context = static_cast<std::uint64_t>(p.limits.context_tokens);
  const auto running = static_cast<std::uint64_t>(p.limits.running);
  const std::uint64_t dummies = w.model.padding_writes ? 1 : 0;
  if (w.model.kv_page_bytes > 0 &&
      p.kv_pages <
          divide_up(context, static_cast<std::uint64_t>(w.model.page_tokens)) + running - 1 + dummies)
    return "too few pages for a context, further sequences and the dummy";
  if (w.model.kv_page_bytes > 0 && p.kv_pages < r.pinned_pages) return "pinned pages are gone";
  if (p.state_slots != running + static_cast<std::uint64_t>(r.state_snapshots) + dummies)
    return "state slots";
  const std::uint64_t experts = w.model.expert_slot_bytes == 0 ? 0 : w.model.experts;
  if (p.expert_slots > experts) return "more slots than experts";
  if (p.expert_slots <
      std::min(experts, std::min(w.model.layer_experts, w.model.experts_per_token * running)))
    return "too few slots for one layer of a step";
  if (p.limits.context_tokens > w.model.max_context_tokens) return "the context is longer than the model's";
  if (r.context_tokens && p.limits.context_tokens != *r.context_tokens) return "--context was not kept";
  if (r.max_running && p.limits.running != *r.max_running) return "--max-running was not kept";
  if (r.step_tokens && p.limits.step_tokens != *r.step_tokens) return "step tokens were not kept";
  if (r.expert_slots && p.expert_slots != *r.expert_slots) return "--expert-slots was not kept";
  if (r.kv_bytes && w.model.kv_page_bytes > 0 && p.kv_pages != *r.kv_bytes / w.model.kv_page_bytes)
    return "--kv-bytes was not kept";
  if (r.graphs && r.captured_sizes.empty() &&
      p.captured_sizes.back() != std::min(p.limits.running, r.most_captured_rows))
    return "the largest batch has no graph";
  return "";
}

void give(world& w, std::uint64_t gift) {
  const auto add = [&](std::uint64_t& bytes) { bytes = saturating_add(bytes, gift); };
  add(w.machine.total_bytes);
  add(w.machine.free_bytes);
  if (w.machine.free_now_bytes) add(*w.machine.free_now_bytes);
  if (w.machine.os_budget_bytes) {  // what is used beyond the budget comes first
    w.machine.os_budget_bytes = std::max(*w.machine.os_budget_bytes, w.machine.os_used_bytes);
    add(*w.machine.os_budget_bytes);
  }
}

/// What was wished for; KV bytes count in pages, as proposals do.
std::optional<std::uint64_t> wished(const world& w, wish what) {
  const auto& r = w.request;
  switch (what) {
    case wish::context_tokens:
      return r.context_tokens;
    case wish::max_running:
      return r.max_running;
    case wish::step_tokens:
      return r.step_tokens;
    case wish::expert_slots:
      return r.expert_slots;
    case wish::kv_bytes:
      return *r.kv_bytes / w.model.kv_page_bytes;
    case wish::state_snapshots:
      return r.state_snapshots;
    case wish::vram_limit_bytes:
      return r.vram_limit_bytes;
    case wish::more_memory_bytes:
      break;
  }
  return std::nullopt;
}
/// Makes one change, `more` of it than was proposed.
void make_change(world& w, const wish_change& change, int more = 0) {
  auto& r = w.request;
  if (!change.value) {
    r.expert_slots.reset();  // nothing else may be dropped
    return;
  }
  const std::uint64_t value = *change.value;
  const int number = static_cast<int>(value) + more;
  switch (change.what) {
    case wish::context_tokens:
      r.context_tokens = number;
      break;
    case wish::max_running:
      r.max_running = number;
      break;
    case wish::step_tokens:
      r.step_tokens = number;
      break;
    case wish::expert_slots:
      r.expert_slots = more < 0 ? value - 1 : value + static_cast<std::uint64_t>(more);
      break;
    case wish::kv_bytes: {
      const std::uint64_t pages = value / w.model.kv_page_bytes;
      r.kv_bytes = more == 0 ? value : (more < 0 ? pages - 1 : pages + 1) * w.model.kv_page_bytes;
      break;
    }
    case wish::state_snapshots:
      r.state_snapshots = number;
      break;
    case wish::vram_limit_bytes:
      r.vram_limit_bytes = value;
      break;
    case wish::more_memory_bytes:
      give(w, value);
      break;
  }
}

struct proposals_seen {
  int budgets = 0, singles = 0, raised = 0, combinations = 0, instead_of_impossible = 0;
};

/// The first proposal that is wrong, or "". Each fits, and none of its numbers could be one larger, or one
/// less where it is above what was wished.
std::string wrong_proposal(const world& w, const refusal_seen& refusal, proposals_seen& seen) {
  for (const plan_proposal& proposal : refusal.proposals) {
    world changed = w;
    for (const auto& change : proposal.changes) make_change(changed, change);
    if (!attempt(changed)) return "does not fit: " + proposal.text;
    const bool impossible = refusal.text.find("any one of:") == std::string::npos;
    seen.instead_of_impossible += impossible;
    if (!impossible && ("\n" + refusal.text + "\n").find("\n  " + proposal.text + "\n") == std::string::npos)
      return "not in the text: " + proposal.text;
    const wish first = proposal.changes.front().what;
    if (first == wish::vram_limit_bytes || first == wish::more_memory_bytes) {
      ++seen.budgets;
      continue;
    }
    seen.combinations += proposal.changes.size() > 1;
    for (std::size_t i = 0; i < proposal.changes.size(); ++i) {
      const wish_change& change = proposal.changes[i];
      if (!change.value) continue;
      const bool raised = *change.value > wished(w, change.what).value_or(0) && change.what != wish::kv_bytes;
      const bool more_pages =
          change.what == wish::kv_bytes && *change.value / w.model.kv_page_bytes > *wished(w, change.what);
      seen.singles += proposal.changes.size() == 1;
      seen.raised += raised || more_pages;
      world further = w;
      for (std::size_t j = 0; j < proposal.changes.size(); ++j)
        make_change(further, proposal.changes[j], i != j ? 0 : raised || more_pages ? -1 : 1);
      if (attempt(further))
        return "not the " + std::string(raised ? "least" : "largest") + ": " + proposal.text;
    }
  }
  return "";
}

bool no_less(const memory_plan& more, const memory_plan& less) {
  return more.limits.step_tokens >= less.limits.step_tokens && more.limits.running >= less.limits.running &&
         more.limits.context_tokens >= less.limits.context_tokens && more.expert_slots >= less.expert_slots &&
         more.kv_pages >= less.kv_pages && more.state_slots >= less.state_slots;
}

}  // namespace

TEST_CASE("plan: 100,000 random machines and models") {
  generator random(20260830);
  int planned = 0, refused = 0;
  proposals_seen seen;
  for (int i = 0; i < 100'000; ++i) {
    const world w = random.make();
    refusal_seen refusal;
    const auto p = attempt(w, &refusal);
    INFO("world " << i);
    if (p) {
      ++planned;
      const std::string rule = broken_rule(w, *p);
      if (!rule.empty()) FAIL("world " << i << ": " << rule << "\n" << p->lines.text());
    } else {
      ++refused;
      const std::string wrong = wrong_proposal(w, refusal, seen);
      if (!wrong.empty()) FAIL("world " << i << ": " << wrong << "\n" << refusal.text);
    }
    // More memory never means less of anything, and never a refusal.
    world richer = w;
    const std::uint64_t gift =
        refusal.missing != 0 && random.chance(2) ? refusal.missing : random.size(16 * gib);
    give(richer, gift);
    if (richer.request.vram_limit_bytes)
      richer.request.vram_limit_bytes = saturating_add(*richer.request.vram_limit_bytes, gift);
    const auto q = attempt(richer);
    if (q) {
      const std::string rule = broken_rule(richer, *q);
      if (!rule.empty()) FAIL("world " << i << ", richer: " << rule << "\n" << q->lines.text());
    }
    if (p && !q) FAIL("world " << i << ": refused with more memory");
    if (p && q && !no_less(*q, *p))
      FAIL("world " << i << ": less of something with more memory\n" << p->lines.text() << q->lines.text());
  }
  // Both kinds are tested in numbers.
  CHECK(planned > 20'000);
  CHECK(refused > 20'000);
  CHECK(seen.budgets > 10'000);
  CHECK(seen.singles > 3'000);
  CHECK(seen.combinations > 1'000);
  CHECK(seen.raised > 1'000);
  CHECK(seen.instead_of_impossible > 1'000);
}
