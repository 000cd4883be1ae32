// SPDX-License-Identifier: Apache-2.0
/// \file
/// The contract of model_runner::step, checked before a step touches any cache.
#pragma once

#include <cstddef>
#include <span>

#include "engine/model_runner.hpp"

namespace qwen3_moe {

/// Throws nibble::error unless 0 <= slot < limits.slots.
void check_slot(const runner_limits& limits, int slot);

/// Throws nibble::error when a token, position, slot, page, row count or the logits' size is out of range, or
/// two sequences share a slot.
void check_step(const runner_limits& limits, std::span<const step_sequence> sequences,
                std::size_t logits_floats);

/// The same for model_runner::begin: previous_token may stand for the one token of a sequence, and no
/// sequence wants all its logits.
void check_drawing_step(const runner_limits& limits, std::span<const step_sequence> sequences);

}  // namespace qwen3_moe
