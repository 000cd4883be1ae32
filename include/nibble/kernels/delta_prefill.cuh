// SPDX-License-Identifier: Apache-2.0
/// \file
/// The family of prefill kernels of the delta rule.
#pragma once

#include <algorithm>

#include "nibble/kernels/delta_chunk_kernel.cuh"
#include "nibble/kernels/delta_decode.cuh"
#include "nibble/kernels/delta_prefill_kernel.cuh"
#include "nibble/kernels/delta_solve_kernel.cuh"

namespace nibble {

template <delta_shape S, device_class Device = default_device>
inline constexpr auto delta_gates_kernel_of =
    &delta_gates_kernel<Device.dynamic_shared_bytes(), S.hidden, S.channels(), S.value_heads>;
template <delta_shape S>
inline constexpr auto delta_conv_kernel_of =
    &delta_conv_kernel<S.key_heads, S.value_heads, S.key_dim, S.value_dim>;
template <delta_shape S>
inline constexpr auto delta_recurrence_kernel_of =
    &delta_recurrence_kernel<S.key_heads, S.value_heads, S.key_dim, S.value_dim>;
template <delta_shape S, device_class Device = default_device>
inline constexpr auto delta_solve_kernel_of =
    &delta_solve_kernel<Device.dynamic_shared_bytes(), S.key_heads, S.value_heads, S.key_dim, S.value_dim>;
template <delta_shape S, device_class Device = default_device>
inline constexpr auto delta_chunk_kernel_of =
    &delta_chunk_kernel<Device.dynamic_shared_bytes(), S.key_heads, S.value_heads, S.key_dim, S.value_dim>;
template <delta_shape S>
inline constexpr auto delta_norm_kernel_of =
    &delta_norm_kernel<S.key_heads, S.value_heads, S.key_dim, S.value_dim>;

/// Any number of rows per sequence, x normalised. Gates, convolution, recurrence, gated norm.
///
/// The recurrence of a sequence's piece (see delta_chunks_of): whole chunks of 64 tokens that begin at
/// positions that are multiples of 64 go on matrix instructions, what is before and behind them token by
/// token with decode's bits. So a piece without a whole chunk gives the bits of decode, a prompt cut at
/// multiples of 64 those of the whole prompt, and who shares the launch changes nothing; a prompt cut
/// elsewhere differs within rounding. Every shape has both forms. Four kernels below 64 rows, else seven:
/// what each chunk needs for itself, then before, in and behind the chunks.
///
/// Cost: two chains, over chunks and over the other tokens (at most 126 a piece with chunks), with
/// value_heads · value_dim / 32 blocks per sequence.
///
/// `step.first_row`, `position` and `slot` must be older than the kernel launched just before; rows of the
/// launch are the step's rows first_row[0] … first_row[sequences] - 1, at most `rows` of them.
template <delta_shape Shape, device_class Device = default_device>
struct delta_prefill_family {
  static_assert(Shape.valid(),
                "the delta rule has 64 or 128 key and 32, 64, 128 or 256 value dimensions, a "
                "window of 4, and a hidden size that is a multiple of 256");
  using params = delta_rule_params;
  using product =
      rows_product_plan<2 * Shape.value_heads, false, Shape.hidden, Device.dynamic_shared_bytes()>;
  using stream = delta_stream<Shape.key_dim>;
  using solve =
      delta_solve_plan<Shape.value_heads / Shape.key_heads, Shape.key_dim, Device.dynamic_shared_bytes()>;
  using chunk = delta_chunk_plan<Shape.key_dim, Device.dynamic_shared_bytes()>;
  static constexpr const char* name = "delta_prefill";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = visit(delta_gates_kernel_of<Shape, Device>, product::threads,
                     static_cast<std::size_t>(product::shared_bytes), "delta_gates");
    if (s.ok()) s = visit(delta_conv_kernel_of<Shape>, 256, std::size_t{0}, "delta_conv");
    if (s.ok())
      s = visit(delta_recurrence_kernel_of<Shape>, device::delta_threads, recurrence_shared(true),
                "delta_recurrence");
    if (s.ok())
      s = visit(delta_solve_kernel_of<Shape, Device>, solve::threads, std::size_t{solve::shared_bytes},
                "delta_solve");
    if (s.ok())
      s = visit(delta_chunk_kernel_of<Shape, Device>, chunk::threads, std::size_t{chunk::shared_bytes},
                "delta_chunk");
    if (s.ok()) s = visit(delta_norm_kernel_of<Shape>, 256, std::size_t{0}, "delta_norm");
    return s;
  }

  static status launch(const params& p, const launch_options& options) {
    if (const status s = detail::check_delta(Shape, p, name); !s.ok()) return s;
    if (p.rows < 1) return status::invalid(name, "a launch takes at least one row");
    if (p.workspace == nullptr || reinterpret_cast<std::uintptr_t>(p.workspace) % 256 != 0)
      return status::invalid(name, "the workspace needs a 256-byte address");
    const auto count = [](int n, int by) { return static_cast<unsigned>((n + by - 1) / by); };
    const auto sequences = static_cast<unsigned>(p.step.sequences);
    status s = nibble::launch(delta_gates_kernel_of<Shape, Device>, dim3(count(p.rows, product::tile_rows)),
                              product::threads, product::shared_bytes, options, name, p);
    if (s.ok())
      s = nibble::launch(
          delta_conv_kernel_of<Shape>,
          dim3(count(p.rows, delta_conv_run) + sequences, count(2 * Shape.key_heads + Shape.value_heads, 8)),
          256, 0, options, name, p);
    const auto value_heads = static_cast<unsigned>(Shape.value_heads);
    const dim3 blocks(static_cast<unsigned>(Shape.splits()), value_heads, sequences);
    const auto chunk_slots = static_cast<unsigned>(p.rows / delta_chunk);
    const auto tokens = [&](bool behind) {
      if (s.ok())
        s = nibble::launch(delta_recurrence_kernel_of<Shape>, blocks, device::delta_threads,
                           recurrence_shared(p.step.sequences == 1), options, name, p, behind);
    };
    if (s.ok() && chunk_slots > 0)
      s = nibble::launch(delta_solve_kernel_of<Shape, Device>, dim3(chunk_slots, value_heads / solve::heads),
                         solve::threads, solve::shared_bytes, options, name, p);
    tokens(false);
    if (s.ok() && chunk_slots > 0)
      s = nibble::launch(delta_chunk_kernel_of<Shape, Device>, blocks, chunk::threads, chunk::shared_bytes,
                         options, name, p);
    if (chunk_slots > 0) tokens(true);
    if (s.ok())
      s = nibble::launch(delta_norm_kernel_of<Shape>,
                         dim3(count(p.rows, delta_norm_run) + sequences, count(Shape.value_heads, 8)), 256, 0,
                         options, name, p);
    return s;
  }

 private:
  /// Shared memory of a block of the recurrence. With `alone` it is more than half of a multiprocessor's: the
  /// blocks of one sequence are no more than multiprocessors, and two on one would be as slow as two in turn.
  static constexpr std::size_t recurrence_shared(bool alone) {
    constexpr int more_than_half = (Device.shared_bytes() + 1024) / 2 + 2048;
    static_assert(stream::shared_bytes <= Device.dynamic_shared_bytes() &&
                      more_than_half <= Device.dynamic_shared_bytes(),
                  "a block of this architecture has too little shared memory for the recurrence");
    return static_cast<std::size_t>(alone ? std::max<int>(stream::shared_bytes, more_than_half)
                                          : stream::shared_bytes);
  }
};

}  // namespace nibble
