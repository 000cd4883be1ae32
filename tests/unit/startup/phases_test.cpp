// SPDX-License-Identifier: Apache-2.0
// The order of a start and what it leaves behind, on a device that only counts.
#include "nibble/startup/phases.hpp"

#include <algorithm>

#include "support/catch.hpp"
#include "support/fake_platform.hpp"

using namespace nibble;
using namespace nibble::test;

namespace {

constexpr std::uint64_t mib = 1 << 20, gib = 1024 * mib;
using strings = std::vector<std::string>;

template <int N>
struct family {
  static constexpr const char* name = "gemv";
  static constexpr geometry shape = matrix(64 * N, 64, weight_format::nvfp4);
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = visit(&family::shape, 128, std::size_t{0}, name);
    return s.ok() ? visit(&family::name, 128, std::size_t{0}, name) : s;
  }
};

class small_model {
 public:
  using platform = fake_platform;
  using kernel_table = table_of<family<1>, family<2>, family<1>>;

  small_model(start_context<fake_platform>& context, std::uint64_t weights)
      : m_(context.platform().machine()), weights_(weights) {
    m_.take(weights);
    m_.say("weights");
  }
  [[nodiscard]] memory_model memory() const {
    memory_model m;
    m.weight_bytes = weights_;
    m.kernel_bytes = 2 * mib;
    m.graph_bytes = 1 * mib;
    m.max_context_tokens = 65536;
    m.state_slot_bytes = 64 * mib;
    m.kv_page_bytes = mib;
    m.page_tokens = 16;
    m.expert_slot_bytes = 2 * mib;
    m.experts = 8192;
    m.layer_experts = 256;
    m.experts_per_token = 8;
    m.workspace_bytes = [](const step_limits& l) {
      return static_cast<std::uint64_t>(l.step_tokens) * mib / 4;
    };
    return m;
  }
  void allocate(start_context<fake_platform>& context, const memory_plan& plan) {
    m_.say("allocate " + std::to_string(plan.expert_slots));
    std::uint64_t taken = 0;
    const auto take = [&](ledger_line line, std::uint64_t bytes) {
      context.measure(line, [&] { m_.take(bytes); });
      taken += bytes;
    };
    try {
      take(ledger_line::workspace, plan.lines[ledger_line::workspace].planned_bytes);
      take(ledger_line::states, plan.state_slots * 64 * mib);
      take(ledger_line::kv_pages, plan.kv_pages * mib);
      take(ledger_line::expert_slots, plan.expert_slots * 2 * mib);
    } catch (...) {
      m_.free += taken;
      throw;
    }
    slots_ = plan.expert_slots;
    pages_ = plan.kv_pages;
  }
  status representative_launch(int rows) {
    m_.say("representative " + std::to_string(rows));
    return status::success();
  }
  status record(int rows) { return m_.stream->launch("step " + std::to_string(rows)); }
  status resize(start_context<fake_platform>& context, const memory_plan& plan) {
    const std::int64_t need =
        (static_cast<std::int64_t>(plan.expert_slots) - static_cast<std::int64_t>(slots_)) * 2 +
        (static_cast<std::int64_t>(plan.kv_pages) - static_cast<std::int64_t>(pages_));
    if (need > 0 && static_cast<std::uint64_t>(need) * mib > m_.free)
      return status::cuda(2, "small_model", "out of memory");
    m_.free -= static_cast<std::uint64_t>(need) * mib;
    slots_ = plan.expert_slots;
    pages_ = plan.kv_pages;
    context.set_measured(ledger_line::expert_slots, slots_ * 2 * mib);
    context.set_measured(ledger_line::kv_pages, pages_ * mib);
    return status::success();
  }
  [[nodiscard]] std::uint64_t pages_in_use() const { return 10; }

 private:
  fake_machine& m_;
  std::uint64_t weights_, slots_ = 0, pages_ = 0;
};

struct start_fixture {
  start_fixture() { current_machine() = machine; }
  std::shared_ptr<fake_machine> machine = std::make_shared<fake_machine>();
  strings log;
  start_options options() {
    start_options o;
    o.log = [this](std::string_view line) { log.emplace_back(line); };
    return o;
  }
  /// Events without synchronisations.
  strings order() const {
    strings out;
    for (const auto& e : machine->events)
      if (e != "synchronize") out.push_back(e);
    return out;
  }
};

}  // namespace

TEST_CASE("start: weights, then every kernel, then the plan, then caches, then graphs") {
  start_fixture f;
  auto engine = startup::start<small_model>(f.options(), 3 * gib);
  const strings order = f.order();
  REQUIRE(order.size() == 6);
  CHECK(strings(order.begin(), order.begin() + 5) ==
        strings{"context", "weights", "preload", "representative 1", "representative 4"});
  CHECK(order[5].rfind("allocate ", 0) == 0);
  // Each representative launch is waited for before anything else happens.
  const auto& e = f.machine->events;
  for (const char* launch : {"representative 1", "representative 4"})
    CHECK(*(std::find(e.begin(), e.end(), launch) + 1) == "synchronize");
  CHECK(f.log.at(0).find("2 distinct geometries, 4 kernels resident in") == 0);
  // Eager warm-up of each size, then its capture.
  CHECK(f.machine->stream->ran == strings{"step 4", "step 2", "step 1"});
  CHECK(engine.graphs_of_steps().report().captured == std::vector<int>{1, 2, 4});
  CHECK(engine.context().kernels().launched_rows == 4);
  CHECK(engine.padded(3) == 4);
  f.machine->stream->ran.clear();
  REQUIRE(engine.decode(4).ok());
  CHECK(f.machine->stream->ran == strings{"step 4"});
}

TEST_CASE("start: with graphs disabled kernels are loaded all the same and nothing is launched") {
  start_fixture f;
  auto options = f.options();
  options.request.graphs = false;
  auto engine = startup::start<small_model>(options, 3 * gib);
  const strings order = f.order();
  CHECK(std::count(order.begin(), order.end(), "preload") == 1);
  CHECK(std::count_if(order.begin(), order.end(),
                      [](const std::string& e) { return e.rfind("representative", 0) == 0; }) == 0);
  CHECK(f.machine->stream->ran.empty());
  CHECK(engine.graphs_of_steps().graphs() == 0);
  REQUIRE(engine.decode(3).ok());
  CHECK(f.machine->stream->ran == strings{"step 3"});
  CHECK(engine.context().lines()[ledger_line::graphs].planned_bytes == 0);
}

TEST_CASE("start: the ledger holds every byte that free memory lost") {
  start_fixture f;
  auto engine = startup::start<small_model>(f.options(), 3 * gib);
  auto& context = engine.context();
  const ledger& l = context.lines();
  CHECK(l[ledger_line::weights].measured_bytes == 3 * gib);
  CHECK(l[ledger_line::kernels].measured_bytes == 2 * mib);
  for (const auto line :
       {ledger_line::context, ledger_line::kernels, ledger_line::weights, ledger_line::workspace,
        ledger_line::states, ledger_line::kv_pages, ledger_line::expert_slots})
    CHECK(l[line].measured_bytes == l[line].planned_bytes);
  CHECK(l.planned_total() <= 12 * gib);
  CHECK(context.unaccounted_bytes() == 0);
  f.machine->free -= 7 * mib;  // something that is on no line
  CHECK(context.unaccounted_bytes() == 7 * static_cast<std::int64_t>(mib));
  const std::string json = context.json();
  for (const char* part :
       {"{\"line\":\"weights\",\"planned_bytes\":3221225472,\"measured_bytes\":3221225472}",
        "{\"phase\":\"device\",\"ms\":", "{\"phase\":\"weights\"", "{\"phase\":\"kernels\"",
        "{\"phase\":\"plan\"", "{\"phase\":\"caches\"", "{\"phase\":\"graphs\"", "\"kernels\":4",
        "\"unaccounted_bytes\":7340032}"})
    CHECK(json.find(part) != std::string::npos);
}

TEST_CASE("C059: after the engine phase no step of any kind allocates") {
  start_fixture f;
  auto engine = startup::start<small_model>(f.options(), 3 * gib);
  const int allocations = f.machine->allocations;
  const auto free = f.machine->free;
  const int instantiated = f.machine->stream->instantiated;
  for (int step = 0; step < 1000; ++step) REQUIRE(engine.decode(engine.padded(1 + step % 6)).ok());
  CHECK(f.machine->allocations == allocations);
  CHECK(f.machine->free == free);
  CHECK(f.machine->stream->instantiated == instantiated);
}

TEST_CASE("C061: memory that another process takes before or during the allocation leads to a new plan") {
  start_fixture f;
  bool taken = false;
  f.machine->before_reading = [&](fake_machine& m) {  // once the caches are being allocated, 2 GiB go
    const auto allocating = [](const std::string& e) { return e.rfind("allocate", 0) == 0; };
    if (taken || std::none_of(m.events.begin(), m.events.end(), allocating)) return;
    taken = true;
    m.free -= 2 * gib;
  };
  auto engine = startup::start<small_model>(f.options(), 3 * gib);
  const strings order = f.order();
  CHECK(std::count_if(order.begin(), order.end(),
                      [](const std::string& e) { return e.rfind("allocate", 0) == 0; }) == 2);
  CHECK(std::count_if(f.log.begin(), f.log.end(), [](const std::string& line) {
          return line.find("planning again from the memory there is") != std::string::npos;
        }) == 1);
  CHECK(engine.context().plan().expert_slots < 2000);
  CHECK(engine.context().unaccounted_bytes() == 2 * static_cast<std::int64_t>(gib));
  // A machine that never has enough is refused, not tried for ever.
  start_fixture none;
  none.machine->free = 2 * gib;
  CHECK_THROWS_AS(startup::start<small_model>(none.options(), 3 * gib), device_out_of_memory);
  none.machine->free = 3 * gib + 100 * mib;
  CHECK_THROWS_AS(startup::start<small_model>(none.options(), 3 * gib), plan_refused);
}

TEST_CASE("engine: caches shrink when others take the reserve, and grow back, while graphs stay") {
  start_fixture f;
  auto engine = startup::start<small_model>(f.options(), 3 * gib);
  const auto first = engine.context().plan();
  const std::uint64_t reserve = first.lines[ledger_line::reserve].planned_bytes;
  const int instantiated = f.machine->stream->instantiated;
  CHECK(!engine.adapt());
  f.machine->free -= reserve / 4;  // a browser opens a window: that is what the reserve is for
  CHECK(!engine.adapt());
  f.machine->free -= reserve / 2;
  CHECK(engine.adapt());
  CHECK(f.machine->free >= reserve - 4 * mib);
  CHECK(engine.context().plan().expert_slots < first.expert_slots);
  CHECK(engine.context().plan().limits.running == first.limits.running);
  CHECK(!engine.adapt());
  f.machine->free += 10 * gib;  // more than there was: not past the first plan
  CHECK(engine.adapt());
  CHECK(engine.context().plan().expert_slots == first.expert_slots);
  CHECK(engine.context().plan().kv_pages == first.kv_pages);
  CHECK(!engine.adapt());
  CHECK(f.machine->stream->instantiated == instantiated);
  REQUIRE(engine.decode(4).ok());
}

TEST_CASE("engine: when everything is taken it gives up what it can and goes on") {
  start_fixture f;
  auto engine = startup::start<small_model>(f.options(), 3 * gib);
  f.machine->free = 0;
  CHECK(engine.adapt(true));
  CHECK(f.machine->free > 0);
  REQUIRE(engine.decode(1).ok());
  // Others take whatever is given up.
  for (int i = 0; i < 80; ++i) {
    f.machine->free = 0;
    static_cast<void>(engine.adapt(true));
  }
  CHECK(engine.context().plan().expert_slots >= 8 * 4);
  CHECK(engine.context().plan().kv_pages >= 11);
  CHECK(std::count_if(f.log.begin(), f.log.end(), [](const std::string& line) {
          return line.find("caches can give up no more") == 0;
        }) == 1);
  REQUIRE(engine.decode(1).ok());
}

TEST_CASE("phases: a phase that was moved from says so") {
  start_fixture f;
  startup::device<fake_platform> device(f.options());
  startup::weights<small_model> weights(std::move(device), 3 * gib);
  CHECK_THROWS_AS(startup::weights<small_model>(std::move(device), 3 * gib), error);
  startup::kernels<small_model> kernels(std::move(weights));
  CHECK_THROWS_AS(startup::kernels<small_model>(std::move(weights)), error);
  startup::vram_plan<small_model> plan(std::move(kernels));
  CHECK(plan.plan().limits.running == 4);
  CHECK_THROWS_AS(startup::vram_plan<small_model>(std::move(kernels)), error);
  startup::caches<small_model> caches(std::move(plan));
  startup::graphs<small_model> graphs(std::move(caches));
  startup::engine<small_model> engine(std::move(graphs));
  CHECK_THROWS_AS(startup::engine<small_model>(std::move(graphs)), error);
  REQUIRE(engine.decode(1).ok());
}
