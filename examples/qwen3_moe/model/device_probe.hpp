// SPDX-License-Identifier: Apache-2.0
/// \file
/// Whether this machine has a GPU that this program can use. Needs no CUDA header; works without a driver.
#pragma once

#include <string>

#include "nibble/core/device_class.hpp"

namespace qwen3_moe {

struct device_probe {
  bool usable = false;
  std::string name;            ///< of the device, where there is one
  std::string reason;          ///< why it cannot be used; empty where it can
  int compute_capability = 0;  ///< 10 × major + minor
};

/// "X is sm_89, which this build has no code for", and how to build some, where nibble has any.
[[nodiscard]] inline std::string missing_architecture(const std::string& name, int compute_capability) {
  const std::string text =
      name + " is sm_" + std::to_string(compute_capability) + ", which this build has no code for; ";
  int best = 0;
  for (const nibble::device_class& one : nibble::device_classes)
    if (nibble::runs_on(one, compute_capability)) best = one.architecture;  // they are in ascending order
  if (best == 0) return text + "nibble has kernels for sm_80, 86, 87, 89, 90, 100 and 120";
  return text + "build with -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(best) + (best >= 90 ? "a" : "");
}

/// Looks at the current CUDA device. Makes no context where there is no usable one.
[[nodiscard]] device_probe probe_cuda_device();

}  // namespace qwen3_moe
