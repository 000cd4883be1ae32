// SPDX-License-Identifier: Apache-2.0
// Two texts, split at the first NUL → config.json with hf_quant_config.json, and generation_config.json.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "model/config_json.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto split = text.find('\0');
  const std::string_view first = text.substr(0, split);
  const std::string_view second =
      split == std::string_view::npos ? std::string_view() : text.substr(split + 1);
  try {
    const auto parsed = qwen3_moe::parse_config(first, second, "config.json");
    for (const char* module : {"lm_head", "model.layers.0.mlp.experts.1.up_proj",
                               "model.language_model.layers.1.self_attn.q_proj"})
      (void)parsed.rules.format_of(module);
  } catch (const nibble::format_error&) {
  }
  try {
    (void)qwen3_moe::parse_generation_defaults(first, second, 1000, "generation_config.json");
  } catch (const nibble::format_error&) {
  }
  return 0;
}
