// SPDX-License-Identifier: Apache-2.0
// The graph wrapper on a device; field cases by their number. What needs no device is in tests/unit/graph.
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <thread>

#include "device_test.cuh"
#include "nibble/core/device_memory.cuh"
#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"
#include "nibble/graph/captured_sizes.hpp"
#include "nibble/graph/cuda_graph.cuh"

using namespace nibble;
using device_test::stream;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr int n = 4096;
using set = graph_set<cuda_graph_api>;

std::vector<std::string> notes;

set make(set::recorder record) {
  notes.clear();
  return set(cuda_graph_api(stream()), std::move(record), [](std::string_view note) {
    notes.emplace_back(note);
    std::printf("note: %s\n", notes.back().c_str());
  });
}
std::uint64_t free_bytes() {
  std::size_t free = 0, total = 0;
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}
void wait() { NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream())); }

/// y[row][i] = 3 y[row][i] + x[row][i] + Number, so order and repetition show.
template <int Number>
__global__ void axpy(const float* x, float* y, int rows) {
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * n; i += gridDim.x * blockDim.x)
    y[i] = 3.0f * y[i] + x[i] + Number;
}
template <int Number>
status launch_axpy(const float* x, float* y, int rows, launch_chain chain = device_test::chained,
                   cudaStream_t on = nullptr) {
  return launch(axpy<Number>, dim3(8), 256, 0, launch_options{on == nullptr ? stream() : on, chain}, "axpy",
                x, y, rows);
}
std::vector<float> ramp(int rows) {
  std::vector<float> v(static_cast<std::size_t>(rows) * n);
  std::iota(v.begin(), v.end(), 0.0f);
  for (auto& x : v) x = std::fmod(x, 97.0f);
  return v;
}
std::vector<float> after(const std::vector<float>& x, std::vector<float> y,
                         std::initializer_list<int> numbers) {
  for (const int number : numbers)
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = 3.0f * y[i] + x[i] + static_cast<float>(number);
  return y;
}

void replay_update_recapture_destroy() {
  device_test::buffer<float> x(ramp(4)), y(std::vector<float>(4 * n, 1.0f)),
      z(std::vector<float>(4 * n, 2.0f));
  float* target = y.data();
  bool third = false;
  set graphs = make([&](int rows) {
    status s = launch_axpy<1>(x.data(), target, rows);
    if (s.ok()) s = launch_axpy<2>(x.data(), target, rows);
    if (s.ok() && third) s = launch_axpy<3>(x.data(), target, rows);
    return s;
  });
  NIBBLE_GOOD(graphs.capture({1, 2, 4}, 1, false));
  NIBBLE_CHECK(graphs.graphs() == 3 && notes.empty());
  std::printf("graphs: 3 of 2 kernels in %.2f ms, %.2f MiB\n", graphs.report().ms,
              static_cast<double>(graphs.report().bytes) / mib);
  NIBBLE_GOOD(graphs.run(4, 1));
  NIBBLE_CHECK(y.read() == after(ramp(4), std::vector<float>(4 * n, 1.0f), {1, 2}));
  target = z.data();  // the target has moved: same shape, so updated in place
  NIBBLE_GOOD(graphs.run(4, 2));
  NIBBLE_CHECK(z.read() == after(ramp(4), std::vector<float>(4 * n, 2.0f), {1, 2}));
  NIBBLE_CHECK(y.read() == after(ramp(4), std::vector<float>(4 * n, 1.0f), {1, 2}));
  NIBBLE_CHECK(notes.size() == 1 && notes[0].find("updated") != std::string::npos);
  third = true;  // another shape: captured anew
  NIBBLE_GOOD(graphs.run(4, 3));
  NIBBLE_CHECK(z.read() == after(ramp(4), std::vector<float>(4 * n, 2.0f), {1, 2, 1, 2, 3}));
  NIBBLE_CHECK(notes.size() == 2 && notes[1].find("captured anew") != std::string::npos);
  NIBBLE_GOOD(graphs.recapture(4));
  NIBBLE_GOOD(graphs.run(4, 4));
  NIBBLE_CHECK(z.read() == after(ramp(4), std::vector<float>(4 * n, 2.0f), {1, 2, 1, 2, 3, 1, 2, 3}));
  graphs.destroy();
  NIBBLE_GOOD(graphs.run(4, 4));  // eagerly
  NIBBLE_CHECK(z.read() ==
               after(ramp(4), std::vector<float>(4 * n, 2.0f), {1, 2, 1, 2, 3, 1, 2, 3, 1, 2, 3}));
}

void c066_flat_over_500_requests() {
  device_test::buffer<float> x(ramp(8)), y(ramp(8));
  set graphs = make([&](int rows) { return launch_axpy<1>(x.data(), y.data(), rows); });
  NIBBLE_GOOD(graphs.capture(default_captured_sizes(8)));
  std::uint64_t after_50 = 0;
  for (int request = 1; request <= 500; ++request) {
    for (int step = 0; step < 8; ++step) NIBBLE_GOOD(graphs.run(graphs.padded(1 + request % 8)));
    wait();
    if (request == 50) after_50 = free_bytes();
  }
  NIBBLE_CHECK(free_bytes() == after_50);
  NIBBLE_CHECK(graphs.graphs() == 4);
}

void c068_allocation_inside_a_capture() {
  device_test::buffer<float> x(ramp(2)), y(std::vector<float>(2 * n, 1.0f));
  set graphs = make([&](int rows) {
    const op_scope outer("layer");
    status s = launch_axpy<1>(x.data(), y.data(), rows);
    {
      const op_scope scope("wide scratch");
      if (s.ok() && rows > 1) {  // wants more scratch than there is
        device_memory scratch;
        s = device_memory::try_allocate(64 * mib, scratch);
        if (s.ok()) s = runtime_status(cudaStreamSynchronize(stream()), "scratch", "refused");
      }
    }
    return s.ok() ? launch_axpy<2>(x.data(), y.data(), rows) : s;
  });
  NIBBLE_GOOD(graphs.capture({1, 2}, 0, false));
  NIBBLE_CHECK(graphs.report().captured == std::vector<int>{1});
  NIBBLE_CHECK(graphs.report().eager == std::vector<int>{2});
  NIBBLE_CHECK(notes.size() == 1 && notes[0].find("op wide scratch") != std::string::npos);
  NIBBLE_GOOD(graphs.run(2));
  NIBBLE_CHECK(y.read() == after(ramp(2), std::vector<float>(2 * n, 1.0f), {1, 2}));
}

void c069_what_the_recorder_owned_lives_on() {
  device_test::buffer<float> y(std::vector<float>(n, 0.0f));
  auto owned = std::make_shared<device_test::buffer<float>>(ramp(1));
  set graphs = make([owned, &y](int rows) { return launch_axpy<1>(owned->data(), y.data(), rows); });
  owned.reset();
  NIBBLE_GOOD(graphs.capture({1}, 0, false));
  std::vector<device_memory> scribbles;
  for (int i = 0; i < 4; ++i) {
    scribbles.emplace_back(64 * mib);
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(scribbles.back().data(), 0xFF, 64 * mib, device_test::stream()));
  }
  NIBBLE_CUDA_CHECK(cudaDeviceSynchronize());
  const auto expected = after(ramp(1), std::vector<float>(n, 0.0f), {1});
  for (int i = 0; i < 100; ++i) {
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(y.data(), 0, y.bytes(), stream()));
    NIBBLE_GOOD(graphs.run(1));
    if (i % 25 == 0) NIBBLE_CHECK(y.read() == expected);
  }
  NIBBLE_CHECK(y.read() == expected);
  // A step that allocates through the stream would leave memory inside the graph: refused.
  set allocating = make([&](int) {
    void* memory = nullptr;
    return runtime_status(cudaMallocAsync(&memory, mib, stream()), "allocating", "refused");
  });
  NIBBLE_GOOD(allocating.capture({1}, 0, false));
  NIBBLE_CHECK(allocating.graphs() == 0);
  NIBBLE_CHECK(notes.size() == 1 && notes[0].find("allocates or frees memory") != std::string::npos);
}

void c070_first_use_inside_a_capture() {
  device_test::buffer<float> x(ramp(1)), y(std::vector<float>(n, 0.0f));
  // Neither instance has been launched or loaded in this process.
  set graphs = make([&](int rows) {
    const status s = launch_axpy<70>(x.data(), y.data(), rows);
    return s.ok() ? launch_axpy<71>(x.data(), y.data(), rows) : s;
  });
  NIBBLE_GOOD(graphs.capture({1}, 0, false));
  std::printf("a kernel first used inside a capture: %s\n", graphs.graphs() == 1 ? "captured" : "eager");
  NIBBLE_GOOD(graphs.run(1));
  NIBBLE_CHECK(y.read() == after(ramp(1), std::vector<float>(n, 0.0f), {70, 71}));
  cudaStreamCaptureStatus now;
  NIBBLE_CUDA_CHECK(cudaStreamIsCapturing(stream(), &now));
  NIBBLE_CHECK(now == cudaStreamCaptureStatusNone);
}

/// Captures on `on` while another thread allocates and copies through the default stream.
void capture_beside_another_thread(cudaStream_t on, bool must_capture) {
  device_test::buffer<float> x(ramp(1)), y(std::vector<float>(n, 0.0f));
  std::atomic<bool> stop{false}, failed{false};
  std::atomic<int> rounds{0};
  std::thread other([&] {
    std::vector<float> host(n);
    while (!stop) {
      void* memory = nullptr;
      if (cudaMalloc(&memory, mib) != cudaSuccess ||
          cudaMemcpy(memory, host.data(), 4 * n, cudaMemcpyHostToDevice) != cudaSuccess ||
          cudaFree(memory) != cudaSuccess)
        failed = true;
      ++rounds;
    }
  });
  while (rounds == 0) std::this_thread::yield();
  std::vector<std::string> said;
  set graphs(
      cuda_graph_api(on),
      [&](int rows) {
        status s = launch_axpy<1>(x.data(), y.data(), rows, device_test::chained, on);
        const int seen = rounds;  // the other thread works in the middle of the capture
        for (int spin = 0; must_capture && rounds == seen && spin < 1'000'000; ++spin)
          std::this_thread::yield();
        return s.ok() ? launch_axpy<2>(x.data(), y.data(), rows, device_test::chained, on) : s;
      },
      [&](std::string_view note) { said.emplace_back(note); });
  const status captured = graphs.capture({1}, 0, false);
  stop = true;
  other.join();
  NIBBLE_GOOD(captured);
  if (must_capture) {
    NIBBLE_CHECK(!failed);
    NIBBLE_CHECK(graphs.graphs() == 1);
    NIBBLE_CHECK(said.empty());
  }
  NIBBLE_GOOD(graphs.run(1));
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(on));
  NIBBLE_CHECK(y.read() == after(ramp(1), std::vector<float>(n, 0.0f), {1, 2}));
}

void c071_other_threads() {
  capture_beside_another_thread(stream(), true);
  // A blocking stream is tied to the default stream whatever the mode: the step runs, captured or not.
  cudaStream_t blocking;
  NIBBLE_CUDA_CHECK(cudaStreamCreate(&blocking));
  capture_beside_another_thread(blocking, false);
  NIBBLE_CUDA_CHECK(cudaStreamDestroy(blocking));
}

void c072_forked_work() {
  device_test::buffer<float> x(ramp(1)), y(std::vector<float>(n, 0.0f));
  cudaStream_t side;
  cudaEvent_t fork, join;
  NIBBLE_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  NIBBLE_CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  NIBBLE_CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  bool joined = false;
  set graphs = make([&](int rows) {
    status s = launch_axpy<1>(x.data(), y.data(), rows);
    NIBBLE_CUDA_CHECK(cudaEventRecord(fork, stream()));
    NIBBLE_CUDA_CHECK(cudaStreamWaitEvent(side, fork));
    if (s.ok()) s = launch_axpy<2>(x.data(), y.data(), rows, launch_chain::plain, side);
    if (joined) {
      NIBBLE_CUDA_CHECK(cudaEventRecord(join, side));
      NIBBLE_CUDA_CHECK(cudaStreamWaitEvent(stream(), join));
      if (s.ok()) s = launch_axpy<3>(x.data(), y.data(), rows, launch_chain::plain);
    }
    return s;
  });
  NIBBLE_GOOD(graphs.capture({1}, 0, false));
  NIBBLE_CHECK(graphs.graphs() == 0);
  NIBBLE_CHECK(notes.size() == 1 && notes[0].find("CUDA error 904") != std::string::npos);
  cudaStreamCaptureStatus now;
  NIBBLE_CUDA_CHECK(cudaStreamIsCapturing(side, &now));
  NIBBLE_CHECK(now == cudaStreamCaptureStatusNone);
  joined = true;
  NIBBLE_GOOD(graphs.capture({1}, 0, false));
  NIBBLE_CHECK(graphs.graphs() == 1);
  NIBBLE_GOOD(graphs.run(1));
  NIBBLE_CHECK(y.read() == after(ramp(1), std::vector<float>(n, 0.0f), {1, 2, 3}));
  NIBBLE_CUDA_CHECK(cudaStreamDestroy(side));
  NIBBLE_CUDA_CHECK(cudaEventDestroy(fork));
  NIBBLE_CUDA_CHECK(cudaEventDestroy(join));
}

/// Edges of a captured chain of `launches`, and how many are programmatic.
std::pair<std::size_t, std::size_t> edges_of_chain(launch_chain chain) {
  device_test::buffer<float> x(ramp(1)), y(std::vector<float>(n, 0.0f));
  cuda_graph_api api(stream());
  NIBBLE_GOOD(api.begin());
  NIBBLE_CHECK(api.state() == capture_state::active);
  NIBBLE_GOOD(launch_axpy<1>(x.data(), y.data(), 1, chain));
  NIBBLE_GOOD(launch_axpy<2>(x.data(), y.data(), 1, chain));
  NIBBLE_GOOD(launch_axpy<3>(x.data(), y.data(), 1, chain));
  cudaGraph_t graph = nullptr;
  NIBBLE_GOOD(api.end(graph));
  std::size_t edges = 0, programmatic = 0;
  NIBBLE_CUDA_CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
  std::vector<cudaGraphNode_t> from(edges), to(edges);
  std::vector<cudaGraphEdgeData> data(edges);
  NIBBLE_CUDA_CHECK(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &edges));
  for (const auto& edge : data) programmatic += edge.type == cudaGraphDependencyTypeProgrammatic;
  cudaGraphExec_t exec = nullptr;
  NIBBLE_GOOD(api.instantiate(exec, graph));
  NIBBLE_GOOD(api.launch(exec));
  NIBBLE_CHECK(y.read() == after(ramp(1), std::vector<float>(n, 0.0f), {1, 2, 3}));
  api.destroy_exec(exec);
  api.destroy(graph);
  return {edges, programmatic};
}

void c073_chained_launches_in_a_capture() {
  if (device_test::chained == launch_chain::pdl)
    NIBBLE_CHECK(edges_of_chain(launch_chain::pdl) == std::pair(std::size_t{2}, std::size_t{2}));
  NIBBLE_CHECK(edges_of_chain(launch_chain::plain) == std::pair(std::size_t{2}, std::size_t{0}));
}

/// A toy decode step: row r writes its token at its position of its page and adds it to its state slot.
__global__ void toy_decode(const int* tokens, const int* positions, const int* slots, const int* pages,
                           int page_stride, int page_tokens, int* kv, int* states, float* out) {
  const int r = blockIdx.x;
  if (threadIdx.x != 0) return;
  const int page = pages[r * page_stride + positions[r] / page_tokens];
  kv[page * page_tokens + positions[r] % page_tokens] = tokens[r];
  states[slots[r]] += tokens[r];
  out[r] = static_cast<float>(states[slots[r]]);
}

void c080_padding_rows_touch_nothing_that_lives() {
  constexpr int captured = 4, live = 3, page_tokens = 4, pages_in_pool = 9, slots_in_pool = 4, stride = 2;
  std::vector<int> pool(pages_in_pool * page_tokens), states(slots_in_pool);
  std::iota(pool.begin(), pool.end(), 1000);  // the pool is full
  std::iota(states.begin(), states.end(), 50);
  device_test::buffer<int> kv(pool), state(states), tokens(captured), positions(captured), slots(captured),
      pages(captured * stride);
  device_test::buffer<float> out(std::vector<float>(captured + 1, 7.0f));
  set graphs = make([&](int rows) {
    toy_decode<<<rows, 32, 0, stream()>>>(tokens.data(), positions.data(), slots.data(), pages.data(), stride,
                                          page_tokens, kv.data(), state.data(), out.data());
    return runtime_status(cudaGetLastError(), "toy_decode", "refused");
  });
  NIBBLE_GOOD(graphs.capture({1, 2, 4}, 0, false));
  // Sequences own pages 1 2, 3 4, 5 6 and slots 1 2 3; pages 7 8 belong to one that is not in this batch.
  std::vector<std::int32_t> t = {11, 12, 13, -1}, p = {5, 0, 7, -1}, s = {1, 2, 3, -1},
                            g = {1, 2, 3, 4, 5, 6, -1, -1};
  pad_decode_rows(live, captured, {}, t, p, s, g, stride);
  const auto send = [](device_test::buffer<int>& to, const std::vector<std::int32_t>& from) {
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), 4 * from.size(), cudaMemcpyHostToDevice,
                                      device_test::stream()));
  };
  send(tokens, t), send(positions, p), send(slots, s), send(pages, g);
  NIBBLE_CHECK(graphs.padded(live) == captured);
  NIBBLE_GOOD(graphs.run(captured));
  auto expected_pool = pool;
  auto expected_states = states;
  expected_pool[2 * page_tokens + 1] = 11, expected_pool[3 * page_tokens] = 12,
                                  expected_pool[6 * page_tokens + 3] = 13;
  expected_pool[0] = 0;  // the dummy page, by the padding row
  for (int row = 0; row < live; ++row) expected_states[s[row]] += t[row];
  NIBBLE_CHECK(kv.read() == expected_pool);
  NIBBLE_CHECK(state.read() == expected_states);  // the dummy slot gained a token of zero
  const auto y = out.read();
  NIBBLE_CHECK(y[0] == 62.0f && y[3] == 50.0f && y[4] == 7.0f);
}

void c083_double_buffers() {
  device_test::buffer<float> x(ramp(1)), a(std::vector<float>(n, 1.0f)), b(std::vector<float>(n, 0.0f));
  device_test::buffer<float> c(std::vector<float>(n, 1.0f)), d(std::vector<float>(n, 0.0f));
  float *from = a.data(), *to = b.data();
  const auto step = [&](int) {
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(to, from, 4 * n, cudaMemcpyDeviceToDevice, stream()));
    return launch_axpy<1>(x.data(), to, 1, launch_chain::plain);
  };
  set graphs = make(step);
  NIBBLE_GOOD(graphs.capture({1}, reinterpret_cast<std::uintptr_t>(to), false));
  for (int token = 0; token < 33; ++token) {
    NIBBLE_GOOD(graphs.run(1, reinterpret_cast<std::uintptr_t>(to)));
    std::swap(from, to);
    if (token % 8 == 7) NIBBLE_CUDA_CHECK(cudaMemsetAsync(from, 0, 4 * n, stream()));  // keeps numbers finite
  }
  const auto with_graphs = std::pair(a.read(), b.read());
  from = c.data(), to = d.data();
  for (int token = 0; token < 33; ++token) {
    NIBBLE_GOOD(step(1));
    std::swap(from, to);
    if (token % 8 == 7) NIBBLE_CUDA_CHECK(cudaMemsetAsync(from, 0, 4 * n, stream()));
  }
  NIBBLE_CHECK(with_graphs == std::pair(c.read(), d.read()));
}

void c085_flat_over_100_captures() {
  device_test::buffer<float> x(ramp(4)), y(ramp(4));
  set graphs = make([&](int rows) { return launch_axpy<1>(x.data(), y.data(), rows); });
  std::uint64_t after_10 = 0;
  for (int i = 0; i < 100; ++i) {
    NIBBLE_GOOD(graphs.capture({1, 2, 4}, 0, false));
    NIBBLE_GOOD(graphs.run(4));
    graphs.destroy();
    NIBBLE_GOOD(graphs.run(4));
    wait();
    if (i == 10) after_10 = free_bytes();
  }
  NIBBLE_CHECK(free_bytes() == after_10);
}

__global__ void write_nowhere(int* p) { *p = 1; }

/// The last test of its process: the context is gone afterwards.
void c078_a_fault_in_a_graph() {
  set graphs = make([&](int) {
    write_nowhere<<<1, 1, 0, stream()>>>(reinterpret_cast<int*>(0x10));
    return runtime_status(cudaGetLastError(), "write_nowhere", "refused");
  });
  NIBBLE_GOOD(graphs.capture({1}, 0, false));
  NIBBLE_GOOD(graphs.run(1));
  const status s = graphs.api().synchronize();
  NIBBLE_CHECK(!s.ok() && is_sticky(s));
  bool typed = false;
  try {
    require(graphs.run(1));
  } catch (const context_lost_error& problem) {
    std::printf("fault: %s\n", problem.what());
    typed = true;
  }
  NIBBLE_CHECK(typed);
  std::printf("1 test of fault, %d failed checks\n", device_test::failures());
  std::fflush(stdout);
  std::_Exit(device_test::failures() != 0);
}

const bool added[] = {
    device_test::add("graph", "replay, update, recapture, destroy", replay_update_recapture_destroy),
    device_test::add("graph", "C066: memory is flat over 500 requests", c066_flat_over_500_requests),
    device_test::add("graph", "C068: an allocation inside a capture", c068_allocation_inside_a_capture),
    device_test::add("graph", "C069: what the recorder owned lives on",
                     c069_what_the_recorder_owned_lives_on),
    device_test::add("graph", "C070: first use inside a capture", c070_first_use_inside_a_capture),
    device_test::add("graph", "C071: other threads", c071_other_threads),
    device_test::add("graph", "C072: forked work", c072_forked_work),
    device_test::add("graph", "C073: chained launches in a capture", c073_chained_launches_in_a_capture),
    device_test::add("graph", "C079, C080, C082: padding rows", c080_padding_rows_touch_nothing_that_lives),
    device_test::add("graph", "C083: double buffers", c083_double_buffers),
    device_test::add("graph", "C085: memory is flat over 100 captures", c085_flat_over_100_captures),
    device_test::add("graph_fault", "C078: a fault in a graph", c078_a_fault_in_a_graph),
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {  // without a group: everything but the fault, which ends the context
    char group[] = "graph";
    char* arguments[] = {argv[0], group};
    return device_test::run(2, arguments);
  }
  return device_test::run(argc, argv);
}
