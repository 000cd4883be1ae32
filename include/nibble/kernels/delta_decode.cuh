// SPDX-License-Identifier: Apache-2.0
/// \file
/// The family of decode kernels of the delta rule.
#pragma once

#include "nibble/core/launch.cuh"
#include "nibble/kernels/delta_decode_kernel.cuh"

namespace nibble {
namespace detail {

inline bool aligned_16(const void* p) {
  return p != nullptr && reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

/// What decode and prefill ask of their parameters alike.
inline status check_delta(const delta_shape& s, const delta_rule_params& p, const char* where) {
  if (p.step.sequences < 1 || p.step.sequences > 65535)
    return status::invalid(where, "a launch takes 1 to 65535 sequences");
  if (p.step.first_row == nullptr || p.step.position == nullptr || p.step.slot == nullptr)
    return status::invalid(where, "the step's first_row, position and slot are missing");
  if (!aligned_16(p.pool.base) || p.pool.slot_bytes % 16 != 0 || p.pool.layer_offset_bytes % 16 != 0)
    return status::invalid(where, "the states need a base, slots and layers at multiples of 16 bytes");
  if (p.pool.slot_bytes < p.pool.layer_offset_bytes + state_bytes(s))
    return status::invalid(where, "a slot is smaller than the state of its layer");
  const auto rows = [](const void* at, int ld, int width) {
    return aligned_16(at) && ld >= width && ld % 8 == 0;
  };
  if (!rows(p.qkvz, p.ldqkvz, s.projected()) || !rows(p.x, p.ldx, s.hidden) ||
      !rows(p.out, p.ldo, s.value_width()))
    return status::invalid(
        where,
        "qkvz, x and out need 16-byte addresses and row strides of their width or more, multiples of 8");
  if (!aligned_16(p.ba) || !aligned_16(p.conv) || p.a_log == nullptr || p.dt_bias == nullptr ||
      p.norm == nullptr)
    return status::invalid(where, "weights are missing, or ba or conv lacks a 16-byte address");
  return status::success();
}

/// A launch whose blocks along x form clusters.
template <class Kernel>
status launch_clusters(Kernel kernel, dim3 grid, int threads, int cluster, const launch_options& options,
                       const char* where, const delta_rule_params& p) {
  if (options.stream == nullptr || options.stream == cudaStreamLegacy)
    return status::invalid(where,
                           "the default stream is not used: give a stream made by cudaStreamCreateWithFlags");
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = options.stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = options.chain == launch_chain::pdl ? 2 : 1;
  return status::cuda(static_cast<int>(cudaLaunchKernelEx(&config, kernel, p)), where,
                      "the CUDA runtime refused the launch");
}

}  // namespace detail

/// How the blocks of a decode launch share a head, and how many of them a multiprocessor holds.
enum class delta_blocks : unsigned char {
  cluster,     ///< 32 columns a block
  head_alone,  ///< a whole head a block, one block a multiprocessor, with registers to spare
  head,        ///< a whole head a block, three blocks a multiprocessor
};

template <delta_shape S, delta_blocks Blocks, bool NormedInput>
inline constexpr auto delta_decode_kernel_of =
    &delta_decode_kernel<Blocks == delta_blocks::cluster, Blocks == delta_blocks::head_alone ? 2 : 3,
                         NormedInput, S.hidden, S.key_heads, S.value_heads, S.key_dim, S.value_dim>;

/// One row per sequence: b and a products, convolution, l2 norms, gates, the recurrence in place, the gated
/// norm: one kernel. Cost: the states of the sequences, read and written once. The same bits for a sequence
/// whoever shares its launch, and the same state and output as prefill from equal b|a products.
///
/// \tparam NormedInput false: x is the residual stream, and b and a are taken of its RMSNorm (input_norm,
///         zero_centred, eps) without rounding the normalised row to bf16
template <delta_shape Shape, bool NormedInput = true, device_class Device = default_device>
struct delta_decode_family {
  static_assert(Shape.valid(),
                "the delta rule has 64 or 128 key and 32, 64, 128 or 256 value dimensions, a "
                "window of 4, and a hidden size that is a multiple of 256");
  using params = delta_rule_params;
  static constexpr const char* name = "delta_decode";
  static constexpr bool has_clusters = Device.has_bulk_copies() && Shape.splits() > 1;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = status::success();
    if constexpr (has_clusters)
      s = visit(delta_decode_kernel_of<Shape, delta_blocks::cluster, NormedInput>, device::delta_threads,
                std::size_t{0}, name);
    if (s.ok())
      s = visit(delta_decode_kernel_of<Shape, delta_blocks::head_alone, NormedInput>, device::delta_threads,
                std::size_t{0}, name);
    if (s.ok())
      s = visit(delta_decode_kernel_of<Shape, delta_blocks::head, NormedInput>, device::delta_threads,
                std::size_t{0}, name);
    return s;
  }

  /// The same bits whatever the blocks. \param blocks cluster: a head alone where there are no clusters
  static status launch_with(const params& p, const launch_options& options, delta_blocks blocks) {
    if (const status s = detail::check_delta(Shape, p, name); !s.ok()) return s;
    if (!NormedInput && !detail::aligned_16(p.input_norm))
      return status::invalid(name, "raw input needs the norm's weight at a 16-byte address");
    const auto heads = static_cast<unsigned>(Shape.value_heads);
    const auto sequences = static_cast<unsigned>(p.step.sequences);
    if constexpr (has_clusters)
      if (blocks == delta_blocks::cluster)
        return detail::launch_clusters(delta_decode_kernel_of<Shape, delta_blocks::cluster, NormedInput>,
                                       dim3(static_cast<unsigned>(Shape.splits()), heads, sequences),
                                       device::delta_threads, Shape.splits(), options, name, p);
    if (blocks == delta_blocks::head)
      return nibble::launch(delta_decode_kernel_of<Shape, delta_blocks::head, NormedInput>,
                            dim3(1, heads, sequences), device::delta_threads, 0, options, name, p);
    return nibble::launch(delta_decode_kernel_of<Shape, delta_blocks::head_alone, NormedInput>,
                          dim3(1, heads, sequences), device::delta_threads, 0, options, name, p);
  }
  static status launch(const params& p, const launch_options& options) {
    // Clusters put more multiprocessors to work on few sequences.
    const int heads = p.step.sequences * Shape.value_heads;
    return launch_with(p, options,
                       has_clusters && heads <= most_clustered_heads ? delta_blocks::cluster
                       : heads <= Device.multiprocessors             ? delta_blocks::head_alone
                                                                     : delta_blocks::head);
  }
  /// Heads of a launch up to which clusters are faster (measured on an H200).
  static constexpr int most_clustered_heads = 80;
};

/// The empty state of one layer in a slot. Asynchronous; a memset node when captured.
template <delta_shape Shape>
status clear_delta_state(const state_pool& pool, int slot, cudaStream_t stream) {
  const auto e = cudaMemsetAsync(pool.slot(slot), 0, state_bytes(Shape), stream);
  return status::cuda(static_cast<int>(e), "clear_delta_state", "the CUDA runtime refused the memset");
}

}  // namespace nibble
