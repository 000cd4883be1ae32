// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the operations on a GPU take and give: rows of activations and logits in device memory, never owned.
#pragma once

#include <cuda_bf16.h>

namespace qwen3_moe {

/// A matrix of bf16 activations, rows dense.
struct device_rows {
  __nv_bfloat16* data = nullptr;
  int rows = 0;
  int columns = 0;
};
/// Rows that stand for their RMSNorm. `weight`: the norm is still to be taken, by the kernel that reads them;
/// null: it has been.
struct normed_rows {
  const __nv_bfloat16* data = nullptr;
  int rows = 0;
  int columns = 0;
  const float* weight = nullptr;
};
/// Those rows of the residual stream whose logits are wanted; nothing is copied, the norm gathers them.
struct selected_rows {
  int rows = 0;
};
struct device_logits {
  float* data = nullptr;
  int rows = 0;
};

}  // namespace qwen3_moe
