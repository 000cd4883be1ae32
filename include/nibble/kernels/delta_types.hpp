// SPDX-License-Identifier: Apache-2.0
/// \file
/// The gated delta rule on the device: what its kernels are specialised on, and where its memory lies.
///
/// From the rows q | k | v | z of the fused projection and x, the normalised input, per token and value head:
///
///     c = silu(causal_conv(q | k | v))
///     q̂ = c_q · rsqrt(Σ c_q² + 1e-6) · key_dim^-1/2;  k̂ likewise, unscaled
///     β = sigmoid(b · x);  e^g = exp(-exp(a_log) · softplus(a · x + dt_bias))
///     u = Sᵀk̂;  δ = β (v − e^g u);  S ← e^g S + k̂ δᵀ;  o = Sᵀq̂
///     out = o · rsqrt(mean o² + eps) ⊙ norm ⊙ silu(z)
///
/// All in fp32 from bf16 rows. Value head h reads key head h / (value_heads / key_heads).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"
#include "nibble/core/device_class.hpp"

namespace nibble {

/// Columns of a head's state that 256 threads hold.
inline constexpr int delta_columns = 32;

struct delta_shape {
  int hidden = 0;       ///< width of x, a multiple of 256
  int key_heads = 0;    ///
  int value_heads = 0;  ///< a multiple of key_heads
  int key_dim = 0;      ///< 64 or 128
  int value_dim = 0;    ///< a multiple of 32, at most 256; 64 and 128 are tested
  int conv_width = 4;   ///< taps of the causal convolution: 4

  friend constexpr bool operator==(const delta_shape&, const delta_shape&) = default;

  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int key_width() const { return key_heads * key_dim; }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int value_width() const { return value_heads * value_dim; }
  /// Channels of the convolution: q | k | v.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int channels() const { return 2 * key_width() + value_width(); }
  /// Elements of a projected row: q | k | v | z.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int projected() const { return channels() + value_width(); }
  /// Runs of 32 columns of a value head.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int splits() const { return value_dim / delta_columns; }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t recurrent_bytes() const {
    return std::size_t{4} * static_cast<std::size_t>(value_heads) * static_cast<std::size_t>(key_dim) *
           static_cast<std::size_t>(value_dim);
  }
  /// A ring of the last conv_width projected inputs (bf16): the input of position p is entry p mod
  /// conv_width.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t window_bytes() const {
    return std::size_t{2} * static_cast<std::size_t>(conv_width) * static_cast<std::size_t>(channels());
  }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr bool valid() const {
    return hidden > 0 && hidden % 256 == 0 && key_heads > 0 && value_heads > 0 &&
           value_heads % key_heads == 0 && (key_dim == 64 || key_dim == 128) &&
           (value_dim == 32 || value_dim == 64 || value_dim == 128 || value_dim == 256) && conv_width == 4;
  }
};

/// Bytes of one layer and slot: the fp32 state in the kernels' own order, then the window. Zero bytes are the
/// empty state; the position of its sequence is then 0. A multiple of 256.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t state_bytes(const delta_shape& s) {
  return (s.recurrent_bytes() + s.window_bytes() + 255) / 256 * 256;
}

/// Where element (head, i, column) of the state lies, in floats: for those who look at a state from outside.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t state_index(const delta_shape& s, int head, int i,
                                                                   int column) {
  // Lane l (0…15) of a column pair holds the rows 4 l … 4 l + 3 of every 64; 16 bytes are two rows of a pair.
  const int split = column / delta_columns, pair = column % delta_columns / 2;
  const int lane = i % 64 / 4, j = i / 64 * 2 + i % 4 / 2;
  return (static_cast<std::size_t>(head * s.splits() + split) * static_cast<std::size_t>(s.key_dim / 32) +
          static_cast<std::size_t>(j)) *
             1024 +
         static_cast<std::size_t>(4 * (16 * pair + lane) + 2 * (i % 2) + column % 2);
}

/// Tokens of a chunk, and from where to where a sequence's piece goes in chunks.
inline constexpr int delta_chunk = 64;

/// q̂ of chunks is so many times larger, so that what is left of its small numbers is not lost in f16.
inline constexpr float delta_query_factor = 64;

/// The part of a piece that is computed in chunks: whole chunks that begin at absolute positions that are
/// multiples of delta_chunk, all of them. What is before and behind goes token by token.
struct delta_chunks {
  int first = 0;  ///< row of the first chunk, from the piece's first row
  int count = 0;  ///< chunks
};
/// \param position of the piece's first row; negative: padding  \param rows of the piece
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr delta_chunks delta_chunks_of(int position, int rows) {
  const int first = (delta_chunk - position % delta_chunk) % delta_chunk;
  return position < 0 || rows - first < delta_chunk ? delta_chunks{}
                                                    : delta_chunks{first, (rows - first) / delta_chunk};
}

/// What is prepared of a chunk and value head, as the chunks' kernel reads it: T, then A, both lower
/// triangular, as f16 and the f16 of what is left, in squares of 16 × 16, the squares of a row one after
/// another, row after row. Of a square the upper eight rows come first; a lane's 16 bytes are its right
/// operand of the matrix instruction and that of what is left.
struct delta_chunk_record {
  static constexpr int squares = 10, square_bytes = 1024;
  static constexpr int matrix_bytes = squares * square_bytes;
  static constexpr int factors_at = 2 * matrix_bytes;  ///< γ_i, then γ_last / γ_i, in fp32
  static constexpr int bytes = factors_at + 8 * delta_chunk;

  /// Where 8 rows × 16 columns of a matrix lie.
  [[nodiscard]] NIBBLE_HOST_DEVICE static constexpr int at(int eight_rows, int sixteen_columns) {
    const int square = eight_rows / 2;
    return square_bytes * (square * (square + 1) / 2 + sixteen_columns) + square_bytes / 2 * (eight_rows % 2);
  }
};

/// Where the records of a workspace begin, in bytes: behind q̂ | k̂ | v (o takes the place of v) in fp32 and
/// decay and β. A row of a chunk has q̂ and k̂ as pairs of f16, the second what the first left, in the same
/// bytes: the head's first ones, then its second ones; q̂ times delta_query_factor.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t delta_records_at(int channels, int value_heads,
                                                                        int rows) {
  const std::size_t floats = static_cast<std::size_t>(channels) + 2 * static_cast<std::size_t>(value_heads);
  return (4 * floats * static_cast<std::size_t>(rows) + 255) / 256 * 256;
}

/// Workspace of a prefill launch over `rows` rows, in bytes; 256-byte aligned, contents do not matter.
/// Per row: see delta_records_at; per 64 rows and value head a record.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t delta_prefill_workspace_bytes(const delta_shape& s,
                                                                                     int rows) {
  return delta_records_at(s.channels(), s.value_heads, rows) + static_cast<std::size_t>(rows / delta_chunk) *
                                                                   static_cast<std::size_t>(s.value_heads) *
                                                                   delta_chunk_record::bytes;
}

}  // namespace nibble
