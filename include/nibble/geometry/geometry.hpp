// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a kernel is specialised on: the shape and format of a weight matrix, as a template argument.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace nibble {

/// How the elements of a weight matrix are stored.
enum class weight_format : std::uint8_t {
  bf16,   ///< 2 bytes an element
  fp8,    ///< E4M3, 1 byte an element, one fp32 scale per row segment
  nvfp4,  ///< E2M1, 4 bits an element, one E4M3 scale per 16 along K, one fp32 scale per row segment
};

[[nodiscard]] constexpr std::string_view name_of(weight_format format) {
  switch (format) {
    case weight_format::bf16:
      return "bf16";
    case weight_format::fp8:
      return "fp8";
    case weight_format::nvfp4:
      return "nvfp4";
  }
  return "?";
}

/// Elements that share one block scale.
inline constexpr int nvfp4_group = 16;

/// Row segments a fused matrix may have, q|k|v being the most.
inline constexpr int max_segments = 4;

/// A weight matrix W[n, k] of y = x · Wᵀ. All members are public, so it is a structural template argument and
/// equality deduplicates kernels. A fused matrix (gate|up, q|k|v, qkv|z) is one geometry with row segments,
/// each with its own fp32 scale.
struct geometry {
  int n = 0;  ///< rows: outputs
  int k = 0;  ///< columns: inputs
  weight_format format = weight_format::bf16;
  std::array<int, max_segments> segment_rows{};  ///< rows of each segment, then zeros; all zero: one segment

  friend constexpr bool operator==(const geometry&, const geometry&) = default;
  friend constexpr auto operator<=>(const geometry&, const geometry&) = default;

  [[nodiscard]] constexpr int segments() const {
    int count = 0;
    while (count < max_segments && segment_rows[static_cast<std::size_t>(count)] != 0) ++count;
    return count == 0 ? 1 : count;
  }
  /// Rows of segment `i`.
  [[nodiscard]] constexpr int rows_of(int i) const {
    return segment_rows[0] == 0 ? n : segment_rows[static_cast<std::size_t>(i)];
  }
  /// First row of segment `i`.
  [[nodiscard]] constexpr int first_row_of(int i) const {
    int row = 0;
    for (int j = 0; j < i; ++j) row += rows_of(j);
    return row;
  }
  /// Positive sizes, segments that add up to n, K a multiple of 16 where block scales need it.
  [[nodiscard]] constexpr bool valid() const {
    if (n < 1 || k < 1 || (format == weight_format::nvfp4 && k % nvfp4_group != 0)) return false;
    int rows = 0;
    for (int i = 0; i < segments(); ++i) {
      if (rows_of(i) < 1) return false;
      rows += rows_of(i);
    }
    return rows == n;
  }

  /// Bytes of the element codes.
  [[nodiscard]] constexpr std::uint64_t code_bytes() const {
    const auto elements = static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(k);
    switch (format) {
      case weight_format::bf16:
        return elements * 2;
      case weight_format::fp8:
        return elements;
      case weight_format::nvfp4:
        return elements / 2;
    }
    return 0;
  }
  /// Bytes of the E4M3 block scales.
  [[nodiscard]] constexpr std::uint64_t block_scale_bytes() const {
    if (format != weight_format::nvfp4) return 0;
    return static_cast<std::uint64_t>(n) * static_cast<std::uint64_t>(k) / nvfp4_group;
  }
  /// Everything one product reads of the matrix, the fp32 scales of the segments included.
  [[nodiscard]] constexpr std::uint64_t bytes() const {
    const std::uint64_t scales =
        format == weight_format::bf16 ? 0 : 4u * static_cast<std::uint64_t>(segments());
    return code_bytes() + block_scale_bytes() + scales;
  }

  /// "nvfp4 12288x2048 (8192+4096)", the label of tests and benchmarks.
  [[nodiscard]] std::string name() const {
    std::string text(name_of(format));
    text += " " + std::to_string(n) + "x" + std::to_string(k);
    if (segments() > 1) {
      for (int i = 0; i < segments(); ++i) text += (i == 0 ? " (" : "+") + std::to_string(rows_of(i));
      text += ")";
    }
    return text;
  }
};

/// A geometry of one segment.
[[nodiscard]] constexpr geometry matrix(int n, int k, weight_format format) { return {n, k, format, {}}; }

/// A fused geometry: row segments on top of each other.
template <class... Rows>
[[nodiscard]] constexpr geometry fused(int k, weight_format format, Rows... rows) {
  static_assert(sizeof...(Rows) >= 2 && sizeof...(Rows) <= max_segments,
                "a fused matrix has two to four row segments");
  return {(0 + ... + rows), k, format, {rows...}};
}

}  // namespace nibble
