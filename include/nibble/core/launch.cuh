// SPDX-License-Identifier: Apache-2.0
/// \file
/// One launch, ordinary or chained, that reports instead of aborting.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "nibble/core/device_class.hpp"
#include "nibble/core/status.hpp"

namespace nibble {

/// How a kernel follows the one before it on its stream.
enum class launch_chain : unsigned char {
  plain,  ///< it starts when the other has ended
  pdl,    ///< programmatic dependent launch (sm_90+): it starts early, asks for weights, then waits
};

/// How kernels follow each other on a class of devices where nothing speaks against it.
[[nodiscard]] constexpr launch_chain chain_of(device_class device) {
  return device.architecture >= 90 ? launch_chain::pdl : launch_chain::plain;
}

struct launch_options {
  cudaStream_t stream = nullptr;  ///< must be a created stream: the default stream is refused
  launch_chain chain = chain_of(default_device);
  /// What grids of one persistent block a multiprocessor leave to a kernel that runs beside them.
  int left_multiprocessors = 0;
};

/// What a loaded kernel takes.
struct kernel_info {
  const char* name = "";
  int registers = 0;
  int local_bytes = 0;
  int static_shared_bytes = 0;
  int dynamic_shared_bytes = 0;
  int threads = 0;
};

/// Launches `kernel`. No allocation, no synchronisation.
template <class... Parameters, class... Arguments>
status launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes,
              const launch_options& options, const char* where, const Arguments&... arguments) {
  if (options.stream == nullptr || options.stream == cudaStreamLegacy)
    return status::invalid(where,
                           "the default stream is not used: give a stream made by cudaStreamCreateWithFlags");
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = options.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = options.chain == launch_chain::pdl ? 1 : 0;
  return status::cuda(static_cast<int>(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...)), where,
                      "the CUDA runtime refused the launch");
}

/// Loads `kernel` on the current device, allows it its dynamic shared memory, and reports what it takes. To
/// be called for every kernel before anything is captured or caches are allocated.
template <class Kernel>
status prepare(Kernel kernel, int threads, std::size_t shared_bytes, const char* where,
               kernel_info* info = nullptr) {
  cudaFuncAttributes attributes{};
  if (const auto e = cudaFuncGetAttributes(&attributes, kernel); e != cudaSuccess)
    return status::cuda(static_cast<int>(e), where,
                        "this build has no code of the kernel for the current device");
  if (shared_bytes > 0) {
    if (const auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes));
        e != cudaSuccess)
      return status::cuda(static_cast<int>(e), where,
                          "the device has less shared memory than the kernel needs");
    if (const auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared);
        e != cudaSuccess)
      return status::cuda(static_cast<int>(e), where, "the shared-memory carve-out was refused");
  }
  if (info != nullptr)
    *info = {where,
             attributes.numRegs,
             static_cast<int>(attributes.localSizeBytes),
             static_cast<int>(attributes.sharedSizeBytes),
             static_cast<int>(shared_bytes),
             threads};
  return status::success();
}

}  // namespace nibble
