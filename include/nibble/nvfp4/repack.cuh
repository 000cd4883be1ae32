// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a checkpoint's matrix to the resident tiles on the device: the same bytes as nvfp4::pack and
/// fp8::pack, for weights that reach the device in their checkpoint order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/fp8/decode.hpp"
#include "nibble/geometry/tile.hpp"
#include "nibble/nvfp4/decode.hpp"

namespace nibble {

struct repack_params {
  resident_layout layout{};
  int row_tiles = 0, k_tiles = 0;
  const std::uint8_t* weight = nullptr;        ///< NVFP4: codes [n][k/2]; FP8: bytes [n][k]
  const std::uint8_t* block_scales = nullptr;  ///< NVFP4: [n][k/16]
  std::uint8_t* tiles = nullptr;               ///< layout.bytes()
  linear_map map{};
};

namespace device {

__device__ __forceinline__ std::uint32_t apply(const linear_map& map, std::uint32_t word) {
  std::uint32_t out = 0;
#pragma unroll
  for (int b = 0; b < 32; ++b) out ^= (word >> b & 1u) != 0 ? map.columns[b] : 0u;
  return out;
}

}  // namespace device

/// A warp a tile: a lane makes its eight words and its four scale bytes.
/// `Unused` makes the kernel a template, so that a header may define it.
template <int Unused>
__global__ void repack_nvfp4_kernel(const __grid_constant__ repack_params p) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (tile >= p.row_tiles * p.k_tiles) return;
  const int rt = tile / p.k_tiles, kt = tile % p.k_tiles, k = p.layout.shape.k;
  const int rows[2] = {p.layout.row_at(rt, g), p.layout.row_at(rt, g + 8)};
  std::uint8_t* to = p.tiles + static_cast<std::size_t>(tile) * (1024 + 128);
  for (int i = 0; i < 4; ++i) {
    const int column = kt * tile_columns + run_column(i, t);
    std::uint64_t codes[2] = {0, 0};  // eight codes of each row, 32 bits
    for (int h = 0; h < 2; ++h) {
      std::uint8_t scale = 0;
      if (rows[h] >= 0 && column < k) {
        const std::size_t at = static_cast<std::size_t>(rows[h]) * k + column;
        scale = p.block_scales[at / 16];
        if ((scale & 0x7F) != 0) codes[h] = *reinterpret_cast<const std::uint32_t*>(p.weight + at / 2);
        if ((scale & 0x80) != 0) codes[h] ^= 0x8888'8888u;
      }
      if (i % 2 == 0) to[1024 + 4 * lane + 2 * h + i / 2] = nvfp4::stored_scale(scale & 0x7F);
    }
    for (int j = 0; j < 2; ++j) {  // four columns each
      const auto a = static_cast<std::uint32_t>(codes[0] >> (16 * j)),
                 b = static_cast<std::uint32_t>(codes[1] >> (16 * j));
      const std::uint32_t word = (a & 0xFFu) | (b & 0xFFu) << 8 | (a & 0xFF00u) << 8 | (b & 0xFF00u) << 16;
      const int s = 2 * i + j;
      *reinterpret_cast<std::uint32_t*>(to + 512 * (s / 4) + 16 * lane + 4 * (s % 4)) =
          device::apply(p.map, word);
    }
  }
}

template <int Unused>
__global__ void repack_fp8_kernel(const __grid_constant__ repack_params p) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (tile >= p.row_tiles * p.k_tiles) return;
  const int rt = tile / p.k_tiles, kt = tile % p.k_tiles, k = p.layout.shape.k;
  const int rows[2] = {p.layout.row_at(rt, g), p.layout.row_at(rt, g + 8)};
  std::uint8_t* to = p.tiles + static_cast<std::size_t>(tile) * 2048;
  for (int w = 0; w < 16; ++w) {
    const int column = kt * tile_columns + run_column(w / 4, t) + 4 * (w / 2 % 2) + 2 * (w % 2);
    std::uint32_t word = 0;
    for (int h = 0; h < 2; ++h)
      if (rows[h] >= 0 && column < k)
        word |= static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(
                    p.weight + static_cast<std::size_t>(rows[h]) * k + column))
                << (16 * h);
    *reinterpret_cast<std::uint32_t*>(to + 512 * (w / 4) + 16 * lane + 4 * (w % 4)) =
        device::apply(p.map, word);
  }
}

/// Packs on the device. \param weight codes or bytes as in the checkpoint, 16-byte aligned  \param
/// block_scales NVFP4 only  \param tiles layout.bytes(), 128-byte aligned; must not overlap the sources
inline status launch_repack(const resident_layout& layout, const std::uint8_t* weight,
                            const std::uint8_t* block_scales, std::uint8_t* tiles,
                            const launch_options& options) {
  static constexpr const char* where = "nibble::repack";
  const bool four_bits = layout.shape.format == weight_format::nvfp4;
  if (!layout.valid() || layout.shape.format == weight_format::bf16)
    return status::invalid(
        where, "needs an NVFP4 or FP8 matrix, K a multiple of 16, two equal segments for gate|up");
  if (weight == nullptr || tiles == nullptr || (four_bits && block_scales == nullptr) ||
      reinterpret_cast<std::uintptr_t>(weight) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(tiles) % tile_alignment_bytes != 0)
    return status::invalid(
        where,
        "the weights need a 16-byte address, the tiles one that is a multiple of 128, NVFP4 its scales");
  repack_params p;
  p.layout = layout;
  p.row_tiles = layout.row_tiles(), p.k_tiles = layout.k_tiles();
  p.weight = weight, p.block_scales = block_scales, p.tiles = tiles;
  p.map = four_bits ? nvfp4::word_map : fp8::word_map;
  const auto warps = static_cast<unsigned>(p.row_tiles) * static_cast<unsigned>(p.k_tiles);
  launch_options plain = options;
  plain.chain = launch_chain::plain;
  return launch(four_bits ? repack_nvfp4_kernel<0> : repack_fp8_kernel<0>, dim3((warps + 7) / 8), 256, 0,
                plain, where, p);
}

}  // namespace nibble
