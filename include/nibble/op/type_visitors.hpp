// SPDX-License-Identifier: Apache-2.0
/// \file
/// What follows from an op tree's type alone: distinct geometries, leaf counts, bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "nibble/geometry/geometry_set.hpp"
#include "nibble/op/leaves.hpp"
#include "nibble/op/walk.hpp"

namespace nibble {

namespace detail {

/// Distinct leaf types are few even in a deep model, since lists and sequences count instead of repeating.
inline constexpr std::size_t geometry_capacity = 64;

}  // namespace detail

/// Bytes a leaf of this type needs at rest.
template <class Leaf>
[[nodiscard]] constexpr std::uint64_t leaf_bytes() {
  if constexpr (Leaf::kind == leaf_kind::matrix) {
    return Leaf::shape.bytes();
  } else if constexpr (Leaf::kind == leaf_kind::parameter) {
    return 4u * static_cast<std::uint64_t>(Leaf::elements);
  } else {
    static_assert(Leaf::kind == leaf_kind::embedding, "an unknown leaf has no byte count");
    return 2u * static_cast<std::uint64_t>(Leaf::rows) * static_cast<std::uint64_t>(Leaf::columns);
  }
}

/// The distinct geometries of all matrices in `Op`, sorted: each is one kernel instantiation.
template <class Op>
[[nodiscard]] constexpr geometry_set<detail::geometry_capacity> distinct_geometries() {
  geometry_set<detail::geometry_capacity> found;
  for_each_leaf_type<Op>([&]<class Leaf>(std::type_identity<Leaf>, int) {
    if constexpr (Leaf::kind == leaf_kind::matrix) found.insert(Leaf::shape);
  });
  return found;
}

/// Bytes of all weights of `Op` at rest.
template <class Op>
[[nodiscard]] constexpr std::uint64_t weight_bytes() {
  std::uint64_t bytes = 0;
  for_each_leaf_type<Op>([&]<class Leaf>(std::type_identity<Leaf>, int times) {
    bytes += leaf_bytes<Leaf>() * static_cast<std::uint64_t>(times);
  });
  return bytes;
}

/// Leaves of `Op`, each as often as the tree has it.
template <class Op>
[[nodiscard]] constexpr int leaf_count() {
  int count = 0;
  for_each_leaf_type<Op>([&]<class Leaf>(std::type_identity<Leaf>, int times) { count += times; });
  return count;
}

}  // namespace nibble
