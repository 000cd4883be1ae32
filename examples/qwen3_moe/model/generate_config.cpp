// SPDX-License-Identifier: Apache-2.0
// Writes the C++ constant of a config.json: generate_config NAME IDENTIFIER CONFIG.json OUTPUT.hpp. Run by
// the build.
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "model/config_json.hpp"
#include "nibble/io/file.hpp"

namespace {

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", value);  // hexadecimal: no rounding
  return text;
}

std::string source_for(const std::string& name, const std::string& identifier,
                       const qwen3_moe::parsed_config& parsed) {
  const auto& c = parsed.config;
  std::string out =
      "// SPDX-License-Identifier: Apache-2.0\n// Generated from a config.json by the build.\n#pragma "
      "once\n\n"
      "#include \"model/model_config.hpp\"\n\nnamespace qwen3_moe::compiled {\n\nstruct " +
      identifier + " {\n  static constexpr const char* name = \"" + name +
      "\";\n  static constexpr int max_positions = " + std::to_string(parsed.max_positions) +
      ";\n  static constexpr model_config value = [] {\n    model_config c;\n";
  const auto field = [&](const char* member, const std::string& value) {
    out += std::string("    c.") + member + " = " + value + ";\n";
  };
  const auto integer = [&](const char* member, int value) { field(member, std::to_string(value)); };
  const auto boolean = [&](const char* member, bool value) { field(member, value ? "true" : "false"); };
  integer("vocab_size", c.vocab_size);
  integer("hidden_size", c.hidden_size);
  integer("layers", c.layers);
  integer("attention_heads", c.attention_heads);
  integer("kv_heads", c.kv_heads);
  integer("head_dim", c.head_dim);
  integer("rotary_dim", c.rotary_dim);
  field("rope_theta", number(c.rope_theta));
  boolean("attention_gate", c.attention_gate);
  integer("delta_key_heads", c.delta_key_heads);
  integer("delta_value_heads", c.delta_value_heads);
  integer("delta_key_dim", c.delta_key_dim);
  integer("delta_value_dim", c.delta_value_dim);
  integer("delta_conv_width", c.delta_conv_width);
  integer("experts", c.experts);
  integer("experts_per_token", c.experts_per_token);
  integer("expert_intermediate", c.expert_intermediate);
  integer("shared_intermediate", c.shared_intermediate);
  boolean("normalise_top_k", c.normalise_top_k);
  field("norm_eps", number(c.norm_eps));
  boolean("zero_centred_norm", c.zero_centred_norm);
  boolean("tied_embeddings", c.tied_embeddings);
  for (int i = 0; i < c.layers; ++i)
    if (c.full_attention[static_cast<std::size_t>(i)])
      out += "    c.full_attention[" + std::to_string(i) + "] = true;\n";
  const auto format = [&](const char* member, qwen3_moe::weight_format value) {
    field((std::string("formats.") + member).c_str(), "weight_format::" + std::string(name_of(value)));
  };
  format("attention_qkv", c.formats.attention_qkv);
  format("attention_out", c.formats.attention_out);
  format("delta_qkvz", c.formats.delta_qkvz);
  format("delta_out", c.formats.delta_out);
  format("expert_gate_up", c.formats.expert_gate_up);
  format("expert_down", c.formats.expert_down);
  format("shared_gate_up", c.formats.shared_gate_up);
  format("shared_down", c.formats.shared_down);
  format("lm_head", c.formats.lm_head);
  return out + "    return c;\n  }();\n};\n\n}  // namespace qwen3_moe::compiled\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: generate_config NAME IDENTIFIER CONFIG.json OUTPUT.hpp\n");
    return 2;
  }
  try {
    const std::filesystem::path config_path = argv[3];
    const auto quantization_path = config_path.parent_path() / "hf_quant_config.json";
    constexpr std::uint64_t limit_bytes = 16u << 20;
    const std::string quantization =
        config_path.filename() == "config.json" && std::filesystem::exists(quantization_path)
            ? nibble::io::file::read_text(quantization_path, limit_bytes)
            : "";
    const auto parsed = qwen3_moe::parse_config(nibble::io::file::read_text(config_path, limit_bytes),
                                                quantization, config_path.string());
    std::ofstream out(argv[4]);
    out << source_for(argv[1], argv[2], parsed);
    out.close();
    if (!out) throw nibble::error(std::string(argv[4]) + ": cannot be written");
  } catch (const nibble::error& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 2;
  }
  return 0;
}
