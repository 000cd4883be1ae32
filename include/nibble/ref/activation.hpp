// SPDX-License-Identifier: Apache-2.0
/// \file
/// Reference activations, fp64.
#pragma once

#include <cmath>

namespace nibble::ref {

/// 1 / (1 + e^-x)
[[nodiscard]] inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// x · sigmoid(x)
[[nodiscard]] inline double silu(double x) { return x * sigmoid(x); }

/// log(1 + e^x); x itself above 20, as the model defines it.
[[nodiscard]] inline double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

}  // namespace nibble::ref
