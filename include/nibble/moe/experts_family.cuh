// SPDX-License-Identifier: Apache-2.0
/// \file
/// The routed experts of a shape as a kernel family: gate|up and down together.
#pragma once

#include <cstddef>

#include "nibble/moe/experts_launch.cuh"

namespace nibble::moe {

template <experts_shape Shape>
struct experts_family {
  using params = experts_params;
  static constexpr const char* name = "experts";
  static constexpr experts_shape shape = Shape;

  /// Bytes of p.h for at most `most_tokens` tokens a launch.
  [[nodiscard]] static constexpr std::size_t h_bytes(int most_tokens) {
    return static_cast<std::size_t>(most_tokens) * Shape.groups() * Shape.inner * sizeof(std::uint16_t);
  }
  /// Bytes of p.workspace for at most `most_tokens` tokens a launch, from a 128-byte address; may be zero.
  [[nodiscard]] static constexpr std::size_t workspace_bytes(int most_tokens) {
    return most_tokens <= max_tokens ? 0 : 128;
  }

  /// visit(kernel, threads, dynamic shared bytes, name) → status, for every kernel of launch().
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    constexpr experts_policy one = select_experts(Shape, 1), many = select_experts(Shape, 8);
    const auto none = std::size_t{0};
    status s = visit(gate_up_kernel_of<Shape, one, 1>, 32 * one.up_warps, none, "experts_gate_up");
    if (s.ok()) s = visit(gate_up_kernel_of<Shape, many, 8>, 32 * many.up_warps, none, "experts_gate_up");
    if (s.ok())
      s = visit(down_kernel_of<Shape, one>, 32 * one.down_warps * Shape.groups(), none, "experts_down");
    if (s.ok())
      s = visit(down_kernel_of<Shape, many>, 32 * many.down_warps * Shape.groups(), none, "experts_down");
    return s;
  }

  /// gate|up, then down, for p.m tokens. p.ids, p.weights, p.shared_weights and p.x may come from the kernel
  /// just before; p.slot_of must be older.
  static status launch(const params& p, const launch_options& options) {
    if (const status s = launch_gate_up<Shape>(p, options); !s.ok()) return s;
    return launch_down<Shape>(p, options);
  }
};

}  // namespace nibble::moe
