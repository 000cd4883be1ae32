// SPDX-License-Identifier: Apache-2.0
/// \file
/// Steps that follow a routing trace: one small kernel a step, and nothing in any other layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/cuda_backend.cuh"
#include "nibble/core/device_memory.cuh"
#include "nibble/core/launch.cuh"
#include "routing_trace.hpp"
#include "timing.cuh"

namespace bench {

/// Copies a step of the trace, [steps][planes][row_ids], to `ids`, [planes][rows][row_ids], and goes on to
/// the next one. One block.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    copy_routing(const std::int32_t* trace, unsigned* step, std::int32_t* ids, int steps, int planes,
                 int row_ids, int rows) {
  nibble::device::wait_for_previous_grid();
  nibble::device::let_next_grid_start();
  const unsigned now = *step;
  const int step_ids = planes * row_ids;
  for (int i = static_cast<int>(threadIdx.x); i < rows * step_ids; i += Threads) {
    const int row = i / step_ids, plane = i % step_ids / row_ids, id = i % row_ids;
    // Rows follow the trace at places far from each other.
    const unsigned at = (now + static_cast<unsigned>(row) * 131u) % static_cast<unsigned>(steps);
    ids[(static_cast<std::size_t>(plane) * rows + row) * row_ids + id] =
        trace[static_cast<std::size_t>(at) * step_ids + i % step_ids];
  }
  __syncthreads();
  if (threadIdx.x == 0) *step = (now + 1) % static_cast<unsigned>(steps);
}

/// The hook of qwen3_moe::cuda_backend that makes steps follow a trace. The routers run as always; what is
/// behind them reads the trace's ids instead of theirs. Graphs captured with it hold its addresses.
class forced_routing {
 public:
  /// \param most_rows of a step
  forced_routing(const routing_options& options, int most_rows) : trace_(options), most_rows_(most_rows) {
    const auto all = trace_.ids();
    const auto step_ids = static_cast<std::size_t>(trace_.planes() * options.top_k);
    all_ = nibble::device_memory(all.size_bytes());
    ids_ = nibble::device_memory(sizeof(std::int32_t) * step_ids * static_cast<std::size_t>(most_rows));
    step_ = nibble::device_memory(256);
    good(cudaMemcpy(all_.data(), all.data(), all.size_bytes(), cudaMemcpyHostToDevice), "trace");
    good(cudaMemset(step_.data(), 0, 256), "trace");
  }
  /// A qwen3_moe::router_hook: layer 0 fetches the ids of the whole step.
  static nibble::status hook(void* self, int layer, int rows, qwen3_moe::routed_ids& routed,
                             const nibble::launch_options& options) {
    const auto& r = *static_cast<const forced_routing*>(self);
    if (rows > r.most_rows_)
      return nibble::status::invalid(where, "the step has more rows than it was made for");
    const routing_options& o = r.trace_.options();
    routed.ids = r.plane(layer, rows);
    if (routed.next != nullptr && layer + 1 < o.layers)
      routed.next = r.plane(r.trace_.guess_plane(layer + 1), rows);
    if (layer > 0) return nibble::status::success();
    return nibble::launch(&copy_routing<threads>, dim3(1), threads, 0, options, where,
                          static_cast<const std::int32_t*>(r.all_.as<std::int32_t>()), r.step_.as<unsigned>(),
                          r.ids_.as<std::int32_t>(), o.steps, r.trace_.planes(), o.top_k, rows);
  }

 private:
  static constexpr const char* where = "bench::forced_routing";
  static constexpr int threads = 512;

  /// Of the ids that a step of `rows` rows has: [rows][top_k].
  [[nodiscard]] const std::int32_t* plane(int index, int rows) const {
    return ids_.as<std::int32_t>() + static_cast<std::ptrdiff_t>(index) * rows * trace_.options().top_k;
  }

  routing_trace trace_;
  int most_rows_;
  nibble::device_memory all_, ids_, step_;
};

}  // namespace bench
