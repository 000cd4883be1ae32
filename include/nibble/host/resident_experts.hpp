// SPDX-License-Identifier: Apache-2.0
/// \file
/// NVFP4 experts computed by the CPU from the tiles in which they rest for the device: no second copy of the
/// weights is needed for the misses that the CPU takes over.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <nibble/host/thread_pool.hpp>

namespace nibble::host {

/// Experts of one layer, expert e at first + e · slot_bytes: gate|up tiles, then down tiles
/// (geometry/tile.hpp, nvfp4/layout.hpp).
struct resident_experts {
  int hidden = 0;  ///< a multiple of 16
  int inner = 0;   ///< a multiple of 16
  int top_k = 0;
  const std::byte* first = nullptr;
  std::size_t slot_bytes = 0;
  const std::array<float, 3>* scales = nullptr;  ///< [experts]: gate, up, down
};

/// y[r] = Σ weights[r][s] · expert_{ids[r][s]}(x[r]), summed over ascending ids in fp32. Overwrites y.
///
/// A row's result depends neither on the other rows nor on the threads; instruction sets round differently.
/// \param ids [m][top_k]; -1 adds nothing, and one that a row names twice has both weights \param weights
/// [m][top_k] \param x [m][hidden], dense \param y [m][hidden], dense
void routed_experts(thread_pool& pool, const resident_experts& experts, const std::int32_t* ids,
                    const float* weights, const float* x, int m, float* y);

}  // namespace nibble::host
