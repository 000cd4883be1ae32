// SPDX-License-Identifier: Apache-2.0
/// \file
/// What all phases of a start share: device, options, ledger, times.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "nibble/graph/graph_set.hpp"
#include "nibble/plan/planner.hpp"
#include "nibble/startup/kernel_report.hpp"

namespace nibble {

struct start_options {
  int device = 0;
  plan_request request;  ///< wishes; request.graphs decides whether decode steps are captured
  note_sink log;         ///< takes one line at a time; null: silence
};

struct memory_reading {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};

/// A device as the phases see it: nibble::cuda_platform, or a fake one in tests. It is made by
/// `Platform(int device)`, moves, and throws nibble::error.
template <class T>
concept start_platform = requires(T platform) {
  { platform.context_bytes() } -> std::same_as<std::uint64_t>;  // what the context took when it was made
  { platform.read_memory() } -> std::same_as<memory_reading>;
  platform.synchronize();
  { platform.graphs() } -> std::same_as<typename T::graph_api>;  // on the platform's stream
};

struct phase_time {
  const char* phase;
  double ms;
};

/// Handed to the hooks of a model. Its address stays the same from the first phase to the engine's end.
template <class Platform>
class start_context {
 public:
  explicit start_context(start_options options)
      : options_(std::move(options)), platform_(options_.device), at_start_(platform_.read_memory()) {
    lines_.plan(ledger_line::context, platform_.context_bytes());
    lines_.measure(ledger_line::context, platform_.context_bytes());
  }
  start_context(const start_context&) = delete;
  start_context& operator=(const start_context&) = delete;

  [[nodiscard]] Platform& platform() { return platform_; }
  [[nodiscard]] const start_options& options() const { return options_; }
  [[nodiscard]] const ledger& lines() const { return lines_; }
  [[nodiscard]] const std::vector<phase_time>& times() const { return times_; }
  [[nodiscard]] const kernel_report& kernels() const { return kernels_; }
  /// The plan in force; empty before the plan phase.
  [[nodiscard]] const memory_plan& plan() const { return plan_; }

  void log(std::string_view line) const {
    if (options_.log) options_.log(line);
  }

  /// Runs `allocate` and adds what free memory lost meanwhile to a line of the ledger.
  template <class F>
  decltype(auto) measure(ledger_line line, F&& allocate) {
    platform_.synchronize();
    const std::uint64_t before = platform_.read_memory().free_bytes;
    const auto add = [&] {
      platform_.synchronize();
      const std::uint64_t after = platform_.read_memory().free_bytes;
      lines_.add_measured(line, before > after ? before - after : 0);
    };
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      std::forward<F>(allocate)();
      add();
    } else {
      auto result = std::forward<F>(allocate)();
      add();
      return result;
    }
  }
  /// Replaces what was measured of a line, after an arena changed its size.
  void set_measured(ledger_line line, std::uint64_t bytes) { lines_.measure(line, bytes); }

  /// Back to what was measured at an earlier time.
  void restore_measured(const ledger& earlier) {
    const memory_plan plan = plan_;
    lines_ = earlier;
    take_plan(plan);
  }

  /// Own memory on the device beside the context, as measured line by line.
  [[nodiscard]] std::uint64_t held_bytes() const {
    const std::uint64_t all = lines_.measured_total();
    return all - lines_[ledger_line::context].measured_bytes.value_or(0);
  }
  /// What is missing from free memory since the start and on no line: allocations nobody measured, or other
  /// programs.
  [[nodiscard]] std::int64_t unaccounted_bytes() {
    const std::uint64_t now = platform_.read_memory().free_bytes;
    return static_cast<std::int64_t>(at_start_.free_bytes) - static_cast<std::int64_t>(now) -
           static_cast<std::int64_t>(held_bytes());
  }
  /// The machine as the planner wants it, read now.
  [[nodiscard]] machine_memory machine() {
    machine_memory m;
    m.total_bytes = at_start_.total_bytes;
    m.free_bytes = at_start_.free_bytes;
    m.context_bytes = platform_.context_bytes();
    m.free_now_bytes = platform_.read_memory().free_bytes;
    m.held_bytes = held_bytes();
    m.resident_bytes = lines_[ledger_line::weights].measured_bytes.value_or(0) +
                       lines_[ledger_line::kernels].measured_bytes.value_or(0);
    return m;
  }

  /// `{"lines":[…],"phases":[{"phase","ms"}…],"kernels":n,"unaccounted_bytes":n}`.
  [[nodiscard]] std::string json() {
    std::string out = "{\"lines\":" + lines_.json_rows() + ",\"phases\":[";
    char row[96];
    for (std::size_t i = 0; i < times_.size(); ++i) {
      std::snprintf(row, sizeof row, "%s{\"phase\":\"%s\",\"ms\":%.3f}", i == 0 ? "" : ",", times_[i].phase,
                    times_[i].ms);
      out += row;
    }
    std::snprintf(row, sizeof row, "],\"kernels\":%zu,\"unaccounted_bytes\":%lld}", kernels_.kernels.size(),
                  static_cast<long long>(unaccounted_bytes()));
    return out + row;
  }

  // For the phases.
  void finish_phase(const char* phase, std::chrono::steady_clock::time_point begin) {
    times_.push_back(
        {phase, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count()});
  }
  void take_kernels(kernel_report report) {
    kernels_ = std::move(report);
    lines_.measure(ledger_line::kernels, kernels_.bytes);
  }
  /// The planned column becomes the plan's; what was measured stays.
  void take_plan(memory_plan plan) {
    plan_ = std::move(plan);
    ledger merged = plan_.lines;
    for (std::size_t i = 0; i < ledger_lines; ++i) {
      const auto line = static_cast<ledger_line>(i);
      if (lines_[line].measured_bytes) merged.measure(line, *lines_[line].measured_bytes);
    }
    lines_ = std::move(merged);
  }

 private:
  start_options options_;
  Platform platform_;
  memory_reading at_start_;
  ledger lines_;
  memory_plan plan_;
  kernel_report kernels_;
  std::vector<phase_time> times_;
};

}  // namespace nibble
