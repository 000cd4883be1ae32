// SPDX-License-Identifier: Apache-2.0
/// \file
/// Random weights of a whole model in little memory: every matrix is a window of its own into a pool of
/// random bytes, so no two experts are alike and nothing of the model's size is generated.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "nibble/core/bf16.hpp"
#include "nibble/fp8/e4m3.hpp"
#include "nibble/nvfp4/e2m1.hpp"
#include "nibble/op/walk.hpp"

namespace qwen3_moe::test {

/// Weights as a checkpoint stores them, in host memory. Products of unit inputs have unit size, decays and
/// gates are spread as in trained models.
template <class Config>
class pooled_weights {
 public:
  explicit pooled_weights(unsigned seed) : random_(seed) {
    codes_.resize(16 << 20);
    for (auto& byte : codes_) byte = static_cast<std::uint8_t>(random_());
    scales_.resize(2 << 20);
    for (auto& byte : scales_) byte = static_cast<std::uint8_t>(0x30 + random_() % 16);  // 0.5 … 1.875
    fp8_.resize(32 << 20);
    for (auto& byte : fp8_) {
      const auto v = static_cast<std::uint8_t>(random_());
      byte = static_cast<std::uint8_t>((v & 0x80) | (0x20 + (v & 0x1F)));  // ±(2^-3 … 1.875)
    }
    nibble::for_each_leaf(lm_, [this](const nibble::op_path& path, auto& leaf) { fill(path, leaf); });
  }
  pooled_weights(const pooled_weights&) = delete;
  pooled_weights& operator=(const pooled_weights&) = delete;

  [[nodiscard]] causal_lm<Config>& lm() { return lm_; }

 private:
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(random_() % 65536) / 65535.0f;
  }

  /// A window that begins at any multiple of 64 bytes.
  template <class T>
  const std::byte* window(const std::vector<T>& pool, std::size_t bytes) {
    const std::size_t room = pool.size() * sizeof(T);
    if (bytes > room) throw std::runtime_error("a matrix is larger than the pool of random bytes");
    return reinterpret_cast<const std::byte*>(pool.data()) + 64 * (random_() % ((room - bytes) / 64 + 1));
  }
  /// bf16 numbers of size 1/sqrt(k).
  const std::vector<std::uint16_t>& bf16_of(int k) {
    auto& pool = bf16_[k];
    if (pool.empty()) {
      pool.resize(4 << 20);
      const float most = std::sqrt(3.0f / static_cast<float>(k));
      for (auto& v : pool) v = nibble::bf16::encode(uniform(-most, most));
    }
    return pool;
  }
  template <class Decode>
  static float mean_square(int first, int last, Decode decode) {
    double sum = 0;
    for (int i = first; i <= last; ++i) {
      const double v = decode(i);
      sum += v * v;
    }
    return static_cast<float>(sum / (last - first + 1));
  }

  template <class Leaf>
  void fill(const nibble::op_path& path, Leaf& leaf) {
    if constexpr (Leaf::kind == nibble::leaf_kind::matrix) {
      for (int i = 0; i < Leaf::shape.segments(); ++i) {
        const nibble::geometry part =
            nibble::matrix(Leaf::shape.rows_of(i), Leaf::shape.k, Leaf::shape.format);
        auto& to = leaf.segments[static_cast<std::size_t>(i)];
        const auto k = static_cast<float>(part.k);
        // Segments have scales of their own: a mistaken one shows.
        const float spread = uniform(0.8f, 1.25f);
        switch (part.format) {
          case weight_format::nvfp4: {
            static const float square =
                mean_square(0, 7, [](int c) { return nibble::e2m1::decode(static_cast<unsigned>(c)); }) *
                mean_square(0x30, 0x3F,
                            [](int b) { return nibble::e4m3::decode(static_cast<std::uint8_t>(b)); });
            to.weight = window(codes_, part.code_bytes());
            to.block_scale = window(scales_, part.block_scale_bytes());
            to.global_scale = spread / std::sqrt(square * k);
            break;
          }
          case weight_format::fp8: {
            static const float square = mean_square(
                0x20, 0x3F, [](int b) { return nibble::e4m3::decode(static_cast<std::uint8_t>(b)); });
            to.weight = window(fp8_, part.code_bytes());
            to.global_scale = spread / std::sqrt(square * k);
            break;
          }
          case weight_format::bf16:
            to.weight = window(bf16_of(part.k), part.code_bytes());
            break;
        }
      }
    } else if constexpr (Leaf::kind == nibble::leaf_kind::parameter) {
      const std::string name = path.joined(Leaf::part_name);
      auto& values = parameters_.emplace_back(static_cast<std::size_t>(Leaf::elements));
      const bool centred = Config::value.zero_centred_norm && !name.ends_with("linear_attn.norm.weight");
      for (auto& v : values)
        v = name.ends_with("A_log")         ? std::log(uniform(1.0f, 16.0f))
            : name.ends_with("dt_bias")     ? uniform(-6.0f, -1.0f)
            : name.ends_with("norm.weight") ? uniform(0.7f, 1.3f) - (centred ? 1.0f : 0.0f)
                                            : uniform(-0.8f, 0.8f);
      leaf.data = values.data();
    } else {
      embedding_.resize(static_cast<std::size_t>(Leaf::rows) * static_cast<std::size_t>(Leaf::columns));
      for (auto& v : embedding_) v = nibble::bf16::encode(uniform(-1.0f, 1.0f));
      leaf.data = embedding_.data();
    }
  }

  std::minstd_rand random_;
  std::vector<std::uint8_t> codes_, scales_, fp8_;
  std::map<int, std::vector<std::uint16_t>> bf16_;
  std::vector<std::uint16_t> embedding_;
  std::deque<std::vector<float>> parameters_;
  causal_lm<Config> lm_;
};

}  // namespace qwen3_moe::test
