// SPDX-License-Identifier: Apache-2.0
#include "model/checkpoint_names.hpp"

#include <charconv>

namespace qwen3_moe {

using nibble::io::checkpoint;
using nibble::io::tensor_slice;

checkpoint_names::checkpoint_names(checkpoint& source, bool tied_embeddings) : tied_(tied_embeddings) {
  for (const std::string_view prefix : {"model.language_model.", "language_model.model.", "model."}) {
    if (!source.find(std::string(prefix) + "embed_tokens.weight")) continue;
    decoder_prefix_ = prefix;
    head_prefix_ = prefix == "language_model.model." ? "language_model." : "";
    return;
  }
  std::string found;
  int examples = 0;
  for (const auto& [name, file] : source.names()) {
    if (examples++ == 3) break;
    found += (found.empty() ? "" : ", ") + name;
  }
  throw nibble::format_error(
      source.folder().string() + ": tensors are named " + found +
      ", …; expected model.language_model.embed_tokens.weight, model.embed_tokens.weight or "
      "language_model.model.embed_tokens.weight among them");
}

std::string checkpoint_names::of(std::string_view tree_name) const {
  if (tree_name.starts_with("model.")) return decoder_prefix_ + std::string(tree_name.substr(6));
  if (tied_ && tree_name == "lm_head.weight") return decoder_prefix_ + "embed_tokens.weight";
  return head_prefix_ + std::string(tree_name);
}

bool checkpoint_names::skipped(std::string_view name) const {
  for (const std::string_view start :
       {"model.visual.", "visual.", "vision_tower.", "mtp.", "model.mtp.", "language_model.mtp."})
    if (name.starts_with(start)) return true;
  return name.ends_with(".rotary_emb.inv_freq") || (tied_ && name == head_prefix_ + "lm_head.weight");
}

std::optional<tensor_slice> checkpoint_names::fused_expert(checkpoint& source, std::string_view name) {
  constexpr std::string_view marker = ".experts.";
  const auto at = name.find(marker);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string stack(name.substr(0, at + marker.size()));
  const std::string_view rest = name.substr(at + marker.size());
  std::uint64_t expert = 0;
  const auto [end, failure] = std::from_chars(rest.data(), rest.data() + rest.size(), expert);
  if (failure != std::errc()) return std::nullopt;
  const std::string_view part(end, static_cast<std::size_t>(rest.data() + rest.size() - end));
  if (part == ".down_proj.weight") {
    const auto whole = source.find(stack + "down_proj");
    return whole ? checkpoint::item(*whole, expert) : std::nullopt;
  }
  const bool gate = part == ".gate_proj.weight";
  if (!gate && part != ".up_proj.weight") return std::nullopt;
  const auto whole = source.find(stack + "gate_up_proj");
  const auto both = whole ? checkpoint::item(*whole, expert) : std::nullopt;
  if (!both || both->shape.empty() || both->shape[0] % 2 != 0) return std::nullopt;
  const std::uint64_t half = both->shape[0] / 2;
  return checkpoint::rows(*both, gate ? 0 : half, half);
}

void checkpoint_names::find_format(checkpoint& source, std::string_view tree_module,
                                   weight_format& format) const {
  const std::string module = of(tree_module);
  const auto weight = source.find(module + ".weight");
  if (source.find(module + ".weight_packed") || (weight && weight->type() == nibble::io::dtype::u8))
    format = weight_format::nvfp4;
  else if (weight && weight->type() == nibble::io::dtype::f8_e4m3)
    format = weight_format::fp8;
  else if (weight || fused_expert(source, module + ".weight"))
    format = weight_format::bf16;
}

module_formats checkpoint_names::stored_formats(checkpoint& source, const model_config& config) const {
  module_formats formats = config.formats;
  for (int i = config.layers - 1; i >= 0;
       --i) {  // the first layer of a kind speaks for it; binding checks the rest
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    if (config.full_attention[static_cast<std::size_t>(i)]) {
      find_format(source, layer + "self_attn.q_proj", formats.attention_qkv);
      find_format(source, layer + "self_attn.o_proj", formats.attention_out);
    } else {
      find_format(source, layer + "linear_attn.in_proj_qkv", formats.delta_qkvz);
      find_format(source, layer + "linear_attn.out_proj", formats.delta_out);
    }
  }
  const std::string mlp = "model.layers.0.mlp.";
  find_format(source, mlp + "experts.0.gate_proj", formats.expert_gate_up);
  find_format(source, mlp + "experts.0.down_proj", formats.expert_down);
  if (config.shared_intermediate > 0) {
    find_format(source, mlp + "shared_expert.gate_proj", formats.shared_gate_up);
    find_format(source, mlp + "shared_expert.down_proj", formats.shared_down);
  }
  if (!config.tied_embeddings) find_format(source, "lm_head", formats.lm_head);
  return formats;
}

nibble::bind_options checkpoint_names::bind_options(const quantization_rules& rules) const {
  nibble::bind_options options;
  options.method = rules.method;
  options.checkpoint_name = [this](std::string_view name) { return of(name); };
  options.fallback = fused_expert;
  options.skip = [this](std::string_view name) { return skipped(name); };
  options.declared_format = [&rules](std::string_view module) { return rules.format_of(module); };
  return options;
}

}  // namespace qwen3_moe
