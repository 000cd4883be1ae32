// SPDX-License-Identifier: Apache-2.0
/// \file
/// The few driver functions that the runtime has no name for, looked up at run time: a program that links
/// libcuda would not start on a machine without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "nibble/core/status.hpp"

namespace nibble {

struct driver_api {
  decltype(&cuFuncIsLoaded) func_is_loaded = nullptr;
  decltype(&cuMemAddressReserve) mem_address_reserve = nullptr;
  decltype(&cuMemAddressFree) mem_address_free = nullptr;
  decltype(&cuMemCreate) mem_create = nullptr;
  decltype(&cuMemRelease) mem_release = nullptr;
  decltype(&cuMemMap) mem_map = nullptr;
  decltype(&cuMemUnmap) mem_unmap = nullptr;
  decltype(&cuMemSetAccess) mem_set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity = nullptr;
  decltype(&cuStreamWriteValue64) stream_write_value = nullptr;
  /// Good once every function above was found.
  status found = status::not_supported("nibble::driver", "the CUDA driver was not asked yet");
};

namespace detail {

template <class Function>
bool find_driver_function(const char* name, Function& function, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess || address == nullptr)
    return false;
  function = reinterpret_cast<Function>(address);
  return true;
}

inline driver_api find_driver() {
  driver_api d;
  const bool all =
      find_driver_function("cuFuncIsLoaded", d.func_is_loaded, 12040) &&
      find_driver_function("cuMemAddressReserve", d.mem_address_reserve, 10020) &&
      find_driver_function("cuMemAddressFree", d.mem_address_free, 10020) &&
      find_driver_function("cuMemCreate", d.mem_create, 10020) &&
      find_driver_function("cuMemRelease", d.mem_release, 10020) &&
      find_driver_function("cuMemMap", d.mem_map, 10020) &&
      find_driver_function("cuMemUnmap", d.mem_unmap, 10020) &&
      find_driver_function("cuMemSetAccess", d.mem_set_access, 10020) &&
      find_driver_function("cuMemGetAllocationGranularity", d.mem_get_allocation_granularity, 10020) &&
      find_driver_function("cuStreamWriteValue64", d.stream_write_value, 12000);
  d.found = all ? status::success()
                : status::not_supported("nibble::driver",
                                        "no CUDA driver of 12.4 or newer: nibble needs driver 580 or newer");
  return d;
}

}  // namespace detail

/// The driver of this process. Thread-safe; the first call looks the functions up.
[[nodiscard]] inline const driver_api& driver() {
  static const driver_api found = detail::find_driver();
  return found;
}

/// A driver function's result as a status.
[[nodiscard]] inline status driver_status(CUresult result, const char* where, const char* text) {
  return status::cuda(static_cast<int>(result), where, text);
}

/// A runtime function's result as a status. An error that is not sticky is taken off the runtime's list, so
/// that a later check does not see it a second time.
[[nodiscard]] inline status runtime_status(cudaError_t result, const char* where, const char* text) {
  if (result != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status::cuda(static_cast<int>(result), where, text);
}

}  // namespace nibble
