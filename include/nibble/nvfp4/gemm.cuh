// SPDX-License-Identifier: Apache-2.0
/// \file
/// Many tokens: a tensor-core product straight from the resident tiles.
///
/// A block takes 256 rows × 128 tokens; a warp two row tiles, whose weights it decodes in registers. Weights,
/// still packed, and activations come through a three-stage shared-memory ring (cp.async), 128 columns of K a
/// stage. Sums are fp32 in K order. No workspace. NVFP4 and FP8; a bf16 matrix has nothing to decode. The
/// order differs from the matrix-vector kernels': rows are equal to theirs only up to rounding.
/// Architectures: sm_90 and sm_100, by their shared memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/nvfp4/gemv_kernel.cuh"
#include "nibble/nvfp4/gemv_launch.cuh"

namespace nibble {

namespace gemm {
inline constexpr int tokens = 128;    ///< per block
inline constexpr int row_tiles = 16;  ///< per block, two a warp
inline constexpr int threads = 256;
inline constexpr int stages = 3;
inline constexpr int token_bytes = 256 + 64;  ///< staged columns of a token; neighbours on different banks
inline constexpr int x_bytes = tokens * token_bytes;
/// Bytes of a stage: activations, then the block's weight tiles.
[[nodiscard]] constexpr int stage_bytes(weight_format format) {
  return x_bytes + row_tiles * static_cast<int>(tile_bytes(format));
}
}  // namespace gemm

template <class Epilogue, int... LayoutNumbers>
__global__ __launch_bounds__(gemm::threads,
                             1) void gemm_kernel(const __grid_constant__ gemv_params<Epilogue> p) {
  using layout = layout_constants<layout_from<LayoutNumbers...>>;
  constexpr int k_tiles = layout::k_tiles, k = layout::k;
  constexpr int bytes = static_cast<int>(tile_bytes(layout::format)),
                stage_bytes = gemm::x_bytes + gemm::row_tiles * bytes;
  extern __shared__ __align__(128) std::uint8_t staged[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first_token = blockIdx.x * gemm::tokens;
  const int tile = blockIdx.y * gemm::row_tiles + 2 * warp;
  const std::uint8_t* weights[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    weights[r] = p.tiles + static_cast<std::size_t>(min(tile + r, layout::row_tiles - 1)) * k_tiles * bytes;
  // A warp brings its own two tiles, 16 bytes a lane.
  const auto stage_weights = [&](int k_tile) {
    if (k_tile >= k_tiles) return;
    const std::uint32_t to = device::shared_address(staged) + k_tile % gemm::stages * stage_bytes +
                             gemm::x_bytes + 2 * warp * bytes;
#pragma unroll
    for (int i = 0; i < (2 * bytes / 16 + 31) / 32; ++i) {
      const int at = 16 * (32 * i + lane);
      if (at < 2 * bytes)
        device::copy_async(to + at,
                           (at < bytes ? weights[0] + at : weights[1] + at - bytes) +
                               static_cast<std::size_t>(k_tile) * bytes,
                           true);
    }
  };
  const auto stage = [&](int k_tile) {
    if (k_tile < k_tiles) {
      const std::uint32_t to = device::shared_address(staged) + k_tile % gemm::stages * stage_bytes;
#pragma unroll
      for (int i = 0; i < gemm::tokens * 16 / gemm::threads; ++i) {
        const int piece = i * gemm::threads + threadIdx.x, token = piece / 16, at = piece % 16;
        const int column = k_tile * tile_columns + 8 * at;
        const bool live = first_token + token < p.m && column < k;
        const __nv_bfloat16* from =
            live ? p.x + static_cast<std::size_t>(first_token + token) * p.ldx + column : p.x;
        device::copy_async(to + token * gemm::token_bytes + 16 * at, from, live);
      }
    }
    device::commit_copies();
  };
  stage_weights(0);
  stage_weights(1);
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  stage(0);
  stage(1);
  float acc[2][16][4] = {};
#pragma unroll 1
  for (int kt = 0; kt < k_tiles; ++kt) {
    device::wait_for_copies<gemm::stages - 2>();
    __syncthreads();  // this stage has arrived for all, and the one refilled next has been read by all
    stage_weights(kt + 2);
    stage(kt + 2);
    const std::uint32_t x =
        device::shared_address(staged) + kt % gemm::stages * stage_bytes + g * gemm::token_bytes + 16 * t;
    device::fragment<layout::format> f[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      f[r].load(device::shared_address(staged) + kt % gemm::stages * stage_bytes + gemm::x_bytes +
                    (2 * warp + r) * bytes,
                lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t a[2][2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        f[r].for_each_step([&](int s, const std::uint32_t(&from)[4]) {
          if (s / 2 == i)
#pragma unroll
            for (int q = 0; q < 4; ++q) a[r][s % 2][q] = from[q];
        });
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint4 b = device::load_shared(x + 8 * j * gemm::token_bytes + 64 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          device::mma(acc[r][j], a[r][0], b.x, b.y);
          device::mma(acc[r][j], a[r][1], b.z, b.w);
        }
      }
    }
  }
  __shared__ typename Epilogue::shared out;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (tile + r >= layout::row_tiles) break;
    const int row = layout::paired ? 8 * (tile + r) + g : tile_rows * (tile + r) + 2 * g;
    const float s0 = device::scale_of_row<layout_from<LayoutNumbers...>>(p.scale, layout::paired ? 0 : row);
    const float s1 =
        device::scale_of_row<layout_from<LayoutNumbers...>>(p.scale, layout::paired ? layout::rows : row + 1);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int token = first_token + 8 * j + 2 * t;
      const float(&c)[4] = acc[r][j];
      if (token < p.m)
        Epilogue::template pair<layout::rows, false>(p.out, out, token, row, c[0] * s0, c[2] * s1);
      if (token + 1 < p.m)
        Epilogue::template pair<layout::rows, false>(p.out, out, token + 1, row, c[1] * s0, c[3] * s1);
    }
  }
}

template <resident_layout L, class Epilogue>
inline constexpr auto gemm_kernel_of =
    &gemm_kernel<Epilogue, L.shape.n, L.shape.k, static_cast<int>(L.shape.format), static_cast<int>(L.order),
                 L.shape.segment_rows[0], L.shape.segment_rows[1], L.shape.segment_rows[2],
                 L.shape.segment_rows[3]>;

/// Loads the kernel for many tokens and allows it its shared memory.
template <resident_layout Layout, class Epilogue>
status prepare_gemm(kernel_info* info = nullptr) {
  return prepare(gemm_kernel_of<Layout, Epilogue>, gemm::threads,
                 gemm::stages * gemm::stage_bytes(Layout.shape.format), "nibble::gemm", info);
}

/// y = x · Wᵀ for any number of tokens by the tensor-core kernel; the contract is launch_gemv's. Epilogues
/// that keep block state (store_and_argmax) are refused at compile time.
template <resident_layout Layout, class Epilogue>
status launch_gemm(gemv_params<Epilogue> p, int m, const launch_options& options) {
  static_assert(Layout.valid() && Layout.order == Epilogue::order,
                "the epilogue needs the weights packed in another row order");
  static_assert(Layout.shape.format != weight_format::bf16,
                "bf16 matrices have no tensor-core kernel here: nothing is decoded");
  static_assert(!Epilogue::finishes, "logits with a running maximum are made by the matrix-vector kernels");
  static constexpr const char* where = "nibble::gemm";
  p.m = m;
  if (m < 1) return status::invalid(where, "the number of tokens must be positive");
  if (const status s = check_operands<Layout>(p, where); !s.ok()) return s;
  const dim3 grid(
      static_cast<unsigned>((m + gemm::tokens - 1) / gemm::tokens),
      static_cast<unsigned>((layout_constants<Layout>::row_tiles + gemm::row_tiles - 1) / gemm::row_tiles));
  return launch(gemm_kernel_of<Layout, Epilogue>, grid, gemm::threads,
                gemm::stages * gemm::stage_bytes(Layout.shape.format), options, where, p);
}

/// Whether the tensor-core kernel takes less time than turns of the matrix-vector kernels. From measurements
/// on the H200: a block takes 2.6 µs for each 128 columns of K whatever its tokens; a turn of 16 tokens 1.5
/// µs and its bytes at 3.3 TB/s.
[[nodiscard]] constexpr bool gemm_pays(const resident_layout& layout, int m, device_class device = h200) {
  if (m <= max_gemv_tokens || layout.shape.format == weight_format::bf16) return false;
  const auto up = [](double a, double b) {
    const auto whole = static_cast<long long>(a / b);
    return static_cast<double>(whole) * b < a ? static_cast<double>(whole + 1) : static_cast<double>(whole);
  };
  const double blocks = up(m, gemm::tokens) * up(layout.row_tiles(), gemm::row_tiles);
  const double product_us = 2.6 * layout.k_tiles() * up(blocks, device.multiprocessors);
  const double turns_us = up(m, max_gemv_tokens) * (1.5 + static_cast<double>(layout.bytes()) / 3.3e6);
  return product_us < turns_us;
}

/// y = x · Wᵀ for any number of tokens: matrix-vector kernels for a few, else the tensor-core kernel. Both
/// must have been prepared.
template <resident_layout Layout, class Epilogue, device_class Device = h200>
status launch_linear(const gemv_params<Epilogue>& p, int m, const launch_options& options) {
  if constexpr (Layout.shape.format != weight_format::bf16)
    if (gemm_pays(Layout, m, Device)) return launch_gemm<Layout, Epilogue>(p, m, options);
  return launch_gemv<Layout, Epilogue, Device>(p, m, options);
}

}  // namespace nibble
