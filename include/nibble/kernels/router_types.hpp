// SPDX-License-Identifier: Apache-2.0
/// \file
/// Expert choice on the device: RMSNorm, router logits, softmax and top k, the shared expert's gate.
///
///     x = bf16(rms_norm(hidden));  l = W x;  the top_k largest, ties to the lower id;
///     weight = e^(l - max) / (Σ over the chosen, or over all);  gate = sigmoid(w · x)
///
/// fp32 sums over K in runs of 64, each one chain of matrix instructions, added in the order of K: so the
/// logits of a row are the same bits for any number of rows and in both kernels.
#pragma once

#include <cstddef>

#include "nibble/core/config.hpp"
#include "nibble/core/device_class.hpp"

namespace nibble {

/// Rows that the one-kernel path takes.
inline constexpr int max_router_decode_rows = 112;

/// Rows that share a block on the one-kernel path: few, as long as the groups' blocks fit the device.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr int router_group_rows(int rows) {
  return rows <= 1 ? 1 : rows <= 28 ? 4 : rows <= 56 ? 8 : 16;
}

struct router_shape {
  int hidden = 0;         ///< a multiple of 256
  int experts = 0;        ///< at most 512
  int top_k = 0;          ///< at most 32 and at most experts
  bool shared = false;    ///< there is a shared-expert gate
  bool normalise = true;  ///< weights are divided by the sum of the chosen ones

  friend constexpr bool operator==(const router_shape&, const router_shape&) = default;
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr bool valid() const {
    return hidden > 0 && hidden % 256 == 0 && experts > 0 && experts <= 512 && top_k > 0 && top_k <= 32 &&
           top_k <= experts;
  }
  /// Row tiles of 16: the experts', and one for the gate.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int tiles() const {
    return (experts + 15) / 16 + (shared ? 1 : 0);
  }
};

/// Workspace of router launches that follow each other on one stream; 256-byte aligned, zeroed once when
/// allocated: every launch leaves it so.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t router_workspace_bytes(const router_shape& s) {
  return std::size_t{4} * max_router_decode_rows * 16 * static_cast<std::size_t>(s.tiles());
}

}  // namespace nibble
