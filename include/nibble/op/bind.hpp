// SPDX-License-Identifier: Apache-2.0
/// \file
/// Binding a checkpoint to an op tree: find every tensor, check it, report everything that is wrong at once.
///
/// Formats of a matrix, by name and quantisation method and never by magnitude:
///
/// | format | tensors of module M |
/// |---|---|
/// | bf16 | `M.weight` BF16 [rows, k] |
/// | fp8 | `M.weight` F8_E4M3 [rows, k], `M.weight_scale` F32 or BF16, [] or [1]: multiplies |
/// | nvfp4, ModelOpt | `M.weight` U8 [rows, k/2], `M.weight_scale` F8_E4M3 [rows, k/16], `M.weight_scale_2`
/// [] or [1]: multiplies | | nvfp4, compressed-tensors | `M.weight_packed`, `M.weight_scale`,
/// `M.weight_global_scale` [] or [1]: divides |
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "nibble/core/bf16.hpp"
#include "nibble/core/error.hpp"
#include "nibble/core/host_arena.hpp"
#include "nibble/geometry/geometry.hpp"
#include "nibble/io/checkpoint.hpp"
#include "nibble/op/leaves.hpp"
#include "nibble/op/type_visitors.hpp"
#include "nibble/op/walk.hpp"

namespace nibble {

/// Who quantised the checkpoint, from its configuration.
enum class quantization_method : std::uint8_t { none, modelopt, compressed_tensors };

[[nodiscard]] constexpr std::string_view name_of(quantization_method method) {
  switch (method) {
    case quantization_method::none:
      return "none";
    case quantization_method::modelopt:
      return "modelopt";
    case quantization_method::compressed_tensors:
      return "compressed-tensors";
  }
  return "?";
}

/// How the names of an op tree and of a checkpoint meet.
struct bind_options {
  quantization_method method = quantization_method::none;
  /// Tree name → checkpoint name, for prefixes and tied weights. Identity when empty.
  std::function<std::string(std::string_view)> checkpoint_name;
  /// Another way to find a tensor that is not stored under its own name: fused expert tensors.
  std::function<std::optional<io::tensor_slice>(io::checkpoint&, std::string_view)> fallback;
  /// Tensors that may be there and are not used. Returns true to skip a name.
  std::function<bool(std::string_view)> skip;
  /// The format the configuration declares for a module, where it says one.
  std::function<std::optional<weight_format>(std::string_view)> declared_format;
};

/// What is wrong with a checkpoint, all of it.
struct bind_report {
  std::vector<std::string> missing, unexpected, wrong_shape, wrong_dtype, contradiction, bad_value;

  [[nodiscard]] std::size_t problems() const {
    return missing.size() + unexpected.size() + wrong_shape.size() + wrong_dtype.size() +
           contradiction.size() + bad_value.size();
  }
  /// One line for each kind with up to `examples` of it.
  [[nodiscard]] std::string text(std::size_t examples = 3) const {
    std::string out;
    const auto kind = [&](std::string_view name, const std::vector<std::string>& list) {
      if (list.empty()) return;
      out += (out.empty() ? "" : "; ") + std::to_string(list.size()) + " " + std::string(name) + ": ";
      for (std::size_t i = 0; i < list.size() && i < examples; ++i) out += (i == 0 ? "" : ", ") + list[i];
      if (list.size() > examples) out += ", …";
    };
    kind("missing", missing);
    kind("unexpected", unexpected);
    kind("of the wrong shape", wrong_shape);
    kind("of the wrong type", wrong_dtype);
    kind("contradicting the configuration", contradiction);
    kind("with a bad value", bad_value);
    return out;
  }
};

/// Where weights are read to.
enum class load_mode : std::uint8_t {
  copy,  ///< read into aligned memory: a file that changes later does no harm
  map,   ///< matrices stay in the file's mapping: no copy, but the file must not change
};

namespace detail {

/// One transfer from a file into memory, decided in the first phase and done in the second.
struct weight_copy {
  io::tensor_slice from;
  std::byte* to = nullptr;  ///< nothing: the bytes stay in the mapping and are only checked
  enum class conversion : std::uint8_t { bytes, e4m3_values, e4m3_scales, to_fp32 } how = conversion::bytes;
};

/// A tensor's scalar as fp32: shape [] or [1], F32 or BF16.
inline std::optional<float> read_scalar(const io::tensor_slice& slice) {
  if (slice.type() == io::dtype::f32) {
    float value = 0;
    slice.read(0, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  if (slice.type() == io::dtype::bf16) {
    std::uint16_t bits = 0;
    slice.read(0, std::as_writable_bytes(std::span(&bits, 1)));
    return bf16::decode(bits);
  }
  return std::nullopt;
}

}  // namespace detail

/// The visitor of the first phase: resolves and checks the tensors of each leaf, points the leaf at its
/// memory and notes the transfer. Nothing large is read.
class binder {
 public:
  binder(io::checkpoint& source, const bind_options& options, host_arena& arena, load_mode mode)
      : source_(source), options_(options), arena_(arena), mode_(mode) {}

  template <class Leaf>
  void operator()(const op_path& path, Leaf& leaf) {
    if constexpr (Leaf::kind == leaf_kind::matrix) {
      for (std::size_t i = 0; i < Leaf::part_names.size(); ++i)
        bind_segment(path.joined(Leaf::part_names[i]), Leaf::shape.format,
                     static_cast<std::uint64_t>(Leaf::shape.rows_of(static_cast<int>(i))),
                     static_cast<std::uint64_t>(Leaf::shape.k), leaf.segments[i]);
    } else if constexpr (Leaf::kind == leaf_kind::parameter) {
      io::tensor_shape shape(Leaf::dims.begin(), Leaf::dims.end());
      leaf.data =
          bind_parameter(path.joined(Leaf::part_name), shape, static_cast<std::uint64_t>(Leaf::elements));
    } else {
      const auto slice =
          need(path.joined(Leaf::part_name), io::dtype::bf16,
               {static_cast<std::uint64_t>(Leaf::rows), static_cast<std::uint64_t>(Leaf::columns)});
      if (slice) leaf.data = reinterpret_cast<const std::uint16_t*>(place(*slice, copy_kind::bytes, true));
    }
  }

  /// Adds what the tree did not ask for, then hands out the report.
  [[nodiscard]] const bind_report& finish() {
    for (const auto& [name, file] : source_.names())
      if (!used_.contains(name) && !is_unused_scale(name) && !(options_.skip && options_.skip(name)))
        report_.unexpected.push_back(name);
    return report_;
  }
  [[nodiscard]] const std::vector<detail::weight_copy>& copies() const { return copies_; }

 private:
  using copy_kind = detail::weight_copy::conversion;

  /// Scales of activations and of a quantised KV cache: weight-only execution has no use for them.
  [[nodiscard]] static bool is_unused_scale(std::string_view name) {
    for (const std::string_view end :
         {".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale"})
      if (name.ends_with(end)) return true;
    return false;
  }

  [[nodiscard]] std::string checkpoint_name(std::string_view tree_name) const {
    return options_.checkpoint_name ? options_.checkpoint_name(tree_name) : std::string(tree_name);
  }

  [[nodiscard]] std::optional<io::tensor_slice> find(const std::string& name) {
    auto slice = source_.find(name);
    if (!slice && options_.fallback) slice = options_.fallback(source_, name);
    if (slice) used_.insert(slice->name);
    return slice;
  }

  void report_missing(const std::string& name) {
    const std::string* shard = source_.promised_shard(name);
    report_.missing.push_back(shard == nullptr ? name : name + " (the index puts it into " + *shard + ")");
  }

  /// The tensor of exactly this type and shape, or a line in the report.
  [[nodiscard]] std::optional<io::tensor_slice> need(const std::string& tree_name, io::dtype type,
                                                     const io::tensor_shape& shape) {
    const std::string name = checkpoint_name(tree_name);
    const auto slice = find(name);
    if (!slice) {
      report_missing(name);
      return std::nullopt;
    }
    if (slice->type() != type) {
      report_.wrong_dtype.push_back(name + " is " + std::string(io::name_of(slice->type())) + ", expected " +
                                    std::string(io::name_of(type)));
      return std::nullopt;
    }
    if (slice->shape != shape) {
      report_.wrong_shape.push_back(name + " is " + io::to_string(slice->shape) + ", expected " +
                                    io::to_string(shape));
      return std::nullopt;
    }
    return slice;
  }

  [[nodiscard]] const std::byte* place(const io::tensor_slice& slice, copy_kind how, bool needs_alignment) {
    if (mode_ == load_mode::map && !needs_alignment) {
      if (how != copy_kind::bytes || slice.type() == io::dtype::bf16)
        copies_.push_back({slice, nullptr, how});
      return slice.map().data();
    }
    const auto memory = arena_.allocate(slice.bytes);
    copies_.push_back({slice, memory.data(), how});
    return memory.data();
  }

  void bind_segment(const std::string& module, weight_format format, std::uint64_t rows, std::uint64_t k,
                    matrix_segment& segment) {
    check_declared(module, format);
    switch (format) {
      case weight_format::bf16:
        if (const auto slice = need(module + ".weight", io::dtype::bf16, {rows, k}))
          segment.weight = place(*slice, copy_kind::bytes, false);
        return;
      case weight_format::fp8:
        if (const auto slice = need(module + ".weight", io::dtype::f8_e4m3, {rows, k}))
          segment.weight = place(*slice, copy_kind::e4m3_values, false);
        if (const auto scale = need_scale(module + ".weight_scale")) segment.global_scale = *scale;
        return;
      case weight_format::nvfp4:
        bind_nvfp4(module, rows, k, segment);
        return;
    }
  }

  void bind_nvfp4(const std::string& module, std::uint64_t rows, std::uint64_t k, matrix_segment& segment) {
    const bool packed_name = source_.find(checkpoint_name(module + ".weight_packed")).has_value();
    const auto named = packed_name ? quantization_method::compressed_tensors : quantization_method::modelopt;
    if (options_.method != quantization_method::none && options_.method != named &&
        (packed_name || source_.find(checkpoint_name(module + ".weight")))) {
      report_.contradiction.push_back(checkpoint_name(module) + " is named as " +
                                      std::string(name_of(named)) + " does, but the configuration says " +
                                      std::string(name_of(options_.method)));
      return;
    }
    const bool inverse = options_.method == quantization_method::compressed_tensors || packed_name;
    if (const auto codes =
            need(module + (inverse ? ".weight_packed" : ".weight"), io::dtype::u8, {rows, k / 2}))
      segment.weight = place(*codes, copy_kind::bytes, false);
    if (const auto scales = need(module + ".weight_scale", io::dtype::f8_e4m3, {rows, k / nvfp4_group}))
      segment.block_scale = place(*scales, copy_kind::e4m3_scales, false);
    if (const auto scale = need_scale(module + (inverse ? ".weight_global_scale" : ".weight_scale_2")))
      segment.global_scale = inverse ? 1.0f / *scale : *scale;
  }

  /// A finite positive scale of one element.
  [[nodiscard]] std::optional<float> need_scale(const std::string& tree_name) {
    const std::string name = checkpoint_name(tree_name);
    const auto slice = find(name);
    if (!slice) {
      report_missing(name);
      return std::nullopt;
    }
    if (!slice->shape.empty() && slice->shape != io::tensor_shape{1}) {
      report_.wrong_shape.push_back(name + " is " + io::to_string(slice->shape) +
                                    ", expected [] or [1]: one scale for the whole matrix");
      return std::nullopt;
    }
    const auto value = detail::read_scalar(*slice);
    if (!value) {
      report_.wrong_dtype.push_back(name + " is " + std::string(io::name_of(slice->type())) +
                                    ", expected F32");
      return std::nullopt;
    }
    if (!std::isfinite(*value) || !(*value > 0.0f) || !std::isfinite(1.0f / *value)) {
      report_.bad_value.push_back(name + " is " + std::to_string(*value) + ", a scale is finite and above 0");
      return std::nullopt;
    }
    return value;
  }

  void check_declared(const std::string& module, weight_format stored) {
    if (!options_.declared_format) return;
    const std::string name = checkpoint_name(module);
    const auto declared = options_.declared_format(name);
    // bf16 on either side is settled by what is stored; two different quantised formats are not.
    if (declared && *declared != stored && *declared != weight_format::bf16 && stored != weight_format::bf16)
      report_.contradiction.push_back(name + " is stored as " + std::string(name_of(stored)) +
                                      ", the configuration says " + std::string(name_of(*declared)));
  }

  [[nodiscard]] const float* bind_parameter(const std::string& tree_name, const io::tensor_shape& shape,
                                            std::uint64_t elements) {
    const std::string name = checkpoint_name(tree_name);
    const auto slice = find(name);
    if (!slice) {
      report_missing(name);
      return nullptr;
    }
    if (slice->type() != io::dtype::f32 && slice->type() != io::dtype::bf16) {
      report_.wrong_dtype.push_back(name + " is " + std::string(io::name_of(slice->type())) +
                                    ", expected BF16 or F32");
      return nullptr;
    }
    if (slice->shape != shape) {
      report_.wrong_shape.push_back(name + " is " + io::to_string(slice->shape) + ", expected " +
                                    io::to_string(shape));
      return nullptr;
    }
    const auto memory = arena_.allocate(elements * sizeof(float));
    copies_.push_back({*slice, memory.data(), copy_kind::to_fp32});
    return reinterpret_cast<const float*>(memory.data());
  }

  io::checkpoint& source_;
  const bind_options& options_;
  host_arena& arena_;
  load_mode mode_;
  bind_report report_;
  std::vector<detail::weight_copy> copies_;
  std::set<std::string, std::less<>> used_;
};

}  // namespace nibble
