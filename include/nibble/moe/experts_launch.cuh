// SPDX-License-Identifier: Apache-2.0
/// \file
/// Validate, select, launch the expert kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/experts_kernel.cuh"

namespace nibble::moe {

/// The gate|up kernel of a shape and policy; one column: the kernel for one token.
template <experts_shape S, experts_policy P, int Columns>
inline constexpr auto gate_up_kernel_of =
    &experts_gate_up_grouped<Columns, P.up_warps, P.up_depth, P.up_min_blocks, S.hidden, S.inner, S.experts,
                             S.top_k, S.shared ? 1 : 0, static_cast<int>(S.format)>;
template <experts_shape S, experts_policy P>
inline constexpr auto gate_up_kernel_of<S, P, 1> =
    &experts_gate_up_single<P.up_warps, P.up_depth, P.up_min_blocks, S.hidden, S.inner, S.experts, S.top_k,
                            S.shared ? 1 : 0, static_cast<int>(S.format)>;
template <experts_shape S, experts_policy P>
inline constexpr auto down_kernel_of =
    &experts_down<P.down_warps, P.down_depth, P.down_min_blocks, S.hidden, S.inner, S.experts, S.top_k,
                  S.shared ? 1 : 0, static_cast<int>(S.format)>;

namespace detail {

template <experts_shape S>
status check_slots(const experts_params& p, const char* where) {
  static_assert(S.valid(),
                "experts have widths that are multiples of 16, at most 4096 of them and 16 per token with "
                "the shared one");
  const auto aligned = [](const void* a, std::uintptr_t to) {
    return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % to == 0;
  };
  if (!aligned(p.slots, tile_alignment_bytes) || p.slot_scales == nullptr || p.slot_count < 1)
    return status::invalid(
        where, "the slots need an address that is a multiple of 128, scales, and at least one slot");
  if (S.shared && !aligned(p.shared_expert, tile_alignment_bytes))
    return status::invalid(where, "the shared expert needs an address that is a multiple of 128");
  if (p.ids == nullptr || p.slot_of == nullptr)
    return status::invalid(where, "the ids and the slot table are missing");
  if (!aligned(p.h, 16)) return status::invalid(where, "h needs a 16-byte address");
  return status::success();
}

template <experts_shape S>
status check_x(const experts_params& p, const char* where) {
  if (p.x == nullptr || reinterpret_cast<std::uintptr_t>(p.x) % 16 != 0 || p.ldx % 8 != 0 || p.ldx < S.hidden)
    return status::invalid(
        where, "x needs a 16-byte address and a row stride of the hidden size or more, a multiple of 8");
  return status::success();
}

template <experts_shape S>
status check_outputs(const experts_params& p, const char* where) {
  if (p.weights == nullptr) return status::invalid(where, "the routing weights are missing");
  const auto pairs = [](const void* a, int ld) {
    return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % 4 == 0 && ld % 2 == 0 && ld >= S.hidden;
  };
  if (!pairs(p.y, p.ldy))
    return status::invalid(where,
                           "y needs a 4-byte address and an even row stride of the hidden size or more");
  if (p.residual != nullptr && !pairs(p.residual, p.ldr))
    return status::invalid(
        where, "the residual needs a 4-byte address and an even row stride of the hidden size or more");
  return status::success();
}

template <experts_shape S>
status check(const experts_params& p, const char* where) {
  if (p.m < 1 || p.m > max_tokens) return status::invalid(where, "a launch takes 1 to 16 tokens");
  return check_slots<S>(p, where);
}

}  // namespace detail

/// h = SwiGLU of the shared and the chosen experts. Missing experts and ids out of range leave their rows of
/// h unwritten and are added to the report.
template <experts_shape S, experts_policy P, int Columns>
status launch_gate_up_with(const experts_params& p, const launch_options& options) {
  static constexpr const char* where = "nibble::moe::gate_up";
  if (const status s = detail::check<S>(p, where); !s.ok()) return s;
  if (const status s = detail::check_x<S>(p, where); !s.ok()) return s;
  const int tiles = S.gate_up().row_tiles();
  if (Columns == 1 && p.m == 1)
    return launch(gate_up_kernel_of<S, P, Columns>, dim3(static_cast<unsigned>(S.groups() * tiles)),
                  32 * P.up_warps, 0, options, where, p);
  if (Columns == 1) return status::invalid(where, "the kernel for one token takes one token");
  const int groups = (S.shared ? (p.m + Columns - 1) / Columns : 0) + p.m * S.top_k;
  const int blocks = std::min(groups * tiles, P.up_min_blocks * P.multiprocessors);
  return launch(gate_up_kernel_of<S, P, Columns>, dim3(static_cast<unsigned>(blocks)), 32 * P.up_warps, 0,
                options, where, p);
}

/// y = residual + Σ weight · down · h in a fixed order. `ids`, `weights` and `slot_of` must not be written by
/// the kernel that runs just before.
template <experts_shape S, experts_policy P>
status launch_down_with(const experts_params& p, const launch_options& options) {
  static constexpr const char* where = "nibble::moe::down";
  if (const status s = detail::check<S>(p, where); !s.ok()) return s;
  if (const status s = detail::check_outputs<S>(p, where); !s.ok()) return s;
  // As many blocks as one wave holds, then as few as leave each the same share.
  const int units = p.m * S.down().row_tiles();
  const int each =
      (units + P.down_min_blocks * P.multiprocessors - 1) / (P.down_min_blocks * P.multiprocessors);
  const int blocks = (units + each - 1) / each;
  return launch(down_kernel_of<S, P>, dim3(static_cast<unsigned>(blocks)), 32 * P.down_warps * S.groups(), 0,
                options, where, p);
}

/// gate|up for 1…16 tokens with the policy of select_experts. From two tokens on, equal experts share their
/// weights.
template <experts_shape S, device_class Device = default_device>
status launch_gate_up(const experts_params& p, const launch_options& options) {
  if (p.m <= one_token) return launch_gate_up_with<S, select_experts(S, one_token, Device), 1>(p, options);
  return launch_gate_up_with<S, select_experts(S, max_tokens, Device), 8>(p, options);
}

/// down for 1…16 tokens.
template <experts_shape S, device_class Device = default_device>
status launch_down(const experts_params& p, const launch_options& options) {
  if (p.m <= one_token) return launch_down_with<S, select_experts(S, one_token, Device)>(p, options);
  if (p.m <= few_tokens) return launch_down_with<S, select_experts(S, few_tokens, Device)>(p, options);
  return launch_down_with<S, select_experts(S, max_tokens, Device)>(p, options);
}

/// Kernels of a shape for up to 16 tokens.
inline constexpr int experts_kernels = 5;

/// visit(kernel, threads, dynamic shared bytes, name) → status, for each of them.
template <experts_shape S, device_class Device, class Visit>
status visit_experts_few(Visit&& visit) {
  constexpr experts_policy one = select_experts(S, one_token, Device),
                           few = select_experts(S, few_tokens, Device),
                           many = select_experts(S, max_tokens, Device);
  static constexpr const char *up = "experts_gate_up", *down = "experts_down";
  constexpr std::size_t none = 0;
  status s = visit(gate_up_kernel_of<S, one, 1>, 32 * one.up_warps, none, up);
  if (s.ok()) s = visit(gate_up_kernel_of<S, many, 8>, 32 * many.up_warps, none, up);
  if (s.ok()) s = visit(down_kernel_of<S, one>, 32 * one.down_warps * S.groups(), none, down);
  if (s.ok()) s = visit(down_kernel_of<S, few>, 32 * few.down_warps * S.groups(), none, down);
  if (s.ok()) s = visit(down_kernel_of<S, many>, 32 * many.down_warps * S.groups(), none, down);
  return s;
}

/// Loads them on the current device. \param info null, or room for experts_kernels
template <experts_shape S, device_class Device = default_device>
status prepare_experts(kernel_info* info = nullptr) {
  return visit_experts_few<S, Device>([&](auto kernel, int threads, std::size_t shared, const char* name) {
    return prepare(kernel, threads, shared, name, info != nullptr ? info++ : nullptr);
  });
}

}  // namespace nibble::moe
