// SPDX-License-Identifier: Apache-2.0
/// \file
/// Start-up as a chain of values, each made from the one before by moving it, so that a wrong order does not
/// compile:
///
///     using namespace nibble;
///     startup::device<platform> d(options);          // context made, free memory read
///     startup::weights<my_model> w(std::move(d), …); // the model constructed: its weights are resident
///     startup::kernels<my_model> k(std::move(w));    // every kernel loaded and checked
///     startup::vram_plan<my_model> p(std::move(k));  // the ledger: what is left is split
///     startup::caches<my_model> c(std::move(p));     // workspace, states, pages, slots allocated
///     startup::graphs<my_model> g(std::move(c));     // decode steps captured for each batch size
///     startup::engine<my_model> e(std::move(g));     // serves; nothing allocates or loads from here on
///
/// or startup::start<my_model>(options, …), which does just that.
///
/// A model is a class with
///
///     using platform = nibble::cuda_platform;
///     using kernel_table = nibble::table_of<…>;              every kernel family it launches
///     my_model(start_context<platform>&, …);                 loads the weights
///     memory_model memory() const;                           byte counts for the planner
///     void allocate(start_context<platform>&, const memory_plan&);
///         allocates what the plan says, each line inside context.measure(line, …), and points the step's
///         arrays at padding rows. Failing, gives all back and throws device_out_of_memory; then comes again
///     status record(int rows);                               launches one decode step of `rows` rows
///
/// and, where it wants them,
///
///     status representative_launch(int rows);    launches each distinct kernel once on scratch it has: for
///                                                kernels that want a real first launch
///     std::uint64_t signature() const;           of everything graphs hold by value, see graph_set
///     status resize(start_context<platform>&, const memory_plan&);
///         brings expert slots and KV pages to the plan's sizes and tells the context what they take now
///     std::uint64_t pages_in_use() const;        KV pages 0 … n - 1 that must keep their contents
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "nibble/core/driver_error.hpp"
#include "nibble/graph/graph_set.hpp"
#include "nibble/plan/planner.hpp"
#include "nibble/plan/replan.hpp"
#include "nibble/startup/kernel_table.hpp"
#include "nibble/startup/start_context.hpp"

namespace nibble::startup {

template <class T>
concept startable_model = start_platform<typename T::platform> &&
    requires(T model, const T& constant, start_context<typename T::platform>& context,
             const memory_plan& plan) {
  typename T::kernel_table;
  { constant.memory() } -> std::same_as<memory_model>;
  model.allocate(context, plan);
  { model.record(1) } -> std::same_as<status>;
};

namespace detail {

using start_clock = std::chrono::steady_clock;

/// A phase that was moved from has nothing left to give.
template <class Pointer>
Pointer taken(Pointer& from, const char* phase) {
  if (from == nullptr) throw error(std::string("the phase ") + phase + " was used already");
  return std::move(from);
}

/// Context and model travel together; the model goes first when they end.
template <class Model>
struct started {
  std::unique_ptr<start_context<typename Model::platform>> context;
  std::unique_ptr<Model> model;
};

/// The largest batch that may be captured, before the plan has its say.
[[nodiscard]] inline int most_captured_rows(const plan_request& request) {
  const int running =
      std::min(request.max_running.value_or(request.preferred_running), request.most_captured_rows);
  int most = 0;
  for (const int rows : request.captured_sizes)
    if (rows <= running) most = std::max(most, rows);
  return most > 0 ? most : std::max(1, running);
}

template <class Model>
[[nodiscard]] std::uint64_t signature_of(const Model& model) {
  if constexpr (requires {
                  { model.signature() } -> std::convertible_to<std::uint64_t>;
                })
    return model.signature();
  else
    return 0;
}

}  // namespace detail

/// Phase 1: the device's context exists and its free memory is known.
template <class Platform>
class device {
 public:
  static_assert(start_platform<Platform>, "a platform has the functions listed at nibble::start_platform");
  explicit device(start_options options) {
    const auto begin = detail::start_clock::now();
    context_ = std::make_unique<start_context<Platform>>(std::move(options));
    context_->finish_phase("device", begin);
  }
  device(device&&) noexcept = default;
  [[nodiscard]] start_context<Platform>& context() { return *context_; }

 private:
  template <class>
  friend class weights;
  std::unique_ptr<start_context<Platform>> context_;
};

/// Phase 2: the model exists and its weights are resident.
template <class Model>
class weights {
 public:
  static_assert(startable_model<Model>, "a model has the members listed in nibble/startup/phases.hpp");
  template <class... Arguments>
  explicit weights(device<typename Model::platform>&& from, Arguments&&... arguments) {
    const auto begin = detail::start_clock::now();
    own_.context = detail::taken(from.context_, "device");
    auto& context = *own_.context;
    const std::uint64_t before = context.platform().read_memory().free_bytes;
    own_.model = std::make_unique<Model>(context, std::forward<Arguments>(arguments)...);
    context.platform().synchronize();
    const std::uint64_t after = context.platform().read_memory().free_bytes;
    if (!context.lines()[ledger_line::weights].measured_bytes)
      context.set_measured(ledger_line::weights, before > after ? before - after : 0);
    context.finish_phase("weights", begin);
  }
  weights(weights&&) noexcept = default;
  [[nodiscard]] Model& model() { return *own_.model; }

 private:
  template <class>
  friend class kernels;
  detail::started<Model> own_;
};

/// Phase 3: every kernel of the model is loaded; nothing has taken its room.
template <class Model>
class kernels {
 public:
  explicit kernels(weights<Model>&& from) {
    const auto begin = detail::start_clock::now();
    own_.context = detail::taken(from.own_.context, "weights");
    own_.model = std::move(from.own_.model);
    auto& context = *own_.context;
    const std::uint64_t before = context.platform().read_memory().free_bytes;
    kernel_report report = context.platform().template preload<typename Model::kernel_table>();
    if constexpr (requires { own_.model->representative_launch(1); })
      if (context.options().request.graphs) {
        report.launched_rows = detail::most_captured_rows(context.options().request);
        for (const int rows : {1, report.launched_rows}) {
          require(own_.model->representative_launch(rows));
          context.platform().synchronize();
        }
        const std::uint64_t after = context.platform().read_memory().free_bytes;
        report.bytes = before > after ? before - after : 0;
      }
    context.log(report.line());
    context.take_kernels(std::move(report));
    context.finish_phase("kernels", begin);
  }
  kernels(kernels&&) noexcept = default;
  [[nodiscard]] const kernel_report& report() const { return own_.context->kernels(); }

 private:
  template <class>
  friend class vram_plan;
  detail::started<Model> own_;
};

/// Phase 4: what is left is split. Throws plan_refused.
template <class Model>
class vram_plan {
 public:
  explicit vram_plan(kernels<Model>&& from) {
    const auto begin = detail::start_clock::now();
    own_.context = detail::taken(from.own_.context, "kernels");
    own_.model = std::move(from.own_.model);
    auto& context = *own_.context;
    context.take_plan(plan_memory(context.machine(), own_.model->memory(), context.options().request));
    context.finish_phase("plan", begin);
  }
  vram_plan(vram_plan&&) noexcept = default;
  [[nodiscard]] const memory_plan& plan() const { return own_.context->plan(); }

 private:
  template <class>
  friend class caches;
  detail::started<Model> own_;
};

/// Phase 5: workspace, states, pages and slots exist.
template <class Model>
class caches {
 public:
  explicit caches(vram_plan<Model>&& from) {
    const auto begin = detail::start_clock::now();
    own_.context = detail::taken(from.own_.context, "plan");
    own_.model = std::move(from.own_.model);
    allocate(*own_.context, *own_.model);
    own_.context->finish_phase("caches", begin);
  }
  caches(caches&&) noexcept = default;

 private:
  template <class>
  friend class graphs;

  /// Memory that was free when the plan was made may be gone: then the plan is made again from what there is.
  static void allocate(start_context<typename Model::platform>& context, Model& model) {
    constexpr int attempts = 3;
    const ledger before = context.lines();
    for (int attempt = 1;; ++attempt) {
      try {
        model.allocate(context, context.plan());
        context.platform().synchronize();  // whatever stream it wrote its caches on
        return;
      } catch (const device_out_of_memory& problem) {
        if (attempt == attempts) throw;
        context.log(std::string(problem.what()) + ": planning again from the memory there is");
      }
      context.restore_measured(before);
      context.platform().synchronize();
      context.take_plan(plan_memory(context.machine(), model.memory(), context.options().request));
    }
  }
  detail::started<Model> own_;
};

/// Phase 6: decode steps are captured, or run eagerly where the options say so.
template <class Model>
class graphs {
 public:
  using set = graph_set<typename Model::platform::graph_api>;
  explicit graphs(caches<Model>&& from) {
    const auto begin = detail::start_clock::now();
    own_.context = detail::taken(from.own_.context, "caches");
    own_.model = std::move(from.own_.model);
    auto& context = *own_.context;
    set_ = set(
        context.platform().graphs(), [model = own_.model.get()](int rows) { return model->record(rows); },
        context.options().log);
    const auto& sizes = context.plan().captured_sizes;
    if (!sizes.empty()) {
      require(set_.capture(sizes, detail::signature_of(*own_.model)));
      context.set_measured(ledger_line::graphs, set_.report().bytes);
    }
    context.finish_phase("graphs", begin);
  }
  graphs(graphs&&) noexcept = default;
  [[nodiscard]] const capture_report& report() const { return set_.report(); }

 private:
  template <class>
  friend class engine;
  detail::started<Model> own_;
  set set_;
};

/// Phase 7: serves.
template <class Model>
class engine {
 public:
  using platform = typename Model::platform;
  explicit engine(graphs<Model>&& from)
      : own_{detail::taken(from.own_.context, "graphs"), std::move(from.own_.model)},
        set_(std::move(from.set_)),
        first_plan_(own_.context->plan()) {
    own_.context->platform().synchronize();
    own_.context->log(own_.context->lines().text());
  }
  engine(engine&&) noexcept = default;

  [[nodiscard]] Model& model() { return *own_.model; }
  [[nodiscard]] start_context<platform>& context() { return *own_.context; }
  [[nodiscard]] graph_set<typename platform::graph_api>& graphs_of_steps() { return set_; }

  /// What a batch of `rows` sequences is padded to; the model fills the rows beyond with padding rows.
  [[nodiscard]] int padded(int rows) const { return set_.padded(rows); }
  /// Launches the step for a padded batch: its graph, or eagerly. Does not wait.
  [[nodiscard]] status decode(int padded_rows) {
    return set_.run(padded_rows, detail::signature_of(*own_.model));
  }

  /// To be called now and then between steps, and when an allocation failed (`now`). When others left less
  /// than half of the reserve, expert slots and KV pages shrink until the reserve is whole again; when there
  /// is more than twice the reserve, they grow back, never past the first plan. Graphs stay valid: arenas
  /// keep their address. \return whether anything changed
  bool adapt(bool now = false) requires requires(Model m, start_context<platform>& c, const memory_plan& p) {
    { m.resize(c, p) } -> std::same_as<status>;
  }
  {
    auto& context = *own_.context;
    const machine_memory machine = context.machine();
    const std::uint64_t reserve = first_plan_.lines[ledger_line::reserve].planned_bytes;
    const std::uint64_t free = *machine.free_now_bytes;
    const bool whole = context.plan().expert_slots == first_plan_.expert_slots &&
                       context.plan().kv_pages == first_plan_.kv_pages;
    if (!now && free >= reserve / 2 && (whole || free / 2 <= reserve)) return false;
    const memory_plan next = replanned(machine);
    if (next.expert_slots == context.plan().expert_slots && next.kv_pages == context.plan().kv_pages)
      return false;
    const status s = own_.model->resize(context, next);
    if (is_out_of_memory(s)) {
      context.log("caches stay as they are: " + describe(s));
      return false;
    }
    require(s);
    context.log("caches now hold " + std::to_string(next.expert_slots) + " expert slots and " +
                std::to_string(next.kv_pages) + " KV pages, " + bytes_text(free) + " were free");
    context.take_plan(next);
    return true;
  }

 private:
  [[nodiscard]] memory_plan replanned(const machine_memory& machine) {
    std::uint64_t pages = 0;
    if constexpr (requires { own_.model->pages_in_use(); }) pages = own_.model->pages_in_use();
    plan_request request = own_.context->options().request;
    const memory_model model = own_.model->memory();
    try {
      memory_plan plan = replan_memory(machine, model, request, first_plan_, pages);
      exhausted_ = false;
      return plan;
    } catch (const plan_refused& problem) {
      if (!exhausted_)
        own_.context->log("caches can give up no more, and " + bytes_text(problem.missing_bytes()) +
                          " of the reserve are missing");
      exhausted_ = true;
      request.reserve_bytes = 0;  // better without a reserve than not at all
    }
    try {
      return replan_memory(machine, model, request, first_plan_, pages);
    } catch (const plan_refused&) {
      return own_.context->plan();
    }
  }

  detail::started<Model> own_;
  graph_set<typename platform::graph_api> set_;
  memory_plan first_plan_;
  bool exhausted_ = false;  ///< said that caches are at their least
};

/// All phases in their order. `arguments` go to the model's constructor after the context.
template <class Model, class... Arguments>
[[nodiscard]] engine<Model> start(start_options options, Arguments&&... arguments) {
  return engine<Model>(graphs<Model>(caches<Model>(vram_plan<Model>(kernels<Model>(weights<Model>(
      device<typename Model::platform>(std::move(options)), std::forward<Arguments>(arguments)...))))));
}

}  // namespace nibble::startup
