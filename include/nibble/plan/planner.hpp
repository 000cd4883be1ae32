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
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/plan/budget.hpp"
#include "nibble/plan/changes.hpp"
#include "nibble/plan/costs.hpp"
#include "nibble/plan/largest_that_fits.hpp"
#include "nibble/plan/ledger.hpp"
#include "nibble/plan/memory_model.hpp"

namespace nibble {

namespace detail {

class planner {
 public:
  planner(const machine_memory& machine, const memory_model& model, const plan_request& request)
      : machine_(machine),
        model_(model),
        request_(request),
        budget_(machine, request),
        costs_(machine, model, request, budget_) {
    check_wishes();
    find_ranges();
  }
  planner(const planner&) = delete;
  planner& operator=(const planner&) = delete;

  [[nodiscard]] memory_plan plan() const {
    plan_levels at = least_;
    if (!costs_.fits(at)) refuse(at);
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

  [[nodiscard]] bool feasible() const { return costs_.fits(least_); }

  /// What to wish instead where a wish cannot be.
  [[nodiscard]] static std::vector<plan_proposal> possible_wishes(const machine_memory& machine,
                                                                  const memory_model& model,
                                                                  const plan_request& request) {
    if (request.granule_bytes == 0 || model.page_tokens < 1 || model.max_context_tokens < 1) return {};
    const plan_budget budget(machine, request);
    const plan_costs costs(machine, model, request, budget);
    plan_levels at;
    at.running = u(std::clamp(request.max_running.value_or(1), 1, most_running));
    at.context = u(
        std::clamp(request.context_tokens.value_or(request.least_context_tokens), 1, costs.context_limit()));
    const alternatives others{machine, model};
    return changes_that_fit(request, model, least_from(request, costs, at), others).found();
  }

 private:
  static constexpr int most_running = 1024;
  [[nodiscard]] static std::uint64_t u(int value) { return static_cast<std::uint64_t>(value); }

  [[noreturn]] void impossible(const std::string& text) const { throw wish_refused(text); }
  static void gave_way(std::vector<std::string>& notes, const char* what, std::uint64_t got,
                       std::uint64_t wanted, const std::string& why) {
    if (got < wanted)
      notes.push_back(std::string(what) + " " + std::to_string(got) + " instead of " +
                      std::to_string(wanted) + ": " + why);
  }
  void check_range(const char* name, int value, int least, int most) const {
    if (value < least || value > most)
      impossible(std::string(name) + " " + std::to_string(value) + ": expected " + std::to_string(least) +
                 " to " + std::to_string(most));
  }

  void check_wishes() const {
    if (request_.granule_bytes == 0) impossible("a mapping granule of 0 bytes");
    if (model_.page_tokens < 1 || model_.max_context_tokens < 1)
      impossible("a model needs a context and pages of at least one token");
    if (request_.context_tokens)
      check_range("--context", *request_.context_tokens, 1, model_.max_context_tokens);
    if (request_.max_running) check_range("--max-running", *request_.max_running, 1, most_running);
    if (request_.step_tokens) check_range("step tokens", *request_.step_tokens, 1, 1 << 20);
    if (request_.state_snapshots < 0) impossible("a negative number of state snapshots");
    if (request_.expert_slots && *request_.expert_slots > costs_.experts())
      impossible("--expert-slots " + std::to_string(*request_.expert_slots) + ": the model has " +
                 counted(costs_.experts(), "routed expert") +
                 (costs_.experts() == 0 ? " that could be swapped" : ""));
  }

  void find_ranges() {
    const auto within = [&](int tokens) { return u(std::clamp(tokens, 1, costs_.context_limit())); };
    least_.running = u(request_.max_running.value_or(1));
    target_.running =
        u(request_.max_running.value_or(std::clamp(request_.preferred_running, 1, most_running)));
    target_.step_tokens = u(request_.step_tokens.value_or(std::max(1, request_.preferred_step_tokens)));
    least_.step_tokens = request_.step_tokens
                             ? target_.step_tokens
                             : std::min(target_.step_tokens, u(std::max(1, request_.least_step_tokens)));
    least_.context = within(request_.context_tokens.value_or(request_.least_context_tokens));
    target_.context =
        std::max(least_.context, within(request_.context_tokens.value_or(request_.preferred_context_tokens)));
    if (model_.kv_page_bytes == 0 && !request_.context_tokens)
      least_.context = target_.context = u(costs_.context_limit());  // length costs nothing
    if (request_.kv_bytes && model_.kv_page_bytes > 0) fix_pages();
    if (request_.expert_slots)
      fix_slots();
    else
      target_.slots = std::min(costs_.experts(), request_.most_expert_slots.value_or(UINT64_MAX));
    // Where all experts take no more than the fewest slots and the addresses of the others, all it is.
    if (costs_.experts() > 0 && target_.slots == costs_.experts() &&
        costs_.expert_bytes_of(costs_.experts()) <= costs_.expert_bytes_of(costs_.least_slots(least_)))
      least_.slots = costs_.experts();
  }
  /// How many sequences so few slots are for, if any.
  [[nodiscard]] std::string enough_for(std::uint64_t slots) const {
    const std::uint64_t most = slots / std::max<std::uint64_t>(1, model_.experts_per_token);
    return most == 0 ? "" : "; " + std::to_string(slots) + " do for " + counted(most, "sequence");
  }
  void fix_slots() {
    const std::uint64_t slots = *request_.expert_slots, needed = costs_.least_slots(least_);
    if (slots < needed)
      impossible("--expert-slots " + std::to_string(slots) + ": one layer of a step of " +
                 counted(least_.running, "sequence") + " asks for up to " + std::to_string(needed) + " (" +
                 counted(model_.experts_per_token, "expert") + " a token), so it takes " +
                 std::to_string(needed) + " or more" + enough_for(slots));
    least_.slots = target_.slots = slots;
    const std::uint64_t preferred = target_.running;
    while (target_.running > least_.running && costs_.least_slots(target_) > slots) --target_.running;
    gave_way(notes_, "sequences at once", target_.running, preferred,
             "--expert-slots " + std::to_string(slots) + " holds what one layer asks for with no more");
  }

  /// The user named the KV bytes: the context follows from the pages, or must fit into them.
  void fix_pages() {
    const std::uint64_t pages = *request_.kv_bytes / model_.kv_page_bytes;
    const std::uint64_t needed = costs_.floor_pages(least_);
    if (pages < needed)
      impossible("--kv-bytes " + bytes_text(*request_.kv_bytes) + " are " + counted(pages, "page") + " of " +
                 bytes_text(model_.kv_page_bytes) + "; a context of " + counted(least_.context, "token") +
                 " with " + counted(least_.running, "sequence") + " needs " + std::to_string(needed) + " (" +
                 counted(u(model_.page_tokens), "token") + " a page, one for each further sequence" +
                 (costs_.dummies() > 0 ? ", one dummy" : "") + "): " +
                 mebibytes_at_least(saturating_multiply(needed, model_.kv_page_bytes)) + longest_in(pages));
    fixed_pages_ = pages;
    const std::uint64_t rest = *request_.kv_bytes % model_.kv_page_bytes;
    if (rest > 0)
      notes_.push_back("--kv-bytes is " + counted(pages, "page") + " of " + bytes_text(model_.kv_page_bytes) +
                       " and " + bytes_text(rest) + " that are not used");
    const plan_levels preferred = target_;
    // Sequences and context share these pages.
    const std::uint64_t for_sequences =
        pages - costs_.dummies() - divide_up(least_.context, u(model_.page_tokens));
    target_.running = std::min(target_.running, std::max(least_.running, for_sequences + 1));
    if (!request_.context_tokens)
      target_.context = std::max(
          least_.context, std::min(target_.context, saturating_multiply(pages - costs_.shared_pages(target_),
                                                                        u(model_.page_tokens))));
    least_.pages = target_.pages = pages;
    gave_way(notes_, "sequences at once", target_.running, preferred.running, "--kv-bytes has no more pages");
    gave_way(notes_, "context", target_.context, preferred.context, "--kv-bytes has no more pages");
    const std::uint64_t usable = usable_pages(target_.running);
    if (pages > usable)
      notes_.push_back("--kv-bytes is " + counted(pages, "page") + ": " +
                       counted(target_.running, "sequence") + " at once can use " + std::to_string(usable));
  }
  /// The longest context that so few pages hold for the sequences there must be, if any.
  [[nodiscard]] std::string longest_in(std::uint64_t pages) const {
    const std::uint64_t shared = costs_.shared_pages(least_);
    if (pages <= shared) return "";
    return "; " + counted(pages, "page") + (pages == 1 ? " holds" : " hold") + " a context of " +
           counted(saturating_multiply(pages - shared, u(model_.page_tokens)), "token");
  }
  /// Pages that so many sequences of the longest context fill, the dummy included.
  [[nodiscard]] std::uint64_t usable_pages(std::uint64_t running) const {
    const std::uint64_t longest = u(request_.context_tokens.value_or(costs_.context_limit()));
    return saturating_multiply(divide_up(longest, u(model_.page_tokens)), running) + costs_.dummies();
  }

  /// Spends what is left, item by item, and stops at the first that is not complete.
  void advance(plan_levels& at) const {
    const auto raise = [&](std::uint64_t plan_levels::*item, std::uint64_t target) {
      const auto fits_with = [&](std::uint64_t level) {
        plan_levels more = at;
        more.*item = level;
        return costs_.fits(more);
      };
      // All of it first: with the last expert's slot the others need no addresses, and the sum falls.
      const std::uint64_t most = std::max(at.*item, target);
      at.*item = fits_with(most) ? most : largest_that_fits(at.*item, most, fits_with);
      return at.*item >= target;
    };
    if (!raise(&plan_levels::step_tokens, target_.step_tokens)) return;
    if (!raise(&plan_levels::running, target_.running)) return;
    if (!raise(&plan_levels::context, target_.context)) return;
    at.slots = costs_.slots_of(at);
    if (!raise(&plan_levels::slots, target_.slots)) return;
    if (fixed_pages_ == 0 && model_.kv_page_bytes > 0) {
      at.pages = costs_.floor_pages(at);
      raise(&plan_levels::pages, std::max(at.pages, std::min(usable_pages(at.running),
                                                             request_.most_kv_pages.value_or(UINT64_MAX))));
    }
  }
  [[nodiscard]] memory_plan finished(plan_levels at) const {
    memory_plan plan;
    plan.budget_bytes = budget_.bytes();
    plan.notes = budget_.notes();
    plan.notes.push_back(plan_budget::reserve_note(budget_.bytes(), request_));
    plan.notes.insert(plan.notes.end(), notes_.begin(), notes_.end());
    plan.kv_pages = costs_.pages_of(at);
    if (!request_.context_tokens && model_.kv_page_bytes > 0) {
      // What one sequence may use: the pages beyond those of the further sequences that are preferred.
      const std::uint64_t alone = plan.kv_pages - std::min(plan.kv_pages, costs_.shared_pages(target_));
      at.context = std::max(
          at.context, std::min(u(costs_.context_limit()), saturating_multiply(alone, u(model_.page_tokens))));
      at.pages = plan.kv_pages;
    }
    plan.limits = {static_cast<int>(at.step_tokens), static_cast<int>(at.running),
                   static_cast<int>(at.context)};
    plan.state_slots = costs_.state_count(at);
    plan.expert_slots = costs_.slots_of(at);
    plan.captured_sizes = costs_.sizes_of(at);
    plan.lines = costs_.lines_of(at);
    plan.residency = costs_.residency_of(plan.expert_slots);
    const char* const short_of = budget_.limited() ? "--vram-limit leaves no more" : "memory is short";
    gave_way(plan.notes, "step tokens", at.step_tokens, target_.step_tokens, short_of);
    gave_way(plan.notes, "sequences at once", at.running, target_.running, short_of);
    gave_way(plan.notes, "context", at.context, target_.context, short_of);
    switch (plan.residency) {
      case expert_residency::one_layer:
        plan.notes.push_back("expert slots for one layer: prefill does not overlap fetching and computing");
        break;
      case expert_residency::part_of_layer:
        plan.notes.push_back("expert slots for less than a layer: prefill goes through a layer in pieces");
        break;
      case expert_residency::none:
      case expert_residency::all:
      case expert_residency::two_layers:
        break;
    }
    return plan;
  }
  /// The same machine and model with other wishes.
  struct alternatives {
    const machine_memory& machine;
    const memory_model& model;
    [[nodiscard]] bool fits(const plan_request& request) const {
      try {
        return planner(machine, model, request).feasible();
      } catch (const wish_refused&) {
        return false;
      }
    }
    [[nodiscard]] memory_plan plan(const plan_request& request) const {
      return planner(machine, model, request).plan();
    }
  };

  [[nodiscard]] static least_wishes least_from(const plan_request& request, const plan_costs& costs,
                                               const plan_levels& at) {
    return {u(request.least_context_tokens), 1, u(request.least_step_tokens), costs.least_slots(at),
            costs.floor_pages(at)};
  }
  [[noreturn]] void refuse(const plan_levels& at) const {
    const std::uint64_t without_reserve = costs_.total_of(at) - budget_.reserve_bytes(),
                        total = plan_budget::least_for(without_reserve, request_),
                        missing = total - budget_.bytes();
    // The ledger of that least budget: its reserve, and page tables as long as they may become.
    const std::uint64_t longest = u(request_.context_tokens.value_or(costs_.context_limit()));
    ledger lines = costs_.lines_of(at);
    lines.plan(ledger_line::workspace,
               saturating_align(costs_.workspace_of(at, longest), request_.granule_bytes),
               counted(at.step_tokens, "token") + " a step, page tables up to " + counted(longest, "token"));
    lines.plan(ledger_line::reserve, total - without_reserve);
    std::string text = "the model does not fit: the least plan takes " + bytes_text(total) + ", there are " +
                       bytes_text(budget_.bytes()) + ", " + bytes_text(missing) + " too few\n" + lines.text();
    if (machine_.context_bytes > budget_.bytes())
      text += "the driver's context alone takes " + bytes_text(machine_.context_bytes) + ", more than the " +
              bytes_text(budget_.bytes()) + " there are\n";
    for (const auto& note : budget_.notes()) text += note + "\n";
    text += plan_budget::reserve_note(total, request_) + "\n";
    const std::uint64_t planned =
        saturating_add(lines[ledger_line::weights].planned_bytes, lines[ledger_line::kernels].planned_bytes);
    if (machine_.resident_bytes > planned)
      text += "weights and kernels took " + bytes_text(machine_.resident_bytes) + ", " +
              bytes_text(machine_.resident_bytes - planned) + " more than planned\n";
    const alternatives others{machine_, model_};
    const changes_that_fit changes(request_, model_, least_from(request_, costs_, at), others);
    std::vector<plan_proposal> proposals = changes.found();
    if (plan_proposal budget = budget_that_fits(total); !budget.changes.empty())
      proposals.push_back(std::move(budget));
    if (proposals.empty())
      throw plan_refused(text + "No memory is enough: the sum is more than 64 bits hold", lines, missing);
    text += "It would fit with any one of:";
    for (const auto& proposal : proposals) text += "\n  " + proposal.text;
    throw plan_refused(text, lines, missing, std::move(proposals));
  }
  /// What makes a budget of `total` bytes: memory, a higher limit, or both, rounded up to whole MiB; without
  /// changes where nothing does.
  [[nodiscard]] plan_proposal budget_that_fits(std::uint64_t total) const {
    plan_proposal budget;
    if (total == UINT64_MAX) return budget;  // the sum overflowed
    const auto add = [&](wish what, std::uint64_t bytes, const std::string& text) {
      budget.text += (budget.text.empty() ? "" : " and ") + text;
      budget.changes.push_back({what, saturating_align(bytes, std::uint64_t{1} << 20)});
    };
    if (const std::uint64_t there = budget_.available_bytes(); total > there)
      add(wish::more_memory_bytes, total - there, mebibytes_at_least(total - there) + " more memory");
    if (request_.vram_limit_bytes && *request_.vram_limit_bytes < total)
      add(wish::vram_limit_bytes, total, "--vram-limit " + mebibytes_at_least(total));
    return budget;
  }

  const machine_memory& machine_;
  const memory_model& model_;
  const plan_request& request_;
  plan_budget budget_;
  plan_costs costs_;
  std::uint64_t fixed_pages_ = 0;
  plan_levels least_, target_;
  std::vector<std::string> notes_;  ///< what one wish took from what is preferred
};

}  // namespace detail

/// The split for this machine, model and request. Throws wish_refused for a wish that cannot be, plan_refused
/// with the ledger; both with what would fit.
[[nodiscard]] inline memory_plan plan_memory(const machine_memory& machine, const memory_model& model,
                                             const plan_request& request) try {
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
} catch (const wish_refused& refused) {
  throw wish_refused(refused.what(), detail::planner::possible_wishes(machine, model, request));
}

}  // namespace nibble
