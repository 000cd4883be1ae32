// SPDX-License-Identifier: Apache-2.0
/// \file
/// The leaves of an op tree: a matrix, a small fp32 parameter, an embedding table.
///
/// A leaf is a typed view: it does not own memory. Loading points it at memory bound to a backend.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "nibble/geometry/geometry.hpp"
#include "nibble/op/member.hpp"

namespace nibble {

/// What a leaf is. A constant in the leaf, because nvcc 13 does not match a partial specialisation over a
/// structural argument beside a pack of strings.
enum class leaf_kind : std::uint8_t { matrix, parameter, embedding };

/// The memory of one row segment of a matrix.
struct matrix_segment {
  const std::byte* weight = nullptr;  ///< codes: bf16 [rows, k], E4M3 [rows, k], or E2M1 pairs [rows, k/2]
  const std::byte* block_scale = nullptr;  ///< E4M3 [rows, k/16], nvfp4 only
  float global_scale = 1.0f;               ///< multiplies the product; 1 for bf16
};

/// A weight matrix of geometry `G`. `Parts` are the checkpoint's names of its row segments: one name for a
/// plain matrix, one for each segment of a fused one.
template <geometry G, fixed_string... Parts>
struct linear {
  using leaf_op = void;
  static constexpr leaf_kind kind = leaf_kind::matrix;
  static_assert(G.n >= 1 && G.k >= 1, "a matrix has at least one row and one column");
  static_assert(G.format != weight_format::nvfp4 || G.k % nvfp4_group == 0,
                "the inner dimension K of an NVFP4 matrix is a multiple of 16, the block-scale group");
  static_assert(G.valid(), "the row segments of a matrix are positive and add up to N");
  static_assert(static_cast<int>(sizeof...(Parts)) == G.segments(),
                "a matrix has one name for each row segment");

  static constexpr geometry shape = G;
  static constexpr std::array<std::string_view, sizeof...(Parts)> part_names{Parts.view()...};

  std::array<matrix_segment, sizeof...(Parts)> segments{};
};

/// A small parameter kept in fp32 whatever the checkpoint stores (norm weights, A_log, dt_bias, conv taps).
template <fixed_string Name, int... Dims>
struct parameter {
  using leaf_op = void;
  static constexpr leaf_kind kind = leaf_kind::parameter;
  static_assert(((Dims >= 1) && ...), "a parameter has positive dimensions");
  static constexpr std::string_view part_name = Name.view();
  static constexpr std::array<int, sizeof...(Dims)> dims{Dims...};
  static constexpr int elements = (1 * ... * Dims);

  const float* data = nullptr;
};

/// A bf16 table [rows, columns] of which single rows are read.
template <fixed_string Name, int Rows, int Columns>
struct embedding {
  using leaf_op = void;
  static constexpr leaf_kind kind = leaf_kind::embedding;
  static_assert(Rows >= 1 && Columns >= 1, "a table has at least one row and one column");
  static constexpr std::string_view part_name = Name.view();
  static constexpr int rows = Rows;
  static constexpr int columns = Columns;

  const std::uint16_t* data = nullptr;
};

}  // namespace nibble
