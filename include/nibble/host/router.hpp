// SPDX-License-Identifier: Apache-2.0
/// \file
/// Top-k expert choice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nibble/host/thread_pool.hpp>

namespace nibble::host {

/// p = softmax(logits[r]) over all experts; the top_k largest, ties to the lower id, in descending order;
/// weights are their p, divided by their sum when `renormalise`.
///
/// The choice compares logits, which order like p but do not lose differences to rounding. A NaN logit
/// counts as the smallest value for the choice and makes the row's weights NaN; ids stay valid and distinct.
/// \param logits [rows][experts], rows `ldl` apart
/// \param top_k 1 to `experts`
/// \param ids,weights [rows][top_k], dense
void route(thread_pool& pool, const float* logits, std::ptrdiff_t ldl, int rows, int experts, int top_k,
           bool renormalise, std::int32_t* ids, float* weights);

}  // namespace nibble::host
