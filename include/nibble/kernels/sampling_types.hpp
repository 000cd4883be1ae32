// SPDX-License-Identifier: Apache-2.0
/// \file
/// Sampling on the device: what a row asks for, and where the memory lies.
///
/// The order of operations is that of host/sampling.hpp: allowed-token mask, penalties and bias on the
/// logits, temperature, top_k, top_p, min_p, the draw; ties to the lower id. Probability masses are summed as
/// integers (weights in units of 2^-44 of the largest), so a result does not depend on the grid; a token
/// lighter than 2^-45 of the likeliest is never drawn.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"

namespace nibble {

/// Log-probabilities a row can ask for beside the chosen token's own.
inline constexpr int max_top_logprobs = 20;

struct device_token_bias {
  std::int32_t token;
  float bias;
};

/// One row of a launch; an array of these lies on the device. Pointers are device pointers.
struct sampling_row {
  float temperature = 1;  ///< up to 1e-5: greedy
  int top_k = 0;          ///< 0 and less: off
  float top_p = 1;
  float min_p = 0;
  float repetition = 1;  ///< the penalties act on tokens marked in `seen`
  float presence = 0;
  float frequency = 0;
  int logprobs = -1;                 ///< below 0: none; n: the chosen token's and the n likeliest
  std::uint64_t seed = 0;            ///< with `step`, decides the draw as host::uniform_draw does
  std::uint64_t step = 0;            ///< tokens this request has drawn before
  std::uint64_t* step_at = nullptr;  ///< not null: the step is read there instead, and raised by one
  std::uint32_t* seen = nullptr;  ///< null, or [vocab]: bit 31 a prompt token, below it times generated; the
                                  ///< chosen token's count is raised
  const device_token_bias* bias = nullptr;  ///< [bias_count], each token at most once
  int bias_count = 0;
  const std::uint32_t* allowed =
      nullptr;  ///< null, or ⌈vocab / 32⌉ words: bit t % 32 of word t / 32 set where t may be drawn
};

/// What a row gets.
struct sampled_row {
  std::int32_t token;   ///< -1 with status 1
  std::int32_t status;  ///< 0 good, 1 the logits hold NaN or +inf, or nothing above -inf
  float logprob;        ///< of the raw logits at `token`
  std::int32_t top_count;
  std::int32_t top_token[max_top_logprobs];
  float top_logprob[max_top_logprobs];
};

/// Logits that one block looks at.
inline constexpr int sampling_chunk = 2048;
/// Buckets of the histogram over log-weights: 64 to the nat; the last takes what is lighter than any mass.
inline constexpr int sampling_buckets = 2048;
/// Tokens of one bucket that are looked at as a list; more take a slower way, over the whole row.
inline constexpr int sampling_candidates = 4096;

[[nodiscard]] NIBBLE_HOST_DEVICE constexpr int sampling_chunks(int vocab) {
  return (vocab + sampling_chunk - 1) / sampling_chunk;
}

namespace detail {
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t up_to_256(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}
}  // namespace detail

/// Where the parts of a row's workspace begin, in bytes.
struct sampling_layout {
  std::size_t control = 0, histogram = 0, chunks = 0, chunk_top = 0, candidates = 0, adjusted = 0, bytes = 0;
};
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr sampling_layout sampling_layout_of(int vocab) {
  const auto chunks = static_cast<std::size_t>(sampling_chunks(vocab));
  sampling_layout l;
  l.control = 0;
  l.histogram = l.control + 512;
  l.chunks = l.histogram + std::size_t{12} * sampling_buckets;
  l.chunk_top = l.chunks + detail::up_to_256(64 * chunks);
  l.candidates = l.chunk_top + detail::up_to_256(std::size_t{8} * max_top_logprobs * chunks);
  l.adjusted = l.candidates + std::size_t{8} * sampling_candidates;
  l.bytes = l.adjusted + detail::up_to_256(std::size_t{4} * static_cast<std::size_t>(vocab));
  return l;
}

/// Workspace of launches over at most `rows` rows that follow each other on one stream; 256-byte aligned,
/// zeroed once when allocated (launches leave what they need at zero).
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t sampling_workspace_bytes(int vocab, int rows) {
  return sampling_layout_of(vocab).bytes * static_cast<std::size_t>(rows);
}

}  // namespace nibble
