// SPDX-License-Identifier: Apache-2.0
#include "model/quantization_json.hpp"

#include <array>
#include <utility>
#include <vector>

namespace qwen3_moe {

namespace {

using nibble::quantization_method;

weight_format format_named(const json_fields& fields, std::string_view field, std::string_view algorithm) {
  if (algorithm == "FP8") return weight_format::fp8;
  if (algorithm == "NVFP4" || algorithm == "W4A16_NVFP4") return weight_format::nvfp4;
  fields.fail(field, "is '" + std::string(algorithm) + "'; NVFP4, W4A16_NVFP4 and FP8 are supported");
}

void check_group_size(const json_fields& fields, std::string_view field) {
  const int group = fields.integer_or(field, nibble::nvfp4_group, 1, 1 << 20);
  if (group != nibble::nvfp4_group)
    fields.fail(field, "is " + std::to_string(group) + "; NVFP4 has one scale for 16 values");
}

/// Adds the modules that stay bf16.
void read_ignored(const json_fields& fields, std::string_view field, quantization_rules& rules) {
  const auto* list = fields.find(field);
  if (list == nullptr) return;
  if (!list->is_array()) fields.fail(field, "is not a list of module names");
  for (const auto& entry : list->get_array()) {
    if (!entry.is_string())
      fields.fail(field, "holds " + boost::json::serialize(entry) + ", expected a module name");
    rules.listed.add(name_pattern({entry.get_string().data(), entry.get_string().size()}),
                     weight_format::bf16);
  }
}

void read_modelopt(const json_fields& q, quantization_rules& rules) {
  rules.method = quantization_method::modelopt;
  const std::string algorithm = q.text_or("quant_algo", "");
  if (algorithm != "MIXED_PRECISION") {
    check_group_size(q, "group_size");
    rules.otherwise = format_named(q, "quant_algo", algorithm);
    read_ignored(q, "ignore", rules);
    read_ignored(q, "exclude_modules", rules);
    return;
  }
  const json_fields layers = q.child("quantized_layers");
  for (const auto& item : q.find("quantized_layers")->get_object()) {
    const std::string_view module(item.key().data(), item.key().size());
    const json_fields layer = layers.child(module);
    const weight_format format = format_named(layer, "quant_algo", layer.text_or("quant_algo", ""));
    if (format == weight_format::nvfp4) check_group_size(layer, "group_size");
    rules.listed.add(name_pattern(module), format);
  }
}

void read_compressed_tensors(const json_fields& q, quantization_rules& rules) {
  rules.method = quantization_method::compressed_tensors;
  const std::string format = q.text_or("format", "");
  if (format != "nvfp4-pack-quantized")
    q.fail("format", "is '" + format + "'; nvfp4-pack-quantized is supported");
  const json_fields groups = q.child("config_groups");
  for (const auto& item : q.find("config_groups")->get_object()) {
    const json_fields group = groups.child({item.key().data(), item.key().size()});
    const json_fields weights = group.child("weights");
    if (weights.integer("num_bits", 1, 64) != 4 || weights.text_or("type", "") != "float")
      weights.fail("num_bits", "and type are not 4 and float, the only ones supported");
    check_group_size(weights, "group_size");
    const auto* targets = group.find("targets");
    const bool linear = targets != nullptr && targets->is_array() && targets->get_array().size() == 1 &&
                        targets->get_array()[0] == "Linear";
    if (!linear) group.fail("targets", "is not [\"Linear\"], the only one supported");
  }
  rules.otherwise = weight_format::nvfp4;
  read_ignored(q, "ignore", rules);
}

}  // namespace

quantization_rules read_quantization_rules(const json_fields& config, std::string_view quantization_text,
                                           std::string_view what) {
  quantization_rules rules;
  if (config.find("quantization_config") != nullptr) {
    const json_fields q = config.child("quantization_config");
    const std::string method = q.text_or("quant_method", "");
    if (method == "modelopt") {
      const bool mixed_without_list =
          q.text_or("quant_algo", "") == "MIXED_PRECISION" && q.find("quantized_layers") == nullptr;
      if (!mixed_without_list || quantization_text.empty()) {
        read_modelopt(q, rules);
        return rules;
      }
    } else if (method == "compressed-tensors") {
      read_compressed_tensors(q, rules);
      return rules;
    } else {
      q.fail("quant_method", "is '" + method + "'; modelopt and compressed-tensors are supported");
    }
  }
  if (!quantization_text.empty()) {
    const std::string name = std::string(what) + ": hf_quant_config.json";
    const boost::json::object root = json_fields::parse(quantization_text, name);
    read_modelopt(json_fields(root, name).child("quantization"), rules);
  }
  return rules;
}

namespace {

constexpr std::string_view decoder_prefixes[] = {"model.language_model.", "language_model.model.", "model."};

/// A module's name without what checkpoints put in front of the decoder.
std::string_view without_prefix(std::string_view module) {
  for (const auto prefix : decoder_prefixes)
    if (module.starts_with(prefix)) return module.substr(prefix.size());
  return module;
}

}  // namespace

void quantization_rules::entries::add(const name_pattern& pattern, weight_format format) {
  if (const auto name = pattern.plain_name()) {
    plain_.insert_or_assign(std::string(without_prefix(*name)), format);
    return;
  }
  // Every module is held against every pattern, so their number is bounded; real lists have under 20.
  if (patterns_.size() == pattern_limit)
    throw nibble::format_error("the quantisation configuration has more than " +
                               std::to_string(pattern_limit) +
                               " module patterns; write the modules out instead");
  patterns_.emplace_back(pattern, format);
}

std::optional<weight_format> quantization_rules::entries::find(std::span<const std::string> names) const {
  for (const auto& name : names)
    if (const auto it = plain_.find(name); it != plain_.end()) return it->second;
  for (const auto& [pattern, format] : patterns_)
    for (const auto& name : names)
      if (pattern.matches(name)) return format;
  return std::nullopt;
}

std::optional<weight_format> quantization_rules::format_of(std::string_view module) const {
  if (method == quantization_method::none) return std::nullopt;
  // Configurations name modules below "model." or "model.language_model.", whatever the tensors say, and an
  // entry for ".experts" speaks for every expert.
  const std::string base(without_prefix(module));
  std::vector<std::string> names{base, "model." + base, "model.language_model." + base};
  if (const auto at = base.find(".experts."); at != std::string::npos)
    for (int i = 0; i < 3; ++i)
      names.push_back(names[static_cast<std::size_t>(i)].substr(
          0, names[static_cast<std::size_t>(i)].find(".experts.") + 8));
  return listed.find(names).value_or(otherwise);
}

module_formats declared_formats(const model_config& config, const quantization_rules& rules,
                                std::string_view what) {
  module_formats formats;
  const auto declare = [&](weight_format& format, bool& seen, const std::string& module) {
    const weight_format here = rules.format_of(module).value_or(weight_format::bf16);
    if (seen && here != format)
      throw nibble::format_error(std::string(what) + ": " + module + " is " + std::string(name_of(here)) +
                                 ", the same matrix of an earlier layer, or the one it is fused with, is " +
                                 std::string(name_of(format)) + "; mixed formats are not supported");
    format = here;
    seen = true;
  };
  std::array<bool, 9> seen{};
  for (int i = 0; i < config.layers; ++i) {
    const std::string layer = "model.language_model.layers." + std::to_string(i) + ".";
    if (config.full_attention[static_cast<std::size_t>(i)]) {
      for (const char* part : {"q_proj", "k_proj", "v_proj"})
        declare(formats.attention_qkv, seen[0], layer + "self_attn." + part);
      declare(formats.attention_out, seen[1], layer + "self_attn.o_proj");
    } else {
      for (const char* part : {"in_proj_qkv", "in_proj_z"})
        declare(formats.delta_qkvz, seen[2], layer + "linear_attn." + part);
      declare(formats.delta_out, seen[3], layer + "linear_attn.out_proj");
    }
    for (const char* part : {"gate_proj", "up_proj"}) {
      declare(formats.expert_gate_up, seen[4], layer + "mlp.experts.0." + part);
      if (config.shared_intermediate > 0)
        declare(formats.shared_gate_up, seen[6], layer + "mlp.shared_expert." + part);
    }
    declare(formats.expert_down, seen[5], layer + "mlp.experts.0.down_proj");
    if (config.shared_intermediate > 0)
      declare(formats.shared_down, seen[7], layer + "mlp.shared_expert.down_proj");
  }
  if (!config.tied_embeddings) declare(formats.lm_head, seen[8], "lm_head");
  return formats;
}

void check_inner_dimensions(const model_config& config, std::string_view what) {
  const auto& f = config.formats;
  const std::array<std::pair<weight_format, std::pair<const char*, int>>, 9> inner{{
      {f.attention_qkv, {"hidden_size", config.hidden_size}},
      {f.delta_qkvz, {"hidden_size", config.hidden_size}},
      {f.expert_gate_up, {"hidden_size", config.hidden_size}},
      {f.shared_gate_up, {"hidden_size", config.hidden_size}},
      {f.lm_head, {"hidden_size", config.hidden_size}},
      {f.attention_out, {"num_attention_heads * head_dim", config.attention_width()}},
      {f.delta_out, {"linear_num_value_heads * linear_value_head_dim", config.delta_value_width()}},
      {f.expert_down, {"moe_intermediate_size", config.expert_intermediate}},
      {f.shared_down, {"shared_expert_intermediate_size", config.shared_intermediate}},
  }};
  for (const auto& [format, field] : inner)
    if (format == weight_format::nvfp4 && field.second % nibble::nvfp4_group != 0)
      throw nibble::format_error(std::string(what) + ": " + field.first + " is " +
                                 std::to_string(field.second) +
                                 "; the inner dimension of an NVFP4 matrix is a multiple of 16");
}

}  // namespace qwen3_moe
