// SPDX-License-Identifier: Apache-2.0
/// \file
/// Rotary position embedding on the first dimensions of each head.
#pragma once

#include <cstddef>
#include <nibble/host/sequence_span.hpp>
#include <nibble/host/thread_pool.hpp>
#include <span>
#include <vector>

namespace nibble::host {

/// The frequencies theta^(-2i/rotary_dim), i < rotary_dim/2, rounded to fp32.
/// \param rotary_dim even, at least 2
[[nodiscard]] std::vector<float> rope_frequencies(double theta, int rotary_dim);

/// cos and sin of position · frequency (the product in fp32) for every row of the spans.
/// \param cosine,sine [rows][frequencies.size()], dense
void rope_angles(std::span<const sequence_span> spans, std::span<const float> frequencies, float* cosine,
                 float* sine);

/// In place, rotate-half: with h = frequencies, (x_i, x_{i+h}) becomes (x_i c - x_{i+h} s, x_{i+h} c + x_i s)
/// for i < h; dimensions from 2h on are left alone.
/// \param x at row·row_stride + head·head_stride  \param cosine,sine [rows][half], from rope_angles
void rope(thread_pool& pool, float* x, std::ptrdiff_t row_stride, std::ptrdiff_t head_stride, int rows,
          int heads, int half, const float* cosine, const float* sine);

}  // namespace nibble::host
