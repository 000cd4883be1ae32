// SPDX-License-Identifier: Apache-2.0
/// \file
/// A stream that captures and replays without a device: launches are numbers, graphs are lists of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nibble/graph/graph_set.hpp"

namespace nibble::test {

/// What the "device" ran, and knobs for what fails. Shared by all copies of an api.
struct fake_stream {
  capture_state state = capture_state::none;
  std::vector<std::string> captured;  ///< launches of the capture in progress
  std::vector<std::string> ran;       ///< launches that ran, eagerly or by replay
  int live_graphs = 0, live_execs = 0, instantiated = 0, updated = 0, uploaded = 0, synchronised = 0;
  std::uint64_t free_bytes = std::uint64_t{1} << 30;
  std::uint64_t exec_bytes = 1 << 20;  ///< that each instantiation takes
  status instantiate_result, update_result, end_result, launch_result, begin_result, check_result;
  int fail_instantiate_from = 1 << 30;  ///< the how-many-th instantiation and all after it fail

  /// A kernel launch.
  status launch(const std::string& what) {
    if (state == capture_state::invalidated)
      return status::cuda(901, "fake", "the capture was invalidated before");
    (state == capture_state::active ? captured : ran).push_back(what);
    return status::success();
  }
  /// A call that is not allowed while capturing, such as an allocation: it fails and spoils the capture.
  status forbidden() {
    if (state == capture_state::none) return status::success();
    state = capture_state::invalidated;
    return status::cuda(900, "fake", "the operation is not permitted while the stream is capturing");
  }
};

class fake_graph_api {
 public:
  struct content {
    std::vector<std::string> launches;
  };
  using graph = content*;
  using exec = content*;

  fake_graph_api() = default;
  explicit fake_graph_api(std::shared_ptr<fake_stream> stream) : s_(std::move(stream)) {}

  status begin() {
    if (!s_->begin_result.ok()) return s_->begin_result;
    s_->state = capture_state::active;
    s_->captured.clear();
    return status::success();
  }
  capture_state state() { return s_->state; }
  status end(graph& g) {
    const bool good = s_->state == capture_state::active;
    s_->state = capture_state::none;
    if (!good) return status::cuda(901, "fake", "the capture was invalidated");
    if (!s_->end_result.ok()) return s_->end_result;
    g = new content{s_->captured};
    ++s_->live_graphs;
    return status::success();
  }
  status check(graph&) { return s_->check_result; }
  status instantiate(exec& e, graph& g) {
    if (++s_->instantiated >= s_->fail_instantiate_from) return status::cuda(2, "fake", "out of memory");
    if (!s_->instantiate_result.ok()) return s_->instantiate_result;
    e = new content(*g);
    ++s_->live_execs;
    s_->free_bytes -= s_->exec_bytes;
    return status::success();
  }
  status update(exec& e, graph& g) {
    if (!s_->update_result.ok()) return s_->update_result;
    if (e->launches.size() != g->launches.size()) return status::cuda(910, "fake", "another topology");
    e->launches = g->launches;
    ++s_->updated;
    return status::success();
  }
  status upload(exec&) { return ++s_->uploaded, status::success(); }
  status launch(exec& e) {
    if (!s_->launch_result.ok()) return s_->launch_result;
    s_->ran.insert(s_->ran.end(), e->launches.begin(), e->launches.end());
    return status::success();
  }
  status synchronize() { return ++s_->synchronised, status::success(); }
  std::uint64_t free_bytes() { return s_->free_bytes; }
  void destroy(graph& g) { delete g, g = nullptr, --s_->live_graphs; }
  void destroy_exec(exec& e) { delete e, e = nullptr, --s_->live_execs, s_->free_bytes += s_->exec_bytes; }

 private:
  std::shared_ptr<fake_stream> s_;
};

}  // namespace nibble::test
