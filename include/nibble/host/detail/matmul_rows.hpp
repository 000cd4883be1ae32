// SPDX-License-Identifier: Apache-2.0
/// \file
/// The single-threaded core of linear() and of the experts: some rows of a weight times some rows of x.
#pragma once

#include <cstdint>
#include <nibble/host/linear.hpp>

namespace nibble::host::detail {

/// Floats that a packed row of k values takes. Rows are packed in the order in which the kernel of this
/// format and instruction set meets them, and padded with zeros.
[[nodiscard]] int packed_length(weight_format format, int k);

/// Whether a plain row can be used as it lies, without packing.
[[nodiscard]] bool is_packed(weight_format format, int k);

/// Packs one row of k floats into packed_length(format, k) floats.
void pack_row(weight_format format, const float* x, int k, float* out);

/// y[r][i] = packed_rows[r] · W[i] for r < m and i in [n_begin, n_end).
void matmul_rows(const weight_view& weight, int n_begin, int n_end, const float* const* packed_rows, int m,
                 float* const* y);

}  // namespace nibble::host::detail
