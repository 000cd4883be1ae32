// SPDX-License-Identifier: Apache-2.0
// The answer of a build without device code.
#include "model/device_probe.hpp"

namespace qwen3_moe {

device_probe probe_cuda_device() {
  return {false, {}, "this build has no CUDA backend: build it with nvcc of CUDA 13 and NIBBLE_CUDA=on"};
}

}  // namespace qwen3_moe
