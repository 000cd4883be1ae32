// SPDX-License-Identifier: Apache-2.0
/// \file
/// Validate and launch a placement.
#pragma once

#include "nibble/core/launch.cuh"
#include "nibble/moe/residency_kernel.cuh"

namespace nibble::moe {

template <residency_shape S, residency_policy P>
inline constexpr auto place_kernel_of = &place_experts<P.threads, (S.total() + P.threads - 1) / P.threads>;

/// The tables after a placement say where every expert that `ids` names will be; p.list says which of them
/// are still to be fetched. A chain of place, fetch and gate|up keeps gate|up's promise that its slot table
/// is older than the kernel before. Costs about a chained launch when nothing is missing.
template <residency_shape S, residency_policy P>
status launch_place_with(const place_params& p, const launch_options& options) {
  static constexpr const char* where = "nibble::moe::place_experts";
  static_assert(S.valid(), "residency has at most 1024 experts a layer and 32768 in all");
  static_assert(S.experts <= P.threads && S.total() <= 32 * P.threads,
                "a thread looks after one expert of the layer and at most 32 slots");
  if (p.state.slot_of == nullptr || p.state.slot_key == nullptr || p.state.worth == nullptr ||
      p.list == nullptr)
    return status::invalid(where, "the tables or the list are missing");
  if (p.state.slot_count < 1 || p.state.slot_count > S.total())
    return status::invalid(where, "the pool has between one slot and one for each expert");
  if (p.layer < 0 || p.layer >= S.layers) return status::invalid(where, "there is no such layer");
  if (p.assignments < 0) return status::invalid(where, "a count is negative");
  if (p.fetch_of != nullptr && p.host_list == nullptr)
    return status::invalid(where, "misses left to the CPU need a list");
  if (p.engine.state != nullptr &&
      (p.engine.records == nullptr ||
       static_cast<std::size_t>(p.engine.record_words) < engine_record_words(S.experts)))
    return status::invalid(where, "the copy engine's records are missing or too short");
  if (p.ahead_list != nullptr &&
      (p.layer + 1 >= S.layers || p.ahead_limit < 0 || p.ahead_row < 1 || p.ahead_assignments < 0 ||
       (p.ahead_ids != nullptr && p.ahead_assignments % p.ahead_row != 0)))
    return status::invalid(where, "guesses are for the layer after, from whole rows of ids");
  return launch(place_kernel_of<S, P>, dim3(1), P.threads, 0, options, where, p, S.experts, S.total());
}

/// Placement as a kernel family.
template <residency_shape Shape>
struct residency_family {
  using params = place_params;
  static constexpr const char* name = "residency";
  static constexpr residency_shape residency = Shape;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    constexpr residency_policy p = select_residency(Shape);
    return visit(place_kernel_of<Shape, p>, p.threads, std::size_t{0}, "place_experts");
  }
  static status launch(const params& p, const launch_options& options) {
    return launch_place_with<Shape, select_residency(Shape)>(p, options);
  }
};

}  // namespace nibble::moe
