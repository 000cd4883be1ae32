// SPDX-License-Identifier: Apache-2.0
// One wrong order or one missing kernel a case; CASE_start_valid must compile.
#include "nibble/startup/phases.hpp"

using namespace nibble;

struct fake_graphs {
  using graph = int*;
  using exec = int*;
  status begin() { return {}; }
  capture_state state() { return capture_state::none; }
  status end(graph&) { return {}; }
  status check(graph&) { return {}; }
  status instantiate(exec&, graph&) { return {}; }
  status update(exec&, graph&) { return {}; }
  status upload(exec&) { return {}; }
  status launch(exec&) { return {}; }
  status synchronize() { return {}; }
  std::uint64_t free_bytes() { return 0; }
  void destroy(graph&) {}
  void destroy_exec(exec&) {}
};

struct fake {
  using graph_api = fake_graphs;
  explicit fake(int) {}
  std::uint64_t context_bytes() { return 0; }
  memory_reading read_memory() { return {}; }
  void synchronize() {}
  fake_graphs graphs() { return {}; }
  template <class Table>
  kernel_report preload() {
    return {};
  }
};

template <int Number>
struct family {
  static constexpr const char* name = "family";
  template <class Visit>
  static status for_each_kernel(Visit&&) {
    return status::success();
  }
  static status launch(int) { return status::success(); }
};
struct no_family {};

struct model {
  using platform = fake;
#if defined(CASE_table_of_something_else)
  using kernel_table = table_of<family<1>, no_family>;
#elif defined(CASE_table_with_a_duplicate)
  using kernel_table = nibble::kernel_table<family<1>, family<1>>;
#else
  using kernel_table = table_of<family<1>, family<2>, family<1>>;
#endif
  explicit model(start_context<fake>&) {}
  memory_model memory() const { return {}; }
#if !defined(CASE_model_without_caches)
  void allocate(start_context<fake>&, const memory_plan&) {}
#endif
  status record(int rows) {
#if defined(CASE_launch_outside_the_table)
    return launcher<kernel_table>::launch<family<3>>(rows);
#else
    return launcher<kernel_table>::launch<family<2>>(rows);
#endif
  }
};

// What each phase is made from.
using device_phase = startup::device<fake>;
using weights_phase = startup::weights<model>;
using kernels_phase = startup::kernels<model>;
using plan_phase = startup::vram_plan<model>;
using caches_phase = startup::caches<model>;
using graphs_phase = startup::graphs<model>;
using engine_phase = startup::engine<model>;

void start(start_options options) {
  device_phase device(std::move(options));
#if defined(CASE_kernels_before_weights)
  kernels_phase kernels(std::move(device));
#elif defined(CASE_weights_keep_the_device)
  weights_phase weights(device);
#else
  weights_phase weights(std::move(device));
#endif
#if defined(CASE_plan_before_kernels)
  plan_phase plan(std::move(weights));
#elif defined(CASE_caches_before_kernels)
  caches_phase caches(std::move(weights));
#elif defined(CASE_engine_at_once)
  engine_phase engine(std::move(weights));
#elif defined(CASE_phase_copied)
  weights_phase copy(static_cast<const weights_phase&>(weights));
#elif !defined(CASE_kernels_before_weights) && !defined(CASE_weights_keep_the_device)
  kernels_phase kernels(std::move(weights));
#if defined(CASE_caches_before_plan)
  caches_phase caches(std::move(kernels));
#elif defined(CASE_plan_keeps_the_kernels)
  plan_phase plan(kernels);
#else
  plan_phase plan(std::move(kernels));
#if defined(CASE_graphs_before_caches)
  graphs_phase graphs(std::move(plan));
#elif defined(CASE_phase_of_another_model)
  struct other : model {
    using model::model;
  };
  startup::caches<other> caches(std::move(plan));
#else
  caches_phase caches(std::move(plan));
#if defined(CASE_engine_before_graphs)
  engine_phase engine(std::move(caches));
#elif defined(CASE_graphs_keep_the_caches)
  graphs_phase graphs(caches);
#else
  graphs_phase graphs(std::move(caches));
  engine_phase engine(std::move(graphs));
#if defined(CASE_engine_copied)
  engine_phase second(engine);
#endif
  static_cast<void>(engine.decode(1).ok());
#endif
#endif
#endif
#endif
}
