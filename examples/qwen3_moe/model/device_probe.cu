// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "model/device_probe.hpp"

namespace qwen3_moe {
namespace {

__global__ void probe_kernel() {}

}  // namespace

device_probe probe_cuda_device() {
  int devices = 0;
  if (const auto e = cudaGetDeviceCount(&devices); e != cudaSuccess || devices == 0) {
    static_cast<void>(cudaGetLastError());
    if (e == cudaErrorInsufficientDriver) {
      int driver = 0;
      static_cast<void>(cudaDriverGetVersion(&driver));
      if (driver != 0)
        return {false,
                {},
                "the NVIDIA driver is too old for CUDA 13 (it offers " + std::to_string(driver / 1000) + "." +
                    std::to_string(driver % 1000 / 10) + ")"};
      return {false, {}, "this machine has no NVIDIA driver"};
    }
    return {false, {}, "this machine has no usable NVIDIA GPU"};
  }
  int device = 0;
  cudaDeviceProp properties{};
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaGetDeviceProperties(&properties, device);
  if (e != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {false, {}, std::string("the GPU does not answer: ") + cudaGetErrorString(e)};
  }
  const int capability = 10 * properties.major + properties.minor;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, probe_kernel) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {false, properties.name, missing_architecture(properties.name, capability), capability};
  }
  return {true, properties.name, {}, capability};
}

}  // namespace qwen3_moe
