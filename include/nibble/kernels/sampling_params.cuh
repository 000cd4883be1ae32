// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the sampling launcher takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/kernels/sampling_types.hpp"

namespace nibble {

/// All pointers are device pointers. Two rows of a launch share neither `seen` nor `step_at`.
struct sampling_launch_params {
  int rows = 0;
  const float* logits = nullptr;      ///< [rows][vocab], rows `ldl` apart, 16-byte aligned; not changed
  std::ptrdiff_t ldl = 0;             ///< floats, a multiple of 4
  const sampling_row* row = nullptr;  ///< [rows]
  sampled_row* out = nullptr;         ///< [rows]
  std::int32_t* tokens = nullptr;     ///< null, or the token of row i goes to tokens[token_index[i]] too
  const std::int32_t* token_index = nullptr;  ///< [rows]; null: i; an entry below 0 stores nothing
  std::byte* workspace = nullptr;             ///< sampling_workspace_bytes(vocab, rows)
  bool all_greedy = false;   ///< every row is greedy without penalties, bias and mask: one kernel. Believed
  bool any_logprobs = true;  ///< some row asks for log-probabilities: one more kernel
};

}  // namespace nibble
