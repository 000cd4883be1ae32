// SPDX-License-Identifier: Apache-2.0
/// \file
/// Many tokens: a tensor-core product straight from the resident tiles, any format, no workspace.
///
/// A row's sum does not depend on the other tokens of its launch as long as their number stays in one class
/// (32, 64, more); the order differs from the matrix-vector kernels', so rows equal theirs up to rounding.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/nvfp4/gemm_tile.cuh"
#include "nibble/nvfp4/gemm_wide.cuh"
#include "nibble/nvfp4/gemv_launch.cuh"

namespace nibble {

namespace device {

/// Rows of a dense matrix of activations.
struct dense_rows {
  const __nv_bfloat16* x;
  int ldx, live;
  __device__ __forceinline__ const __nv_bfloat16* operator()(int token) const {
    return token < live ? x + static_cast<std::size_t>(token) * ldx : nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* any() const { return x; }
};

/// Units of a dense product: neighbours share tokens. Blocks of tokens are equally wide.
template <resident_layout Layout, class Epilogue, int RowBlocks>
struct dense_work {
  using layout = layout_constants<Layout>;
  using plan = wide_plan<layout::format, RowBlocks, 128>;
  static constexpr int row_units = (layout::row_tiles + plan::row_tiles - 1) / plan::row_tiles;
  struct unit {
    const std::uint8_t* tiles;
    int last_tile, first_token, count, first_tile;
  };
  struct context {};
  const gemv_params<Epilogue>& p;
  int token_units, width;

  __device__ __forceinline__ explicit dense_work(const gemv_params<Epilogue>& params)
      : p(params),
        token_units((params.m + plan::tokens - 1) / plan::tokens),
        width(((params.m + token_units - 1) / token_units + 7) / 8 * 8) {}
  [[nodiscard]] __device__ __forceinline__ unit load(int u) const {
    const int first_tile = u % row_units * plan::row_tiles, first_token = u / row_units * width;
    return {p.tiles + static_cast<std::size_t>(first_tile) * (layout::k_tiles * tile_bytes(layout::format)),
            layout::row_tiles - 1 - first_tile, first_token, min(width, p.m - first_token), first_tile};
  }
  [[nodiscard]] __device__ __forceinline__ int token(const unit& u, int i) const {
    return i < u.count ? u.first_token + i : -1;
  }
  [[nodiscard]] __device__ __forceinline__ const __nv_bfloat16* row(const unit&, int token) const {
    return token >= 0 ? p.x + static_cast<std::size_t>(token) * p.ldx : nullptr;
  }
  [[nodiscard]] __device__ __forceinline__ context prepare(const unit&) const { return {}; }
  __device__ __forceinline__ void emit(const unit& u, const context&, const float (&acc)[plan::tokens / 2],
                                       int tile, int lane) const {
    typename Epilogue::shared none;
    const int g = lane >> 2, t = lane & 3;
    const int row =
        layout::paired ? 8 * (u.first_tile + tile) + g : tile_rows * (u.first_tile + tile) + 2 * g;
    const float s0 = scale_of_row<Layout>(p.scale, layout::paired ? 0 : row);
    const float s1 = scale_of_row<Layout>(p.scale, layout::paired ? layout::rows : row + 1);
#pragma unroll
    for (int j = 0; j < plan::tokens / 8; ++j) {
      const int i = 8 * j + 2 * t, token = u.first_token + i;
      if (i < u.count)
        Epilogue::template pair<layout::rows, false>(p.out, none, token, row, acc[4 * j] * s0,
                                                     acc[4 * j + 2] * s1);
      if (i + 1 < u.count)
        Epilogue::template pair<layout::rows, false>(p.out, none, token + 1, row, acc[4 * j + 1] * s0,
                                                     acc[4 * j + 3] * s1);
    }
  }
};

}  // namespace device

/// sm_90a only; empty elsewhere.
template <class Epilogue, int RowBlocks, int... LayoutNumbers>
__global__ __launch_bounds__(384, 1) void gemm_wide_kernel(const __grid_constant__ gemv_params<Epilogue> p) {
  constexpr resident_layout layout = layout_from<LayoutNumbers...>;
  using constants = layout_constants<layout>;
  using work = device::dense_work<layout, Epilogue, RowBlocks>;
  const work w(p);
  device::run_wide<constants::format, constants::k, RowBlocks, work::plan::tokens>(
      w, [&w] { return work::row_units * w.token_units; });
}

template <class Epilogue, int RowWarps, int KWarps, int Tiles, int Tokens, int Stages, int MinBlocks,
          int... LayoutNumbers>
__global__ __launch_bounds__(32 * RowWarps * KWarps,
                             MinBlocks) void gemm_kernel(const __grid_constant__ gemv_params<Epilogue> p) {
  constexpr gemm_shape shape = gemm_shape_from<RowWarps, KWarps, Tiles, Tokens, Stages, MinBlocks>;
  using layout = layout_constants<layout_from<LayoutNumbers...>>;
  using product = device::block_product<layout::format, layout::k, shape>;
  extern __shared__ __align__(128) std::uint8_t staged[];
  __shared__ typename Epilogue::shared out;
  const int first_token = blockIdx.y * Tokens, first_tile = blockIdx.x * shape.row_tiles();
  const product b(staged, p.tiles + static_cast<std::size_t>(first_tile) * layout::k_tiles * product::bytes,
                  layout::row_tiles - first_tile);
#pragma unroll
  for (int s = 0; s < Stages - 1; ++s) b.stage_weights(s);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  typename product::sums acc;
  b.run(acc,
        device::dense_rows{p.x + static_cast<std::size_t>(first_token) * p.ldx, p.ldx, p.m - first_token});
  if (!b.emits()) return;
  const int g = b.lane >> 2, t = b.lane & 3;
#pragma unroll
  for (int r = 0; r < Tiles; ++r) {
    const int tile = first_tile + b.row_warp * Tiles + r;
    if (tile >= layout::row_tiles) break;
    const int row = layout::paired ? 8 * tile + g : tile_rows * tile + 2 * g;
    const float s0 = device::scale_of_row<layout_from<LayoutNumbers...>>(p.scale, layout::paired ? 0 : row);
    const float s1 =
        device::scale_of_row<layout_from<LayoutNumbers...>>(p.scale, layout::paired ? layout::rows : row + 1);
#pragma unroll
    for (int j = 0; j < product::token_tiles; ++j) {
      const int token = first_token + 8 * j + 2 * t;
      const float(&c)[4] = acc[r][j];
      if (token < p.m)
        Epilogue::template pair<layout::rows, false>(p.out, out, token, row, c[0] * s0, c[2] * s1);
      if (token + 1 < p.m)
        Epilogue::template pair<layout::rows, false>(p.out, out, token + 1, row, c[1] * s0, c[3] * s1);
    }
  }
}

template <resident_layout L, gemm_shape S, class Epilogue>
inline constexpr auto gemm_kernel_of =
    &gemm_kernel<Epilogue, S.row_warps, S.k_warps, S.tiles, S.tokens, S.stages, S.min_blocks, L.shape.n,
                 L.shape.k, static_cast<int>(L.shape.format), static_cast<int>(L.order),
                 L.shape.segment_rows[0], L.shape.segment_rows[1], L.shape.segment_rows[2],
                 L.shape.segment_rows[3]>;

template <resident_layout L, int RowBlocks, class Epilogue>
inline constexpr auto gemm_wide_kernel_of =
    &gemm_wide_kernel<Epilogue, RowBlocks, L.shape.n, L.shape.k, static_cast<int>(L.shape.format),
                      static_cast<int>(L.order), L.shape.segment_rows[0], L.shape.segment_rows[1],
                      L.shape.segment_rows[2], L.shape.segment_rows[3]>;

/// Whether more than 64 tokens go to the warpgroup kernel: whole K tiles only.
[[nodiscard]] constexpr bool has_wide_gemm(const resident_layout& layout,
                                           const device_class& device = default_device) {
  return has_wgmma && device.architecture == 90 && layout.shape.k % tile_columns == 0;
}

/// visit(kernel, threads, dynamic shared bytes, name) → status for every kernel of launch_gemm.
template <resident_layout Layout, class Epilogue, device_class Device = default_device, class Visit>
status visit_gemm(Visit&& visit, const char* name = "nibble::gemm") {
  const auto one = [&]<int Tokens>() {
    constexpr gemm_shape shape = select_gemm(Layout, Tokens, Device);
    static_assert(
        shape.stages >= 2 && shape.shared_bytes(Layout.shape.format) <= Device.dynamic_shared_bytes(),
        "a block of this architecture has too little shared memory for the product of many tokens");
    return visit(gemm_kernel_of<Layout, shape, Epilogue>, shape.threads(),
                 static_cast<std::size_t>(shape.shared_bytes(Layout.shape.format)), name);
  };
  status s = one.template operator()<32>();
  if (s.ok()) s = one.template operator()<64>();
  if constexpr (has_wide_gemm(Layout, Device)) {
    constexpr weight_format format = Layout.shape.format;
    if (s.ok())
      s = visit(gemm_wide_kernel_of<Layout, 1, Epilogue>, 384, wide_plan<format, 1, 128>::shared_bytes, name);
    if (s.ok())
      s = visit(gemm_wide_kernel_of<Layout, 2, Epilogue>, 384, wide_plan<format, 2, 128>::shared_bytes, name);
  } else if (s.ok()) {
    s = one.template operator()<128>();
  }
  return s;
}

/// Loads the kernels for many tokens and allows them their shared memory. \param info null, or room for four
template <resident_layout Layout, class Epilogue, device_class Device = default_device>
status prepare_gemm(kernel_info* info = nullptr) {
  return visit_gemm<Layout, Epilogue, Device>(
      [&info](auto kernel, int threads, std::size_t bytes, const char* name) {
        return prepare(kernel, threads, bytes, name, info != nullptr ? info++ : nullptr);
      });
}

/// One product with a cut of one's own choosing.
template <resident_layout Layout, gemm_shape Shape, class Epilogue>
status launch_gemm_with(gemv_params<Epilogue> p, int m, const launch_options& options) {
  static_assert(Layout.valid() && Layout.order == Epilogue::order,
                "the epilogue needs the weights packed in another row order");
  static_assert(!Epilogue::finishes, "logits with a running maximum are made by the matrix-vector kernels");
  static_assert(Shape.stages >= 2, "the device has too little shared memory for this product");
  static constexpr const char* where = "nibble::gemm";
  p.m = m;
  if (m < 1) return status::invalid(where, "the number of tokens must be positive");
  if (const status s = check_operands<Layout>(p, where); !s.ok()) return s;
  const dim3 grid(static_cast<unsigned>((layout_constants<Layout>::row_tiles + Shape.row_tiles() - 1) /
                                        Shape.row_tiles()),
                  static_cast<unsigned>((m + Shape.tokens - 1) / Shape.tokens));
  return launch(gemm_kernel_of<Layout, Shape, Epilogue>, grid, Shape.threads(),
                static_cast<std::size_t>(Shape.shared_bytes(Layout.shape.format)), options, where, p);
}

/// One product by the warpgroup kernel, 128 · RowBlocks rows a unit.
template <resident_layout Layout, int RowBlocks, class Epilogue>
status launch_gemm_wide(gemv_params<Epilogue> p, int m, const launch_options& options,
                        int multiprocessors = default_device.multiprocessors) {
  static_assert(Layout.valid() && Layout.order == Epilogue::order,
                "the epilogue needs the weights packed in another row order");
  static_assert(!Epilogue::finishes, "logits with a running maximum are made by the matrix-vector kernels");
  static constexpr const char* where = "nibble::gemm";
  p.m = m;
  if (m < 1) return status::invalid(where, "the number of tokens must be positive");
  if (const status s = check_operands<Layout>(p, where); !s.ok()) return s;
  const int units = wide_units(Layout, RowBlocks, m);
  multiprocessors = std::max(1, multiprocessors - options.left_multiprocessors);
  return launch(gemm_wide_kernel_of<Layout, RowBlocks, Epilogue>,
                dim3(static_cast<unsigned>(units < multiprocessors ? units : multiprocessors)), 384,
                wide_plan<Layout.shape.format, RowBlocks, 128>::shared_bytes, options, where, p);
}

/// y = x · Wᵀ for any number of tokens by the tensor-core kernels; the contract is launch_gemv's. Epilogues
/// that keep block state (store_and_argmax) are refused at compile time.
template <resident_layout Layout, class Epilogue, device_class Device = default_device>
status launch_gemm(const gemv_params<Epilogue>& p, int m, const launch_options& options) {
  switch (gemm_token_class(m)) {
    case 32:
      return launch_gemm_with<Layout, select_gemm(Layout, 32, Device)>(p, m, options);
    case 64:
      return launch_gemm_with<Layout, select_gemm(Layout, 64, Device)>(p, m, options);
    default:
      if constexpr (has_wide_gemm(Layout, Device)) {
        if (wide_row_blocks(Layout, m, Device) == 1)
          return launch_gemm_wide<Layout, 1>(p, m, options, Device.multiprocessors);
        return launch_gemm_wide<Layout, 2>(p, m, options, Device.multiprocessors);
      } else {
        return launch_gemm_with<Layout, select_gemm(Layout, 128, Device)>(p, m, options);
      }
  }
}

/// y = x · Wᵀ for any number of tokens: matrix-vector kernels for up to 16, else the tensor-core kernels. All
/// must have been prepared.
template <resident_layout Layout, class Epilogue, device_class Device = default_device>
status launch_linear(const gemv_params<Epilogue>& p, int m, const launch_options& options) {
  if constexpr (!Epilogue::finishes)
    if (m > max_gemv_tokens) return launch_gemm<Layout, Epilogue, Device>(p, m, options);
  return launch_gemv<Layout, Epilogue, Device>(p, m, options);
}

}  // namespace nibble
