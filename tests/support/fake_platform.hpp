// SPDX-License-Identifier: Apache-2.0
/// \file
/// A device for the phases of a start that only counts bytes and writes down what happened.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nibble/startup/start_context.hpp"
#include "support/fake_graphs.hpp"

namespace nibble::test {

struct fake_machine {
  std::uint64_t total = std::uint64_t{12} << 30;
  std::uint64_t free = (std::uint64_t{12} << 30) - (std::uint64_t{500} << 20);
  std::uint64_t context = std::uint64_t{500} << 20;
  std::vector<std::string> events;
  std::shared_ptr<fake_stream> stream = std::make_shared<fake_stream>();
  std::function<void(fake_machine&)> before_reading;  ///< another process at work
  int allocations = 0;

  void say(std::string event) { events.push_back(std::move(event)); }
  void take(std::uint64_t bytes) {
    if (bytes > free)
      throw device_out_of_memory("fake: " + std::to_string(bytes) + " bytes refused",
                                 status::cuda(2, "", ""));
    free -= bytes;
    ++allocations;
  }
};

/// The machine that the next fake_platform stands for.
inline std::shared_ptr<fake_machine>& current_machine() {
  static std::shared_ptr<fake_machine> machine;
  return machine;
}

class fake_platform {
 public:
  using graph_api = fake_graph_api;
  explicit fake_platform(int) : machine_(current_machine()) { machine_->say("context"); }

  [[nodiscard]] fake_machine& machine() { return *machine_; }
  [[nodiscard]] std::uint64_t context_bytes() const { return machine_->context; }
  [[nodiscard]] memory_reading read_memory() {
    if (machine_->before_reading) machine_->before_reading(*machine_);
    const std::uint64_t graphs = (std::uint64_t{1} << 30) - machine_->stream->free_bytes;
    return {machine_->total, machine_->free > graphs ? machine_->free - graphs : 0};
  }
  void synchronize() { machine_->say("synchronize"); }
  [[nodiscard]] fake_graph_api graphs() { return fake_graph_api(machine_->stream); }
  template <class Table>
  [[nodiscard]] kernel_report preload() {
    kernel_report report;
    report.geometries = Table::geometries();
    report.families = Table::families;
    require(Table::for_each_kernel([&](auto, int threads, std::size_t, const char* name) {
      report.kernels.push_back({name, 32, threads, 0, 0});
      return status::success();
    }));
    report.bytes = 2 << 20;
    machine_->free -= report.bytes;
    machine_->say("preload");
    return report;
  }

 private:
  std::shared_ptr<fake_machine> machine_;
};

}  // namespace nibble::test
