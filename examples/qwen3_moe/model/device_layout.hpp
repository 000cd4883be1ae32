// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a model's weights become on a device: which form each leaf takes, and how many bytes all of it needs.
/// From the type alone; compiles without CUDA.
#pragma once

#include <cstdint>
#include <string_view>

#include "model/model.hpp"
#include "nibble/geometry/tile.hpp"
#include "nibble/moe/experts_types.hpp"
#include "nibble/op/type_visitors.hpp"

namespace qwen3_moe {

/// How a matrix rests on the device.
enum class device_form : std::uint8_t {
  adjacent_tiles,  ///< resident tiles, rows in order
  gate_up_tiles,   ///< resident tiles that pair gate and up rows
  row_major,       ///< as in the checkpoint: the small bf16 matrices that layer kernels read themselves
};

template <class Linear>
[[nodiscard]] constexpr device_form device_form_of() {
  constexpr std::string_view first = Linear::part_names[0];
  if (first == "gate_proj") return device_form::gate_up_tiles;
  if (first == "gate" || first == "shared_expert_gate" || first == "in_proj_b") return device_form::row_major;
  return device_form::adjacent_tiles;
}

template <class Linear>
[[nodiscard]] constexpr nibble::resident_layout resident_layout_of() {
  return {Linear::shape, device_form_of<Linear>() == device_form::gate_up_tiles
                             ? nibble::row_order::gate_up
                             : nibble::row_order::adjacent};
}

/// Every leaf starts at a multiple of this: that of a tile, so that gate|up and down of an expert touch.
inline constexpr std::uint64_t device_alignment_bytes = 128;

[[nodiscard]] constexpr std::uint64_t aligned_device_bytes(std::uint64_t bytes) {
  return (bytes + device_alignment_bytes - 1) / device_alignment_bytes * device_alignment_bytes;
}

/// Bytes of one leaf on the device, padding included.
template <class Leaf>
[[nodiscard]] constexpr std::uint64_t device_bytes_of() {
  if constexpr (Leaf::kind == nibble::leaf_kind::matrix) {
    if constexpr (device_form_of<Leaf>() == device_form::row_major)
      return aligned_device_bytes(Leaf::shape.bytes());
    else
      return aligned_device_bytes(resident_layout_of<Leaf>().bytes());
  } else {
    return aligned_device_bytes(nibble::leaf_bytes<Leaf>());
  }
}

/// Bytes of all leaves below `Op`.
template <class Op>
[[nodiscard]] constexpr std::uint64_t device_bytes_below() {
  std::uint64_t bytes = 0;
  nibble::for_each_leaf_type<Op>([&]<class Leaf>(std::type_identity<Leaf>, int times) {
    bytes += device_bytes_of<Leaf>() * static_cast<std::uint64_t>(times);
  });
  return bytes;
}

/// The routed experts of a model. `shared`: the shared expert has their shape and format and joins their
/// kernels.
[[nodiscard]] constexpr bool shared_joins_routed(const model_config& c) {
  return c.shared_intermediate == c.expert_intermediate && c.shared_intermediate > 0 &&
         c.formats.shared_gate_up == c.formats.expert_gate_up &&
         c.formats.shared_down == c.formats.expert_down;
}

[[nodiscard]] constexpr nibble::moe::experts_shape experts_shape_of(const model_config& c) {
  return {c.hidden_size,       c.expert_intermediate,  c.experts,
          c.experts_per_token, shared_joins_routed(c), c.formats.expert_gate_up};
}

/// Bytes of everything but the routed experts.
template <class Config>
[[nodiscard]] constexpr std::uint64_t dense_device_bytes() {
  constexpr const model_config& c = Config::value;
  using experts = mixture_of_experts<Config>;
  std::uint64_t layer = 2 * device_bytes_below<norm_weight<c.hidden_size>>() +
                        device_bytes_below<decltype(experts::router)>() +
                        device_bytes_below<decltype(experts::shared)>();
  std::uint64_t bytes = static_cast<std::uint64_t>(c.layers) * layer;
  bytes += static_cast<std::uint64_t>(c.full_layers()) * device_bytes_below<attention<Config>>();
  if constexpr (c.delta_layers() > 0)
    bytes += static_cast<std::uint64_t>(c.delta_layers()) * device_bytes_below<delta_net<Config>>();
  return bytes + device_bytes_below<typename decoder<Config>::token_embedding>() +
         device_bytes_below<norm_weight<c.hidden_size>>() +
         device_bytes_below<decltype(causal_lm<Config>::lm_head)>();
}

/// Experts of all layers; expert e of layer l is number l · experts + e.
[[nodiscard]] constexpr int expert_count(const model_config& c) { return c.layers * c.experts; }

}  // namespace qwen3_moe
