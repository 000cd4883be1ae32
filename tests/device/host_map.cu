// SPDX-License-Identifier: Apache-2.0
// What experts in host memory take of the device beside their slots: never more than the plan counts. Prints
// what was measured, size by size. Needs a device that nobody else takes memory of meanwhile.
#include <cstring>
#include <memory>

#include "device_test.cuh"
#include "nibble/core/checked.hpp"
#include "nibble/moe/residency_device.cuh"

using namespace nibble;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

std::uint64_t free_bytes() {
  std::size_t free = 0, total = 0;
  NIBBLE_CUDA_CHECK(cudaDeviceSynchronize());
  NIBBLE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}
/// What `make` takes of the device; `made` keeps it.
template <class Make>
std::uint64_t taken_by(Make&& make) {
  const std::uint64_t before = free_bytes();
  make();
  const std::uint64_t after = free_bytes();
  return before > after ? before - after : 0;
}
double in_mib(std::uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(mib); }

/// Locked in pieces, as a start locks them, next to what was locked before.
void page_tables() {
  std::vector<std::unique_ptr<moe::expert_store>> stores;
  static moe::cuda_page_locker locker(0);
  std::uint64_t locked = 0, taken = 0;
  for (const int experts : {64, 192, 768, 1024, 2048}) {
    if (device_test::quick() && experts > 192) break;
    moe::expert_store_options o;
    o.count = experts, o.slot_bytes = mib, o.locker = &locker;
    taken += taken_by([&] {
      auto store = std::make_unique<moe::expert_store>(o);
      store->fill([](int number, std::span<std::byte> slot, moe::expert_scales&) {
        std::memset(slot.data(), number, slot.size());
      });
      NIBBLE_CHECK(store->locked() == experts);
      stores.push_back(std::move(store));
    });
    locked += static_cast<std::uint64_t>(experts) * mib;
    const std::uint64_t planned = align_up(moe::page_table_bytes_of(locked), 2 * mib);
    std::printf("  %.0f MiB of host memory locked: %.2f MiB of the device, %.0f planned\n", in_mib(locked),
                in_mib(taken), in_mib(planned));
    NIBBLE_CHECK(taken <= planned);
    NIBBLE_CHECK(taken + 2 * mib >= planned);
  }
}

void tables() {
  constexpr moe::residency_shape shape{40, 256, 8};
  for (const int slots : {40, 5000}) {
    std::unique_ptr<moe::device_residency> made;
    const std::uint64_t taken = taken_by([&] {
      made = std::make_unique<moe::device_residency>(
          shape, slots, std::vector<moe::expert_scales>(static_cast<std::size_t>(shape.total())));
    });
    const std::uint64_t planned = moe::device_residency::bytes(shape, slots);
    std::printf("  tables for %d slots: %.2f MiB of the device, %.2f planned\n", slots, in_mib(taken),
                in_mib(planned));
    NIBBLE_CHECK(taken <= align_up(planned, 2 * mib));
  }
  cudaStream_t side = nullptr;
  const std::uint64_t taken =
      taken_by([&] { NIBBLE_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking)); });
  std::printf("  a second stream: %.2f MiB of the device\n", in_mib(taken));
  NIBBLE_CHECK(taken <= 2 * mib);
  NIBBLE_CUDA_CHECK(cudaStreamDestroy(side));
}

const bool registered[] = {
    device_test::add("host_map", "tables and a stream", [] { tables(); }),
    device_test::add("host_map", "page tables of locked memory", [] { page_tables(); }),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
