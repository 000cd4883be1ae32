// SPDX-License-Identifier: Apache-2.0
/// \file
/// The split again, for an engine that runs and whose memory others take or give back.
#pragma once

#include <algorithm>
#include <cstdint>

#include "nibble/plan/planner.hpp"

namespace nibble {

/// A new split of expert slots and KV pages for an engine that runs. Sequences, step and reserve stay as
/// `first`, its plan at start-up, had them; nothing grows past it. What the user asked for gives way here: an
/// engine with less serves on, one without memory does not. Pages 0 … pages_in_use - 1 are kept. Memory
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
