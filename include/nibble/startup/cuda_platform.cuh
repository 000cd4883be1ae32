// SPDX-License-Identifier: Apache-2.0
/// \file
/// A CUDA device for the phases of a start.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <utility>

#include "nibble/core/driver.cuh"
#include "nibble/core/driver_error.hpp"
#include "nibble/graph/cuda_graph.cuh"
#include "nibble/startup/kernel_table.cuh"
#include "nibble/startup/start_context.hpp"

namespace nibble {

namespace detail {

/// Memory in use on a device according to the management library, which needs no context; 0 without it.
[[nodiscard]] inline std::uint64_t used_bytes_of_device(const char* pci_bus_id) {
  struct memory {
    unsigned long long total, free, used;
  };
  void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 0;
  const auto begin = reinterpret_cast<int (*)()>(::dlsym(library, "nvmlInit_v2"));
  const auto end = reinterpret_cast<int (*)()>(::dlsym(library, "nvmlShutdown"));
  const auto find =
      reinterpret_cast<int (*)(const char*, void**)>(::dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
  const auto read = reinterpret_cast<int (*)(void*, memory*)>(::dlsym(library, "nvmlDeviceGetMemoryInfo"));
  std::uint64_t used = 0;
  if (begin != nullptr && end != nullptr && find != nullptr && read != nullptr && begin() == 0) {
    void* handle = nullptr;
    memory m{};
    if (find(pci_bus_id, &handle) == 0 && read(handle, &m) == 0) used = m.used;
    end();
  }
  ::dlclose(library);
  return used;
}

}  // namespace detail

/// The primary context of one device and a stream of one's own. Throws nibble::error where there is no driver
/// or no device; the current device of the calling thread is this one from then on.
class cuda_platform {
 public:
  using graph_api = cuda_graph_api;

  explicit cuda_platform(int device) : device_(device) {
    static constexpr const char* where = "nibble::cuda_platform";
    int count = 0;
    require(runtime_status(cudaGetDeviceCount(&count), where, "there is no usable CUDA driver"));
    if (device < 0 || device >= count)
      throw error("device " + std::to_string(device) + ": there are " + std::to_string(count));
    require(driver().found);
    char bus[32] = "";
    require(
        runtime_status(cudaDeviceGetPCIBusId(bus, sizeof bus, device), where, "the device has no address"));
    const std::uint64_t before = detail::used_bytes_of_device(bus);
    require(runtime_status(cudaInitDevice(device, 0, 0), where, "the device could not be initialised"));
    require(runtime_status(cudaSetDevice(device), where, "the device could not be chosen"));
    require(runtime_status(cudaFree(nullptr), where, "the device's context could not be made"));
    require(runtime_status(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), where,
                           "no stream could be made"));
    synchronize();
    const std::uint64_t after = detail::used_bytes_of_device(bus);
    const memory_reading now = read_memory();
    constexpr std::uint64_t usual = std::uint64_t{512} << 20;  // where nobody can tell own from others
    const std::uint64_t gone = now.total_bytes - now.free_bytes;
    context_bytes_ = before != 0 && after > before ? after - before : gone < usual ? gone : usual;
  }
  cuda_platform(cuda_platform&& other) noexcept
      : device_(other.device_),
        stream_(std::exchange(other.stream_, nullptr)),
        context_bytes_(other.context_bytes_) {}
  cuda_platform& operator=(cuda_platform&&) = delete;
  ~cuda_platform() {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  }

  [[nodiscard]] int index() const { return device_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] std::uint64_t context_bytes() const { return context_bytes_; }
  [[nodiscard]] memory_reading read_memory() const {
    std::size_t free = 0, total = 0;
    require(runtime_status(cudaMemGetInfo(&free, &total), "nibble::cuda_platform",
                           "free memory is not readable"));
    return {total, free};
  }
  void synchronize() const {
    require(runtime_status(cudaDeviceSynchronize(), "nibble::cuda_platform", "work on the device failed"));
  }
  [[nodiscard]] graph_api graphs() const { return graph_api(stream_); }

  /// Loads every kernel of a table; throws with the kernel's name.
  template <class Table>
  [[nodiscard]] kernel_report preload() const {
    preload_result done = nibble::preload<Table>();
    if (!done.ok() && done.kernel[0] != '\0' && !is_sticky(done.result) && !is_out_of_memory(done.result))
      throw device_error("kernel " + std::string(done.kernel) + ": " + describe(done.result), done.result);
    require(done.result);
    return std::move(done.report);
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::uint64_t context_bytes_ = 0;
};

}  // namespace nibble
