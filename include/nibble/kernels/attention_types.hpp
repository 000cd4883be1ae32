// SPDX-License-Identifier: Apache-2.0
/// \file
/// Grouped-query attention over a paged cache: shapes, how a context is cut, workspaces.
///
/// For a row at position p, query head h and its KV head:
///     o = Σ_{j <= p} softmax_j(head_dim^-1/2 · rope(norm(q)) · rope(norm(k_j))) v_j   ⊙ sigmoid(gate)
/// Keys and values take part as the cache holds them, the row's own too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"
#include "nibble/core/device_class.hpp"
#include "nibble/kernels/step.hpp"

namespace nibble {

/// Sequences one launch takes.
inline constexpr int max_attention_sequences = 256;

/// What the attention kernels are specialised on.
struct attention_shape {
  int heads = 0;
  int kv_heads = 0;  ///< divides heads; head h reads KV head h / (heads / kv_heads)
  int head_dim = 0;
  int rotary_dim = 0;  ///< the first dimensions of a head that rotate, rotate-half
  bool gated = false;  ///< a gate of head_dim values follows each query head in its row
  bool zero_centred_norm = false;
  int page_tokens = 16;
  kv_format format = kv_format::bf16;

  friend constexpr bool operator==(const attention_shape&, const attention_shape&) = default;

  /// Query heads that share a KV head.
  [[nodiscard]] constexpr int group() const { return heads / kv_heads; }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int q_width() const {
    return heads * head_dim * (gated ? 2 : 1);
  }
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int kv_width() const { return kv_heads * head_dim; }
  /// A row of the fused projection: q (each head with its gate behind it), k, v.
  [[nodiscard]] constexpr int qkv_width() const { return q_width() + 2 * kv_width(); }
  [[nodiscard]] constexpr int output_width() const { return heads * head_dim; }
  /// Keys and values of one page of one layer.
  [[nodiscard]] constexpr std::size_t page_bytes() const {
    return 2 * static_cast<std::size_t>(kv_width()) * static_cast<std::size_t>(page_tokens) *
           static_cast<std::size_t>(bytes_of(format));
  }
  /// What is wrong with the shape, or null.
  [[nodiscard]] constexpr const char* fault() const {
    const auto power_of_two = [](int v) { return v > 0 && (v & (v - 1)) == 0; };
    if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0)
      return "the query heads must be a multiple of the KV heads";
    if (group() > 16) return "at most 16 query heads can share a KV head";
    if (group() > 8 && head_dim == 256) return "heads of 256 dimensions share a KV head by 8 at most";
    if (head_dim != 64 && head_dim != 128 && head_dim != 256) return "a head has 64, 128 or 256 dimensions";
    if (!power_of_two(rotary_dim) || rotary_dim > head_dim || rotary_dim < head_dim / 16)
      return "the rotary dimensions must be a power of two from head_dim / 16 to head_dim";
    if (!power_of_two(page_tokens) || page_tokens < 16 || page_tokens > 1024)
      return "the tokens of a page must be a power of two from 16 to 1024";
    return nullptr;
  }
  [[nodiscard]] constexpr bool valid() const { return fault() == nullptr; }
};

/// Tuning numbers. A row's bits depend on the numbers of the first group, never on those of the second.
struct attention_policy {
  int decode_warps = 8;          ///< 8, or 4 with two blocks a multiprocessor
  int most_chunks = 66;          ///< of a sequence and KV head: a wave at batch 1
  int least_chunk_tokens = 128;  ///< a multiple of 16, as the next
  int wide_chunk_tokens = 512;   ///< chunks grow up to this size before there are more than flat_chunks

  int decode_blocks = 132;  ///< the grid of decode, whatever the contexts
  int prefill_rows = 128;   ///< rows (token x query head) of a block: 128, or 64 where shared memory is short
  int append_blocks = 528;  ///< the most blocks of the kernel that fills the cache

  friend constexpr bool operator==(const attention_policy&, const attention_policy&) = default;
};

/// The policy for a device of `multiprocessors` whose blocks may have `shared_bytes` of shared memory.
[[nodiscard]] constexpr attention_policy select_attention(const attention_shape& shape, int multiprocessors,
                                                          int shared_bytes) {
  attention_policy p;
  p.decode_warps = shape.head_dim == 256 && shared_bytes < 160 * 1024 ? 4 : 8;
  p.decode_blocks = multiprocessors * 8 / p.decode_warps;
  p.most_chunks = std::clamp(p.decode_blocks / shape.kv_heads, 16, 144);
  p.prefill_rows = shape.head_dim == 256 && shared_bytes < 130 * 1024 ? 64 : 128;
  p.append_blocks = 4 * multiprocessors;
  return p;
}

[[nodiscard]] constexpr attention_policy select_attention(const attention_shape& shape,
                                                          device_class device = default_device) {
  return select_attention(shape, device.multiprocessors, device.shared_bytes());
}

/// Partial results that are added in one go; where there are more chunks, they are added in groups of
/// chunks_per_group first.
inline constexpr int flat_chunks = 16;
inline constexpr int chunks_per_group = 12;
/// Arrival counters of one KV head of one sequence: its groups, then the whole.
inline constexpr int counters_per_head = 16;
static_assert((144 + chunks_per_group - 1) / chunks_per_group < counters_per_head);

/// How decode cuts a context of `tokens` cached tokens: a function of that sequence alone.
struct context_chunks {
  int tokens = 0;  ///< of a chunk, a multiple of 16
  int count = 0;   ///< at least 1
};
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr context_chunks chunks_of(int tokens, int most_chunks,
                                                                    int least_chunk_tokens,
                                                                    int wide_chunk_tokens) {
  const int flat = (tokens + 16 * flat_chunks - 1) / (16 * flat_chunks) * 16;
  const int many = (tokens + 16 * most_chunks - 1) / (16 * most_chunks) * 16;
  int chunk = flat < wide_chunk_tokens ? flat : wide_chunk_tokens;
  chunk = chunk > many ? chunk : many;
  chunk = chunk > least_chunk_tokens ? chunk : least_chunk_tokens;
  const int count = (tokens + chunk - 1) / chunk;
  return {chunk, count > 1 ? count : 1};
}

/// Chunks of all sequences of a launch, at most. \param context_tokens tokens that the caches of all
/// sequences of a launch hold together, at most; 0: no bound is known
[[nodiscard]] constexpr std::size_t most_decode_chunks(int sequences, const attention_policy& policy,
                                                       std::size_t context_tokens = 0) {
  const auto s = static_cast<std::size_t>(sequences);
  const std::size_t all = s * static_cast<std::size_t>(policy.most_chunks);
  if (context_tokens == 0) return all;
  return std::min(all, s + context_tokens / static_cast<std::size_t>(policy.least_chunk_tokens));
}

/// Where the parts of the decode workspace lie.
struct attention_workspace {
  std::size_t counter_bytes = 0;  ///< at the start: zeroed once by the caller, left zero by every launch
  std::size_t sums_offset = 0;    ///< [chunks][kv_heads][group] (largest score, Σ) in fp32
  std::size_t values_offset = 0;  ///< [chunks][kv_heads][group][head_dim] in fp32
  std::size_t bytes = 0;
};
[[nodiscard]] constexpr attention_workspace attention_workspace_of(const attention_shape& shape,
                                                                   const attention_policy& policy,
                                                                   int sequences,
                                                                   std::size_t context_tokens = 0) {
  const auto aligned = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t rows =
      most_decode_chunks(sequences, policy, context_tokens) * static_cast<std::size_t>(shape.heads);
  attention_workspace w;
  w.counter_bytes = aligned(static_cast<std::size_t>(sequences) * static_cast<std::size_t>(shape.kv_heads) *
                            counters_per_head * sizeof(std::uint32_t));
  w.sums_offset = w.counter_bytes;
  w.values_offset = w.sums_offset + aligned(rows * 2 * sizeof(float));
  w.bytes = w.values_offset + aligned(rows * static_cast<std::size_t>(shape.head_dim) * sizeof(float));
  return w;
}

}  // namespace nibble
