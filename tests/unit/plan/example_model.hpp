// SPDX-License-Identifier: Apache-2.0
/// \file
/// The numbers of Qwen3.6-35B-A3B, rounded where the last byte does not matter, and of cards; what a plan
/// says.
#pragma once

#include <cstdint>
#include <string>

#include "nibble/plan/planner.hpp"

namespace nibble::test {

inline constexpr std::uint64_t kib = 1024, mib = 1024 * kib, gib = 1024 * mib;

inline memory_model large_moe() {
  memory_model m;
  m.weight_bytes = 2500 * mib;
  m.kernel_bytes = 4 * mib;
  m.graph_bytes = 4 * mib;
  m.max_context_tokens = 262144;
  m.state_slot_bytes = 64'389'120;
  m.kv_page_bytes = 16 * 20480;
  m.page_tokens = 16;
  m.expert_slot_bytes = 1'775'616;
  m.experts = 10240;
  m.layer_experts = 256;
  m.experts_per_token = 8;
  m.workspace_bytes = [](const step_limits& l) {
    return static_cast<std::uint64_t>(l.step_tokens) * 400'000 +
           static_cast<std::uint64_t>(l.running) * 2'000'000 +
           static_cast<std::uint64_t>(l.running) * static_cast<std::uint64_t>(l.context_tokens) / 16 * 4;
  };
  return m;
}

/// A card of `total` bytes of which the process' context took 500 MiB and nobody anything else.
inline machine_memory card(std::uint64_t total) {
  machine_memory m;
  m.total_bytes = total;
  m.context_bytes = 500 * mib;
  m.free_bytes = total > m.context_bytes ? total - m.context_bytes : 0;
  return m;
}

/// What a plan is refused with, "" where there is one.
inline std::string refusal(const machine_memory& machine, const memory_model& model,
                           const plan_request& request = {}) {
  try {
    static_cast<void>(plan_memory(machine, model, request));
  } catch (const error& problem) {
    return problem.what();
  }
  return "";
}
inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace nibble::test
