// SPDX-License-Identifier: Apache-2.0
/// \file
/// The distinct geometries of a model, as a compile-time value.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "nibble/geometry/geometry.hpp"

namespace nibble {

/// Up to `Capacity` distinct geometries, sorted. Usable in constant expressions.
template <std::size_t Capacity>
struct geometry_set {
  std::array<geometry, Capacity> items{};
  std::size_t count = 0;

  [[nodiscard]] constexpr std::size_t size() const { return count; }
  [[nodiscard]] constexpr const geometry* begin() const { return items.data(); }
  [[nodiscard]] constexpr const geometry* end() const { return items.data() + count; }
  [[nodiscard]] constexpr const geometry& operator[](std::size_t i) const { return items[i]; }
  [[nodiscard]] constexpr bool contains(const geometry& g) const {
    return std::binary_search(begin(), end(), g);
  }

  /// Adds `g` unless an equal one is there: equality is field by field, nothing is rounded or hashed.
  constexpr void insert(const geometry& g) {
    std::size_t i = 0;
    while (i < count && items[i] < g) ++i;
    if (i < count && items[i] == g) return;
    for (std::size_t j = count; j > i; --j) items[j] = items[j - 1];
    items[i] = g;
    ++count;
  }
};

}  // namespace nibble
