// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a candidate split takes: every line of the ledger from its counts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/graph/captured_sizes.hpp"
#include "nibble/plan/budget.hpp"
#include "nibble/plan/ledger.hpp"
#include "nibble/plan/memory_model.hpp"

namespace nibble::detail {

/// One candidate split.
struct plan_levels {
  std::uint64_t step_tokens = 0, running = 0, context = 0, slots = 0;
  std::uint64_t pages = 0;  ///< 0: as many as the context and the sequences need
};

class plan_costs {
 public:
  /// The arguments must outlive it.
  plan_costs(const machine_memory& machine, const memory_model& model, const plan_request& request,
             const plan_budget& budget)
      : machine_(machine), model_(model), request_(request), budget_(budget) {}

  [[nodiscard]] int context_limit() const {
    return std::min(model_.max_context_tokens,
                    std::max(1, request_.most_context_tokens.value_or(model_.max_context_tokens)));
  }
  [[nodiscard]] std::uint64_t experts() const { return model_.expert_slot_bytes == 0 ? 0 : model_.experts; }
  [[nodiscard]] std::uint64_t least_slots(const plan_levels& at) const {
    const std::uint64_t a_layer = std::max<std::uint64_t>(1, model_.layer_experts);
    const std::uint64_t asked =
        saturating_multiply(std::max<std::uint64_t>(1, model_.experts_per_token), at.running);
    return std::min(experts(), std::min(a_layer, asked));
  }
  [[nodiscard]] std::uint64_t dummies() const { return model_.padding_writes ? 1 : 0; }
  /// Pages that the longest sequence cannot have: those of further sequences and the dummy.
  [[nodiscard]] std::uint64_t shared_pages(const plan_levels& at) const { return at.running - 1 + dummies(); }
  [[nodiscard]] std::uint64_t state_count(const plan_levels& at) const {
    return saturating_add(at.running, u(request_.state_snapshots) + dummies());
  }
  [[nodiscard]] std::uint64_t floor_pages(const plan_levels& at) const {
    if (model_.kv_page_bytes == 0) return 1;
    return std::max(divide_up(at.context, u(model_.page_tokens)) + shared_pages(at), request_.pinned_pages);
  }
  [[nodiscard]] std::uint64_t pages_of(const plan_levels& at) const {
    return at.pages != 0 ? at.pages : floor_pages(at);
  }
  [[nodiscard]] std::uint64_t slots_of(const plan_levels& at) const {
    return std::max(at.slots, least_slots(at));
  }
  [[nodiscard]] std::vector<int> sizes_of(const plan_levels& at) const {
    if (!request_.graphs) return {};
    const int running = std::min(static_cast<int>(at.running), request_.most_captured_rows);
    if (request_.captured_sizes.empty()) return default_captured_sizes(running);
    std::vector<int> sizes;
    for (const int rows : request_.captured_sizes)
      if (rows >= 1 && rows <= running) sizes.push_back(rows);
    return checked_captured_sizes(sizes, running);
  }

  [[nodiscard]] std::uint64_t size_count(const plan_levels& at) const {
    if (!request_.graphs) return 0;
    if (!request_.captured_sizes.empty()) return sizes_of(at).size();
    const std::uint64_t most = std::min(at.running, u(std::max(0, request_.most_captured_rows)));
    std::uint64_t count = most > 0;  // powers of two below, and the number itself
    for (std::uint64_t rows = 1; rows < most; rows *= 2) ++count;
    return count;
  }
  [[nodiscard]] std::uint64_t map_of(std::uint64_t slots) const {
    return slots < experts() ? model_.expert_map_bytes : 0;
  }
  [[nodiscard]] std::uint64_t tables_of(std::uint64_t slots) const {
    return slots < experts() && model_.expert_table_bytes ? model_.expert_table_bytes(slots) : 0;
  }
  [[nodiscard]] std::uint64_t expert_bytes_of(std::uint64_t slots) const {
    const std::uint64_t granule = request_.granule_bytes;
    return saturating_add(saturating_align(saturating_multiply(slots, model_.expert_slot_bytes), granule),
                          saturating_align(saturating_add(tables_of(slots), map_of(slots)), granule));
  }
  /// \param context that page tables are made for
  [[nodiscard]] std::uint64_t workspace_of(const plan_levels& at, std::uint64_t context) const {
    if (!model_.workspace_bytes) return 0;
    return model_.workspace_bytes(
        {static_cast<int>(at.step_tokens), static_cast<int>(at.running), static_cast<int>(context)});
  }

  [[nodiscard]] ledger lines_of(const plan_levels& at) const {
    const std::uint64_t granule = request_.granule_bytes;
    const auto rounded = [&](std::uint64_t count, std::uint64_t bytes) {
      return saturating_align(saturating_multiply(count, bytes), granule);
    };
    ledger lines;
    lines.budget_bytes = budget_.bytes();
    lines.plan(ledger_line::context, machine_.context_bytes);
    lines.plan(ledger_line::kernels, saturating_align(model_.kernel_bytes, granule));
    lines.plan(ledger_line::weights, saturating_align(model_.weight_bytes, granule));
    lines.plan(ledger_line::reserve, budget_.reserve_bytes());
    lines.plan(ledger_line::workspace, saturating_align(workspace_of(at, at.context), granule),
               counted(at.step_tokens, "token") + " a step");
    const std::uint64_t sizes = size_count(at);
    lines.plan(ledger_line::graphs, rounded(sizes, model_.graph_bytes), counted(sizes, "size"));
    lines.plan(ledger_line::states, rounded(state_count(at), model_.state_slot_bytes),
               model_.state_slot_bytes == 0
                   ? ""
                   : std::to_string(at.running) + " running, " +
                         counted(u(request_.state_snapshots), "snapshot") + ", " +
                         (dummies() > 0 ? "1 dummy, " : "") + bytes_text(model_.state_slot_bytes) + " each");
    const std::uint64_t pages = pages_of(at);
    lines.plan(ledger_line::kv_pages, rounded(pages, model_.kv_page_bytes),
               counted(pages, "page") + " of " + counted(u(model_.page_tokens), "token") + ", context " +
                   std::to_string(at.context));
    const std::uint64_t slots = slots_of(at);
    const std::uint64_t tables = tables_of(slots), map = map_of(slots);
    lines.plan(ledger_line::expert_slots, expert_bytes_of(slots),
               experts() == 0
                   ? ""
                   : std::to_string(slots) + " of " + counted(experts(), "expert") + ", " +
                         bytes_text(model_.expert_slot_bytes) + " each" +
                         (tables > 0 ? ", " + bytes_text(tables) + " of tables" : "") +
                         (map > 0 ? ", " + bytes_text(map) + " of page tables for host memory" : ""));
    return lines;
  }

  /// The sum of the lines, with page tables for the longest context that may come of the plan, and with what
  /// is there already at what it took, if that is more than was planned.
  [[nodiscard]] std::uint64_t total_of(const plan_levels& at) const {
    const std::uint64_t granule = request_.granule_bytes;
    std::uint64_t sum = saturating_add(machine_.context_bytes, budget_.reserve_bytes());
    const auto add = [&](std::uint64_t count, std::uint64_t bytes) {
      sum = saturating_add(sum, saturating_align(saturating_multiply(count, bytes), granule));
    };
    const std::uint64_t planned = saturating_add(saturating_align(model_.kernel_bytes, granule),
                                                 saturating_align(model_.weight_bytes, granule));
    sum = saturating_add(sum, std::max(planned, machine_.resident_bytes));
    add(1, workspace_of(at, u(request_.context_tokens.value_or(context_limit()))));
    add(size_count(at), model_.graph_bytes);
    add(state_count(at), model_.state_slot_bytes);
    add(pages_of(at), model_.kv_page_bytes);
    add(slots_of(at), model_.expert_slot_bytes);
    // The level itself decides, so that the sum falls with nothing but the slots.
    const bool tables = at.slots < experts() && model_.expert_table_bytes;
    add(1, saturating_add(map_of(at.slots), tables ? model_.expert_table_bytes(slots_of(at)) : 0));
    return sum;
  }
  [[nodiscard]] bool fits(const plan_levels& at) const {
    const std::uint64_t total = total_of(at);
    return total <= budget_.bytes() && total != UINT64_MAX;  // a sum that overflowed fits nothing
  }
  [[nodiscard]] expert_residency residency_of(std::uint64_t slots) const {
    if (experts() == 0) return expert_residency::none;
    if (slots >= experts()) return expert_residency::all;
    if (slots / 2 >= model_.layer_experts) return expert_residency::two_layers;
    return slots >= model_.layer_experts ? expert_residency::one_layer : expert_residency::part_of_layer;
  }

 private:
  [[nodiscard]] static std::uint64_t u(int value) { return static_cast<std::uint64_t>(value); }

  const machine_memory& machine_;
  const memory_model& model_;
  const plan_request& request_;
  const plan_budget& budget_;
};

}  // namespace nibble::detail
