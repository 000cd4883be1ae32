// SPDX-License-Identifier: Apache-2.0
/// \file
/// Writes a checkpoint of random weights for a compiled model, by walking its op tree.
#pragma once

#include <cmath>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "nibble/core/bf16.hpp"
#include "nibble/fp8/e4m3.hpp"
#include "nibble/nvfp4/quantize.hpp"
#include "nibble/op/walk.hpp"
#include "support/safetensors_writer.hpp"

namespace qwen3_moe::test {

using nibble::io::dtype;

/// How the tensors are named and stacked.
struct checkpoint_style {
  nibble::quantization_method method = nibble::quantization_method::modelopt;
  std::string prefix = "model.language_model.";
  bool fused_experts = false;  ///< bf16 only: experts.gate_up_proj and experts.down_proj
  bool extras = true;          ///< vision, MTP and activation scales that must be skipped
};

/// A tensor as it goes into a file.
struct stored_tensor {
  dtype type;
  nibble::io::tensor_shape shape;
  std::string bytes;
};
using stored_tensors = std::map<std::string, stored_tensor>;

/// The visitor: random values for every leaf, under the checkpoint's names.
class random_writer {
 public:
  random_writer(const checkpoint_style& style, unsigned seed) : style_(style), random_(seed) {}

  template <class Leaf>
  void operator()(const nibble::op_path& path, const Leaf&) {
    if constexpr (Leaf::kind == nibble::leaf_kind::matrix) {
      for (std::size_t i = 0; i < Leaf::part_names.size(); ++i)
        matrix(path.joined(Leaf::part_names[i]), Leaf::shape.format, Leaf::shape.rows_of(static_cast<int>(i)),
               Leaf::shape.k);
    } else if constexpr (Leaf::kind == nibble::leaf_kind::parameter) {
      nibble::io::tensor_shape shape(Leaf::dims.begin(), Leaf::dims.end());
      const std::string name = path.joined(Leaf::part_name);
      const bool decay = name.ends_with("A_log");
      std::vector<float> values(static_cast<std::size_t>(Leaf::elements));
      for (auto& v : values)
        v = decay ? std::log(1.0f + 15.0f * std::fabs(normal()))
                  : 0.3f * normal() + (name.ends_with("norm.weight") ? 0.8f : 0.0f);
      // Half of the parameters as F32, half as BF16: both are met in the wild.
      if (random_() % 2 == 0)
        add(name, dtype::f32, shape, bytes_of(values));
      else
        add(name, dtype::bf16, shape, bf16_bytes(values));
    } else {
      add(path.joined(Leaf::part_name), dtype::bf16,
          {static_cast<std::uint64_t>(Leaf::rows), static_cast<std::uint64_t>(Leaf::columns)},
          bf16_bytes(
              normals(static_cast<std::size_t>(Leaf::rows) * static_cast<std::size_t>(Leaf::columns), 1.0f)));
    }
  }

  /// What was written, with experts stacked and unused tensors added where the style says so.
  [[nodiscard]] stored_tensors finish() {
    if (style_.fused_experts) fuse_experts();
    if (style_.extras) {
      tensors_["model.visual.patch_embed.proj.weight"] = {dtype::bf16, {2, 2}, std::string(8, '\1')};
      tensors_["mtp.fc.weight"] = {dtype::bf16, {1, 2}, std::string(4, '\1')};
    }
    return std::move(tensors_);
  }

 private:
  float normal() { return distribution_(random_); }
  std::vector<float> normals(std::size_t count, float scale) {
    std::vector<float> values(count);
    for (auto& v : values) v = scale * normal();
    return values;
  }
  template <class T>
  static std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }
  static std::string bf16_bytes(const std::vector<float>& values) {
    std::vector<std::uint16_t> bits;
    for (const float v : values) bits.push_back(nibble::bf16::encode(v));
    return bytes_of(bits);
  }
  void add(const std::string& tree_name, dtype type, const nibble::io::tensor_shape& shape,
           std::string bytes) {
    const std::string name =
        tree_name.starts_with("model.") ? style_.prefix + tree_name.substr(6) : tree_name;
    tensors_[name] = {type, shape, std::move(bytes)};
  }

  void matrix(const std::string& module, weight_format format, int n, int k) {
    const auto rows = static_cast<std::uint64_t>(n), columns = static_cast<std::uint64_t>(k);
    const auto values = normals(rows * columns, 1.0f / std::sqrt(static_cast<float>(k)));
    const bool packed = style_.method == nibble::quantization_method::compressed_tensors;
    switch (format) {
      case weight_format::bf16:
        add(module + ".weight", dtype::bf16, {rows, columns}, bf16_bytes(values));
        return;
      case weight_format::fp8: {
        const float scale = 0.004f * (1.0f + std::fabs(normal()));
        std::vector<std::uint8_t> bytes;
        for (const float v : values) bytes.push_back(nibble::e4m3::encode(v / scale));
        add(module + ".weight", dtype::f8_e4m3, {rows, columns}, bytes_of(bytes));
        add(module + ".weight_scale", dtype::f32, {}, bytes_of(std::vector<float>{scale}));
        add(module + ".input_scale", dtype::f32, {}, bytes_of(std::vector<float>{0.02f}));
        return;
      }
      case weight_format::nvfp4: {
        const auto q = nibble::nvfp4::quantize(values, n, k);
        add(module + (packed ? ".weight_packed" : ".weight"), dtype::u8, {rows, columns / 2},
            bytes_of(q.codes));
        add(module + ".weight_scale", dtype::f8_e4m3, {rows, columns / 16}, bytes_of(q.block_scales));
        if (packed) {
          add(module + ".weight_global_scale", dtype::f32, {1},
              bytes_of(std::vector<float>{1.0f / q.global_scale}));
          add(module + ".input_global_scale", dtype::f32, {1}, bytes_of(std::vector<float>{37.5f}));
        } else {
          add(module + ".weight_scale_2", dtype::f32, {}, bytes_of(std::vector<float>{q.global_scale}));
        }
        return;
      }
    }
  }

  /// "X.experts.3.gate_proj.weight" … → "X.experts.gate_up_proj" [E, 2I, H] and "X.experts.down_proj".
  void fuse_experts() {
    stored_tensors fused, rest;
    std::map<std::string, std::map<int, std::map<std::string, stored_tensor>>> stacks;
    for (auto& [name, tensor] : tensors_) {
      const auto at = name.find(".experts.");
      if (at == std::string::npos) {
        rest[name] = std::move(tensor);
        continue;
      }
      const std::string tail = name.substr(at + 9);
      stacks[name.substr(0, at + 9)][std::stoi(tail)][tail.substr(tail.find('.') + 1)] = std::move(tensor);
    }
    for (auto& [stack, experts] : stacks) {
      stored_tensor gate_up{dtype::bf16, {}, ""}, down{dtype::bf16, {}, ""};
      for (auto& [number, parts] : experts) {
        gate_up.bytes += parts["gate_proj.weight"].bytes + parts["up_proj.weight"].bytes;
        down.bytes += parts["down_proj.weight"].bytes;
      }
      auto& first = experts.begin()->second;
      gate_up.shape = {experts.size(), 2 * first["gate_proj.weight"].shape[0],
                       first["gate_proj.weight"].shape[1]};
      down.shape = {experts.size(), first["down_proj.weight"].shape[0], first["down_proj.weight"].shape[1]};
      rest[stack + "gate_up_proj"] = std::move(gate_up);
      rest[stack + "down_proj"] = std::move(down);
    }
    tensors_ = std::move(rest);
  }

  checkpoint_style style_;
  std::mt19937 random_;
  std::normal_distribution<float> distribution_;
  stored_tensors tensors_;
};

inline void write_tensors(const stored_tensors& tensors, const std::filesystem::path& file) {
  nibble::test::safetensors_writer writer;
  for (const auto& [name, t] : tensors) writer.add(name, t.type, t.shape, t.bytes);
  writer.write(file);
}

template <class Config>
[[nodiscard]] stored_tensors random_tensors(const checkpoint_style& style, unsigned seed) {
  random_writer writer(style, seed);
  const causal_lm<Config> lm;
  nibble::for_each_leaf(lm, writer);
  auto tensors = writer.finish();
  if (Config::value.tied_embeddings) tensors.erase("lm_head.weight");
  return tensors;
}

}  // namespace qwen3_moe::test
