// SPDX-License-Identifier: Apache-2.0
/// \file
/// RMSNorm over rows of bf16.
#pragma once

#include "nibble/core/launch.cuh"
#include "nibble/kernels/norm_math.cuh"
#include "nibble/kernels/rows_params.cuh"

namespace nibble {

/// A block per row, a warp per 256 columns.
template <int Width>
__global__ __launch_bounds__(Width / 8) void rms_norm_kernel(const __grid_constant__ rms_norm_params p) {
  using namespace device;
  constexpr int parts = Width / norm_columns;
  __shared__ float squares[parts];
  const int column = 8 * threadIdx.x;
  norm_weights weights;
  weights.load(p.weight + column, p.zero_centred);
  wait_for_previous_grid();
  let_next_grid_start();
  int from = static_cast<int>(blockIdx.x);
  if (p.index != nullptr) from = max(0, min(load_int(p.index + from), p.index_limit - 1));
  const uint4 x = load_16(p.x + static_cast<std::size_t>(from) * p.ldx + column);
  float factor;
  const float own = norm_squares(x);
  if constexpr (parts == 1) {
    factor = norm_factor<1>(&own, p.eps);
  } else {
    if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = own;
    __syncthreads();
    factor = norm_factor<parts>(squares, p.eps);
  }
  *reinterpret_cast<uint4*>(p.y + static_cast<std::size_t>(blockIdx.x) * p.ldy + column) =
      weights.apply(x, factor);
}

template <int Width>
struct rms_norm_family {
  static_assert(Width % device::norm_columns == 0 && Width >= device::norm_columns && Width <= 8192,
                "rows to be normalised have a multiple of 256 columns, at most 8192");
  using params = rms_norm_params;
  static constexpr const char* name = "rms_norm";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(&rms_norm_kernel<Width>, Width / 8, std::size_t{0}, name);
  }
  static status launch(const params& p, const launch_options& options) {
    const auto rows = [](const void* at, int ld) {
      return at != nullptr && reinterpret_cast<std::uintptr_t>(at) % 16 == 0 && ld >= Width && ld % 8 == 0;
    };
    if (p.rows < 1) return status::invalid(name, "a launch takes at least one row");
    if (!rows(p.x, p.ldx) || !rows(p.y, p.ldy) || p.weight == nullptr ||
        reinterpret_cast<std::uintptr_t>(p.weight) % 16 != 0)
      return status::invalid(
          name,
          "x, y and the weight need 16-byte addresses, rows strides of the width or more, multiples of 8");
    if (p.index != nullptr && (p.x == p.y || p.index_limit < 1))
      return status::invalid(name, "with an index, y is not x and index_limit is the number of rows of x");
    return nibble::launch(&rms_norm_kernel<Width>, dim3(static_cast<unsigned>(p.rows)), Width / 8, 0, options,
                          name, p);
  }
};

}  // namespace nibble
