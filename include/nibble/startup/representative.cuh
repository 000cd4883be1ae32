// SPDX-License-Identifier: Apache-2.0
/// \file
/// Representative launches: each distinct matrix product of an op tree once, on the tree's own weights,
/// before any cache exists. For a model's representative_launch(rows) hook.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/core/launch.cuh"
#include "nibble/op/walk.hpp"

namespace nibble {

namespace detail {

/// A family of products with one resident matrix: what linear_family looks like.
template <class Family>
concept product_family = requires {
  typename Family::params;
  Family::layout.output_rows();
};

template <class Family>
inline constexpr char family_tag = 0;

/// Where the parts of a representative launch lie in its scratch.
template <class Family>
struct representative_layout {
  std::uint64_t norm_weights = 0, x, y, keys, bytes;
  explicit constexpr representative_layout(int rows) {
    const auto count = static_cast<std::uint64_t>(rows);
    constexpr auto k = static_cast<std::uint64_t>(Family::layout.shape.k);
    x = align_up(4 * k, 256);
    y = align_up(x + 2 * count * k, 256);
    keys = align_up(y + 4 * count * static_cast<std::uint64_t>(row_stride()), 256);
    bytes = align_up(keys + Family::key_bytes(rows), 256);
  }
  static constexpr int row_stride() { return (Family::layout.output_rows() + 7) / 8 * 8; }
};

}  // namespace detail

/// Scratch of launch_representative, from an address that is a multiple of 256.
template <class Family>
[[nodiscard]] constexpr std::uint64_t representative_bytes(int rows) {
  return detail::representative_layout<Family>(rows).bytes;
}

/// One launch of `rows` rows with whatever the scratch holds as activations; outputs stay in the scratch.
/// \param tiles the matrix in its resident layout
template <class Family>
status launch_representative(const std::uint8_t* tiles, int rows, std::byte* scratch,
                             const launch_options& options) {
  using bf16 = __nv_bfloat16;
  const detail::representative_layout<Family> at(rows);
  constexpr int stride = detail::representative_layout<Family>::row_stride();
  typename Family::params p{};
  p.tiles = tiles;
  p.x = reinterpret_cast<const bf16*>(scratch + at.x);
  p.ldx = Family::layout.shape.k;
  p.m = rows;
  for (float& scale : p.scale) scale = 1.0f;
  p.out.y = reinterpret_cast<decltype(p.out.y)>(scratch + at.y);
  p.out.ldy = stride;
  if constexpr (requires { p.out.residual; }) p.out.residual = p.out.y, p.out.ldr = stride;
  if constexpr (requires { p.out.keys; }) {
    p.out.keys = reinterpret_cast<decltype(p.out.keys)>(scratch + at.keys);
    p.out.blocks = Family::most_blocks();
  }
  if constexpr (requires { p.in.weight; }) {
    p.in.weight = reinterpret_cast<decltype(p.in.weight)>(scratch + at.norm_weights);
    if (rows > Family::most_normed_tokens) return Family::launch_many(p, options);
  }
  return Family::launch(p, options);
}

/// Scratch of launch_representatives: that of the largest of its launches.
template <template <class> class FamilyOf, class Op>
[[nodiscard]] constexpr std::uint64_t representatives_bytes(int rows) {
  std::uint64_t most = 0;
  for_each_leaf_type<Op>([&]<class Leaf>(std::type_identity<Leaf>, int) {
    if constexpr (detail::product_family<FamilyOf<Leaf>>)
      most = std::max(most, representative_bytes<FamilyOf<Leaf>>(rows));
  });
  return most;
}

/// Walks a tree whose weights are resident (segments[0].weight is the address of a matrix in its layout) and
/// launches each distinct family once. FamilyOf<Leaf> is the leaf's product family; anything else, such as
/// kernel_table<>, leaves the leaf out. Equal geometries in other layers or in the head are one family, so
/// they are launched once. `launched`, where given, receives how many were.
template <template <class> class FamilyOf, class Op>
status launch_representatives(const Op& tree, int rows, std::byte* scratch, const launch_options& options,
                              int* launched = nullptr) {
  status s;
  std::vector<const char*> seen;
  for_each_leaf(tree, [&]<class Leaf>(const op_path&, const Leaf& leaf) {
    using family = FamilyOf<std::remove_const_t<Leaf>>;
    if constexpr (detail::product_family<family>) {
      const char* const tag = &detail::family_tag<family>;
      if (!s.ok() || std::find(seen.begin(), seen.end(), tag) != seen.end()) return;
      seen.push_back(tag);
      s = launch_representative<family>(reinterpret_cast<const std::uint8_t*>(leaf.segments[0].weight), rows,
                                        scratch, options);
    }
  });
  if (launched != nullptr) *launched = static_cast<int>(seen.size());
  return s;
}

}  // namespace nibble
