// SPDX-License-Identifier: Apache-2.0
/// \file
/// Ids that are never drawn: their logits become -inf, so that even greedy draws need no mask.
#pragma once

#include <cmath>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"

namespace qwen3_moe {

struct forbid_params {
  float* logits = nullptr;  ///< [rows], `ldl` floats apart
  std::ptrdiff_t ldl = 0;
  int rows = 0;
  const std::int32_t* ids = nullptr;  ///< [count], each a column; older than the kernel before
  int count = 0;
};

template <int Threads>
__global__ __launch_bounds__(Threads) void forbid_kernel(const __grid_constant__ forbid_params p) {
  nibble::device::wait_for_previous_grid();
  nibble::device::let_next_grid_start();
  float* row = p.logits + static_cast<std::ptrdiff_t>(blockIdx.y) * p.ldl;
  const int i = static_cast<int>(blockIdx.x) * Threads + static_cast<int>(threadIdx.x);
  if (i < p.count) row[p.ids[i]] = -INFINITY;
}

struct forbid_family {
  using params = forbid_params;
  static constexpr const char* name = "forbid";
  static constexpr int threads = 128;

  template <class Visit>
  static nibble::status for_each_kernel(Visit&& visit) {
    return visit(&forbid_kernel<threads>, threads, std::size_t{0}, name);
  }
  static nibble::status launch(const params& p, const nibble::launch_options& options) {
    if (p.rows < 1 || p.count < 1 || p.logits == nullptr || p.ids == nullptr)
      return nibble::status::invalid(name, "rows, ids and logits must be there");
    return nibble::launch(
        &forbid_kernel<threads>,
        dim3(static_cast<unsigned>((p.count + threads - 1) / threads), static_cast<unsigned>(p.rows)),
        threads, 0, options, name, p);
  }
};

}  // namespace qwen3_moe
