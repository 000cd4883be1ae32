// SPDX-License-Identifier: Apache-2.0
/// \file
/// Whether this machine has a GPU that this program can use. Needs no CUDA header; works without a driver.
#pragma once

#include <string>

namespace qwen3_moe {

struct device_probe {
  bool usable = false;
  std::string name;    ///< of the device, where there is one
  std::string reason;  ///< why it cannot be used; empty where it can
};

/// Looks at the current CUDA device. Makes no context where there is no usable one.
[[nodiscard]] device_probe probe_cuda_device();

}  // namespace qwen3_moe
