// SPDX-License-Identifier: Apache-2.0
/// \file
/// graph_set on a CUDA stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "nibble/core/driver.cuh"
#include "nibble/graph/graph_set.hpp"

namespace nibble {

/// Capture and replay on one stream of the current device. The capture is thread-local: allocations and
/// default-stream work of other threads neither fail nor are captured. Graphs of kernels own no device memory
/// beyond their launch records: all of them read and write the one workspace that the engine allocated.
class cuda_graph_api {
 public:
  using graph = cudaGraph_t;
  using exec = cudaGraphExec_t;

  cuda_graph_api() = default;
  explicit cuda_graph_api(cudaStream_t stream) : stream_(stream) {}

  [[nodiscard]] status begin() {
    return runtime_status(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), where,
                          "the capture could not begin");
  }
  [[nodiscard]] capture_state state() {
    cudaStreamCaptureStatus now = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream_, &now) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return capture_state::invalidated;
    }
    return now == cudaStreamCaptureStatusNone     ? capture_state::none
           : now == cudaStreamCaptureStatusActive ? capture_state::active
                                                  : capture_state::invalidated;
  }
  [[nodiscard]] status end(graph& out) {
    return runtime_status(cudaStreamEndCapture(stream_, &out), where, "the capture did not end well");
  }
  /// Refuses graphs that allocate or free memory: what they hold would end with them.
  [[nodiscard]] status check(graph& g) {
    std::size_t count = 0;
    if (const status s =
            runtime_status(cudaGraphGetNodes(g, nullptr, &count), where, "the graph is not readable");
        !s.ok())
      return s;
    std::vector<cudaGraphNode_t> nodes(count);
    if (const status s =
            runtime_status(cudaGraphGetNodes(g, nodes.data(), &count), where, "the graph is not readable");
        !s.ok())
      return s;
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      if (const status s = runtime_status(cudaGraphNodeGetType(node, &type), where, "a node is not readable");
          !s.ok())
        return s;
      if (type == cudaGraphNodeTypeMemAlloc || type == cudaGraphNodeTypeMemFree)
        return status::invalid(where,
                               "the step allocates or frees memory: buffers are made before the capture");
    }
    return status::success();
  }
  [[nodiscard]] status instantiate(exec& out, graph& g) {
    return runtime_status(cudaGraphInstantiate(&out, g, 0), where, "the graph could not be instantiated");
  }
  [[nodiscard]] status update(exec& e, graph& g) {
    cudaGraphExecUpdateResultInfo info{};
    return runtime_status(cudaGraphExecUpdate(e, g, &info), where, "the graph cannot be updated in place");
  }
  [[nodiscard]] status upload(exec& e) {
    return runtime_status(cudaGraphUpload(e, stream_), where, "the graph could not be uploaded");
  }
  [[nodiscard]] status launch(exec& e) {
    return runtime_status(cudaGraphLaunch(e, stream_), where, "the graph could not be launched");
  }
  [[nodiscard]] status synchronize() {
    return runtime_status(cudaStreamSynchronize(stream_), where, "the work on the stream failed");
  }
  [[nodiscard]] std::uint64_t free_bytes() {
    std::size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) static_cast<void>(cudaGetLastError());
    return free;
  }
  void destroy(graph& g) { static_cast<void>(cudaGraphDestroy(g)); }
  void destroy_exec(exec& e) { static_cast<void>(cudaGraphExecDestroy(e)); }

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  static constexpr const char* where = "nibble::graph";
  cudaStream_t stream_ = nullptr;
};

}  // namespace nibble
