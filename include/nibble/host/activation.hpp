// SPDX-License-Identifier: Apache-2.0
/// \file
/// Elementwise functions, a few ulp accurate. An element's result does not depend on its place in the array.
#pragma once

#include <cstddef>

namespace nibble::host {

/// y = 1 / (1 + e^-x). y may be x, here and below.
void sigmoid(const float* x, float* y, std::size_t n);

/// y = x · sigmoid(x).
void silu(const float* x, float* y, std::size_t n);

/// y = log(1 + e^x), x itself above 20.
void softplus(const float* x, float* y, std::size_t n);

/// y = e^x.
void exponential(const float* x, float* y, std::size_t n);

/// y = silu(gate) · up.
void swiglu(const float* gate, const float* up, float* y, std::size_t n);

/// y = x · sigmoid(gate).
void sigmoid_gate(const float* x, const float* gate, float* y, std::size_t n);

/// y = y + x.
void add(float* y, const float* x, std::size_t n);

}  // namespace nibble::host
