// SPDX-License-Identifier: Apache-2.0
// All phases of a start on a device: what is loaded, what is allocated, what happens when memory is short.
#include <atomic>
#include <chrono>
#include <thread>

#include "activity_counter.hpp"
#include "device_test.cuh"
#include "startup_model.cuh"

using namespace nibble;
using startup_test::tree;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20, gib = 1024 * mib;
using test_model = startup_test::model<tree>;
using test_engine = startup::engine<test_model>;

std::vector<std::string> log_lines;

start_options options_with(int running) {
  log_lines.clear();
  start_options o;
  o.request.max_running = running;
  o.request.step_tokens = 256;
  o.log = [](std::string_view line) {
    log_lines.emplace_back(line);
    std::printf("%s\n", log_lines.back().c_str());
  };
  return o;
}
std::uint64_t free_bytes() {
  std::size_t free = 0, total = 0;
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}
bool logged(const char* part) {
  for (const auto& line : log_lines)
    if (line.find(part) != std::string::npos) return true;
  return false;
}
/// 10,000 steps: batches of 1 … 6, every tenth a prefill of 17 … 256 rows.
void mixed_steps(test_engine& engine, int count) {
  for (int i = 0; i < count; ++i) {
    if (i % 10 == 9)
      NIBBLE_GOOD(engine.model().record(17 + i % 240));
    else
      NIBBLE_GOOD(engine.decode(engine.padded(1 + i % 6)));
    if (i % 500 == 499) engine.context().platform().synchronize();
  }
  engine.context().platform().synchronize();
}
double total_ms(test_engine& engine) {
  double sum = 0;
  for (const auto& t : engine.context().times()) sum += t.ms;
  return sum;
}

void preload_and_ledger() {
  auto engine = startup::start<test_model>(options_with(4), 300 * mib, std::uint64_t{2048});
  auto& context = engine.context();
  std::printf("%s%s\n", context.kernels().table().c_str(), context.json().c_str());
  NIBBLE_CHECK(context.kernels().geometries == 6);
  NIBBLE_CHECK(context.kernels().kernels.size() > 30);
  NIBBLE_CHECK(logged("6 distinct geometries, "));
  NIBBLE_CHECK(context.kernels().launched_rows == 4);
  NIBBLE_CHECK(engine.model().launched_products == 6);  // eight matrices, six distinct
  NIBBLE_CHECK(engine.graphs_of_steps().report().captured == (std::vector<int>{1, 2, 4}));
  NIBBLE_CHECK(context.plan().expert_slots == 2048);
  for (const auto line :
       {ledger_line::context, ledger_line::kernels, ledger_line::weights, ledger_line::workspace,
        ledger_line::graphs, ledger_line::states, ledger_line::kv_pages, ledger_line::expert_slots}) {
    const auto& e = context.lines()[line];
    NIBBLE_CHECK(e.measured_bytes.has_value());
    const auto planned = static_cast<double>(e.planned_bytes);
    const double off = std::abs(planned - static_cast<double>(e.measured_bytes.value_or(0)));
    if (off > 16.0 * mib && off > 0.01 * planned)
      std::printf("line %s: planned %.1f MiB, off by %.1f MiB\n", std::string(name_of(line)).c_str(),
                  planned / mib, off / mib);
    NIBBLE_CHECK(off <= 16.0 * mib || off <= 0.01 * planned);
  }
  const std::int64_t unaccounted = context.unaccounted_bytes();
  NIBBLE_CHECK(std::abs(unaccounted) < 32 * static_cast<std::int64_t>(mib));
  NIBBLE_GOOD(engine.decode(engine.padded(3)));
  context.platform().synchronize();
}

/// The seed's situation: with `left` bytes free beside the weights when caches are sized.
void start_with(std::uint64_t left, bool ballast) {
  NIBBLE_CUDA_CHECK(cudaFree(nullptr));  // the context is older, so that both kinds are timed alike
  constexpr std::uint64_t dense = 2 * gib;
  device_memory taken;
  if (ballast) NIBBLE_GOOD(device_memory::try_allocate(free_bytes() - dense - left - 8 * mib, taken));
  auto engine = startup::start<test_model>(options_with(6), dense, std::uint64_t{16384});
  std::printf("start with %s: %.2f ms in all, free %.1f MiB\n%s\n", ballast ? "ballast" : "all memory free",
              total_ms(engine), static_cast<double>(free_bytes()) / mib, engine.context().json().c_str());
  if (ballast) NIBBLE_CHECK(engine.context().plan().expert_slots < 700);
  NIBBLE_CHECK(engine.graphs_of_steps().report().eager.empty());

  device_test::activity_counter counter;
  std::printf("CUPTI: %s\n", counter.available() ? "counting" : "not there, free memory has to do");
  const std::uint64_t before = free_bytes();
  mixed_steps(engine, 10'000);
  const auto counts = counter.stop();
  std::printf("10,000 steps: %s; free memory fell by %lld bytes\n", counts.text().c_str(),
              static_cast<long long>(before) - static_cast<long long>(free_bytes()));
  NIBBLE_CHECK(counts.none());
  NIBBLE_CHECK(free_bytes() == before);
}
void start_with_all_memory() { start_with(0, false); }
void start_with_ballast() { start_with(700 * mib, true); }

/// The counter itself must see what it is there for.
void the_counter_counts() {
  NIBBLE_CUDA_CHECK(cudaFree(nullptr));
  device_test::activity_counter counter;
  if (!counter.available()) {
    std::printf("CUPTI is not there\n");
    return;
  }
  device_memory memory(mib);
  NIBBLE_CHECK(counter.counts().allocations == 1);
  counter.reset();
  device_arena arena;
  NIBBLE_GOOD(open_device_arena(64 * mib, arena));
  NIBBLE_GOOD(arena.resize(2 * mib));
  NIBBLE_CHECK(counter.counts().allocations >= 3);
  std::printf("counter: %s\n", counter.counts().text().c_str());
  counter.reset();
  const auto loaded = preload<test_model::kernel_table>();
  NIBBLE_GOOD(loaded.result);
  std::printf("counter, preload: %s\n", counter.counts().text().c_str());
  NIBBLE_CHECK(counter.counts().module_loads >= 1);
  counter.reset();
  NIBBLE_GOOD(preload<test_model::kernel_table>().result);
  NIBBLE_CHECK(counter.stop().none());
}

void resize_under_pressure() {
  NIBBLE_CUDA_CHECK(cudaFree(nullptr));
  device_memory ballast;
  NIBBLE_GOOD(device_memory::try_allocate(free_bytes() - 3 * gib, ballast));
  auto engine = startup::start<test_model>(options_with(4), 100 * mib, std::uint64_t{8192});
  const auto first = engine.context().plan();
  const std::byte* const base = engine.model().slots_base();
  const std::uint64_t reserve = first.lines[ledger_line::reserve].planned_bytes;
  std::printf("first plan: %llu slots, %llu pages, reserve %.1f MiB, free %.1f MiB\n",
              static_cast<unsigned long long>(first.expert_slots),
              static_cast<unsigned long long>(first.kv_pages), static_cast<double>(reserve) / mib,
              static_cast<double>(free_bytes()) / mib);
  NIBBLE_CHECK(!engine.adapt());
  std::vector<device_memory> others;
  for (int i = 0; i < 12; ++i) {  // another program takes 600 MiB in pieces
    device_memory piece;
    status s = device_memory::try_allocate(50 * mib, piece);
    if (is_out_of_memory(s)) {
      NIBBLE_CHECK(engine.adapt(true));
      s = device_memory::try_allocate(50 * mib, piece);
    }
    NIBBLE_GOOD(s);
    others.push_back(std::move(piece));
    static_cast<void>(engine.adapt());
    mixed_steps(engine, 50);
  }
  NIBBLE_CHECK(engine.context().plan().expert_slots < first.expert_slots);
  NIBBLE_CHECK(free_bytes() >= reserve / 2 - 4 * mib);
  std::printf("under pressure: %llu slots, free %.1f MiB\n",
              static_cast<unsigned long long>(engine.context().plan().expert_slots),
              static_cast<double>(free_bytes()) / mib);
  others.clear();
  NIBBLE_CHECK(engine.adapt());
  NIBBLE_CHECK(engine.context().plan().expert_slots == first.expert_slots);
  NIBBLE_CHECK(engine.model().slots_base() == base);
  NIBBLE_CHECK(engine.graphs_of_steps().graphs() == 3);
  mixed_steps(engine, 100);
  NIBBLE_CHECK(std::abs(engine.context().unaccounted_bytes()) < 32 * static_cast<std::int64_t>(mib));
}

void without_graphs() {
  auto options = options_with(3);
  options.request.graphs = false;
  auto engine = startup::start<test_model>(options, 10 * mib, std::uint64_t{128});
  NIBBLE_CHECK(engine.graphs_of_steps().graphs() == 0);
  NIBBLE_CHECK(engine.context().kernels().launched_rows == 0 && engine.model().launched_products == 0);
  NIBBLE_CHECK(engine.context().kernels().kernels.size() > 30);
  device_test::activity_counter counter;
  mixed_steps(engine, 100);
  NIBBLE_CHECK(counter.stop().none());
}

__global__ void spin(volatile int* flag, int* seen) {
  *seen = 1;
  while (*flag == 0) {
  }
}

/// A kernel that never ends would wait for ever for one that has to be loaded first; nothing has to be.
void capture_beside_a_spinning_kernel() {
  auto engine = startup::start<test_model>(options_with(4), 10 * mib, std::uint64_t{128});
  pinned_memory flags(8);
  int* const flag = flags.as<int>();
  flag[0] = flag[1] = 0;
  cudaStream_t side;
  NIBBLE_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  spin<<<1, 1, 0, side>>>(flag, flag + 1);
  NIBBLE_CUDA_CHECK(cudaGetLastError());
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const volatile int* const seen = flag + 1;
  while (*seen == 0 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  NIBBLE_CHECK(*seen == 1);
  std::atomic<bool> done{false}, released{false};
  std::thread watchdog([&] {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    released = !done;
    *const_cast<volatile int*>(flag) = 1;
  });
  const cudaStream_t stream = engine.context().platform().stream();
  graph_set<cuda_graph_api> graphs(
      cuda_graph_api(stream), [&](int rows) { return engine.model().record(rows); }, nullptr);
  const status captured = graphs.capture({1, 2, 4, 16});
  const status decoded = graphs.run(4);
  const status prefilled = engine.model().record(200);
  const cudaError_t finished = cudaStreamSynchronize(stream);
  done = true;
  watchdog.join();
  NIBBLE_CHECK(!released);  // everything ran while the other kernel was spinning
  NIBBLE_GOOD(captured);
  NIBBLE_GOOD(decoded);
  NIBBLE_GOOD(prefilled);
  NIBBLE_CUDA_CHECK(finished);
  NIBBLE_CHECK(graphs.graphs() == 4);
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(side));
  NIBBLE_CUDA_CHECK(cudaStreamDestroy(side));
}

template <int Words>
__global__ void uses_local_memory(int* out, int at) {
  int values[Words];
  for (int i = 0; i < Words; ++i) values[i] = out[i];
  values[at % Words] += 1;
  for (int i = 0; i < Words; ++i) out[i * at % Words] += values[(i + at) % Words];
}
template <int Unused>
__global__ __launch_bounds__(64) void small_block(int* out) {
  *out = Unused;
}
template <int Threads, int SharedBytes, bool Local>
struct unusable {
  static constexpr const char* name = "unusable";
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    if constexpr (Local)
      return visit(&uses_local_memory<64>, Threads, std::size_t{SharedBytes}, name);
    else
      return visit(&small_block<0>, Threads, std::size_t{SharedBytes}, name);
  }
};

void kernels_that_are_refused() {
  const auto refused = [](auto table, const char* part) {
    const auto result = preload<decltype(table)>();
    std::printf("refused: kernel %s: %s\n", result.kernel, result.result.text);
    NIBBLE_CHECK(!result.ok());
    NIBBLE_CHECK(std::string(result.kernel) == "unusable");
    NIBBLE_CHECK(std::string(result.result.text).find(part) != std::string::npos);
  };
  refused(kernel_table<unusable<32, 0, true>>{}, "spills to local memory");
  refused(kernel_table<unusable<128, 0, false>>{}, "registers do not suffice");
  refused(kernel_table<unusable<64, 1 << 20, false>>{}, "more shared memory than a block can have");
  NIBBLE_GOOD((preload<kernel_table<unusable<64, 90 << 10, false>>>().result));
  NIBBLE_CHECK(cudaPeekAtLastError() == cudaSuccess);
}

template <int Words>
struct spills_a_little {
  static constexpr const char* name = "spills_a_little";
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(&uses_local_memory<Words>, 256, std::size_t{0}, name);
  }
};

void local_memory_is_there_before_the_first_launch() {
  const auto result = preload<kernel_table<spills_a_little<16>>>();
  NIBBLE_GOOD(result.result);
  NIBBLE_CHECK(result.report.local_bytes() >= 64 && result.report.spilling() == 1);
  NIBBLE_CHECK(result.report.line().find("1 kernel spills up to") != std::string::npos);
  int* numbers = nullptr;
  NIBBLE_CUDA_CHECK(cudaMalloc(&numbers, 16 * sizeof(int)));
  NIBBLE_CUDA_CHECK(cudaMemsetAsync(numbers, 0, 16 * sizeof(int), device_test::stream()));
  NIBBLE_CUDA_CHECK(cudaDeviceSynchronize());
  std::size_t before = 0, after = 0, total = 0;
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&before, &total));
  NIBBLE_GOOD(nibble::launch(&uses_local_memory<16>, dim3(4096), 256, 0,
                             {device_test::stream(), launch_chain::plain}, "test", numbers, 3));
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&after, &total));
  NIBBLE_CHECK(before == after);
  NIBBLE_CUDA_CHECK(cudaFree(numbers));
}

void too_small_a_card() {
  auto options = options_with(4);
  options.request.vram_limit_bytes = 400 * mib;
  bool refused = false;
  try {
    static_cast<void>(startup::start<test_model>(options, 300 * mib, std::uint64_t{128}));
  } catch (const plan_refused& problem) {
    std::printf("%s\n", problem.what());
    refused = problem.missing_bytes() > 0;
  }
  NIBBLE_CHECK(refused);
  options.request.vram_limit_bytes = 2 * gib;
  auto engine = startup::start<test_model>(options, 300 * mib, std::uint64_t{128});
  NIBBLE_CHECK(engine.context().lines().planned_total() <= 2 * gib);
}

const bool added[] = {
    // First: later in the same process every kernel has been loaded.
    device_test::add("counter", "the counter counts", the_counter_counts),
    device_test::add("start", "preload and ledger", preload_and_ledger),
    device_test::add("start", "without graphs", without_graphs),
    device_test::add("start", "kernels that are refused", kernels_that_are_refused),
    device_test::add("start", "local memory before the first launch",
                     local_memory_is_there_before_the_first_launch),
    device_test::add("start", "too small a card", too_small_a_card),
    device_test::add("spin", "capture beside a spinning kernel", capture_beside_a_spinning_kernel),
    device_test::add("all_memory", "10,000 steps", start_with_all_memory),
    device_test::add("ballast", "10,000 steps with 0.7 GiB left", start_with_ballast),
    device_test::add("pressure", "caches shrink and grow", resize_under_pressure),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
