// SPDX-License-Identifier: Apache-2.0
/// \file
/// What to wish instead of what does not fit: for each wish the largest number with which it would, or the
/// least where it is too small for another wish; where none is enough alone, numbers for all that are too
/// large.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/plan/byte_size.hpp"
#include "nibble/plan/largest_that_fits.hpp"
#include "nibble/plan/memory_model.hpp"

namespace nibble::detail {

/// The smallest numbers that are worth a try; the least slots and pages that the other wishes allow.
struct least_wishes {
  std::uint64_t context = 1, running = 1, step_tokens = 1, slots = 0, pages = 1;
};

/// \tparam Alternatives has `bool fits(const plan_request&)`, false for a wish that cannot be, and
///         `memory_plan plan(const plan_request&)` for a request that fits
template <class Alternatives>
class changes_that_fit {
 public:
  changes_that_fit(const plan_request& request, const memory_model& model, const least_wishes& least,
                   const Alternatives& alternatives)
      : request_(request), model_(model), least_(least), alternatives_(alternatives) {
    single_wishes();
    if (found_.empty()) all_wishes();
  }
  /// Any one of them is enough. A single number is the largest below its wish that fits, or the least above
  /// it if that is what it takes. The numbers of several are those of the plan without any of these wishes;
  /// then, in the order in which they stand and until none rises any more, each becomes the largest that fits
  /// beside the others, its wish at most. So one more of any of them does not fit; KV bytes count in pages.
  /// Where several are wrong and one of them is too small, none is found.
  [[nodiscard]] const std::vector<plan_proposal>& found() const { return found_; }

 private:
  [[nodiscard]] static int narrow(std::uint64_t value) { return static_cast<int>(value); }
  [[nodiscard]] static std::uint64_t u(int value) { return static_cast<std::uint64_t>(value); }
  /// Sets a wish; KV bytes by their number of pages.
  void set(plan_request& r, wish what, std::uint64_t value) const {
    switch (what) {
      case wish::context_tokens:
        r.context_tokens = narrow(value);
        break;
      case wish::max_running:
        r.max_running = narrow(value);
        break;
      case wish::step_tokens:
        r.step_tokens = narrow(value);
        break;
      case wish::expert_slots:
        r.expert_slots = value;
        break;
      case wish::kv_bytes:
        r.kv_bytes = saturating_multiply(value, model_.kv_page_bytes);
        break;
      case wish::state_snapshots:
        r.state_snapshots = narrow(value);
        break;
      case wish::vram_limit_bytes:
      case wish::more_memory_bytes:
        break;  // changes of the budget are not looked for here
    }
  }
  [[nodiscard]] std::optional<std::uint64_t> wished(wish what) const {
    const auto number = [](const std::optional<int>& w) {
      return w && *w > 0 ? std::optional(u(*w)) : std::optional<std::uint64_t>();
    };
    switch (what) {
      case wish::context_tokens:
        return number(request_.context_tokens);
      case wish::max_running:
        return number(request_.max_running);
      case wish::step_tokens:
        return number(request_.step_tokens);
      case wish::expert_slots:
        return request_.expert_slots;
      case wish::kv_bytes:
        if (request_.kv_bytes && model_.kv_page_bytes > 0) return *request_.kv_bytes / model_.kv_page_bytes;
        return {};
      case wish::state_snapshots:
        return number(request_.state_snapshots);
      case wish::vram_limit_bytes:
      case wish::more_memory_bytes:
        break;
    }
    return {};
  }
  /// Whole MiB where they stand for no other number of pages.
  [[nodiscard]] std::uint64_t kv_bytes_of(std::uint64_t pages) const {
    const std::uint64_t least = saturating_multiply(pages, model_.kv_page_bytes);
    const std::uint64_t whole = (saturating_add(least, model_.kv_page_bytes - 1) >> 20) << 20;
    return whole >= least ? whole : least;
  }
  void add(plan_proposal& to, wish what, std::uint64_t value) const {
    const std::string number = std::to_string(value);
    std::string text;
    switch (what) {
      case wish::context_tokens:
        text = "--context " + number;
        break;
      case wish::max_running:
        text = "--max-running " + number;
        break;
      case wish::step_tokens:
        text = "steps of " + counted(value, "token");
        break;
      case wish::expert_slots:
        text = "--expert-slots " + number;
        break;
      case wish::kv_bytes:
        value = kv_bytes_of(value);
        text = "--kv-bytes " + (value % (1u << 20) == 0 ? mebibytes_at_least(value) : std::to_string(value));
        break;
      case wish::state_snapshots:
        text = value == 0 ? "no state snapshots" : counted(value, "state snapshot");
        break;
      case wish::vram_limit_bytes:
      case wish::more_memory_bytes:
        break;
    }
    to.text += (to.text.empty() ? "" : " ") + text;
    to.changes.push_back({what, value});
  }

  [[nodiscard]] bool fits_with(plan_request r, wish what, std::uint64_t value) const {
    set(r, what, value);
    return alternatives_.fits(r);
  }
  /// The largest number below the wish that fits, if `low` does.
  [[nodiscard]] std::optional<std::uint64_t> largest(std::uint64_t low, wish what) const {
    const auto most = wished(what);
    if (!most || low >= *most || !fits_with(request_, what, low)) return std::nullopt;
    return largest_that_fits(low, *most - 1,
                             [&](std::uint64_t value) { return fits_with(request_, what, value); });
  }
  /// What is least for somebody who wishes no less; who does may be told of 1.
  [[nodiscard]] std::uint64_t least_of(std::uint64_t usual, wish what) const {
    return wished(what).value_or(0) > usual ? usual : 1;
  }

  bool single(wish what, std::optional<std::uint64_t> value) {
    if (!value) return false;
    add(found_.emplace_back(), what, *value);
    return true;
  }
  /// The least number that other wishes allow, for a wish below it.
  [[nodiscard]] std::optional<std::uint64_t> raised(std::uint64_t least, wish what) const {
    if (wished(what).value_or(least) >= least || !fits_with(request_, what, least)) return std::nullopt;
    return least;
  }
  void single_wishes() {
    single(wish::context_tokens,
           largest(least_of(least_.context, wish::context_tokens), wish::context_tokens));
    single(wish::max_running, largest(least_.running, wish::max_running));
    single(wish::step_tokens, largest(least_of(least_.step_tokens, wish::step_tokens), wish::step_tokens));
    if (request_.expert_slots && !single(wish::expert_slots, raised(least_.slots, wish::expert_slots)) &&
        !single(wish::expert_slots, largest(least_.slots, wish::expert_slots))) {
      plan_request without = request_;
      without.expert_slots.reset();
      if (alternatives_.fits(without))  // all experts need no addresses of others
        found_.push_back({"no --expert-slots", {{wish::expert_slots, std::nullopt}}});
    }
    if (!single(wish::kv_bytes, raised(least_.pages, wish::kv_bytes)))
      single(wish::kv_bytes, largest(least_.pages, wish::kv_bytes));
    single(wish::state_snapshots, largest(0, wish::state_snapshots));
  }

  /// Where none is enough alone.
  void all_wishes() {
    plan_request without = request_, other = request_;
    without.context_tokens.reset(), without.max_running.reset(), without.step_tokens.reset();
    without.expert_slots.reset(), without.kv_bytes.reset();
    if (!alternatives_.fits(without)) return;
    const memory_plan plan = alternatives_.plan(without);
    struct number {
      wish what;
      std::uint64_t value;
    };
    std::vector<number> numbers = {{wish::context_tokens, u(plan.limits.context_tokens)},
                                   {wish::max_running, u(plan.limits.running)},
                                   {wish::step_tokens, u(plan.limits.step_tokens)},
                                   {wish::expert_slots, plan.expert_slots},
                                   {wish::kv_bytes, plan.kv_pages}};
    // A wish that the plan meets stays.
    std::erase_if(numbers, [&](const number& n) { return wished(n.what).value_or(0) <= n.value; });
    for (const number& n : numbers) set(other, n.what, n.value);
    if (!alternatives_.fits(other)) return;
    for (bool rose = true; rose;) {
      rose = false;
      for (number& n : numbers) {
        const auto fits = [&](std::uint64_t value) { return fits_with(other, n.what, value); };
        const std::uint64_t most = *wished(n.what);  // itself first: with all experts' slots the sum falls
        const std::uint64_t value = fits(most) ? most : largest_that_fits(n.value, most, fits);
        rose |= value > n.value;
        n.value = value;
        set(other, n.what, value);
      }
    }
    plan_proposal proposal;
    for (const number& n : numbers)
      if (n.value < *wished(n.what)) add(proposal, n.what, n.value);
    if (!proposal.changes.empty()) found_.push_back(std::move(proposal));
  }

  const plan_request& request_;
  const memory_model& model_;
  const least_wishes& least_;
  const Alternatives& alternatives_;
  std::vector<plan_proposal> found_;
};

}  // namespace nibble::detail
