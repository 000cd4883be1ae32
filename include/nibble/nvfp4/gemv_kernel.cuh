// SPDX-License-Identifier: Apache-2.0
/// \file
/// The matrix-vector kernel: one interface over three ways for weights to travel.
#pragma once

#include <cstdint>

#include "nibble/nvfp4/gemv_one_shot.cuh"
#include "nibble/nvfp4/gemv_registers.cuh"
#include "nibble/nvfp4/gemv_ring.cuh"

namespace nibble {

template <class Epilogue, class Input, std::uint64_t Policy, int... LayoutNumbers>
__global__ __launch_bounds__(
    plan_for<layout_from<LayoutNumbers...>, policy_from<Policy>>.threads,
    policy_from<Policy>.min_blocks) void gemv_kernel(const __grid_constant__ gemv_params<Epilogue, Input> p) {
  if constexpr (policy_from<Policy>.variant == gemv_variant::registers)
    device::gemv_registers<layout_from<LayoutNumbers...>, policy_from<Policy>, Epilogue, Input>(p);
  else if constexpr (policy_from<Policy>.variant == gemv_variant::one_shot)
    device::gemv_one_shot<layout_from<LayoutNumbers...>, policy_from<Policy>, Epilogue, Input>(p);
  else
    device::gemv_ring<layout_from<LayoutNumbers...>, policy_from<Policy>, Epilogue, Input>(p);
}

/// The kernel of a layout, policy, epilogue and input.
template <resident_layout L, gemv_policy Policy, class Epilogue, class Input = plain_input>
inline constexpr auto gemv_kernel_of =
    &gemv_kernel<Epilogue, Input, encode(Policy), L.shape.n, L.shape.k, static_cast<int>(L.shape.format),
                 static_cast<int>(L.order), L.shape.segment_rows[0], L.shape.segment_rows[1],
                 L.shape.segment_rows[2], L.shape.segment_rows[3]>;

}  // namespace nibble
