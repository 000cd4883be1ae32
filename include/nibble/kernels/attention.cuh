// SPDX-License-Identifier: Apache-2.0
/// \file
/// Launching attention: three kernel families of one shape.
///
///     attention_decode_family   one row per sequence, all in one kernel
///     attention_append_family   prefill 1 of 2: keys and values into the cache
///     attention_prefill_family  prefill 2 of 2: rows of any number over the cache, which holds theirs too
#pragma once

#include <algorithm>
#include <cstdint>

#include "nibble/core/launch.cuh"
#include "nibble/kernels/attention_decode.cuh"
#include "nibble/kernels/attention_prefill.cuh"
#include "nibble/kernels/kv_append.cuh"

namespace nibble {
namespace detail {

template <attention_shape S>
status check_attention(const attention_params& p, const char* where) {
  static_assert(S.heads > 0 && S.kv_heads > 0 && S.heads % S.kv_heads == 0 && S.group() <= 16,
                "the query heads must be a multiple of the KV heads, at most 16 to one");
  static_assert(S.valid(), "attention has no kernels for this shape: attention_shape::fault() says why");
  const auto aligned = [](const void* a, std::uintptr_t to) {
    return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % to == 0;
  };
  if (p.step.sequences < 1 || p.step.sequences > max_attention_sequences)
    return status::invalid(where, "a launch takes 1 to 256 sequences");
  if (p.step.first_row == nullptr || p.step.position == nullptr || p.step.pages == nullptr ||
      p.step.page_stride < 1)
    return status::invalid(where, "the step lacks its rows, positions or pages");
  if (!aligned(p.pool.base, 16) || p.pool.page_bytes % 16 != 0 || p.pool.layer_offset_bytes % 16 != 0 ||
      p.pool.page_bytes < p.pool.layer_offset_bytes + S.page_bytes())
    return status::invalid(where,
                           "the pages need 16-byte addresses and room for the layer's keys and values");
  if (!aligned(p.qkv, 16) || p.ldqkv % 8 != 0 || p.ldqkv < S.qkv_width())
    return status::invalid(
        where, "qkv needs a 16-byte address and a row stride of the fused width or more, a multiple of 8");
  if (p.q_norm == nullptr || p.k_norm == nullptr || p.inverse_frequencies == nullptr)
    return status::invalid(where, "norm weights or frequencies are missing");
  return status::success();
}

template <attention_shape S>
status check_attention_output(const attention_params& p, const char* where) {
  if (p.out == nullptr || reinterpret_cast<std::uintptr_t>(p.out) % 16 != 0 || p.ldo % 8 != 0 ||
      p.ldo < S.output_width())
    return status::invalid(
        where, "the output needs a 16-byte address and a row stride of all heads or more, a multiple of 8");
  return status::success();
}

}  // namespace detail

/// Attention of one row per sequence: row first_row[s] of qkv, which becomes token position[s]. Writes its
/// key and value to the cache and its output row. One grid for every context.
///
/// A row's result depends on its sequence alone, bit for bit. The workspace must hold the launch's sequences
/// and contexts.
template <attention_shape Shape, attention_policy Policy = select_attention(Shape)>
struct attention_decode_family {
  static constexpr const char* name = "attention_decode";
  static constexpr auto kernel =
      attention_decode<Policy.decode_warps, Policy.most_chunks, Policy.least_chunk_tokens,
                       Policy.wide_chunk_tokens, Shape.heads, Shape.kv_heads, Shape.head_dim,
                       Shape.rotary_dim, int{Shape.gated}, int{Shape.zero_centred_norm}, Shape.page_tokens,
                       int(Shape.format)>;
  static constexpr int threads = 32 * Policy.decode_warps;
  static constexpr std::size_t shared_bytes = sizeof(device::decode_shared<Shape, Policy.decode_warps>);

  /// \param context_tokens tokens that the sequences of a launch hold together at most, 0: unknown
  [[nodiscard]] static constexpr attention_workspace workspace(int sequences,
                                                               std::size_t context_tokens = 0) {
    return attention_workspace_of(Shape, Policy, sequences, context_tokens);
  }
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(kernel, threads, shared_bytes, name);
  }
  static status launch(const attention_params& p, const launch_options& options) {
    static_assert((Policy.decode_warps == 4 || Policy.decode_warps == 8) &&
                      Policy.least_chunk_tokens % 16 == 0 && Policy.wide_chunk_tokens % 16 == 0 &&
                      Policy.most_chunks >= 1 && Policy.most_chunks <= flat_chunks * chunks_per_group &&
                      (Policy.most_chunks + chunks_per_group - 1) / chunks_per_group < counters_per_head,
                  "chunks are whole 16-token tiles, and their number fits the arrival counters");
    if (const status s = detail::check_attention<Shape>(p, name); !s.ok()) return s;
    if (const status s = detail::check_attention_output<Shape>(p, name); !s.ok()) return s;
    if (p.workspace == nullptr || reinterpret_cast<std::uintptr_t>(p.workspace) % 256 != 0 ||
        p.layout.counter_bytes < workspace(p.step.sequences, 1).counter_bytes)
      return status::invalid(
          name, "the workspace is missing, not 256-byte aligned or laid out for fewer sequences");
    return nibble::launch(kernel, dim3(static_cast<unsigned>(Policy.decode_blocks)), threads, shared_bytes,
                          options, name, p);
  }
};

/// Writes the keys and values of all rows of the step to the cache.
template <attention_shape Shape, attention_policy Policy = select_attention(Shape)>
struct attention_append_family {
  static constexpr const char* name = "attention_append";
  static constexpr auto kernel =
      attention_append<Shape.heads, Shape.kv_heads, Shape.head_dim, Shape.rotary_dim, int{Shape.gated},
                       int{Shape.zero_centred_norm}, Shape.page_tokens, int(Shape.format)>;
  static constexpr int threads = attention_append_threads;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(kernel, threads, std::size_t{0}, name);
  }
  static status launch(const attention_params& p, const launch_options& options) {
    if (const status s = detail::check_attention<Shape>(p, name); !s.ok()) return s;
    if (p.rows < 1) return status::invalid(name, "a launch has at least one row");
    const long long heads = 2ll * p.rows * Shape.kv_heads, warps = threads / 32;
    const auto blocks = std::min<long long>((heads + warps - 1) / warps, Policy.append_blocks);
    return nibble::launch(kernel, dim3(static_cast<unsigned>(blocks)), threads, 0, options, name, p);
  }
};

/// Attention of all rows of the step over the cache, to which attention_append_family has added them.
template <attention_shape Shape, attention_policy Policy = select_attention(Shape)>
struct attention_prefill_family {
  static constexpr const char* name = "attention_prefill";
  static constexpr auto kernel =
      attention_prefill<Policy.prefill_rows, Shape.heads, Shape.kv_heads, Shape.head_dim, Shape.rotary_dim,
                        int{Shape.gated}, int{Shape.zero_centred_norm}, Shape.page_tokens, int(Shape.format)>;
  static constexpr int threads = 2 * Policy.prefill_rows;
  static constexpr std::size_t shared_bytes = sizeof(device::prefill_shared<Shape, Policy.prefill_rows>);

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(kernel, threads, shared_bytes, name);
  }
  static status launch(const attention_params& p, const launch_options& options) {
    static_assert(Policy.prefill_rows == 64 || Policy.prefill_rows == 128, "a block has 64 or 128 rows");
    if (const status s = detail::check_attention<Shape>(p, name); !s.ok()) return s;
    if (const status s = detail::check_attention_output<Shape>(p, name); !s.ok()) return s;
    if (p.rows < 1) return status::invalid(name, "a launch has at least one row");
    const long long pairs = static_cast<long long>(p.rows) * Shape.group();
    const long long blocks = std::min<long long>(pairs / Policy.prefill_rows + p.step.sequences, pairs);
    return nibble::launch(kernel, dim3(static_cast<unsigned>(blocks * Shape.kv_heads)), threads, shared_bytes,
                          options, name, p);
  }
};

}  // namespace nibble
