// SPDX-License-Identifier: Apache-2.0
/// \file
/// Validate, select, launch.
#pragma once

#include <cstdint>
#include <cstdio>

#include "nibble/core/launch.cuh"
#include "nibble/nvfp4/gemv_kernel.cuh"
#include "nibble/nvfp4/gemv_policy.hpp"

namespace nibble {

/// What every product asks of its pointers and strides.
template <resident_layout Layout, class Epilogue, class Input>
status check_operands(const gemv_params<Epilogue, Input>& p, const char* where) {
  if (p.tiles == nullptr || reinterpret_cast<std::uintptr_t>(p.tiles) % tile_alignment_bytes != 0)
    return status::invalid(where, "the weight tiles need an address that is a multiple of 128");
  if (p.x == nullptr || reinterpret_cast<std::uintptr_t>(p.x) % 16 != 0 || p.ldx % 8 != 0 ||
      p.ldx < Layout.shape.k)
    return status::invalid(where, "x needs a 16-byte address and a row stride of K or more, a multiple of 8");
  if (const status s = Input::check(p.in, where); !s.ok()) return s;
  return Epilogue::check(p.out, layout_constants<Layout>::rows, where);
}

/// One matrix-vector product with a policy of one's own choosing: m is at most policy.columns.
template <resident_layout Layout, gemv_policy Policy, class Epilogue, class Input = plain_input>
status launch_gemv_with(const gemv_params<Epilogue, Input>& p, const launch_options& options) {
  static_assert(
      Layout.valid(),
      "a resident matrix has positive sizes, K a multiple of 16, and for gate|up two equal row segments");
  static_assert(Layout.order == Epilogue::order,
                "the epilogue needs the weights packed in another row order");
  static_assert(compatible(Layout, Policy), "the policy cannot serve this layout");
  static constexpr const char* where = "nibble::gemv";
  if (p.m < 1 || p.m > Policy.columns)
    return status::invalid(where, "the number of tokens does not fit the policy's columns");
  if (const status s = check_operands<Layout>(p, where); !s.ok()) return s;
  if constexpr (Epilogue::finishes)
    if (p.out.blocks < Policy.grid)
      return status::invalid(where, "the key buffer has fewer blocks than the grid");
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  return launch(gemv_kernel_of<Layout, Policy, Epilogue, Input>, dim3(Policy.grid), plan.threads,
                plan.shared_bytes, options, where, p);
}

/// The policy of a product's kernel for so many token columns.
template <resident_layout Layout, int Columns, class Epilogue, class Input = plain_input,
          device_class Device = default_device>
inline constexpr gemv_policy gemv_policy_of = select_gemv(Layout, Columns, Device, Input::norm_bytes,
                                                          Epilogue::ends_block);

/// y = x · Wᵀ for m ≥ 1 tokens, the kernel chosen by select_gemv. Sixteen tokens a launch; more take turns,
/// each reading the weights again. The kernels must have been prepared (prepare_gemv).
///
/// Chained launches: everything the previous kernel on the stream wrote may be read, the weights must not be
/// what it wrote. x and the output must not overlap; the output may be what this kernel's predecessor read.
template <resident_layout Layout, class Epilogue, device_class Device = default_device,
          class Input = plain_input>
status launch_gemv(gemv_params<Epilogue, Input> p, int m, const launch_options& options) {
  if (m < 1) return status::invalid("nibble::gemv", "the number of tokens must be positive");
  while (m > 0) {
    p.m = m < max_gemv_tokens ? m : max_gemv_tokens;
    status s;
    switch (token_columns(p.m)) {
      case 1:
        s = launch_gemv_with<Layout, gemv_policy_of<Layout, 1, Epilogue, Input, Device>>(p, options);
        break;
      case 2:
        s = launch_gemv_with<Layout, gemv_policy_of<Layout, 2, Epilogue, Input, Device>>(p, options);
        break;
      case 4:
        s = launch_gemv_with<Layout, gemv_policy_of<Layout, 4, Epilogue, Input, Device>>(p, options);
        break;
      case 8:
        s = launch_gemv_with<Layout, gemv_policy_of<Layout, 8, Epilogue, Input, Device>>(p, options);
        break;
      default:
        s = launch_gemv_with<Layout, gemv_policy_of<Layout, 16, Epilogue, Input, Device>>(p, options);
    }
    if (!s.ok()) return s;
    m -= p.m;
    p.x += static_cast<std::ptrdiff_t>(p.m) * p.ldx;
    p.out = Epilogue::advanced(p.out, p.m);
  }
  return status::success();
}

/// Loads the kernel of one policy and allows it its shared memory.
template <resident_layout Layout, gemv_policy Policy, class Epilogue, class Input = plain_input>
status prepare_gemv_with(kernel_info* info = nullptr) {
  constexpr gemv_plan plan = plan_for<Layout, Policy>;
  return prepare(gemv_kernel_of<Layout, Policy, Epilogue, Input>, plan.threads, plan.shared_bytes,
                 "nibble::gemv", info);
}

/// Loads the five kernels of a layout, epilogue and input on the current device. \param info null, or room
/// for five
template <resident_layout Layout, class Epilogue, device_class Device = default_device,
          class Input = plain_input>
status prepare_gemv(kernel_info* info = nullptr) {
  status s =
      prepare_gemv_with<Layout, gemv_policy_of<Layout, 1, Epilogue, Input, Device>, Epilogue, Input>(info);
  if (s.ok())
    s = prepare_gemv_with<Layout, gemv_policy_of<Layout, 2, Epilogue, Input, Device>, Epilogue, Input>(
        info != nullptr ? info + 1 : nullptr);
  if (s.ok())
    s = prepare_gemv_with<Layout, gemv_policy_of<Layout, 4, Epilogue, Input, Device>, Epilogue, Input>(
        info != nullptr ? info + 2 : nullptr);
  if (s.ok())
    s = prepare_gemv_with<Layout, gemv_policy_of<Layout, 8, Epilogue, Input, Device>, Epilogue, Input>(
        info != nullptr ? info + 3 : nullptr);
  if (s.ok())
    s = prepare_gemv_with<Layout, gemv_policy_of<Layout, 16, Epilogue, Input, Device>, Epilogue, Input>(
        info != nullptr ? info + 4 : nullptr);
  return s;
}

}  // namespace nibble
