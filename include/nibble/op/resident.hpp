// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a bound leaf to the form in which its weights rest on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "nibble/fp8/layout.hpp"
#include "nibble/geometry/tile.hpp"
#include "nibble/kernels/bf16_layout.hpp"
#include "nibble/nvfp4/layout.hpp"
#include "nibble/op/leaves.hpp"

namespace nibble {

/// The row segments of a bound matrix one after another, as the checkpoint stores them.
struct row_major_matrix {
  std::vector<std::uint8_t> codes, block_scales;

  template <class Linear>
  explicit row_major_matrix(const Linear& leaf)
      : codes(Linear::shape.code_bytes()), block_scales(Linear::shape.block_scale_bytes()) {
    std::size_t code_at = 0, scale_at = 0;
    for (int i = 0; i < Linear::shape.segments(); ++i) {
      const geometry part = matrix(Linear::shape.rows_of(i), Linear::shape.k, Linear::shape.format);
      const matrix_segment& from = leaf.segments[static_cast<std::size_t>(i)];
      std::memcpy(codes.data() + code_at, from.weight, part.code_bytes());
      if (part.block_scale_bytes() != 0)
        std::memcpy(block_scales.data() + scale_at, from.block_scale, part.block_scale_bytes());
      code_at += part.code_bytes();
      scale_at += part.block_scale_bytes();
    }
  }
};

/// Packs a bound matrix into resident tiles.
/// \param tiles resident_layout{Linear::shape, order}.bytes()  \param workers threads, 0: one per core. Cost:
/// one transient copy of the matrix.  \throws nibble::error when the span does not fit the layout
template <class Linear>
void pack_resident(const Linear& leaf, row_order order, std::span<std::uint8_t> tiles, int workers = 0) {
  constexpr geometry shape = Linear::shape;
  const resident_layout layout{shape, order};
  const row_major_matrix from(leaf);
  if constexpr (shape.format == weight_format::nvfp4) {
    nvfp4::pack(layout, from.codes, from.block_scales, tiles, workers);
  } else if constexpr (shape.format == weight_format::fp8) {
    fp8::pack(layout, from.codes, tiles, workers);
  } else {
    std::vector<std::uint16_t> elements(from.codes.size() / 2);
    std::memcpy(elements.data(), from.codes.data(), from.codes.size());
    bf16_weights::pack(layout, elements, tiles, workers);
  }
}

}  // namespace nibble
