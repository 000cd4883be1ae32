// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a checkpoint's NVFP4 matrix to the resident tiles and back.
///
/// A tile is 1152 bytes: two halves of 64 columns, of which lane l has one block of rows g and g + 8 each.
/// Codes: word w (0…3) of half p at 512 p + 16 l + 4 w. It holds the four columns 64 p + 16 t + 4 w … + 3 as
/// code pairs (row g, columns 0 1), (row g + 8, 0 1), (row g, 2 3), (row g + 8, 2 3), through
/// nvfp4::word_of_codes. Scales: at 1024 + 4 l, bytes (g; p = 0), (g; 1), (g + 8; 0), (g + 8; 1), through
/// nvfp4::stored_scale.
///
/// Two things are made canonical, neither of which changes a value: a block whose scale is zero has codes
/// zero, and the sign of a negative scale moves into its codes. On canonical matrices packing is a bijection
/// onto its image; tile parts beyond the matrix are zero and never depend on what the memory held before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/error.hpp"
#include "nibble/core/parallel.hpp"
#include "nibble/fp8/e4m3.hpp"
#include "nibble/geometry/tile.hpp"
#include "nibble/nvfp4/decode.hpp"

namespace nibble::nvfp4 {

/// The value-preserving normal form described above, in place.
/// \param codes [n][k/2]  \param block_scales [n][k/16]
inline void make_canonical(std::span<std::uint8_t> codes, std::span<std::uint8_t> block_scales) {
  for (std::size_t b = 0; b < block_scales.size(); ++b) {
    std::uint8_t* block = codes.data() + 8 * b;
    std::uint8_t& scale = block_scales[b];
    if ((scale & 0x7F) == 0) {
      scale = 0;
      std::memset(block, 0, 8);
    } else if ((scale & 0x80) != 0) {
      scale &= 0x7F;
      for (int i = 0; i < 8; ++i) block[i] ^= 0x88;
    }
  }
}

namespace detail {

inline void check_layout(const resident_layout& layout, std::size_t code_bytes, std::size_t scale_bytes,
                         std::size_t tiles_bytes) {
  if (layout.shape.format != weight_format::nvfp4 || !layout.valid())
    throw error("NVFP4 layout of " + layout.shape.name() +
                ": needs an nvfp4 matrix, K a multiple of 16, and two equal segments for the gate|up order");
  if (code_bytes != layout.shape.code_bytes() || scale_bytes != layout.shape.block_scale_bytes() ||
      tiles_bytes != layout.bytes())
    throw error("NVFP4 layout of " + layout.shape.name() + ": got " + std::to_string(code_bytes) + " code, " +
                std::to_string(scale_bytes) + " scale and " + std::to_string(tiles_bytes) +
                " tile bytes; expected " + std::to_string(layout.shape.code_bytes()) + ", " +
                std::to_string(layout.shape.block_scale_bytes()) + " and " + std::to_string(layout.bytes()));
}

/// The eight codes of a word before the map: rows a and b (null: outside), two bytes each.
inline std::uint32_t codes_of_rows(const std::uint8_t* a, std::uint32_t flip_a, const std::uint8_t* b,
                                   std::uint32_t flip_b) {
  std::uint32_t word = 0;
  if (a != nullptr) word |= (a[0] | static_cast<std::uint32_t>(a[1]) << 16) ^ (flip_a & 0x0088'0088u);
  if (b != nullptr)
    word |= (static_cast<std::uint32_t>(b[0]) << 8 | static_cast<std::uint32_t>(b[1]) << 24) ^
            (flip_b & 0x8800'8800u);
  return word;
}

}  // namespace detail

/// Packs a row-major NVFP4 matrix into `tiles`, all of which is written.
/// \param codes [n][k/2], even column in the low nibble  \param block_scales [n][k/16], E4M3, no NaN (refused
/// by the loader; here a NaN reads as 480)  \param tiles layout.bytes(), 128-byte aligned on the device
/// \param workers threads, 0: one per core
/// \throws nibble::error when a span does not fit the layout
inline void pack(const resident_layout& layout, std::span<const std::uint8_t> codes,
                 std::span<const std::uint8_t> block_scales, std::span<std::uint8_t> tiles, int workers = 0) {
  detail::check_layout(layout, codes.size(), block_scales.size(), tiles.size());
  const int k = layout.shape.k, k_tiles = layout.k_tiles();
  parallel_ranges(layout.row_tiles(), workers, [=](int begin, int end) {
    for (int rt = begin; rt < end; ++rt)
      for (int g = 0; g < 8; ++g) {
        const int rows[2] = {layout.row_at(rt, g), layout.row_at(rt, g + 8)};
        for (int kt = 0; kt < k_tiles; ++kt) {
          std::uint8_t* tile =
              tiles.data() + (static_cast<std::size_t>(rt) * k_tiles + kt) * tile_bytes(weight_format::nvfp4);
          for (int block = 0; block < 8; ++block) {
            const int column = kt * tile_columns + 16 * block, half = block / 4, lane = 4 * g + block % 4;
            const std::uint8_t* code[2] = {nullptr, nullptr};
            std::uint32_t flip[2] = {0, 0};
            for (int h = 0; h < 2; ++h) {
              std::uint8_t scale = 0;
              if (rows[h] >= 0 && column < k) {
                const std::size_t at = (static_cast<std::size_t>(rows[h]) * k + column) / 16;
                scale = block_scales[at];
                if ((scale & 0x7F) != 0) code[h] = codes.data() + 8 * at;
                if ((scale & 0x80) != 0) flip[h] = 0x8888'8888u;
              }
              tile[1024 + 4 * lane + 2 * h + half] = stored_scale(scale & 0x7F);
            }
            for (int word = 0; word < 4; ++word) {  // four columns each
              const std::uint32_t v = word_of_codes(
                  detail::codes_of_rows(code[0] != nullptr ? code[0] + 2 * word : nullptr, flip[0],
                                        code[1] != nullptr ? code[1] + 2 * word : nullptr, flip[1]));
              std::memcpy(tile + 512 * half + 16 * lane + 4 * word, &v, 4);
            }
          }
        }
      }
  });
}

/// The inverse: the canonical form of the matrix that was packed.
/// \throws nibble::error when a span does not fit the layout
inline void unpack(const resident_layout& layout, std::span<const std::uint8_t> tiles,
                   std::span<std::uint8_t> codes, std::span<std::uint8_t> block_scales, int workers = 0) {
  detail::check_layout(layout, codes.size(), block_scales.size(), tiles.size());
  const int k = layout.shape.k, k_tiles = layout.k_tiles();
  parallel_ranges(layout.row_tiles(), workers, [=](int begin, int end) {
    for (int rt = begin; rt < end; ++rt)
      for (int g = 0; g < 8; ++g)
        for (int kt = 0; kt < k_tiles; ++kt) {
          const std::uint8_t* tile =
              tiles.data() + (static_cast<std::size_t>(rt) * k_tiles + kt) * tile_bytes(weight_format::nvfp4);
          for (int block = 0; block < 8; ++block) {
            const int column = kt * tile_columns + 16 * block, half = block / 4, lane = 4 * g + block % 4;
            if (column >= k) break;
            for (int h = 0; h < 2; ++h) {
              const int row = layout.row_at(rt, g + 8 * h);
              if (row < 0) continue;
              const std::size_t at = (static_cast<std::size_t>(row) * k + column) / 16;
              block_scales[at] = scale_magnitude(tile[1024 + 4 * lane + 2 * h + half]);
              for (int word = 0; word < 4; ++word) {
                std::uint32_t v;
                std::memcpy(&v, tile + 512 * half + 16 * lane + 4 * word, 4);
                v = codes_of_word(v);
                codes[8 * at + 2 * word] = static_cast<std::uint8_t>(v >> (8 * h));
                codes[8 * at + 2 * word + 1] = static_cast<std::uint8_t>(v >> (16 + 8 * h));
              }
            }
          }
        }
  });
}

}  // namespace nibble::nvfp4
