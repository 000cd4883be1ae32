// SPDX-License-Identifier: Apache-2.0
#include "model/config_json.hpp"

#include <algorithm>

#include "model/json_fields.hpp"
#include "model/quantization_json.hpp"
#include "nibble/io/file.hpp"

namespace qwen3_moe {

namespace {

constexpr std::uint64_t config_limit_bytes = 16u << 20;

/// Which layers attend: `layer_types`, else every `full_attention_interval`-th. Both given must agree.
void read_layer_kinds(const json_fields& text, model_config& config) {
  const int interval = text.integer_or("full_attention_interval", 0, 1, max_layers);
  const auto* types = text.find("layer_types");
  if (types == nullptr) {
    for (int i = 0; i < config.layers; ++i)
      config.full_attention[static_cast<std::size_t>(i)] = (i + 1) % (interval == 0 ? 4 : interval) == 0;
    return;
  }
  if (!types->is_array() || static_cast<int>(types->get_array().size()) != config.layers)
    text.fail("layer_types",
              "is not a list of num_hidden_layers = " + std::to_string(config.layers) + " entries");
  for (int i = 0; i < config.layers; ++i) {
    const auto& type = types->get_array()[static_cast<std::size_t>(i)];
    const bool full = type == "full_attention";
    if (!full && type != "linear_attention")
      text.fail("layer_types", "names " + boost::json::serialize(type) + " for layer " + std::to_string(i) +
                                   "; full_attention and linear_attention are supported");
    if (interval != 0 && full != ((i + 1) % interval == 0))
      text.fail("layer_types", "and full_attention_interval = " + std::to_string(interval) +
                                   " disagree about layer " + std::to_string(i));
    config.full_attention[static_cast<std::size_t>(i)] = full;
  }
}

void read_rope(const json_fields& text, model_config& config) {
  double theta = text.number_or("rope_theta", 10000.0, 1.0, 1e12);
  double partial = text.number_or("partial_rotary_factor", 1.0, 0.0, 1.0);
  for (const std::string_view field : {"rope_parameters", "rope_scaling"}) {
    if (text.find(field) == nullptr) continue;
    const json_fields rope = text.child(field);
    const std::string type = rope.text_or("rope_type", rope.text_or("type", "default"));
    if (type != "default") rope.fail("rope_type", "is '" + type + "'; only 'default' is supported");
    theta = rope.number_or("rope_theta", theta, 1.0, 1e12);
    partial = rope.number_or("partial_rotary_factor", partial, 0.0, 1.0);
  }
  config.rope_theta = theta;
  config.rotary_dim = static_cast<int>(config.head_dim * partial);
  if (config.rotary_dim % 2 != 0 || config.rotary_dim == 0)
    text.fail("partial_rotary_factor",
              "gives " + std::to_string(config.rotary_dim) +
                  " rotating dimensions of a head; an even number above 0 is needed");
}

void read_delta(const json_fields& text, model_config& config) {
  if (config.delta_layers() == 0) return;
  config.delta_key_heads = text.integer("linear_num_key_heads", 1, 4096);
  config.delta_value_heads = text.integer("linear_num_value_heads", 1, 4096);
  config.delta_key_dim = text.integer("linear_key_head_dim", 1, 1024);
  config.delta_value_dim = text.integer("linear_value_head_dim", 1, 1024);
  config.delta_conv_width = text.integer("linear_conv_kernel_dim", 2, 8);
  if (config.delta_value_heads % config.delta_key_heads != 0)
    text.fail("linear_num_value_heads",
              "= " + std::to_string(config.delta_value_heads) +
                  " is not a multiple of linear_num_key_heads = " + std::to_string(config.delta_key_heads));
}

/// Dense layers inside an MoE model are not supported: the tree has one MLP kind.
void refuse_dense_layers(const json_fields& text) {
  if (const auto* dense = text.find("mlp_only_layers");
      dense != nullptr && !(dense->is_array() && dense->get_array().empty()))
    text.fail("mlp_only_layers",
              "is " + boost::json::serialize(*dense) + "; only models without dense layers are supported");
  if (text.integer_or("decoder_sparse_step", 1, 0, max_layers) != 1)
    text.fail("decoder_sparse_step", "is not 1; only models in which every layer has experts are supported");
}

model_config read_text_config(const json_fields& text, bool hybrid) {
  constexpr int most = 1 << 20;
  model_config config;
  config.vocab_size = text.integer("vocab_size", 1, 1 << 24);
  config.hidden_size = text.integer("hidden_size", 16, most);
  config.layers = text.integer("num_hidden_layers", 1, max_layers);
  config.attention_heads = text.integer("num_attention_heads", 1, 4096);
  config.kv_heads = text.integer_or("num_key_value_heads", config.attention_heads, 1, 4096);
  config.head_dim = text.integer_or("head_dim", config.hidden_size / config.attention_heads, 2, 1024);
  if (config.attention_heads % config.kv_heads != 0)
    text.fail("num_attention_heads",
              "= " + std::to_string(config.attention_heads) +
                  " is not a multiple of num_key_value_heads = " + std::to_string(config.kv_heads));
  config.attention_gate = text.boolean_or("attn_output_gate", hybrid);
  if (text.boolean_or("attention_bias", false))
    text.fail("attention_bias", "is true; biases are not supported");
  if (text.text_or("hidden_act", "silu") != "silu")
    text.fail("hidden_act", "is not silu, the only one supported");
  if (text.boolean_or("use_sliding_window", false))
    text.fail("use_sliding_window", "is true; it is not supported");
  config.norm_eps = text.number_or("rms_norm_eps", 1e-6, 0.0, 1.0);
  config.zero_centred_norm = hybrid;
  config.tied_embeddings = text.boolean_or("tie_word_embeddings", false);
  if (hybrid)
    read_layer_kinds(text, config);
  else
    std::fill_n(config.full_attention.begin(), config.layers, true);
  read_rope(text, config);
  read_delta(text, config);
  refuse_dense_layers(text);
  config.experts = text.integer("num_experts", 1, 4096);
  config.experts_per_token = text.integer("num_experts_per_tok", 1, config.experts);
  config.expert_intermediate = text.integer("moe_intermediate_size", 1, most);
  config.shared_intermediate = hybrid ? text.integer_or("shared_expert_intermediate_size", 0, 0, most) : 0;
  config.normalise_top_k = text.boolean_or("norm_topk_prob", true);
  return config;
}

}  // namespace

parsed_config parse_config(std::string_view config_text, std::string_view quantization_text,
                           std::string_view what) {
  const boost::json::object root = json_fields::parse(config_text, what);
  const json_fields top(root, std::string(what));
  parsed_config parsed;
  parsed.model_type = top.text_or("model_type", "");
  const bool hybrid = parsed.model_type == "qwen3_5_moe" || parsed.model_type == "qwen3_5_moe_text";
  if (!hybrid && parsed.model_type != "qwen3_moe")
    top.fail("model_type", "is '" + parsed.model_type + "'; qwen3_5_moe and qwen3_moe are supported");
  const json_fields text = top.find("text_config") != nullptr ? top.child("text_config") : top;
  parsed.config = read_text_config(text, hybrid);
  if (top.boolean_or("tie_word_embeddings", false)) parsed.config.tied_embeddings = true;
  parsed.max_positions = text.integer_or("max_position_embeddings", 4096, 1, 1 << 30);
  parsed.rules = read_quantization_rules(top, quantization_text, what);
  parsed.config.formats = declared_formats(parsed.config, parsed.rules, what);
  check_inner_dimensions(parsed.config, what);
  return parsed;
}

parsed_config read_config(const std::filesystem::path& folder) {
  std::error_code unreadable;
  if (!std::filesystem::is_directory(folder, unreadable))
    throw nibble::format_error(folder.string() + ": not a folder" +
                               (unreadable ? ": " + unreadable.message() : "") +
                               "; give the folder of a Hugging Face checkpoint");
  const auto path = folder / "config.json";
  const auto quantization =
      nibble::io::file::read_optional_text(folder / "hf_quant_config.json", config_limit_bytes).value_or("");
  return parse_config(nibble::io::file::read_text(path, config_limit_bytes), quantization, path.string());
}

namespace {

void add_token_ids(const json_fields& fields, std::string_view field, int vocab_size,
                   std::vector<std::int32_t>& ids) {
  const auto* value = fields.find(field);
  if (value == nullptr) return;
  const auto add = [&](const boost::json::value& id) {
    if (!id.is_int64() || id.get_int64() < 0 || id.get_int64() >= vocab_size)
      fields.fail(field, "is " + boost::json::serialize(id) + ", expected a token id below " +
                             std::to_string(vocab_size));
    const auto token = static_cast<std::int32_t>(id.get_int64());
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  };
  if (value->is_array())
    for (const auto& id : value->get_array()) add(id);
  else
    add(*value);
}

}  // namespace

generation_defaults parse_generation_defaults(std::string_view generation_text, std::string_view config_text,
                                              int vocab_size, std::string_view what) {
  generation_defaults defaults;
  if (!generation_text.empty()) {
    const boost::json::object object = json_fields::parse(generation_text, what);
    const json_fields fields(object, std::string(what));
    add_token_ids(fields, "eos_token_id", vocab_size, defaults.eos_token_ids);
    defaults.do_sample = fields.boolean_or("do_sample", true);
    defaults.temperature = static_cast<float>(fields.number_or("temperature", 1.0, 0.0, 100.0));
    defaults.top_k = fields.integer_or("top_k", 0, 0, 1 << 24);
    defaults.top_p = static_cast<float>(fields.number_or("top_p", 1.0, 0.0, 1.0));
    defaults.min_p = static_cast<float>(fields.number_or("min_p", 0.0, 0.0, 1.0));
    defaults.repetition_penalty =
        static_cast<float>(fields.number_or("repetition_penalty", 1.0, 0.01, 100.0));
  }
  if (defaults.eos_token_ids.empty()) {
    const boost::json::object root = json_fields::parse(config_text, "config.json");
    const json_fields top(root, "config.json");
    add_token_ids(top.find("text_config") != nullptr ? top.child("text_config") : top, "eos_token_id",
                  vocab_size, defaults.eos_token_ids);
  }
  return defaults;
}

generation_defaults read_generation_defaults(const std::filesystem::path& folder, int vocab_size) {
  const auto path = folder / "generation_config.json";
  const auto text = nibble::io::file::read_optional_text(path, config_limit_bytes);
  if (text && text->empty()) throw nibble::format_error(path.string() + ": is empty");
  return parse_generation_defaults(text.value_or(""),
                                   nibble::io::file::read_text(folder / "config.json", config_limit_bytes),
                                   vocab_size, path.string());
}

std::string describe(const model_config& config) {
  std::string text = std::to_string(config.layers) + " layers (" + std::to_string(config.full_layers()) +
                     " attention, " + std::to_string(config.delta_layers()) + " gated delta), hidden " +
                     std::to_string(config.hidden_size) + ", " + std::to_string(config.experts) +
                     " experts top-" + std::to_string(config.experts_per_token) + " of " +
                     std::to_string(config.expert_intermediate);
  if (config.shared_intermediate > 0)
    text += " and a shared one of " + std::to_string(config.shared_intermediate);
  return text + ", vocabulary " + std::to_string(config.vocab_size);
}

std::string describe(const module_formats& f) {
  const auto pair = [](weight_format a, weight_format b) {
    std::string text(name_of(a));
    if (a != b) text += "/" + std::string(name_of(b));
    return text;
  };
  return "experts " + pair(f.expert_gate_up, f.expert_down) + ", shared expert " +
         pair(f.shared_gate_up, f.shared_down) + ", attention " + pair(f.attention_qkv, f.attention_out) +
         ", delta " + pair(f.delta_qkvz, f.delta_out) + ", lm_head " + std::string(name_of(f.lm_head));
}

}  // namespace qwen3_moe
