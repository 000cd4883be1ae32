// SPDX-License-Identifier: Apache-2.0
/// \file
/// The routed experts of a shape as a kernel family, for any number of tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/moe/experts_launch.cuh"
#include "nibble/moe/experts_many_launch.cuh"

namespace nibble::moe {

/// y = residual + shared weight · shared expert + Σ_j weight_j · expert_j, see experts_types.hpp.
///
/// Up to 16 tokens two kernels made for few tokens, above them a sort by expert, two tensor-core products and
/// a sum; a token's result is the same bits for any number of tokens up to 16, and equal up to rounding
/// above.
template <experts_shape Shape, device_class Device = default_device>
struct experts_family {
  using params = experts_params;
  static constexpr const char* name = "experts";
  static constexpr experts_shape shape = Shape;

  /// Bytes of p.h for at most `most_tokens` tokens a launch.
  [[nodiscard]] static constexpr std::size_t h_bytes(int most_tokens) {
    return static_cast<std::size_t>(most_tokens) * Shape.groups() * Shape.inner * sizeof(std::uint16_t);
  }
  /// Bytes of p.workspace for at most `most_tokens` tokens a launch, from a 128-byte address; zero for 16 or
  /// fewer. About (top_k + 1) · hidden · 2 bytes a token.
  [[nodiscard]] static constexpr std::size_t workspace_bytes(int most_tokens) {
    return most_tokens <= max_tokens ? 0 : workspace_of(Shape, most_tokens).bytes;
  }

  /// visit(kernel, threads, dynamic shared bytes, name) → status, for every kernel of launch().
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = visit_experts_few<Shape, Device>(visit);
    if (s.ok()) s = visit_experts_many<Shape, Device>(visit);
    return s;
  }

  /// Everything for p.m tokens. p.ids, p.weights, p.shared_weights and p.x may come from the kernel just
  /// before; p.slot_of must be older.
  static status launch(const params& p, const launch_options& options) { return launch(p, p.m, options); }
  /// The same for a piece of a step of `step_tokens` tokens: by the kernels that the whole step would take,
  /// so that the pieces have its bits.
  /// \param begins how the first kernel follows what is on the stream, where that is more than one kernel
  static status launch(const params& p, int step_tokens, const launch_options& options, launch_chain begins) {
    launch_options first = options;
    first.chain = begins;
    if (step_tokens > max_tokens) return launch_experts_many<Shape, Device>(p, first, step_tokens);
    if (const status s = launch_gate_up<Shape, Device>(p, first); !s.ok()) return s;
    return launch_down<Shape, Device>(p, options);
  }
  static status launch(const params& p, int step_tokens, const launch_options& options) {
    return launch(p, step_tokens, options, options.chain);
  }
};

}  // namespace nibble::moe
