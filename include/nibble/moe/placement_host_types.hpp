// SPDX-License-Identifier: Apache-2.0
/// \file
/// Missing experts that the CPU computes while others are fetched: what kernel and host thread share.
///
///     place (lists them) → ask_host → fetch → gate|up → down → add_from_host
///
/// y[t] gains Σ weight · expert(x[t]) over the listed experts, summed by the host in fp32 and added to the
/// bf16 row after the other experts: one rounding more than on the device, and another order of the sum.
/// Everything else of a step is the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

/// Tokens of a step that hands work to the CPU.
inline constexpr int most_host_rows = 16;

/// In locked host memory. The device writes a question and then its number; the host writes the answer's rows
/// and then the same number. There is one question at a time.
struct host_experts_mail {
  alignas(128) std::uint32_t asked = 0;  ///< device: number of the question
  std::int32_t layer = 0, rows = 0, count = 0;
  std::int32_t experts[most_split_misses] = {};
  alignas(128) std::uint64_t answered = 0;  ///< host: number << 32 | 1 good, 2 failed
};

struct host_experts_params {
  const std::int32_t* host_list = nullptr;  ///< of the placement
  int layer = 0;
  int rows = 0;    ///< at most most_host_rows
  int hidden = 0;  ///< a multiple of 8
  int top_k = 0;
  const std::int32_t* ids = nullptr;  ///< [rows][top_k]
  const float* weights = nullptr;     ///< [rows][top_k]
  const void* x = nullptr;            ///< bf16 [rows][hidden], rows ldx apart, 16-byte aligned
  int ldx = 0;
  void* y = nullptr;  ///< bf16 [rows][hidden], rows ldy apart, 16-byte aligned
  int ldy = 0;
  host_experts_mail* mail = nullptr;
  std::uint8_t* rows_out = nullptr;   ///< locked: host_rows_out_bytes
  const float* rows_in = nullptr;     ///< locked: [most_host_rows][hidden]
  std::uint32_t* asked = nullptr;     ///< device memory, zero at the start: questions so far
  std::uint64_t* failures = nullptr;  ///< residency_counts::failed
};

/// x as bf16, then ids, then weights.
[[nodiscard]] constexpr std::size_t host_rows_out_bytes(int hidden, int top_k) {
  return static_cast<std::size_t>(most_host_rows) *
         (2 * static_cast<std::size_t>(hidden) + 8 * static_cast<std::size_t>(top_k));
}

}  // namespace nibble::moe
