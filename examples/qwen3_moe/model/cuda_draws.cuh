// SPDX-License-Identifier: Apache-2.0
/// \file
/// What draws on the device need of each slot: options, tokens seen, how many were drawn.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "engine/model_runner.hpp"
#include "model/device_workspace.hpp"
#include "nibble/core/driver.cuh"
#include "nibble/core/driver_error.hpp"
#include "nibble/kernels/sampling_params.cuh"

namespace qwen3_moe {

/// Everything is sent in the order of the stream, so a step in flight keeps the options it began with.
class cuda_draws {
 public:
  cuda_draws(const model_config& c, const device_workspace& w, const device_sizes& sizes,
             std::byte* workspace, cudaStream_t stream)
      : vocab_(c.vocab_size), stream_(stream), rows_(static_cast<std::size_t>(sizes.sequences)) {
    const auto at = [workspace]<class T>(T*& pointer, std::uint64_t offset) {
      pointer = reinterpret_cast<T*>(workspace + offset);
    };
    at(sampling_, w.sampling);
    at(device_rows_, w.sampling_rows);
    at(sampled_, w.sampled);
    at(seen_, w.seen);
    at(allowed_, w.allowed);
    at(bias_, w.bias);
    at(drawn_, w.drawn);
    at(previous_, w.previous);
    at(forbidden_, w.forbidden);
  }

  [[nodiscard]] static bool can_draw(const sampling_options& o) {
    return o.logprobs.value_or(0) <= nibble::max_top_logprobs &&
           o.logit_bias.size() <= static_cast<std::size_t>(most_device_biases);
  }

  void forbid(std::span<const std::int32_t> ids) {
    forbidden_count_ = static_cast<int>(ids.size());
    send(forbidden_, ids.data(), ids.size());
  }

  void set(int slot, const sampling_options& o, const draw_history& history) {
    const auto s = static_cast<std::size_t>(slot);
    const auto width = static_cast<std::size_t>(vocab_), words = (width + 31) / 32;
    nibble::sampling_row& row = rows_[s];
    row = {};
    row.temperature = o.temperature, row.top_k = o.top_k, row.top_p = o.top_p, row.min_p = o.min_p;
    row.repetition = o.repetition_penalty, row.presence = o.presence_penalty;
    row.frequency = o.frequency_penalty;
    row.logprobs = o.logprobs.value_or(-1);
    row.seed = o.seed;
    row.step_at = drawn_ + s;
    send(drawn_ + s, &history.drawn, 1);
    if (o.penalised()) {
      row.seen = seen_ + s * width;
      std::vector<std::uint32_t> counts(width, 0);
      for (const auto& token : history.seen)
        counts[static_cast<std::size_t>(token.token)] =
            0x8000'0000u | static_cast<std::uint32_t>(token.generated);
      send(row.seen, counts.data(), width);
    }
    if (!o.logit_bias.empty()) {
      auto* to = bias_ + s * most_device_biases;
      std::vector<nibble::device_token_bias> list;
      for (const auto& bias : o.logit_bias) list.push_back({bias.token, bias.bias});
      send(to, list.data(), list.size());
      row.bias = to, row.bias_count = static_cast<int>(list.size());
    }
    if (!o.allowed.empty()) {
      auto* to = allowed_ + s * words;
      send(to, o.allowed.data(), words);
      row.allowed = to;
    }
  }

  /// The draws of a step whose wanted rows belong to these slots, in order. \param rows host memory for as
  /// many rows, kept until the step is over  \param drawing_slot the slots on the device
  [[nodiscard]] nibble::sampling_launch_params prepare(std::span<const std::int32_t> slots,
                                                       nibble::sampling_row* rows,
                                                       const std::int32_t* drawing_slot) {
    nibble::sampling_launch_params p;
    p.rows = static_cast<int>(slots.size());
    p.all_greedy = true, p.any_logprobs = false;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const nibble::sampling_row& row = rows_[static_cast<std::size_t>(slots[i])];
      rows[i] = row;
      p.all_greedy &=
          row.temperature <= 1e-5f && row.seen == nullptr && row.bias == nullptr && row.allowed == nullptr;
      p.any_logprobs |= row.logprobs >= 0;
    }
    send(device_rows_, rows, slots.size());
    p.row = device_rows_, p.out = sampled_;
    p.tokens = previous_, p.token_index = drawing_slot;
    p.workspace = sampling_;
    return p;
  }
  void read(nibble::sampled_row* to, std::size_t rows) {
    nibble::require(nibble::runtime_status(
        cudaMemcpyAsync(to, sampled_, rows * sizeof *to, cudaMemcpyDeviceToHost, stream_), where,
        "the drawn tokens could not be read"));
  }

  [[nodiscard]] const std::int32_t* forbidden() const { return forbidden_; }
  [[nodiscard]] int forbidden_count() const { return forbidden_count_; }

 private:
  static constexpr const char* where = "qwen3_moe::cuda_draws";

  template <class T>
  void send(T* to, const T* from, std::size_t count) {
    if (count > 0)
      nibble::require(nibble::runtime_status(
          cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream_), where,
          "the options of a draw could not be sent"));
  }

  int vocab_;
  cudaStream_t stream_;
  std::vector<nibble::sampling_row> rows_;  ///< of each slot
  int forbidden_count_ = 0;
  std::byte* sampling_ = nullptr;
  nibble::sampling_row* device_rows_ = nullptr;
  nibble::sampled_row* sampled_ = nullptr;
  std::uint32_t *seen_ = nullptr, *allowed_ = nullptr;
  nibble::device_token_bias* bias_ = nullptr;
  std::uint64_t* drawn_ = nullptr;
  std::int32_t *previous_ = nullptr, *forbidden_ = nullptr;
};

}  // namespace qwen3_moe
