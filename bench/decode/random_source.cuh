// SPDX-License-Identifier: Apache-2.0
/// \file
/// Weights for timing: random numbers of sensible size, no file. Leaves of one geometry share one host
/// matrix; experts repeat a few on the device, at addresses of their own.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "model/cuda_core.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/op/walk.hpp"

namespace bench {

template <class Config>
class random_model {
  static constexpr qwen3_moe::model_config c = Config::value;

 public:
  explicit random_model(unsigned seed) : random_(seed) {
    nibble::for_each_leaf(lm_, [this](const nibble::op_path&, auto& leaf) { fill(leaf); });
  }

  [[nodiscard]] qwen3_moe::weight_source<Config> source() {
    qwen3_moe::weight_source<Config> made;
    made.write_dense = [this](qwen3_moe::device_uploader& uploader, std::byte* memory,
                              qwen3_moe::causal_lm<Config>& lm) {
      lm = lm_;
      qwen3_moe::dense_weights_writer<Config>(uploader, memory, 0).write(lm);
    };
    made.send_experts = [this](qwen3_moe::device_uploader& uploader, int first, int count, std::byte* to) {
      constexpr std::size_t slot_bytes = qwen3_moe::experts_shape_of(Config::value).slot_bytes();
      const int distinct = std::min(count, 16);
      qwen3_moe::send_experts(uploader, lm_, first, distinct, to, 0);
      uploader.finish();
      for (int done = distinct; done < count;) {
        const int piece = std::min(done, count - done);
        nibble::require(nibble::runtime_status(
            cudaMemcpy(to + static_cast<std::size_t>(done) * slot_bytes, to,
                       static_cast<std::size_t>(piece) * slot_bytes, cudaMemcpyDeviceToDevice),
            "bench", "experts could not be repeated"));
        done += piece;
      }
    };
    made.pack_expert = [this](int number, std::span<std::uint8_t> slot) {
      // Packed once, then repeated: host memory of its own for each expert, as in a real model.
      const auto& kind = packed_.at(static_cast<std::size_t>(number) % packed_.size());
      std::memcpy(slot.data(), kind.data(), slot.size());
    };
    if (packed_.empty())
      for (int e = 0; e < 16; ++e) {
        auto& slot = packed_.emplace_back(qwen3_moe::experts_shape_of(Config::value).slot_bytes());
        lm_.model.layers.visit(
            0, [&](const auto& layer) { qwen3_moe::pack_expert(layer.mlp.experts[e % c.experts], slot); });
      }
    const float scale = scale_of(c.hidden_size);
    made.scales.assign(static_cast<std::size_t>(qwen3_moe::expert_count(c)),
                       {scale, scale, scale_of(c.expert_intermediate)});
    return made;
  }

 private:
  // E2M1 magnitudes average 2, block scales here 1: a product of unit inputs keeps unit size.
  static float scale_of(int k) { return 0.4f / std::sqrt(static_cast<float>(k)); }

  std::vector<std::uint8_t>& bytes_of(const std::string& key, std::size_t count, auto&& byte_at) {
    auto& bytes = memory_[key];
    if (bytes.empty()) {
      bytes.resize(count);
      for (std::size_t i = 0; i < count; ++i) bytes[i] = byte_at(i);
    }
    return bytes;
  }

  template <class Leaf>
  void fill(Leaf& leaf) {
    if constexpr (Leaf::kind == nibble::leaf_kind::matrix) {
      for (int i = 0; i < Leaf::shape.segments(); ++i) {
        const nibble::geometry part =
            nibble::matrix(Leaf::shape.rows_of(i), Leaf::shape.k, Leaf::shape.format);
        auto& to = leaf.segments[static_cast<std::size_t>(i)];
        to.weight = reinterpret_cast<const std::byte*>(codes_of(part).data());
        if (part.block_scale_bytes() != 0)
          to.block_scale = reinterpret_cast<const std::byte*>(
              bytes_of(part.name() + " scales", part.block_scale_bytes(), [this](std::size_t) {
                return static_cast<std::uint8_t>(0x30 + random_() % 16);  // E4M3 0.5 … 1.9
              }).data());
        to.global_scale = part.format == nibble::weight_format::bf16 ? 1.0f : scale_of(part.k);
      }
    } else if constexpr (Leaf::kind == nibble::leaf_kind::parameter) {
      auto& values = floats_[std::to_string(Leaf::elements)];
      if (values.empty())
        for (int i = 0; i < Leaf::elements; ++i)
          values.push_back(static_cast<float>(static_cast<int>(random_() % 200) - 100) * 0.002f);
      leaf.data = values.data();
    } else {
      leaf.data = reinterpret_cast<const std::uint16_t*>(
          codes_of(nibble::matrix(Leaf::rows, Leaf::columns, nibble::weight_format::bf16)).data());
    }
  }

  std::vector<std::uint8_t>& codes_of(const nibble::geometry& part) {
    if (part.format == nibble::weight_format::bf16) {
      auto& bytes = memory_[part.name()];
      if (bytes.empty()) {
        bytes.resize(part.code_bytes());
        const float size = 2.0f / std::sqrt(static_cast<float>(part.k));
        std::vector<std::uint16_t> pool(1 << 16);
        for (auto& v : pool)
          v = nibble::bf16::encode((static_cast<float>(random_() % 2001) / 1000.0f - 1.0f) * size);
        for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
          const std::uint16_t v = pool[random_() % pool.size()];
          bytes[i] = static_cast<std::uint8_t>(v), bytes[i + 1] = static_cast<std::uint8_t>(v >> 8);
        }
      }
      return bytes;
    }
    return bytes_of(part.name(), part.code_bytes(), [&](std::size_t) {
      const auto v = static_cast<std::uint8_t>(random_());
      // FP8: magnitudes of 2^-3 … 1.9, no NaN.
      return part.format == nibble::weight_format::fp8
                 ? static_cast<std::uint8_t>((v & 0x80) | (0x20 + (v & 0x1F)))
                 : v;
    });
  }

  std::minstd_rand random_;
  std::vector<std::vector<std::uint8_t>> packed_;
  std::map<std::string, std::vector<std::uint8_t>> memory_;
  std::map<std::string, std::vector<float>> floats_;
  qwen3_moe::causal_lm<Config> lm_;
};

}  // namespace bench
