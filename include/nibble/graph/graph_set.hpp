// SPDX-License-Identifier: Apache-2.0
/// \file
/// One captured graph for each batch size: capture, replay, update, recapture, and running eagerly where a
/// graph cannot be had.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nibble/core/driver_error.hpp"
#include "nibble/core/status.hpp"
#include "nibble/graph/captured_sizes.hpp"
#include "nibble/graph/op_scope.hpp"

namespace nibble {

enum class capture_state : std::uint8_t { none, active, invalidated };

/// Takes one line about something that was decided: a fallback, a recapture.
using note_sink = std::function<void(std::string_view)>;

/// What graph_set does on its stream. nibble::cuda_graph_api is the one of a GPU; tests have another.
///
/// `graph` and `exec` are handles that copy and compare like pointers.
template <class T>
concept graph_api = requires(T api, typename T::graph& graph, typename T::exec& exec) {
  { api.begin() } -> std::same_as<status>;         // thread-local capture of the stream
  { api.state() } -> std::same_as<capture_state>;  // of the stream
  { api.end(graph) } -> std::same_as<status>;      // the capture is over whatever it returns
  { api.check(graph) } -> std::same_as<status>;    // refuses nodes that own memory
  { api.instantiate(exec, graph) } -> std::same_as<status>;
  { api.update(exec, graph) } -> std::same_as<status>;  // in place, without new memory
  { api.upload(exec) } -> std::same_as<status>;
  { api.launch(exec) } -> std::same_as<status>;
  { api.synchronize() } -> std::same_as<status>;
  { api.free_bytes() } -> std::same_as<std::uint64_t>;
  api.destroy(graph);
  api.destroy_exec(exec);
};

/// What capturing did, for the log and the ledger.
struct capture_report {
  std::vector<int> captured;  ///< sizes, ascending
  std::vector<int> eager;     ///< sizes that have no graph
  std::uint64_t bytes = 0;    ///< free memory before − after
  double ms = 0;
};

/// Graphs of one step for several batch sizes.
///
/// `record(rows)` launches the step for `rows` rows on the API's stream and returns the first status that is
/// not good. The set owns it, and with it everything that it owns: the pointers a graph holds live at least
/// as long as the graph. A graph that would own memory itself (an allocation inside the capture) is refused.
///
/// `signature` sums up everything a graph took by value: addresses, strides, which of two buffers is current.
/// When it changes, the next run updates or recaptures the graph first; a stale one is never replayed.
template <class Api>
class graph_set {
 public:
  using recorder = std::function<status(int rows)>;

  graph_set() = default;
  graph_set(Api api, recorder record, note_sink note)
      : api_(std::move(api)), record_(std::move(record)), note_(std::move(note)) {
    static_assert(graph_api<Api>, "a graph set needs the functions listed at nibble::graph_api");
  }
  graph_set(graph_set&& other) noexcept { swap(other); }
  graph_set& operator=(graph_set&& other) noexcept {
    graph_set(std::move(other)).swap(*this);
    return *this;
  }
  ~graph_set() { destroy(); }

  /// Captures each size, largest first, so that what the driver keeps for the largest serves the others.
  /// Before each capture the step runs once eagerly with `warm_up`. A size whose capture or instantiation
  /// fails runs eagerly from then on, with one note; only an error of the device itself is returned.
  [[nodiscard]] status capture(std::vector<int> sizes, std::uint64_t signature = 0, bool warm_up = true) {
    destroy();
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    const auto begin = std::chrono::steady_clock::now();
    const std::uint64_t free_before = api_.free_bytes();
    report_ = {};
    for (auto rows = sizes.rbegin(); rows != sizes.rend(); ++rows) {
      if (warm_up) {
        status s = record_(*rows);
        if (s.ok()) s = api_.synchronize();
        if (!s.ok()) return s;
      }
      captured_graph made{*rows, signature, {}, {}, false};
      const status s = capture_into(made);
      if (s.ok()) {
        graphs_.push_back(made);
      } else {
        if (is_sticky(s)) return s;
        eager_.push_back(*rows);
      }
    }
    std::reverse(graphs_.begin(), graphs_.end());
    std::reverse(eager_.begin(), eager_.end());
    sizes_ = std::move(sizes);
    if (const status s = api_.synchronize(); !s.ok()) return s;
    const std::uint64_t free_after = api_.free_bytes();
    report_.bytes = free_before > free_after ? free_before - free_after : 0;
    report_.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    for (const auto& g : graphs_) report_.captured.push_back(g.rows);
    report_.eager = eager_;
    return status::success();
  }

  /// What a batch of `rows` is padded to: the next captured size, or `rows` where none is that large.
  [[nodiscard]] int padded(int rows) const {
    const int size = captured_size_for(sizes_, rows);
    return size == 0 ? rows : size;
  }
  [[nodiscard]] bool has_graph(int rows) const { return find(rows) != nullptr; }

  /// Runs the step for `rows` rows, a padded size: its graph, or eagerly. Does not wait. A replay that fails
  /// is reported, never repeated.
  [[nodiscard]] status run(int rows, std::uint64_t signature = 0) {
    captured_graph* const g = find(rows);
    if (g == nullptr) return record_(rows);
    if (g->signature != signature) {
      const status s = refresh(*g, signature);
      if (!s.ok() && is_sticky(s)) return s;
      if (!s.ok()) {
        remove(rows);
        return record_(rows);
      }
    }
    return api_.launch(g->exec);
  }

  /// Captures every size anew, after something that graphs hold has moved.
  [[nodiscard]] status recapture(std::uint64_t signature) { return capture(sizes_, signature, false); }

  /// Gives all graphs back; steps run eagerly until the next capture.
  void destroy() {
    if (!graphs_.empty()) static_cast<void>(api_.synchronize().ok());  // none may be running
    for (auto& g : graphs_) destroy(g);
    graphs_.clear();
    eager_.clear();
  }

  [[nodiscard]] const capture_report& report() const { return report_; }
  [[nodiscard]] std::span<const int> sizes() const { return sizes_; }
  [[nodiscard]] std::size_t graphs() const { return graphs_.size(); }
  [[nodiscard]] Api& api() { return api_; }

 private:
  struct captured_graph {
    int rows = 0;
    std::uint64_t signature = 0;
    typename Api::graph graph{};
    typename Api::exec exec{};
    bool said = false;  ///< that it was updated
  };

  [[nodiscard]] const captured_graph* find(int rows) const {
    for (const auto& g : graphs_)
      if (g.rows == rows) return &g;
    return nullptr;
  }
  [[nodiscard]] captured_graph* find(int rows) {
    return const_cast<captured_graph*>(std::as_const(*this).find(rows));
  }
  void destroy(captured_graph& g) {
    if (g.exec != typename Api::exec{}) api_.destroy_exec(g.exec);
    if (g.graph != typename Api::graph{}) api_.destroy(g.graph);
    g.exec = {};
    g.graph = {};
  }
  void remove(int rows) {
    for (std::size_t i = 0; i < graphs_.size(); ++i)
      if (graphs_[i].rows == rows) {
        static_cast<void>(api_.synchronize().ok());
        destroy(graphs_[i]);
        graphs_.erase(graphs_.begin() + static_cast<std::ptrdiff_t>(i));
        eager_.push_back(rows);
        return;
      }
  }

  /// One capture of `rows` into `graph`. The stream is usable again whatever this returns.
  status record_graph(int rows, typename Api::graph& graph) {
    static constexpr const char* where = "nibble::graph_set";
    status s = api_.state() == capture_state::none
                   ? api_.begin()
                   : status::invalid(where, "the stream is being captured by somebody else");
    if (!s.ok()) {
      failure_ = "graph of " + std::to_string(rows) + " rows: " + describe(s);
      return s;
    }
    detail::capture_watch watch{
        [](void* self) { return static_cast<graph_set*>(self)->api_.state() == capture_state::invalidated; },
        this, nullptr};
    auto& context = detail::this_thread_op();
    detail::capture_watch* const outer = std::exchange(context.watch, &watch);
    const char* const op_before = context.current;
    status recorded = record_(rows);
    const char* failed_op = watch.culprit;
    context.watch = outer;
    context.current = op_before;
    const capture_state after = api_.state();
    const status ended = api_.end(graph);
    if (recorded.ok() && after != capture_state::active)
      recorded = status::cuda(ended.ok() ? cuda_error_capture_invalidated : ended.cuda_error, where,
                              "a call that is not allowed while capturing ended the capture");
    if (recorded.ok()) recorded = ended;
    if (recorded.ok()) recorded = api_.check(graph);
    if (!recorded.ok()) {
      if (graph != typename Api::graph{}) api_.destroy(graph);
      graph = {};
      std::string text = "graph of " + std::to_string(rows) + " rows";
      if (failed_op != nullptr && failed_op[0] != '\0') text += ", op " + std::string(failed_op);
      failure_ = text + ": " + describe(recorded);
    }
    return recorded;
  }

  status capture_into(captured_graph& made) {
    status s = record_graph(made.rows, made.graph);
    if (s.ok()) {
      s = api_.instantiate(made.exec, made.graph);
      if (s.ok()) s = api_.upload(made.exec);
      if (!s.ok()) failure_ = "graph of " + std::to_string(made.rows) + " rows: " + describe(s);
    }
    if (!s.ok()) {
      destroy(made);
      say(failure_ + "; batches of this size run eagerly");
    }
    return s;
  }

  /// Brings a graph up to a new signature: updated in place when its shape allows it, instantiated anew
  /// otherwise.
  status refresh(captured_graph& g, std::uint64_t signature) {
    typename Api::graph graph{};
    status s = record_graph(g.rows, graph);
    if (!s.ok()) {
      say(failure_ + "; batches of this size run eagerly");
      return s;
    }
    if (api_.update(g.exec, graph).ok()) {
      api_.destroy(g.graph);
      g.graph = graph;
      g.signature = signature;
      if (!std::exchange(g.said, true))  // a step that swaps buffers does this every time
        say("graph of " + std::to_string(g.rows) + " rows: updated, since what it reads has moved");
      return status::success();
    }
    if (s = api_.synchronize(); !s.ok()) {
      api_.destroy(graph);
      return s;
    }
    destroy(g);
    g.graph = graph;
    s = api_.instantiate(g.exec, g.graph);
    if (s.ok()) s = api_.upload(g.exec);
    if (s.ok()) {
      g.signature = signature;
      say("graph of " + std::to_string(g.rows) + " rows: captured anew, since what it reads has moved");
    } else {
      say("graph of " + std::to_string(g.rows) + " rows: " + describe(s) +
          "; batches of this size run eagerly");
    }
    return s;
  }

  void say(const std::string& text) {
    if (note_) note_(text);
  }
  void swap(graph_set& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(record_, other.record_);
    std::swap(note_, other.note_);
    std::swap(graphs_, other.graphs_);
    std::swap(sizes_, other.sizes_);
    std::swap(eager_, other.eager_);
    std::swap(report_, other.report_);
    std::swap(failure_, other.failure_);
  }

  static constexpr int cuda_error_capture_invalidated = 901;

  Api api_{};
  recorder record_;
  note_sink note_;
  std::vector<captured_graph> graphs_;  ///< by size, ascending
  std::vector<int> sizes_;              ///< asked for, ascending
  std::vector<int> eager_;
  capture_report report_;
  std::string failure_;
};

}  // namespace nibble
