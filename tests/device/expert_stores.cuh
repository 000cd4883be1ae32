// SPDX-License-Identifier: Apache-2.0
/// \file
/// Experts in host memory for tests of what brings them.
#pragma once

#include <cstring>
#include <memory>
#include <random>

#include "device_test.cuh"
#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"
#include "nibble/moe/residency_device.cuh"

namespace device_test {

inline constexpr nibble::moe::residency_shape store_shape{3, 16, 2};

/// Random experts, the first `locked` of them page-locked (rounded up to the store's pieces).
inline std::unique_ptr<nibble::moe::expert_store> make_store(int count, std::size_t slot_bytes,
                                                             std::uint64_t locked_bytes) {
  static nibble::moe::cuda_page_locker locker(0);
  nibble::moe::expert_store_options o;
  o.count = count, o.slot_bytes = slot_bytes, o.locker = &locker, o.piece_bytes = 1;
  o.most_locked_bytes = locked_bytes;
  auto store = std::make_unique<nibble::moe::expert_store>(o);
  store->fill([](int number, std::span<std::byte> slot, nibble::moe::expert_scales& scales) {
    std::mt19937_64 random(static_cast<std::uint64_t>(number) + 7);
    for (std::size_t i = 0; i < slot.size(); i += 8) {
      // Neither NaN nor large as codes, scales or bf16: bits of small numbers.
      const std::uint64_t v = random() & 0xB7B7'B7B7'B7B7'B7B7ull;
      std::memcpy(slot.data() + i, &v, 8);
    }
    scales = {0.01f + 0.0001f * static_cast<float>(number), 0.02f,
              0.005f + 0.0001f * static_cast<float>(number)};
  });
  return store;
}

/// Allows the kernels of a family their shared memory, as a start does.
template <class Family>
void prepare_kernels() {
  NIBBLE_GOOD(
      Family::for_each_kernel([](auto kernel, int threads, std::size_t shared_bytes, const char* name) {
        return nibble::prepare(kernel, threads, shared_bytes, name);
      }));
}

/// Stands for a layer's products: every block takes one of the experts that the layer asks for and counts it
/// as wrong unless all of its bytes are in the slot that the tables name.
static __global__ void use_experts(const std::int32_t* ids, const std::int32_t* slot_of,
                                   const std::uint32_t* store, const std::uint32_t* slots, int words,
                                   unsigned* wrong) {
  nibble::device::wait_for_previous_grid();
  nibble::device::let_next_grid_start();
  const int id = ids[blockIdx.x], slot = slot_of[id];
  bool good = slot >= 0;
  for (int i = static_cast<int>(threadIdx.x); good && i < words; i += static_cast<int>(blockDim.x))
    good = store[static_cast<std::ptrdiff_t>(id) * words + i] ==
           slots[static_cast<std::ptrdiff_t>(slot) * words + i];
  if (!good) atomicAdd(wrong, 1u);
}

}  // namespace device_test
