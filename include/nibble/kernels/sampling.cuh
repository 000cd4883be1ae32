// SPDX-License-Identifier: Apache-2.0
/// \file
/// The family of sampling kernels.
#pragma once

#include "nibble/core/launch.cuh"
#include "nibble/kernels/sampling_kernel.cuh"
#include "nibble/kernels/sampling_logprobs.cuh"

namespace nibble {

/// Tokens from rows of fp32 logits, as host::sample and host::logprobs would have them: the same order of
/// operations and the same uniform numbers. Masses are sums of integers, so a row's token depends neither on
/// its batch nor on the device; where a draw falls within rounding of a boundary, host and device may differ.
/// Cost: one kernel for greedy rows, five for others, one more for log-probabilities; each reads the row
/// once.
template <int Vocab>
struct sampling_family {
  static_assert(Vocab >= 1 && sampling_chunks(Vocab) <= device::sampling_threads,
                "a vocabulary has 1 to 524288 tokens");
  using params = sampling_launch_params;
  static constexpr const char* name = "sampling";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    constexpr int threads = device::sampling_threads;
    const auto none = std::size_t{0};
    status s = visit(&sampling_prepare_kernel<Vocab, false>, threads, none, "sampling_greedy");
    if (s.ok()) s = visit(&sampling_prepare_kernel<Vocab, true>, threads, none, "sampling_prepare");
    if (s.ok()) s = visit(&sampling_histogram_kernel<Vocab>, threads, none, "sampling_histogram");
    if (s.ok()) s = visit(&sampling_select_kernel<Vocab, 0>, threads, none, "sampling_top_k");
    if (s.ok()) s = visit(&sampling_select_kernel<Vocab, 1>, threads, none, "sampling_last_cut");
    if (s.ok()) s = visit(&sampling_select_kernel<Vocab, 2>, threads, none, "sampling_draw");
    if (s.ok()) s = visit(&sampling_logprobs_kernel<Vocab>, threads, none, "sampling_logprobs");
    return s;
  }

  static status launch(const params& p, const launch_options& options) {
    const auto aligned = [](const void* a, std::uintptr_t to) {
      return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % to == 0;
    };
    if (p.rows < 1 || p.rows > 65535) return status::invalid(name, "a launch takes 1 to 65535 rows");
    if (!aligned(p.logits, 16) || p.ldl < Vocab || p.ldl % 4 != 0)
      return status::invalid(
          name, "logits need a 16-byte address and a row stride of the vocabulary or more, a multiple of 4");
    if (p.row == nullptr || p.out == nullptr || !aligned(p.workspace, 256))
      return status::invalid(name, "rows or results are missing, or the workspace lacks a 256-byte address");
    const dim3 grid(static_cast<unsigned>(sampling_chunks(Vocab)), static_cast<unsigned>(p.rows));
    const auto run = [&](auto kernel) {
      return nibble::launch(kernel, grid, device::sampling_threads, 0, options, name, p);
    };
    status s = p.all_greedy ? run(&sampling_prepare_kernel<Vocab, false>)
                            : run(&sampling_prepare_kernel<Vocab, true>);
    if (!p.all_greedy) {
      if (s.ok()) s = run(&sampling_histogram_kernel<Vocab>);
      if (s.ok()) s = run(&sampling_select_kernel<Vocab, 0>);
      if (s.ok()) s = run(&sampling_select_kernel<Vocab, 1>);
      if (s.ok()) s = run(&sampling_select_kernel<Vocab, 2>);
    }
    if (s.ok() && p.any_logprobs) s = run(&sampling_logprobs_kernel<Vocab>);
    return s;
  }
};

}  // namespace nibble
