// SPDX-License-Identifier: Apache-2.0
// Device memory that grows and shrinks while a captured graph goes on using it.
#include <chrono>

#include "device_test.cuh"
#include "nibble/core/device_arena.cuh"
#include "nibble/core/device_memory.cuh"
#include "nibble/graph/cuda_graph.cuh"

using namespace nibble;
using device_test::stream;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

std::uint64_t free_bytes() {
  std::size_t free = 0, total = 0;
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

/// words[i] += 1 for i < *count, which may change between replays.
__global__ void bump(unsigned* words, const unsigned long long* count) {
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < *count; i += gridDim.x * blockDim.x)
    words[i] += 1;
}

/// Number of words in [first, last) that are not `expected`.
unsigned long long wrong_words(const unsigned* words, std::uint64_t first, std::uint64_t last,
                               unsigned expected) {
  std::vector<unsigned> host(last - first);
  NIBBLE_CUDA_CHECK(cudaMemcpy(host.data(), words + first, 4 * host.size(), cudaMemcpyDeviceToHost));
  unsigned long long wrong = 0;
  for (const unsigned w : host) wrong += w != expected;
  return wrong;
}

void arena_under_a_graph() {
  device_arena arena;
  NIBBLE_GOOD(open_device_arena(256 * mib, arena));
  NIBBLE_CHECK(arena.mapped_bytes() == 0);
  const std::uint64_t granule = arena.granule_bytes();
  NIBBLE_CHECK(granule >= mib && (granule & (granule - 1)) == 0);
  NIBBLE_GOOD(arena.resize(4 * mib));
  NIBBLE_CUDA_CHECK(cudaMemsetAsync(arena.base(), 0, arena.mapped_bytes(), stream()));
  auto* const words = reinterpret_cast<unsigned*>(arena.base());
  device_test::buffer<unsigned long long> count(std::vector<unsigned long long>{4 * mib / 4});

  graph_set<cuda_graph_api> graphs(
      cuda_graph_api(stream()),
      [&](int) {
        bump<<<64, 256, 0, stream()>>>(words, count.data());
        return runtime_status(cudaGetLastError(), "bump", "the launch failed");
      },
      [](std::string_view note) { std::printf("note: %.*s\n", int(note.size()), note.data()); });
  NIBBLE_GOOD(graphs.capture({1}, 0, false));
  NIBBLE_CHECK(graphs.graphs() == 1);
  const auto run = [&](std::uint64_t bytes) {
    const unsigned long long n = bytes / 4;
    NIBBLE_CUDA_CHECK(
        cudaMemcpyAsync(count.data(), &n, sizeof n, cudaMemcpyHostToDevice, device_test::stream()));
    NIBBLE_GOOD(graphs.run(1));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream()));
  };
  run(4 * mib);
  NIBBLE_CHECK(wrong_words(words, 0, mib, 1) == 0);

  NIBBLE_GOOD(arena.resize(90 * mib));  // five blocks of 16, and what is left
  NIBBLE_CHECK(reinterpret_cast<unsigned*>(arena.base()) == words);
  NIBBLE_CHECK(arena.mapped_bytes() >= 90 * mib && arena.mapped_bytes() < 90 * mib + granule);
  NIBBLE_CUDA_CHECK(cudaMemsetAsync(arena.base() + 4 * mib, 0, arena.mapped_bytes() - 4 * mib, stream()));
  run(90 * mib);
  NIBBLE_CHECK(wrong_words(words, 0, mib, 2) == 0);
  NIBBLE_CHECK(wrong_words(words, mib, 90 * mib / 4, 1) == 0);

  NIBBLE_GOOD(arena.resize(20 * mib));
  NIBBLE_CHECK(arena.mapped_bytes() >= 20 * mib && arena.mapped_bytes() <= 36 * mib + granule);
  run(20 * mib);
  NIBBLE_CHECK(wrong_words(words, 0, mib, 3) == 0);
  NIBBLE_CHECK(wrong_words(words, mib, 20 * mib / 4, 2) == 0);

  for (int i = 0; i < 20; ++i) {  // while replays are under way
    NIBBLE_GOOD(graphs.run(1));
    NIBBLE_GOOD(arena.resize((20 + 16 * (i % 4)) * mib));
  }
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream()));
  NIBBLE_CHECK(wrong_words(words, 0, mib, 23) == 0);
  NIBBLE_CHECK(graphs.graphs() == 1);
}

void memory_is_accounted_for() {
  NIBBLE_CUDA_CHECK(cudaDeviceSynchronize());
  const std::uint64_t before = free_bytes();
  {
    device_arena arena;
    NIBBLE_GOOD(open_device_arena(2048 * mib, arena));
    NIBBLE_CHECK(before - free_bytes() <= 2 * mib);  // address space costs page tables at most
    const auto begin = std::chrono::steady_clock::now();
    NIBBLE_GOOD(arena.resize(1024 * mib));
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    const std::uint64_t taken = before - free_bytes();
    std::printf("arena: 1 GiB mapped in %.2f ms, free memory fell by %.1f MiB\n", ms,
                static_cast<double>(taken) / mib);
    NIBBLE_CHECK(taken >= arena.mapped_bytes() && taken <= arena.mapped_bytes() + 4 * mib);
    NIBBLE_GOOD(arena.resize(512 * mib));
    NIBBLE_CHECK(before - free_bytes() <= 516 * mib);
    device_arena moved = std::move(arena);
    NIBBLE_CHECK(moved.mapped_bytes() == 512 * mib);
  }
  NIBBLE_CHECK(before - free_bytes() <= 2 * mib);
}

void growth_without_memory_is_soft() {
  std::size_t free = 0, total = 0;
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  device_arena arena;
  NIBBLE_GOOD(open_device_arena(total + 1024 * mib, arena, 1024 * mib));
  NIBBLE_GOOD(arena.resize(32 * mib));
  const status s = arena.resize(total + 512 * mib);
  NIBBLE_CHECK(is_out_of_memory(s));
  NIBBLE_CHECK(!is_sticky(s));
  NIBBLE_CHECK(arena.mapped_bytes() == 32 * mib);
  NIBBLE_CUDA_CHECK(cudaMemsetAsync(arena.base(), 1, 32 * mib, stream()));
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream()));
  std::size_t free_after = 0;
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&free_after, &total));
  NIBBLE_CHECK(free - free_after <= 36 * mib);
  // Plain allocations: typed, and nothing is left behind on the runtime's list of errors.
  bool typed = false;
  try {
    const device_memory too_much(total + 1024 * mib);
  } catch (const device_out_of_memory&) {
    typed = true;
  }
  NIBBLE_CHECK(typed);
  NIBBLE_CHECK(cudaPeekAtLastError() == cudaSuccess);
  device_memory memory;
  NIBBLE_CHECK(is_out_of_memory(device_memory::try_allocate(total + 1024 * mib, memory)));
  NIBBLE_CHECK(memory.data() == nullptr);
  NIBBLE_GOOD(device_memory::try_allocate(mib, memory));
  NIBBLE_CHECK(memory.bytes() == mib);
}

const bool added[] = {
    device_test::add("arena", "grows and shrinks under a captured graph", arena_under_a_graph),
    device_test::add("arena", "memory is accounted for", memory_is_accounted_for),
    device_test::add("memory", "growth without memory is soft", growth_without_memory_is_soft),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
