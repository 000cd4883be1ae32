// SPDX-License-Identifier: Apache-2.0
/// \file
/// elastic_arena on a CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/arena.hpp"
#include "nibble/core/driver.cuh"

namespace nibble {

/// Address space and memory of one device through cuMemAddressReserve and cuMemMap.
class device_arena_driver {
 public:
  device_arena_driver() = default;

  /// Asks the device for its mapping granule (2 MiB on every GPU seen so far).
  [[nodiscard]] static status of_device(int device, device_arena_driver& out) {
    static constexpr const char* where = "nibble::device_arena";
    if (!driver().found.ok()) return driver().found;
    device_arena_driver made;
    made.device_ = device;
    const CUmemAllocationProp property = made.property();
    std::size_t granule = 0;
    if (const status s = driver_status(driver().mem_get_allocation_granularity(
                                           &granule, &property, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                                       where, "the device has no virtual memory management");
        !s.ok())
      return s;
    made.granule_ = granule;
    out = made;
    return status::success();
  }

  [[nodiscard]] std::uint64_t granule_bytes() const { return granule_; }

  [[nodiscard]] status reserve(std::uint64_t bytes, std::byte*& base) {
    CUdeviceptr address = 0;
    const status s = driver_status(driver().mem_address_reserve(&address, bytes, 0, 0, 0),
                                   "nibble::device_arena", "the address space was refused");
    if (s.ok()) base = reinterpret_cast<std::byte*>(address);
    return s;
  }
  void release(std::byte* base, std::uint64_t bytes) {
    static_cast<void>(driver().mem_address_free(reinterpret_cast<CUdeviceptr>(base), bytes));
  }

  [[nodiscard]] status map(std::byte* at, std::uint64_t bytes) {
    static constexpr const char* where = "nibble::device_arena";
    const CUmemAllocationProp property = this->property();
    const auto address = reinterpret_cast<CUdeviceptr>(at);
    CUmemGenericAllocationHandle memory = 0;
    if (const status s = driver_status(driver().mem_create(&memory, bytes, &property, 0), where,
                                       "the device has too little free memory");
        !s.ok())
      return s;
    status s =
        driver_status(driver().mem_map(address, bytes, 0, memory, 0), where, "the mapping was refused");
    // The mapping keeps the memory; without one it goes back here.
    static_cast<void>(driver().mem_release(memory));
    if (!s.ok()) return s;
    CUmemAccessDesc access{};
    access.location = property.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    s = driver_status(driver().mem_set_access(address, bytes, &access, 1), where,
                      "access to the mapping was refused");
    if (!s.ok()) static_cast<void>(driver().mem_unmap(address, bytes));
    return s;
  }
  [[nodiscard]] status unmap(std::byte* at, std::uint64_t bytes) {
    return driver_status(driver().mem_unmap(reinterpret_cast<CUdeviceptr>(at), bytes), "nibble::device_arena",
                         "the mapping was not given back");
  }
  [[nodiscard]] status synchronize() {
    return runtime_status(cudaDeviceSynchronize(), "nibble::device_arena",
                          "work on the device failed before the arena shrank");
  }

 private:
  [[nodiscard]] CUmemAllocationProp property() const {
    CUmemAllocationProp p{};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = device_;
    return p;
  }

  int device_ = 0;
  std::uint64_t granule_ = 0;
};

using device_arena = elastic_arena<device_arena_driver>;

/// Reserves `reserved_bytes` of the current device's address space.
[[nodiscard]] inline status open_device_arena(std::uint64_t reserved_bytes, device_arena& arena,
                                              std::uint64_t block_bytes = device_arena::default_block_bytes) {
  int device = 0;
  if (const status s =
          runtime_status(cudaGetDevice(&device), "nibble::open_device_arena", "no current device");
      !s.ok())
    return s;
  device_arena_driver driver;
  if (const status s = device_arena_driver::of_device(device, driver); !s.ok()) return s;
  return device_arena::open(driver, reserved_bytes, arena, block_bytes);
}

}  // namespace nibble
