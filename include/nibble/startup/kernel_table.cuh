// SPDX-License-Identifier: Apache-2.0
/// \file
/// Preloading: every kernel of a table made resident on the current device, checked, and proven to be loaded.
///
/// A linked kernel is not a loaded one: CUDA loads at the first launch, which may need device memory, wait
/// for all running work, and is not allowed while a graph is captured. Measured on an H200: 48 kernels load
/// in under 2 ms and take 2 MiB, so all of them are loaded before any cache exists.
///
/// Local memory: the driver backs it for every thread that the device can hold, at the first launch of a
/// kernel that needs more than any before, and keeps it. Kernels that spill a few bytes are therefore allowed
/// up to most_local_bytes; where a table has one, a kernel that uses that much is launched once, so that
/// memory is taken here and never later. It is part of the report's bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "nibble/core/driver.cuh"
#include "nibble/core/launch.cuh"
#include "nibble/startup/kernel_report.hpp"
#include "nibble/startup/kernel_table.hpp"

namespace nibble {

/// Local memory of a thread that a kernel of a table may use.
inline constexpr int most_local_bytes = 128;

/// What a preload refuses: one kernel, named, with one sentence. `text` of the status says why.
struct preload_result {
  status result;
  kernel_report report;
  const char* kernel = "";  ///< the one that was refused
  [[nodiscard]] bool ok() const { return result.ok(); }
};

namespace detail {

/// What kernels must fit.
struct device_limits {
  int compute = 0;  ///< 10 × major + minor
  int registers_per_block = 0;
  int threads_per_block = 0;
  int shared_bytes_per_block = 0;  ///< with opt-in
};

[[nodiscard]] inline status read_device_limits(device_limits& limits) {
  static constexpr const char* where = "nibble::preload";
  int device = 0;
  status s = runtime_status(cudaGetDevice(&device), where, "there is no current device");
  const auto read = [&](int& value, cudaDeviceAttr attribute) {
    if (s.ok())
      s = runtime_status(cudaDeviceGetAttribute(&value, attribute, device), where,
                         "a device attribute could not be read");
  };
  int major = 0, minor = 0;
  read(major, cudaDevAttrComputeCapabilityMajor);
  read(minor, cudaDevAttrComputeCapabilityMinor);
  read(limits.registers_per_block, cudaDevAttrMaxRegistersPerBlock);
  read(limits.threads_per_block, cudaDevAttrMaxThreadsPerBlock);
  read(limits.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  limits.compute = 10 * major + minor;
  return s;
}

/// Registers are given to a warp in units of 256.
[[nodiscard]] constexpr int registers_of_block(int registers, int threads) {
  const int warps = (threads + 31) / 32, a_warp = (registers * 32 + 255) / 256 * 256;
  return warps * a_warp;
}

[[nodiscard]] inline status check_kernel(const cudaFuncAttributes& a, int threads, std::size_t shared_bytes,
                                         const device_limits& limits) {
  static constexpr const char* where = "nibble::preload";
  if (a.binaryVersion / 10 != limits.compute / 10 || a.binaryVersion > limits.compute)
    return status::not_supported(
        where, "the kernel's machine code is for another architecture: add the device's to the build");
  if (a.localSizeBytes > most_local_bytes)
    return status::not_supported(where,
                                 "the kernel spills to local memory beyond the 128 bytes that are set aside, "
                                 "so the driver would allocate at its first launch");
  if (threads < 1 || threads > a.maxThreadsPerBlock || threads > limits.threads_per_block ||
      registers_of_block(a.numRegs, threads) > limits.registers_per_block)
    return status::not_supported(where, "the kernel's registers do not suffice for its block of threads");
  if (a.sharedSizeBytes + shared_bytes > static_cast<std::size_t>(limits.shared_bytes_per_block))
    return status::not_supported(where, "the kernel needs more shared memory than a block can have");
  return status::success();
}

/// Takes Bytes of local memory a thread. \param count read by no compiler: at run time Bytes / 4
template <int Bytes>
__global__ void use_local_memory(unsigned count, unsigned* out) {
  volatile unsigned own[Bytes / 4];
  for (unsigned i = 0; i < count; ++i) own[i] = i;
  if (out != nullptr) *out = own[count - 1];
}

/// Has the driver set aside most_local_bytes for every thread.
[[nodiscard]] inline status set_local_memory_aside() {
  static constexpr const char* where = "nibble::preload";
  constexpr auto kernel = &use_local_memory<most_local_bytes>;
  cudaFuncAttributes attributes{};
  status s = runtime_status(cudaFuncGetAttributes(&attributes, kernel), where,
                            "the kernel for local memory is lost");
  if (s.ok() && attributes.localSizeBytes < static_cast<std::size_t>(most_local_bytes))
    s = status::not_supported(where, "the compiler took the local memory away that others need");
  if (!s.ok()) return s;
  cudaStream_t stream = nullptr;
  s = runtime_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), where,
                     "no stream could be made");
  if (!s.ok()) return s;
  s = launch(kernel, dim3(1), 32, 0, {stream, launch_chain::plain}, where,
             static_cast<unsigned>(most_local_bytes) / 4, nullptr);
  const status ended = runtime_status(cudaStreamSynchronize(stream), where, "no local memory could be had");
  static_cast<void>(cudaStreamDestroy(stream));
  return s.ok() ? ended : s;
}

/// Whether the driver says that the kernel is loaded in the current context.
[[nodiscard]] inline status check_loaded(const void* kernel) {
  static constexpr const char* where = "nibble::preload";
  if (!driver().found.ok()) return driver().found;
  cudaFunction_t function = nullptr;
  if (const status s = runtime_status(cudaGetFuncBySymbol(&function, kernel), where,
                                      "the kernel is not known to the driver");
      !s.ok())
    return s;
  CUfunctionLoadingState state = CU_FUNCTION_LOADING_STATE_UNLOADED;
  if (const status s =
          driver_status(driver().func_is_loaded(&state, function), where, "the loading state was refused");
      !s.ok())
    return s;
  return state == CU_FUNCTION_LOADING_STATE_LOADED
             ? status::success()
             : status::not_supported(where, "the kernel is still not loaded after it was preloaded");
}

}  // namespace detail

/// Loads every kernel of `Table` on the current device: attributes read, shared memory allowed, machine code,
/// launchability and little local memory checked; then asks the driver whether each one is loaded.
/// Synchronises the device before it reads free memory. Stops at the first kernel that cannot be used.
template <class Table>
[[nodiscard]] preload_result preload() {
  static constexpr const char* where = "nibble::preload";
  preload_result out;
  detail::device_limits limits;
  out.report.geometries = Table::geometries();
  out.report.families = Table::families;
  std::size_t free_before = 0, free_after = 0, total = 0;
  out.result = runtime_status(cudaDeviceSynchronize(), where, "the device had failed before");
  if (out.result.ok()) out.result = detail::read_device_limits(limits);
  if (out.result.ok())
    out.result = runtime_status(cudaMemGetInfo(&free_before, &total), where, "free memory could not be read");
  if (!out.result.ok()) return out;

  const auto begin = std::chrono::steady_clock::now();
  std::vector<const void*> loaded;
  out.result = Table::for_each_kernel(
      [&](auto kernel, int threads, std::size_t shared_bytes, const char* name) -> status {
        const void* const address = reinterpret_cast<const void*>(kernel);
        if (std::find(loaded.begin(), loaded.end(), address) != loaded.end()) return status::success();
        out.kernel = name;
        kernel_info info;
        cudaFuncAttributes attributes{};
        if (const status s = runtime_status(cudaFuncGetAttributes(&attributes, address), where,
                                            "this build has no code of the kernel for the current device");
            !s.ok())
          return s;
        if (const status s = detail::check_kernel(attributes, threads, shared_bytes, limits); !s.ok())
          return s;
        if (const status s = prepare(kernel, threads, shared_bytes, where, &info); !s.ok()) return s;
        loaded.push_back(address);
        out.report.kernels.push_back({name, info.registers, threads, info.static_shared_bytes,
                                      info.dynamic_shared_bytes, info.local_bytes});
        return status::success();
      });
  for (std::size_t i = 0; out.result.ok() && i < loaded.size(); ++i) {
    out.kernel = out.report.kernels[i].name;
    out.result = detail::check_loaded(loaded[i]);
  }
  if (out.result.ok() && out.report.local_bytes() > 0) {
    out.kernel = "use_local_memory";
    out.result = detail::set_local_memory_aside();
  }
  if (out.result.ok()) out.result = runtime_status(cudaDeviceSynchronize(), where, "a kernel's load failed");
  out.report.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  if (out.result.ok())
    out.result = runtime_status(cudaMemGetInfo(&free_after, &total), where, "free memory could not be read");
  if (out.result.ok()) out.kernel = "";
  out.report.bytes = free_before > free_after ? free_before - free_after : 0;
  return out;
}

}  // namespace nibble
