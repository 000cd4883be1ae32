// SPDX-License-Identifier: Apache-2.0
/// \file
/// The split of device memory: pure arithmetic over what was measured and what types say.
///
/// The rule. Fixed lines come first: context, kernels, weights, reserve, and for the least step its
/// workspace, its graphs, its states (running + snapshots), its KV pages (one context of the least length, a
/// page for each further sequence), one dummy of both where padding rows write somewhere, and the expert
/// slots that one layer of one step can ask for (experts per token × running, at most a layer). If these do
/// not fit, the plan is refused. Then memory is spent in this order, each item as far as it goes, the next
/// one only once the one before is complete:
///
///     1. tokens of a step, to the preferred number    (workspace)
///     2. sequences that run, to the preferred number  (states, workspace, graphs, pages)
///     3. context, to the preferred length             (KV pages)
///     4. expert slots, to all experts
///     5. KV pages, to a context of the model's full length for every sequence that runs
///
/// A wish of the user fixes its item: it is then part of what must fit. Because an item begins only after the
/// one before is complete, more memory never means less of anything.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/graph/captured_sizes.hpp"
#include "nibble/plan/ledger.hpp"
#include "nibble/plan/memory_model.hpp"

namespace nibble {

namespace detail {

/// The largest level in [low, high] that `fits`, given that `low` does and that fits is monotone.
template <class Fits>
[[nodiscard]] std::uint64_t largest_that_fits(std::uint64_t low, std::uint64_t high, const Fits& fits) {
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2 + 1;
    if (fits(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/// One candidate split.
struct plan_levels {
  std::uint64_t step_tokens = 0, running = 0, context = 0, slots = 0;
  std::uint64_t pages = 0;  ///< 0: as many as the context and the sequences need
};

class planner {
 public:
  planner(const machine_memory& machine, const memory_model& model, const plan_request& request)
      : machine_(machine), model_(model), request_(request) {
    check_inputs();
    find_budget();
    find_ranges();
  }

  [[nodiscard]] memory_plan plan() const {
    plan_levels at = least_;
    if (!fits(at)) refuse(at);
    advance(at);
    return finished(at);
  }
  /// Whether steps of a fetching engine would be preferred larger than this plan's. Not where steps below the
  /// usual least are preferred: larger ones would have a larger least plan, which may not fit.
  [[nodiscard]] static bool wants_larger_steps(const memory_plan& plan, const plan_request& request) {
    return !request.step_tokens && request.preferred_step_tokens >= request.least_step_tokens &&
           request.preferred_step_tokens_fetching > request.preferred_step_tokens &&
           plan.residency == expert_residency::two_layers;
  }

  [[nodiscard]] bool feasible() const { return fits(least_); }
  [[nodiscard]] std::uint64_t budget() const { return budget_; }

 private:
  [[nodiscard]] static std::uint64_t u(int value) { return static_cast<std::uint64_t>(value); }

  [[noreturn]] void impossible(const std::string& text) const { throw wish_refused(text); }
  [[noreturn]] void absurd(const std::string& text) const { throw plan_refused(text, {}, 0); }
  void check_range(const char* name, int value, int least, int most) const {
    if (value < least || value > most)
      impossible(std::string(name) + " " + std::to_string(value) + ": expected " + std::to_string(least) +
                 " to " + std::to_string(most));
  }

  void check_inputs() const {
    if (machine_.total_bytes == 0) absurd("the device reports no memory at all: 0 bytes in total");
    const auto check_reading = [&](std::uint64_t free) {
      if (free > machine_.total_bytes)
        absurd("the device reports " + bytes_text(free) + " free of " + bytes_text(machine_.total_bytes) +
               ": the reading is wrong, no plan can be made from it");
    };
    check_reading(machine_.free_bytes);
    if (machine_.free_now_bytes) check_reading(*machine_.free_now_bytes);
    if (request_.granule_bytes == 0) impossible("a mapping granule of 0 bytes");
    if (model_.page_tokens < 1 || model_.max_context_tokens < 1)
      impossible("a model needs a context and pages of at least one token");
    if (request_.context_tokens)
      check_range("context", *request_.context_tokens, 1, model_.max_context_tokens);
    if (request_.max_running) check_range("max-running", *request_.max_running, 1, 1024);
    if (request_.step_tokens) check_range("step tokens", *request_.step_tokens, 1, 1 << 20);
    if (request_.state_snapshots < 0) impossible("a negative number of state snapshots");
    if (request_.expert_slots && *request_.expert_slots > experts())
      impossible("expert-slots " + std::to_string(*request_.expert_slots) + ": the model has " +
                 std::to_string(experts()) + " routed experts" +
                 (experts() == 0 ? " that could be swapped" : ""));
  }

  void find_budget() {
    std::uint64_t free = machine_.free_bytes;
    if (machine_.os_budget_bytes) {
      const std::uint64_t left = *machine_.os_budget_bytes > machine_.os_used_bytes
                                     ? *machine_.os_budget_bytes - machine_.os_used_bytes
                                     : 0;
      if (left < free) {
        free = left;
        notes_.push_back("the operating system leaves " + bytes_text(left) + " of " +
                         bytes_text(machine_.free_bytes) + " that the driver calls free");
      }
    }
    budget_ = saturating_add(machine_.context_bytes, free);
    if (machine_.free_now_bytes) {
      // Memory that others gave back is not counted: they may want it again.
      const std::uint64_t now = saturating_add(saturating_add(machine_.context_bytes, machine_.held_bytes),
                                               *machine_.free_now_bytes);
      if (now < budget_) {
        if (budget_ - now > (std::uint64_t{16} << 20))
          notes_.push_back("others took " + bytes_text(budget_ - now) + " since the start");
        budget_ = now;
      }
    }
    if (request_.vram_limit_bytes && *request_.vram_limit_bytes < budget_)
      budget_ = *request_.vram_limit_bytes;
    else if (request_.vram_limit_bytes && *request_.vram_limit_bytes > budget_)
      notes_.push_back("the limit of " + bytes_text(*request_.vram_limit_bytes) + " is more than the " +
                       bytes_text(budget_) + " there are");
    reserve_ = request_.reserve_bytes.value_or(reserve_of(budget_));
    notes_.push_back(request_.reserve_bytes
                         ? "reserve: as asked"
                         : "reserve: 1/64 of " + bytes_text(budget_) + ", within 64 and 512 MiB");
  }

  static constexpr std::uint64_t least_reserve = std::uint64_t{64} << 20,
                                 most_reserve = std::uint64_t{512} << 20;
  [[nodiscard]] static constexpr std::uint64_t reserve_of(std::uint64_t budget) {
    return std::clamp(budget / 64, least_reserve, most_reserve);
  }
  /// The least budget that holds `bytes` beside its reserve.
  [[nodiscard]] std::uint64_t budget_for(std::uint64_t bytes) const {
    if (request_.reserve_bytes) return saturating_add(bytes, *request_.reserve_bytes);
    const std::uint64_t small = saturating_add(bytes, least_reserve);
    if (reserve_of(small) == least_reserve) return small;
    const std::uint64_t middle = saturating_add(bytes, divide_up(bytes, 63));
    return std::min(std::max(middle, small), saturating_add(bytes, most_reserve));
  }

  void find_ranges() {
    const auto within = [&](int tokens) { return u(std::clamp(tokens, 1, context_limit())); };
    least_.running = u(request_.max_running.value_or(1));
    target_.running = u(request_.max_running.value_or(std::clamp(request_.preferred_running, 1, 1024)));
    target_.step_tokens = u(request_.step_tokens.value_or(std::max(1, request_.preferred_step_tokens)));
    least_.step_tokens = request_.step_tokens
                             ? target_.step_tokens
                             : std::min(target_.step_tokens, u(std::max(1, request_.least_step_tokens)));
    least_.context = within(request_.context_tokens.value_or(request_.least_context_tokens));
    target_.context =
        std::max(least_.context, within(request_.context_tokens.value_or(request_.preferred_context_tokens)));
    if (model_.kv_page_bytes == 0 && !request_.context_tokens)
      least_.context = target_.context = u(context_limit());  // length costs nothing
    if (request_.kv_bytes && model_.kv_page_bytes > 0) fix_pages();
    if (request_.expert_slots)
      fix_slots();
    else
      target_.slots = std::min(experts(), request_.most_expert_slots.value_or(UINT64_MAX));
    // Where all experts take no more than the fewest slots and the addresses of the others, all it is.
    if (experts() > 0 && target_.slots == experts() &&
        expert_bytes_of(experts()) <= expert_bytes_of(least_slots(least_)))
      least_.slots = experts();
  }
  [[nodiscard]] int context_limit() const {
    return std::min(model_.max_context_tokens,
                    std::max(1, request_.most_context_tokens.value_or(model_.max_context_tokens)));
  }

  void fix_slots() {
    const std::uint64_t slots = *request_.expert_slots, needed = least_slots(least_);
    if (slots < needed)
      impossible("expert-slots " + std::to_string(slots) + ": one layer of a step of " +
                 std::to_string(least_.running) + " sequences asks for up to " + std::to_string(needed) +
                 " (" + std::to_string(model_.experts_per_token) + " experts a token)");
    least_.slots = target_.slots = slots;
    while (target_.running > least_.running && least_slots(target_) > slots) --target_.running;
  }

  /// The user named the KV bytes: the context follows from the pages, or must fit into them.
  void fix_pages() {
    const std::uint64_t pages = *request_.kv_bytes / model_.kv_page_bytes;
    const std::uint64_t needed = floor_pages(least_);
    if (pages < needed)
      impossible("kv-bytes " + bytes_text(*request_.kv_bytes) + " are " + std::to_string(pages) +
                 " pages of " + bytes_text(model_.kv_page_bytes) + "; a context of " +
                 std::to_string(least_.context) + " tokens with " + std::to_string(least_.running) +
                 " sequences needs " + std::to_string(needed) + " (" + std::to_string(model_.page_tokens) +
                 " tokens a page, one for each further sequence" + (dummies() > 0 ? ", one dummy" : "") +
                 "): " + bytes_text(saturating_multiply(needed, model_.kv_page_bytes)));
    fixed_pages_ = pages;
    // Sequences and context share these pages.
    const std::uint64_t for_sequences = pages - dummies() - divide_up(least_.context, u(model_.page_tokens));
    target_.running = std::min(target_.running, std::max(least_.running, for_sequences + 1));
    if (!request_.context_tokens)
      target_.context = std::max(least_.context,
                                 std::min(target_.context, saturating_multiply(pages - shared_pages(target_),
                                                                               u(model_.page_tokens))));
    least_.pages = target_.pages = pages;
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
    return std::max(divide_up(at.context, u(model_.page_tokens)) + (at.running - 1), request_.pinned_pages) +
           dummies();
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
  [[nodiscard]] std::uint64_t expert_bytes_of(std::uint64_t slots) const {
    const std::uint64_t granule = request_.granule_bytes;
    return saturating_add(saturating_align(saturating_multiply(slots, model_.expert_slot_bytes), granule),
                          saturating_align(map_of(slots), granule));
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
    lines.budget_bytes = budget_;
    lines.plan(ledger_line::context, machine_.context_bytes);
    lines.plan(ledger_line::kernels, saturating_align(model_.kernel_bytes, granule));
    lines.plan(ledger_line::weights, saturating_align(model_.weight_bytes, granule));
    lines.plan(ledger_line::reserve, reserve_);
    lines.plan(ledger_line::workspace, saturating_align(workspace_of(at, at.context), granule),
               std::to_string(at.step_tokens) + " tokens a step");
    const std::uint64_t sizes = size_count(at);
    lines.plan(ledger_line::graphs, rounded(sizes, model_.graph_bytes), std::to_string(sizes) + " sizes");
    lines.plan(ledger_line::states, rounded(state_count(at), model_.state_slot_bytes),
               model_.state_slot_bytes == 0
                   ? ""
                   : std::to_string(at.running) + " running, " + std::to_string(request_.state_snapshots) +
                         " snapshots, " + (dummies() > 0 ? "1 dummy, " : "") +
                         bytes_text(model_.state_slot_bytes) + " each");
    const std::uint64_t pages = pages_of(at);
    lines.plan(ledger_line::kv_pages, rounded(pages, model_.kv_page_bytes),
               std::to_string(pages) + " pages of " + std::to_string(model_.page_tokens) +
                   " tokens, context " + std::to_string(at.context));
    const std::uint64_t slots = slots_of(at);
    const std::uint64_t map = map_of(slots);
    lines.plan(ledger_line::expert_slots, expert_bytes_of(slots),
               experts() == 0
                   ? ""
                   : std::to_string(slots) + " of " + std::to_string(experts()) + " experts, " +
                         bytes_text(model_.expert_slot_bytes) + " each" +
                         (map > 0 ? ", " + bytes_text(map) + " of page tables for host memory" : ""));
    return lines;
  }

  /// The sum of the lines, with page tables for the longest context that may come of the plan, and with what
  /// is there already at what it took, if that is more than was planned.
  [[nodiscard]] std::uint64_t total_of(const plan_levels& at) const {
    const std::uint64_t granule = request_.granule_bytes;
    std::uint64_t sum = saturating_add(machine_.context_bytes, reserve_);
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
    add(1, map_of(at.slots));  // the level itself, so that the sum falls with nothing but the slots
    return sum;
  }
  [[nodiscard]] bool fits(const plan_levels& at) const {
    const std::uint64_t total = total_of(at);
    return total <= budget_ && total != UINT64_MAX;  // a sum that overflowed fits nothing
  }

  /// Spends what is left, item by item, and stops at the first that is not complete.
  void advance(plan_levels& at) const {
    const auto raise = [&](std::uint64_t plan_levels::*item, std::uint64_t target) {
      const auto fits_with = [&](std::uint64_t level) {
        plan_levels more = at;
        more.*item = level;
        return fits(more);
      };
      // All of it first: with the last expert's slot the others need no addresses, and the sum falls.
      const std::uint64_t most = std::max(at.*item, target);
      at.*item = fits_with(most) ? most : largest_that_fits(at.*item, most, fits_with);
      return at.*item >= target;
    };
    if (!raise(&plan_levels::step_tokens, target_.step_tokens)) return;
    if (!raise(&plan_levels::running, target_.running)) return;
    if (!raise(&plan_levels::context, target_.context)) return;
    at.slots = slots_of(at);
    if (!raise(&plan_levels::slots, target_.slots)) return;
    if (fixed_pages_ == 0 && model_.kv_page_bytes > 0) {
      const std::uint64_t full =
          divide_up(u(request_.context_tokens.value_or(context_limit())), u(model_.page_tokens));
      at.pages = floor_pages(at);
      raise(&plan_levels::pages,
            std::max(at.pages, std::min(saturating_multiply(full, at.running) + dummies(),
                                        request_.most_kv_pages.value_or(UINT64_MAX))));
    }
  }
  [[nodiscard]] memory_plan finished(plan_levels at) const {
    memory_plan plan;
    plan.budget_bytes = budget_;
    plan.notes = notes_;
    plan.kv_pages = pages_of(at);
    if (!request_.context_tokens && model_.kv_page_bytes > 0) {
      // What one sequence may use: the pages beyond those of the further sequences that are preferred.
      const std::uint64_t alone = plan.kv_pages - std::min(plan.kv_pages, shared_pages(target_));
      at.context = std::max(at.context,
                            std::min(u(context_limit()), saturating_multiply(alone, u(model_.page_tokens))));
      at.pages = plan.kv_pages;
    }
    plan.limits = {static_cast<int>(at.step_tokens), static_cast<int>(at.running),
                   static_cast<int>(at.context)};
    plan.state_slots = state_count(at);
    plan.expert_slots = slots_of(at);
    plan.captured_sizes = sizes_of(at);
    plan.lines = lines_of(at);
    plan.residency = residency_of(plan.expert_slots);
    const auto gave_way = [&](const char* what, std::uint64_t got, std::uint64_t wanted) {
      if (got < wanted)
        plan.notes.push_back(std::string(what) + " " + std::to_string(got) + " instead of " +
                             std::to_string(wanted) + ": memory is short");
    };
    gave_way("step tokens", at.step_tokens, target_.step_tokens);
    gave_way("sequences at once", at.running, target_.running);
    gave_way("context", at.context, target_.context);
    switch (plan.residency) {
      case expert_residency::one_layer:
        plan.notes.push_back("expert slots for one layer: prefill does not overlap fetching and computing");
        break;
      case expert_residency::part_of_layer:
        plan.notes.push_back("expert slots for less than a layer: prefill goes through a layer in groups");
        break;
      case expert_residency::none:
      case expert_residency::all:
      case expert_residency::two_layers:
        break;
    }
    return plan;
  }
  [[nodiscard]] expert_residency residency_of(std::uint64_t slots) const {
    if (experts() == 0) return expert_residency::none;
    if (slots >= experts()) return expert_residency::all;
    if (slots / 2 >= model_.layer_experts) return expert_residency::two_layers;
    return slots >= model_.layer_experts ? expert_residency::one_layer : expert_residency::part_of_layer;
  }

  [[noreturn]] void refuse(const plan_levels& at) const {
    const std::uint64_t without_reserve = total_of(at) - reserve_, total = budget_for(without_reserve),
                        missing = total - budget_;
    // The ledger of that least budget: its reserve, and page tables as long as they may become.
    const std::uint64_t longest = u(request_.context_tokens.value_or(context_limit()));
    ledger lines = lines_of(at);
    lines.plan(ledger_line::workspace, saturating_align(workspace_of(at, longest), request_.granule_bytes),
               std::to_string(at.step_tokens) + " tokens a step, page tables for " + std::to_string(longest));
    lines.plan(ledger_line::reserve, total - without_reserve);
    std::string text = "the model does not fit: the least plan takes " + bytes_text(total) + ", there are " +
                       bytes_text(budget_) + ", " + bytes_text(missing) + " too few\n" + lines.text();
    for (const auto& note : notes_) text += note + "\n";
    const std::uint64_t planned =
        saturating_add(lines[ledger_line::weights].planned_bytes, lines[ledger_line::kernels].planned_bytes);
    if (machine_.resident_bytes > planned)
      text += "weights and kernels took " + bytes_text(machine_.resident_bytes) + ", " +
              bytes_text(machine_.resident_bytes - planned) + " more than planned\n";
    text += "It would fit with any one of:\n";
    for (const auto& change : changes_that_fit()) text += "  " + change + "\n";
    text += "  " + bytes_text(missing) + " more memory";
    throw plan_refused(text, lines, missing);
  }
  /// Single wishes that, given up, make the least plan fit.
  [[nodiscard]] std::vector<std::string> changes_that_fit() const {
    std::vector<std::string> found;
    const auto attempt = [&](bool set, const std::string& what, auto&& change) {
      if (!set) return;
      plan_request other = request_;
      change(other);
      try {
        const planner alternative(machine_, model_, other);
        if (alternative.feasible()) found.push_back(what);
      } catch (const error&) {  // not possible for another reason
      }
    };
    attempt(request_.context_tokens && least_.context > u(request_.least_context_tokens), "a smaller context",
            [&](plan_request& r) { r.context_tokens = request_.least_context_tokens; });
    attempt(request_.max_running && *request_.max_running > 1, "--max-running 1",
            [](plan_request& r) { r.max_running = 1; });
    attempt(request_.step_tokens && *request_.step_tokens > request_.least_step_tokens, "smaller steps",
            [](plan_request& r) { r.step_tokens = r.least_step_tokens; });
    attempt(request_.expert_slots.has_value(), "fewer expert slots",
            [](plan_request& r) { r.expert_slots.reset(); });
    attempt(request_.kv_bytes.has_value(), "fewer KV bytes", [](plan_request& r) { r.kv_bytes.reset(); });
    attempt(request_.state_snapshots > 0, "no state snapshots",
            [](plan_request& r) { r.state_snapshots = 0; });
    attempt(request_.graphs, "no captured graphs", [](plan_request& r) { r.graphs = false; });
    attempt(request_.vram_limit_bytes.has_value(), "no --vram-limit",
            [](plan_request& r) { r.vram_limit_bytes.reset(); });
    return found;
  }

  const machine_memory& machine_;
  const memory_model& model_;
  const plan_request& request_;
  std::uint64_t budget_ = 0, reserve_ = 0, fixed_pages_ = 0;
  plan_levels least_, target_;
  std::vector<std::string> notes_;
};

}  // namespace detail

/// The split for this machine, model and request. Throws wish_refused for a wish that cannot be, plan_refused
/// with the ledger and what would fit.
[[nodiscard]] inline memory_plan plan_memory(const machine_memory& machine, const memory_model& model,
                                             const plan_request& request) {
  memory_plan plan = detail::planner(machine, model, request).plan();
  if (!detail::planner::wants_larger_steps(plan, request)) return plan;
  // The same wishes with larger steps, as long as few slots go for them: slots are what decode lives on.
  plan_request larger = request;
  larger.preferred_step_tokens_fetching = 0;
  for (int tokens = request.preferred_step_tokens_fetching; tokens > request.preferred_step_tokens;
       tokens /= 2) {
    larger.preferred_step_tokens = tokens;
    memory_plan with = detail::planner(machine, model, larger).plan();
    if (with.residency == expert_residency::two_layers && with.limits.running >= plan.limits.running &&
        with.limits.context_tokens >= plan.limits.context_tokens &&
        with.expert_slots >= plan.expert_slots - plan.expert_slots / 8)
      return with;
  }
  return plan;
}

/// A new split of expert slots and KV pages for an engine that runs. Sequences, step and reserve stay as
/// `first`, its plan at start-up, had them; nothing grows past it. What the user asked for gives way here: an
/// engine with less serves on, one without memory does not. The first `pages_in_use` pages are kept. Memory
/// is given up in the reverse of the order in which it is spent. Throws plan_refused when even the least does
/// not fit.
[[nodiscard]] inline memory_plan replan_memory(const machine_memory& machine, const memory_model& model,
                                               plan_request request, const memory_plan& first,
                                               std::uint64_t pages_in_use) {
  const int context = first.limits.context_tokens;
  request.max_running = first.limits.running;
  request.step_tokens = first.limits.step_tokens;
  if (!request.reserve_bytes) request.reserve_bytes = first.lines[ledger_line::reserve].planned_bytes;
  request.preferred_context_tokens =
      std::min(context, request.context_tokens.value_or(request.preferred_context_tokens));
  request.least_context_tokens = std::min(request.least_context_tokens, context);
  request.most_context_tokens = context;
  request.most_expert_slots = first.expert_slots;
  request.most_kv_pages = first.kv_pages;
  request.context_tokens.reset();
  request.expert_slots.reset();
  if (model.all_experts_stay && first.expert_slots == model.experts)
    request.expert_slots = first.expert_slots;
  request.kv_bytes.reset();
  request.pinned_pages = pages_in_use;
  return plan_memory(machine, model, request);
}

}  // namespace nibble
