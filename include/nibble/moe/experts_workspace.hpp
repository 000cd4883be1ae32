// SPDX-License-Identifier: Apache-2.0
/// \file
/// Memory that the expert kernels for many tokens need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/moe/experts_types.hpp"

namespace nibble::moe {

/// A unit of work: up to so many sorted assignments of one expert.
struct expert_tile {
  std::int32_t slot;   ///< -1: the shared expert
  std::int32_t first;  ///< position in the sorted order
  std::int32_t count;
  std::int32_t width;  ///< count, rounded up to a multiple of eight; equal for an expert's tiles
};

/// The parts of the workspace, in bytes from its start. A function of the shape and the tokens it serves.
struct experts_workspace {
  std::size_t tile_count = 0;  ///< int32
  std::size_t order = 0;       ///< int32 [tokens · top_k]: sorted position → assignment
  std::size_t position = 0;  ///< int32 [tokens · top_k]: assignment → sorted position, -1: nothing to add
  std::size_t tiles = 0;     ///< expert_tile [most_tiles]
  std::size_t parts = 0;     ///< bf16 [tokens · groups][hidden]: down of each, by sorted position
  std::size_t bytes = 0;
};

/// Tiles that `tokens` tokens can need when a tile takes `width` assignments.
[[nodiscard]] constexpr int most_expert_tiles(const experts_shape& shape, int tokens, int width) {
  const int assignments = tokens * shape.top_k;
  const int cut = assignments < shape.experts ? assignments : shape.experts;
  return assignments / width + cut + (shape.shared ? (tokens + width - 1) / width : 0);
}

inline constexpr int least_tile_width = 16;

[[nodiscard]] constexpr experts_workspace workspace_of(const experts_shape& shape, int tokens) {
  experts_workspace w;
  std::size_t at = 0;
  const auto take = [&at](std::size_t bytes) {
    const std::size_t from = at;
    at += (bytes + 127) / 128 * 128;
    return from;
  };
  const auto assignments = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape.top_k);
  w.tile_count = take(sizeof(std::int32_t));
  w.order = take(assignments * sizeof(std::int32_t));
  w.position = take(assignments * sizeof(std::int32_t));
  w.tiles = take(static_cast<std::size_t>(most_expert_tiles(shape, tokens, least_tile_width)) *
                 sizeof(expert_tile));
  w.parts = take(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape.groups()) *
                 static_cast<std::size_t>(shape.hidden) * sizeof(std::uint16_t));
  w.bytes = at;
  return w;
}

}  // namespace nibble::moe
