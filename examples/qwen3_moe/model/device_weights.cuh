// SPDX-License-Identifier: Apache-2.0
/// \file
/// A model's weights on the device: packing on the host, copying, and where everything went.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "model/device_layout.hpp"
#include "nibble/core/error.hpp"
#include "nibble/core/parallel.hpp"
#include "nibble/op/resident.hpp"

namespace qwen3_moe {

/// Throws nibble::out_of_memory or nibble::error for a CUDA call that failed.
inline void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  const std::string text = std::string(what) + ": " + cudaGetErrorString(result);
  if (result == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // not sticky
    throw nibble::out_of_memory(text);
  }
  throw nibble::error(text);
}

/// Copies to the device through two page-locked buffers, so that packing and copying overlap.
class device_uploader {
 public:
  explicit device_uploader(cudaStream_t stream) : stream_(stream) {
    for (auto& half : halves_) {
      check_cuda(cudaEventCreateWithFlags(&half.copied, cudaEventDisableTiming), "event for weight copies");
      if (cudaMallocHost(&half.pinned, capacity_bytes) != cudaSuccess) {
        // Without page-locked memory copies are slower, not wrong.
        static_cast<void>(cudaGetLastError());
        half.pinned = nullptr;
        half.pageable.resize(capacity_bytes);
      }
    }
  }
  device_uploader(const device_uploader&) = delete;
  device_uploader& operator=(const device_uploader&) = delete;
  ~device_uploader() {
    static_cast<void>(cudaStreamSynchronize(stream_));
    for (auto& half : halves_) {
      static_cast<void>(cudaEventDestroy(half.copied));
      if (half.pinned != nullptr) static_cast<void>(cudaFreeHost(half.pinned));
    }
  }

  static constexpr std::size_t capacity_bytes = std::size_t{64} << 20;

  /// Lets `fill(span)` write `bytes` of host memory and sends them to `to`.
  template <class Fill>
  void send(std::byte* to, std::size_t bytes, Fill&& fill) {
    if (bytes > capacity_bytes) {
      std::vector<std::uint8_t> whole(bytes);
      fill(std::span<std::uint8_t>(whole));
      check_cuda(cudaMemcpyAsync(to, whole.data(), bytes, cudaMemcpyHostToDevice, stream_), "weight copy");
      check_cuda(cudaStreamSynchronize(stream_), "weight copy");
      return;
    }
    half& h = halves_[next_];
    next_ ^= 1;
    check_cuda(cudaEventSynchronize(h.copied), "weight copy");
    auto* at = h.pinned != nullptr ? static_cast<std::uint8_t*>(h.pinned) : h.pageable.data();
    fill(std::span<std::uint8_t>(at, bytes));
    check_cuda(cudaMemcpyAsync(to, at, bytes, cudaMemcpyHostToDevice, stream_), "weight copy");
    check_cuda(cudaEventRecord(h.copied, stream_), "weight copy");
  }
  void finish() { check_cuda(cudaStreamSynchronize(stream_), "weight copies"); }

 private:
  struct half {
    void* pinned = nullptr;
    std::vector<std::uint8_t> pageable;
    cudaEvent_t copied = nullptr;
  };
  cudaStream_t stream_;
  std::array<half, 2> halves_;
  int next_ = 0;
};

/// fp32 scales of one routed expert: gate, up, down.
using expert_scales = std::array<float, 3>;

/// Fills a dense region with a model's weights and points the leaves of `lm` at it.
///
/// Matrices: segments[0].weight is the device address of the whole matrix in its device form, the segments'
/// global scales stay. Norm weights are multiplied out: 1 + w where the model says so.
template <class Config>
class dense_weights_writer {
  static constexpr model_config c = Config::value;

 public:
  /// \param memory dense_device_bytes<Config>() bytes, 256-byte aligned
  dense_weights_writer(device_uploader& uploader, std::byte* memory, int threads)
      : uploader_(uploader), at_(memory), end_(memory + dense_device_bytes<Config>()), threads_(threads) {}

  void write(causal_lm<Config>& lm) {
    write_leaf(lm.model.embed_tokens.table);
    for (int i = 0; i < c.layers; ++i) lm.model.layers.visit(i, [&](auto& layer) { write_layer(layer); });
    write_norm(lm.model.norm);
    write_leaf(lm.lm_head);
    if (at_ != end_) throw nibble::error("device weights: the region and the model's byte count disagree");
  }

 private:
  template <class Layer>
  void write_layer(Layer& layer) {
    write_norm(layer.input_layernorm);
    write_norm(layer.post_attention_layernorm);
    if constexpr (requires { layer.self_attn; }) {
      write_leaf(layer.self_attn.qkv);
      write_norm(layer.self_attn.q_norm);
      write_norm(layer.self_attn.k_norm);
      write_leaf(layer.self_attn.o_proj);
    } else {
      write_leaf(layer.linear_attn.qkvz);
      write_leaf(layer.linear_attn.ba);
      write_leaf(layer.linear_attn.conv1d.weight);
      write_leaf(layer.linear_attn.a_log);
      write_leaf(layer.linear_attn.dt_bias);
      write_leaf(layer.linear_attn.norm.weight);  // the gated norm multiplies by w itself
      write_leaf(layer.linear_attn.out_proj);
    }
    write_leaf(layer.mlp.router);
    if constexpr (mixture_of_experts<Config>::has_shared) {
      write_leaf(layer.mlp.shared.shared_expert.gate_up);
      write_leaf(layer.mlp.shared.shared_expert.down);
      write_leaf(layer.mlp.shared.gate);
    }
  }

  template <class Norm>
  void write_norm(Norm& norm) {
    const float* from = norm.weight.data;
    write_values<std::remove_reference_t<decltype(norm.weight)>>(
        norm.weight, [from](std::size_t i) { return c.zero_centred_norm ? 1.0f + from[i] : from[i]; });
  }

  template <class Leaf>
  void write_leaf(Leaf& leaf) {
    if constexpr (Leaf::kind == nibble::leaf_kind::matrix) {
      std::byte* to = take<Leaf>();
      if constexpr (device_form_of<Leaf>() == device_form::row_major) {
        static_assert(Leaf::shape.format == weight_format::bf16, "only bf16 matrices stay row-major");
        uploader_.send(to, Leaf::shape.bytes(), [&](std::span<std::uint8_t> out) {
          const nibble::row_major_matrix from(leaf);
          std::memcpy(out.data(), from.codes.data(), out.size());
        });
      } else {
        constexpr nibble::resident_layout layout = resident_layout_of<Leaf>();
        uploader_.send(to, layout.bytes(), [&](std::span<std::uint8_t> out) {
          nibble::pack_resident(leaf, layout.order, out, threads_);
        });
      }
      for (auto& segment : leaf.segments) segment.weight = nullptr, segment.block_scale = nullptr;
      leaf.segments[0].weight = to;
    } else if constexpr (Leaf::kind == nibble::leaf_kind::parameter) {
      const float* from = leaf.data;
      write_values<Leaf>(leaf, [from](std::size_t i) { return from[i]; });
    } else {
      std::byte* to = take<Leaf>();
      constexpr std::size_t bytes = nibble::leaf_bytes<Leaf>();
      const auto* from = reinterpret_cast<const std::uint8_t*>(leaf.data);
      for (std::size_t done = 0; done < bytes; done += device_uploader::capacity_bytes) {
        const std::size_t piece = std::min(bytes - done, device_uploader::capacity_bytes);
        uploader_.send(to + done, piece, [&](std::span<std::uint8_t> out) {
          std::memcpy(out.data(), from + done, out.size());
        });
      }
      leaf.data = reinterpret_cast<const std::uint16_t*>(to);
    }
  }

  template <class Leaf, class Value>
  void write_values(Leaf& leaf, Value value) {
    std::byte* to = take<Leaf>();
    uploader_.send(to, nibble::leaf_bytes<Leaf>(), [&](std::span<std::uint8_t> out) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(Leaf::elements); ++i) {
        const float v = value(i);
        std::memcpy(out.data() + 4 * i, &v, 4);
      }
    });
    leaf.data = reinterpret_cast<const float*>(to);
  }

  template <class Leaf>
  std::byte* take() {
    std::byte* piece = at_;
    at_ += device_bytes_of<Leaf>();
    if (at_ > end_) throw nibble::error("device weights: the model needs more than its byte count says");
    return piece;
  }

  device_uploader& uploader_;
  std::byte *at_, *end_;
  int threads_;
};

/// Packs expert `e` of a layer into one slot: gate|up tiles, then down tiles.
template <class Expert>
void pack_expert(const Expert& expert, std::span<std::uint8_t> slot) {
  constexpr std::size_t up_bytes = resident_layout_of<decltype(Expert::gate_up)>().bytes();
  nibble::pack_resident(expert.gate_up, nibble::row_order::gate_up, slot.first(up_bytes), 1);
  nibble::pack_resident(expert.down, nibble::row_order::adjacent, slot.subspan(up_bytes), 1);
}

template <class Expert>
[[nodiscard]] expert_scales scales_of(const Expert& expert) {
  return {expert.gate_up.segments[0].global_scale, expert.gate_up.segments[1].global_scale,
          expert.down.segments[0].global_scale};
}

/// Packs experts first … first + count - 1 (numbered over all layers) and sends them to the slots at `to`.
template <class Config>
void send_experts(device_uploader& uploader, const causal_lm<Config>& lm, int first, int count, std::byte* to,
                  int threads) {
  constexpr const model_config& c = Config::value;
  constexpr std::size_t slot_bytes = experts_shape_of(Config::value).slot_bytes();
  const int most = static_cast<int>(std::max<std::size_t>(1, device_uploader::capacity_bytes / slot_bytes));
  for (int done = 0; done < count;) {
    const int piece = std::min(most, count - done);
    uploader.send(to + static_cast<std::size_t>(done) * slot_bytes,
                  static_cast<std::size_t>(piece) * slot_bytes, [&](std::span<std::uint8_t> out) {
                    std::atomic<bool> starved = false;
                    nibble::parallel_ranges(piece, threads, [&](int begin, int end) {
                      for (int i = begin; i < end; ++i) {
                        const int number = first + done + i;
                        try {
                          lm.model.layers.visit(number / c.experts, [&](const auto& layer) {
                            pack_expert(layer.mlp.experts[number % c.experts],
                                        out.subspan(static_cast<std::size_t>(i) * slot_bytes, slot_bytes));
                          });
                        } catch (const std::bad_alloc&) {
                          starved = true;
                        }
                      }
                    });
                    if (starved) throw nibble::out_of_memory("packing experts: the host has no memory left");
                  });
    done += piece;
  }
}

}  // namespace qwen3_moe
