// SPDX-License-Identifier: Apache-2.0
/// \file
/// Validate, choose the tile width, launch the kernels for many tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/moe/experts_launch.cuh"
#include "nibble/moe/experts_many.cuh"
#include "nibble/moe/experts_wide.cuh"

namespace nibble::moe {

/// Whether experts with many assignments go to the warpgroup kernels: whole K tiles only.
[[nodiscard]] constexpr bool has_wide_experts(const experts_shape& shape,
                                              const device_class& device = default_device) {
  return has_wgmma && device.architecture == 90 && shape.hidden % tile_columns == 0 &&
         shape.inner % tile_columns == 0;
}

/// Assignments of a tile at most. Few: about what an expert gets when all are equal. Many: with the warpgroup
/// kernels the width whose tiles hold the usual deviation, two square roots of the mean, with the least to
/// spare.
[[nodiscard]] constexpr int expert_tile_width(const experts_shape& shape, int m,
                                              device_class device = default_device) {
  const int mean = m * shape.top_k / shape.experts;
  if (mean <= 10) return 16;
  if (mean <= 24) return 32;
  if (!has_wide_experts(shape, device)) return mean <= 48 ? 64 : 128;
  int root = 1;
  while (root * root < mean) ++root;
  const int most = mean + 2 * root;
  int best = 128;
  const auto cost = [most](int width) { return (most + width - 1) / width * (width + 16); };
  for (const int width : {96, 64})
    if (cost(width) < cost(best)) best = width;
  return best;
}

/// The cut of a block for tiles of at most `width` assignments.
[[nodiscard]] constexpr gemm_shape experts_cut(const experts_shape& shape, int width, device_class device) {
  return fit_gemm(shape.format, width, device);
}

template <experts_shape S, int Width>
inline constexpr auto gate_up_wide_kernel_of =
    &experts_gate_up_wide<2, Width, S.hidden, S.inner, S.experts, S.top_k, S.shared ? 1 : 0,
                          static_cast<int>(S.format)>;
template <experts_shape S, int Width>
inline constexpr auto down_wide_kernel_of =
    &experts_down_wide<2, Width, S.hidden, S.inner, S.experts, S.top_k, S.shared ? 1 : 0,
                       static_cast<int>(S.format)>;
template <experts_shape S, gemm_shape G>
inline constexpr auto gate_up_many_kernel_of =
    &experts_gate_up_many<G.row_warps, G.tiles, G.tokens, G.stages, G.min_blocks, S.hidden, S.inner,
                          S.experts, S.top_k, S.shared ? 1 : 0, static_cast<int>(S.format)>;
template <experts_shape S, gemm_shape G>
inline constexpr auto down_many_kernel_of =
    &experts_down_many<G.row_warps, G.tiles, G.tokens, G.stages, G.min_blocks, S.hidden, S.inner, S.experts,
                       S.top_k, S.shared ? 1 : 0, static_cast<int>(S.format)>;
template <experts_shape S>
inline constexpr auto sort_kernel_of = &experts_sort<S.experts, S.top_k, S.shared ? 1 : 0>;
template <experts_shape S>
inline constexpr auto combine_kernel_of = &experts_combine<S.hidden, S.top_k, S.shared ? 1 : 0>;

namespace detail {

template <experts_shape S>
status check_many(const experts_params& p, const char* where) {
  static_assert(S.valid(),
                "experts have widths that are multiples of 16, at most 4096 of them and 16 per token with "
                "the shared one");
  const auto aligned = [](const void* a, std::uintptr_t to) {
    return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % to == 0;
  };
  if (p.m < 1) return status::invalid(where, "the number of tokens must be positive");
  if (!aligned(p.workspace, 128) || p.workspace_bytes < workspace_of(S, p.m).bytes)
    return status::invalid(
        where, "the workspace needs an address that is a multiple of 128 and the bytes its query names");
  if (const status s = check_slots<S>(p, where); !s.ok()) return s;
  if (const status s = check_x<S>(p, where); !s.ok()) return s;
  return check_outputs<S>(p, where);
}

template <experts_shape S>
many_params with_workspace(const experts_params& p) {
  const experts_workspace w = workspace_of(S, p.m);
  many_params q;
  q.e = p;
  q.tile_count = reinterpret_cast<std::int32_t*>(p.workspace + w.tile_count);
  q.order = reinterpret_cast<std::int32_t*>(p.workspace + w.order);
  q.position = reinterpret_cast<std::int32_t*>(p.workspace + w.position);
  q.tiles = reinterpret_cast<expert_tile*>(p.workspace + w.tiles);
  q.parts = reinterpret_cast<__nv_bfloat16*>(p.workspace + w.parts);
  return q;
}

}  // namespace detail

/// visit(kernel, threads, dynamic shared bytes, name) → status for every kernel of launch_experts_many.
template <experts_shape S, device_class Device = default_device, class Visit>
status visit_experts_many(Visit&& visit) {
  status s =
      visit(sort_kernel_of<S>, 32 * sort_warps(S.experts), sort_shared_bytes(S.experts), "experts_sort");
  if (s.ok()) s = visit(combine_kernel_of<S>, 256, std::size_t{0}, "experts_combine");
  if (!s.ok()) return s;
  const auto narrow = [&visit]<int Width>() {
    constexpr gemm_shape cut = experts_cut(S, Width, Device);
    static_assert(cut.stages >= 2 && cut.shared_bytes(S.format) <= Device.dynamic_shared_bytes(),
                  "a block of this architecture has too little shared memory for experts");
    constexpr auto bytes = static_cast<std::size_t>(cut.shared_bytes(S.format));
    const status up = visit(gate_up_many_kernel_of<S, cut>, cut.threads(), bytes, "experts_gate_up_many");
    return up.ok() ? visit(down_many_kernel_of<S, cut>, cut.threads(), bytes, "experts_down_many") : up;
  };
  s = narrow.template operator()<16>();
  if (s.ok()) s = narrow.template operator()<32>();
  if constexpr (has_wide_experts(S, Device)) {
    const auto wide = [&visit]<int Width>() {
      constexpr std::size_t bytes = wide_plan<S.format, 2, Width>::shared_bytes;
      const status up = visit(gate_up_wide_kernel_of<S, Width>, 384, bytes, "experts_gate_up_wide");
      return up.ok() ? visit(down_wide_kernel_of<S, Width>, 384, bytes, "experts_down_wide") : up;
    };
    if (s.ok()) s = wide.template operator()<64>();
    if (s.ok()) s = wide.template operator()<96>();
    if (s.ok()) s = wide.template operator()<128>();
  } else {
    if (s.ok()) s = narrow.template operator()<64>();
    if (s.ok()) s = narrow.template operator()<128>();
  }
  return s;
}

/// The products of tiles at most `Width` assignments wide.
template <experts_shape S, int Width, device_class Device = default_device>
status launch_experts_many_with(const experts_params& p, const launch_options& options) {
  static constexpr const char* where = "nibble::moe::experts";
  if (const status s = detail::check_many<S>(p, where); !s.ok()) return s;
  constexpr gemm_shape cut = experts_cut(S, Width, Device);
  static_assert(cut.stages >= 2 && cut.tokens >= least_tile_width,
                "the device has too little shared memory for experts");
  constexpr auto bytes = static_cast<std::size_t>(cut.shared_bytes(S.format));
  const many_params q = detail::with_workspace<S>(p);
  const auto blocks = [&](int row_tiles) {
    return dim3(static_cast<unsigned>(most_expert_tiles(S, p.m, cut.tokens) *
                                      ((row_tiles + cut.row_tiles() - 1) / cut.row_tiles())));
  };
  status s = launch(sort_kernel_of<S>, dim3(1), 32 * sort_warps(S.experts), sort_shared_bytes(S.experts),
                    options, where, q, static_cast<int>(cut.tokens));
  if (s.ok())
    s = launch(gate_up_many_kernel_of<S, cut>, blocks(S.gate_up().row_tiles()), cut.threads(), bytes, options,
               where, q);
  if (s.ok())
    s = launch(down_many_kernel_of<S, cut>, blocks(S.down().row_tiles()), cut.threads(), bytes, options,
               where, q);
  if (s.ok()) s = launch(combine_kernel_of<S>, dim3(static_cast<unsigned>(p.m)), 256, 0, options, where, q);
  return s;
}

/// The products of tiles at most `Width` assignments wide by the warpgroup kernels: 64, 96 or 128.
template <experts_shape S, int Width, device_class Device = default_device>
status launch_experts_wide(const experts_params& p, const launch_options& options) {
  static constexpr const char* where = "nibble::moe::experts";
  if (const status s = detail::check_many<S>(p, where); !s.ok()) return s;
  using plan = wide_plan<S.format, 2, Width>;
  const many_params q = detail::with_workspace<S>(p);
  const auto blocks = [&](int row_tiles) {
    const int units =
        most_expert_tiles(S, p.m, Width) * ((row_tiles + plan::row_tiles - 1) / plan::row_tiles);
    return dim3(
        static_cast<unsigned>(std::clamp(Device.multiprocessors - options.left_multiprocessors, 1, units)));
  };
  status s = launch(sort_kernel_of<S>, dim3(1), 32 * sort_warps(S.experts), sort_shared_bytes(S.experts),
                    options, where, q, Width);
  if (s.ok())
    s = launch(gate_up_wide_kernel_of<S, Width>, blocks(S.gate_up().row_tiles()), plan::threads,
               plan::shared_bytes, options, where, q);
  if (s.ok())
    s = launch(down_wide_kernel_of<S, Width>, blocks(S.down().row_tiles()), plan::threads, plan::shared_bytes,
               options, where, q);
  if (s.ok()) s = launch(combine_kernel_of<S>, dim3(static_cast<unsigned>(p.m)), 256, 0, options, where, q);
  return s;
}

/// y = residual + Σ_j weight_j · down_j · SwiGLU(gate_j · x, up_j · x) for any number of tokens. The contract
/// of launch_gate_up and launch_down, and a workspace; the grid does not depend on the routes. \param
/// step_tokens tokens whose kernels are to be taken, see experts_family
template <experts_shape S, device_class Device = default_device>
status launch_experts_many(const experts_params& p, const launch_options& options, int step_tokens = 0) {
  const int width = expert_tile_width(S, step_tokens > 0 ? step_tokens : p.m, Device);
  if (width <= 16) return launch_experts_many_with<S, 16, Device>(p, options);
  if (width <= 32) return launch_experts_many_with<S, 32, Device>(p, options);
  if constexpr (has_wide_experts(S, Device)) {
    if (width <= 64) return launch_experts_wide<S, 64, Device>(p, options);
    if (width <= 96) return launch_experts_wide<S, 96, Device>(p, options);
    return launch_experts_wide<S, 128, Device>(p, options);
  } else {
    if (width <= 64) return launch_experts_many_with<S, 64, Device>(p, options);
    return launch_experts_many_with<S, 128, Device>(p, options);
  }
}

/// Loads the kernels for many tokens on the current device.
template <experts_shape S, device_class Device = default_device>
status prepare_experts_many() {
  return visit_experts_many<S, Device>([](auto kernel, int threads, std::size_t bytes, const char* name) {
    return prepare(kernel, threads, bytes, name);
  });
}

}  // namespace nibble::moe
