// SPDX-License-Identifier: Apache-2.0
/// \file
/// What to wish instead of what does not fit: for each wish the largest number with which it would.
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

/// The smallest numbers that are worth a try.
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
  /// One text for each change that is enough.
  [[nodiscard]] const std::vector<std::string>& found() const { return found_; }

 private:
  static void set_context(plan_request& r, std::uint64_t tokens) {
    r.context_tokens = static_cast<int>(tokens);
  }
  static void set_running(plan_request& r, std::uint64_t sequences) {
    r.max_running = static_cast<int>(sequences);
  }
  static void set_steps(plan_request& r, std::uint64_t tokens) { r.step_tokens = static_cast<int>(tokens); }
  static void set_slots(plan_request& r, std::uint64_t slots) { r.expert_slots = slots; }
  static void set_snapshots(plan_request& r, std::uint64_t states) {
    r.state_snapshots = static_cast<int>(states);
  }
  static std::string option(const char* name, std::uint64_t value) {
    return std::string(name) + " " + std::to_string(value);
  }
  static std::string steps_text(std::uint64_t tokens) { return "steps of " + counted(tokens, "token"); }
  /// An option's text for `pages`, as whole MiB where they stand for no other number of pages.
  [[nodiscard]] std::string kv_text(std::uint64_t pages) const {
    const std::uint64_t least = saturating_multiply(pages, model_.kv_page_bytes);
    const std::uint64_t whole = (saturating_add(least, model_.kv_page_bytes - 1) >> 20) << 20;
    return "--kv-bytes " + (whole >= least ? mebibytes_at_least(whole) : std::to_string(least));
  }

  /// The largest number below `wished` that fits, if `low` does.
  template <class Set>
  [[nodiscard]] std::optional<std::uint64_t> largest(std::uint64_t low, std::uint64_t wished,
                                                     const Set& set) const {
    const auto fits_with = [&](std::uint64_t value) {
      plan_request other = request_;
      set(other, value);
      return alternatives_.fits(other);
    };
    if (low >= wished || !fits_with(low)) return std::nullopt;
    return largest_that_fits(low, wished - 1, fits_with);
  }
  /// What is least for somebody who wishes no less; who does may be told of 1.
  [[nodiscard]] static std::uint64_t least_of(std::uint64_t usual, int wished) {
    return static_cast<std::uint64_t>(wished) > usual ? usual : 1;
  }

  void single_wishes() {
    const auto u = [](int value) { return static_cast<std::uint64_t>(value); };
    const auto& r = request_;
    if (r.context_tokens)
      if (const auto most =
              largest(least_of(least_.context, *r.context_tokens), u(*r.context_tokens), set_context))
        found_.push_back(option("--context", *most));
    if (r.max_running)
      if (const auto most = largest(least_.running, u(*r.max_running), set_running))
        found_.push_back(option("--max-running", *most));
    if (r.step_tokens)
      if (const auto most =
              largest(least_of(least_.step_tokens, *r.step_tokens), u(*r.step_tokens), set_steps))
        found_.push_back(steps_text(*most));
    if (r.expert_slots) {
      plan_request without = r;
      without.expert_slots.reset();
      if (const auto most = largest(least_.slots, *r.expert_slots, set_slots))
        found_.push_back(option("--expert-slots", *most));
      else if (alternatives_.fits(without))
        found_.push_back("no --expert-slots");  // all experts need no addresses of others
    }
    if (r.kv_bytes && model_.kv_page_bytes > 0) {
      const auto set_pages = [&](plan_request& other, std::uint64_t pages) {
        other.kv_bytes = saturating_multiply(pages, model_.kv_page_bytes);
      };
      if (const auto most = largest(least_.pages, *r.kv_bytes / model_.kv_page_bytes, set_pages))
        found_.push_back(kv_text(*most));
    }
    if (const auto most = largest(0, u(r.state_snapshots), set_snapshots))
      found_.push_back(*most == 0 ? "no state snapshots" : counted(*most, "state snapshot"));
  }

  /// Where none is enough alone: what the plan would be without any of them.
  void all_wishes() {
    const auto& r = request_;
    plan_request without = r, other = r;
    without.context_tokens.reset(), without.max_running.reset(), without.step_tokens.reset();
    without.expert_slots.reset(), without.kv_bytes.reset();
    if (!alternatives_.fits(without)) return;
    const memory_plan plan = alternatives_.plan(without);
    const step_limits& limits = plan.limits;  // a wish that it meets stays
    std::vector<std::string> texts;
    if (r.context_tokens && *r.context_tokens > limits.context_tokens) {
      other.context_tokens = limits.context_tokens;
      texts.push_back(option("--context", static_cast<std::uint64_t>(limits.context_tokens)));
    }
    if (r.max_running && *r.max_running > limits.running) {
      other.max_running = limits.running;
      texts.push_back(option("--max-running", static_cast<std::uint64_t>(limits.running)));
    }
    if (r.step_tokens && *r.step_tokens > limits.step_tokens) {
      other.step_tokens = limits.step_tokens;
      texts.push_back(steps_text(static_cast<std::uint64_t>(limits.step_tokens)));
    }
    if (r.expert_slots && *r.expert_slots > plan.expert_slots) {
      other.expert_slots = plan.expert_slots;
      texts.push_back(option("--expert-slots", plan.expert_slots));
    }
    if (r.kv_bytes && model_.kv_page_bytes > 0 && *r.kv_bytes / model_.kv_page_bytes > plan.kv_pages) {
      other.kv_bytes = plan.kv_pages * model_.kv_page_bytes;
      texts.push_back(kv_text(plan.kv_pages));
    }
    if (texts.size() < 2 || !alternatives_.fits(other)) return;
    std::string text;
    for (const auto& part : texts) text += (text.empty() ? "" : " ") + part;
    found_.push_back(text);
  }

  const plan_request& request_;
  const memory_model& model_;
  const least_wishes& least_;
  const Alternatives& alternatives_;
  std::vector<std::string> found_;
};

}  // namespace nibble::detail
