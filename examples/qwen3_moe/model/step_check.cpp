// SPDX-License-Identifier: Apache-2.0
#include "model/step_check.hpp"

#include <string>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/core/error.hpp"

namespace qwen3_moe {

namespace {

void require(bool fine, const char* what, std::int64_t value, std::int64_t limit) {
  if (!fine)
    throw nibble::error(std::string("step: ") + what + " " + std::to_string(value) +
                        " is out of range, the limit is " + std::to_string(limit));
}

}  // namespace

void check_slot(const runner_limits& limits, int slot) {
  require(slot >= 0 && slot < limits.slots, "slot", slot, limits.slots - 1);
}

namespace {

/// \return rows that want logits
std::size_t check_sequences(const runner_limits& limits, std::span<const step_sequence> sequences,
                            bool previous_may_stand) {
  std::size_t rows = 0, wanted = 0;
  std::vector<bool> taken(static_cast<std::size_t>(limits.slots), false);
  for (const auto& sequence : sequences) {
    check_slot(limits, sequence.slot);
    if (taken[static_cast<std::size_t>(sequence.slot)])
      throw nibble::error("step: slot " + std::to_string(sequence.slot) + " is given to two sequences");
    taken[static_cast<std::size_t>(sequence.slot)] = true;
    const std::size_t tokens = sequence.tokens.size();
    require(tokens > 0, "token count", 0, 1);
    require(sequence.position >= 0, "position", sequence.position, 0);
    const std::size_t length = static_cast<std::size_t>(sequence.position) + tokens;
    require(length <= static_cast<std::size_t>(limits.context_tokens), "sequence length",
            static_cast<std::int64_t>(length), limits.context_tokens);
    const auto pages = nibble::divide_up(length, static_cast<std::uint64_t>(limits.page_tokens));
    require(sequence.pages.size() >= pages, "page count", static_cast<std::int64_t>(sequence.pages.size()),
            static_cast<std::int64_t>(pages));
    for (const auto page : sequence.pages)
      require(page >= 0 && page < limits.pages, "page", page, limits.pages - 1);
    const bool previous = previous_may_stand && tokens == 1 && sequence.tokens[0] == previous_token;
    for (const auto token : sequence.tokens)
      require(previous || (token >= 0 && token < limits.vocab_size), "token", token, limits.vocab_size - 1);
    rows += tokens;
    wanted += sequence.logits == wanted_logits::all ? tokens : sequence.logits == wanted_logits::last ? 1 : 0;
  }
  require(rows <= static_cast<std::size_t>(limits.step_tokens), "tokens of the step",
          static_cast<std::int64_t>(rows), limits.step_tokens);
  return wanted;
}

}  // namespace

void check_step(const runner_limits& limits, std::span<const step_sequence> sequences,
                std::size_t logits_floats) {
  const std::size_t wanted = check_sequences(limits, sequences, false);
  const std::size_t needed = wanted * static_cast<std::size_t>(limits.vocab_size);
  require(logits_floats >= needed, "logits buffer", static_cast<std::int64_t>(logits_floats),
          static_cast<std::int64_t>(needed));
}

void check_drawing_step(const runner_limits& limits, std::span<const step_sequence> sequences) {
  check_sequences(limits, sequences, true);
  for (const auto& sequence : sequences)
    if (sequence.logits == wanted_logits::all)
      throw nibble::error("step: a step that draws gives no logits of all rows");
}

}  // namespace qwen3_moe
