// SPDX-License-Identifier: Apache-2.0
// Experts that do not fit, measured: bench_offload parts | steps [FILE.json]. Needs 24 GiB of host memory.
#include "parts.cuh"
#include "steps.cuh"

using nibble::moe::fetch_policy;

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "parts" && what != "steps") {
    std::fprintf(stderr, "usage: bench_offload parts | steps [FILE.json]\n");
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device\n");
    return 4;
  }
  bench::timer timer;
  const double begin = bench::seconds();
  const auto store = bench::make_store(what == "parts" ? 1024 : bench::shape.total());
  std::printf("{\"part\":\"store\",\"experts\":%d,\"locked\":%d,\"seconds\":%.2f}\n", store->count(),
              store->locked(), bench::seconds() - begin);
  if (what == "steps") {
    bench::all_steps(timer, *store, argc > 2 ? argv[2] : "");
    return 0;
  }
  {
    const int slots = 256;
    nibble::device_memory arena(bench::slot_bytes * slots);
    auto* const at = arena.as<std::uint8_t>();
    bench::time_copies(timer, *store, at);
    bench::time_fetch<fetch_policy{6, 8}>(timer, *store, at, slots);
    bench::time_fetch<fetch_policy{8, 8}>(timer, *store, at, slots);
    bench::time_fetch<fetch_policy{32, 8}>(timer, *store, at, slots);
    bench::time_fetch<fetch_policy{132, 8}>(timer, *store, at, slots);
    bench::time_fetch<fetch_policy{8, 8, true}>(timer, *store, at, slots);
    bench::time_fetch<fetch_policy{32, 8, true}>(timer, *store, at, slots);
  }
  bench::time_place<nibble::moe::residency_policy{1024}>(timer, 4800);
  bench::time_place<nibble::moe::residency_policy{512}>(timer, 4800);
  return 0;
}
