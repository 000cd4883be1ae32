// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which rows of a step belong to which sequence.
#pragma once

#include <cstdint>

namespace nibble::host {

/// Consecutive rows of one sequence in a step. Row first_row + i stands at position + i of the sequence.
struct sequence_span {
  int first_row = 0;                    ///< in every activation matrix of the step
  int rows = 0;                         ///< tokens of this step; 0 is allowed and does nothing
  int position = 0;                     ///< tokens of the sequence already in the caches
  int slot = 0;                         ///< of the recurrent states
  const std::int32_t* pages = nullptr;  ///< at least ceil((position + rows) / page_tokens) ids of KV pages
};

}  // namespace nibble::host
