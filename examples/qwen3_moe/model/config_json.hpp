// SPDX-License-Identifier: Apache-2.0
/// \file
/// From a checkpoint's config.json, hf_quant_config.json and generation_config.json to plain values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/model_config.hpp"
#include "model/name_pattern.hpp"
#include "nibble/op/bind.hpp"

namespace qwen3_moe {

/// Which modules the configuration says are quantised, and how.
struct quantization_rules {
  nibble::quantization_method method = nibble::quantization_method::none;

  /// What to say about the modules a pattern names. Plain names, of which there are hundreds, are looked up.
  struct entries {
    static constexpr std::size_t pattern_limit = 256;
    void add(const name_pattern& pattern, weight_format format);
    /// Tries each of `names`, all of which stand for one module.
    [[nodiscard]] std::optional<weight_format> find(std::span<const std::string> names) const;

   private:
    std::map<std::string, weight_format, std::less<>> plain_;
    std::vector<std::pair<name_pattern, weight_format>> patterns_;
  };
  entries listed;  ///< ModelOpt MIXED_PRECISION: a format for each module; `ignore` lists: bf16
  weight_format otherwise = weight_format::bf16;  ///< of Linear modules that are not listed

  /// The declared format of a module, by its name in the checkpoint or below either usual prefix. Nothing
  /// when the configuration makes no statement (no quantisation at all).
  [[nodiscard]] std::optional<weight_format> format_of(std::string_view module) const;
};

struct parsed_config {
  model_config config;  ///< formats as declared
  quantization_rules rules;
  std::string model_type;
  int max_positions = 0;  ///< context length the model was made for
};

/// Parses the text of config.json and, where there is one, hf_quant_config.json. `what` names the first in
/// errors. Throws nibble::format_error: field, value, limit.
[[nodiscard]] parsed_config parse_config(std::string_view config_text, std::string_view quantization_text,
                                         std::string_view what);

/// Reads both files of a checkpoint folder.
[[nodiscard]] parsed_config read_config(const std::filesystem::path& folder);

/// Sampling defaults and stop tokens of generation_config.json, with config.json's eos as a fallback.
struct generation_defaults {
  std::vector<std::int32_t> eos_token_ids;
  bool do_sample = true;
  float temperature = 1.0f;
  int top_k = 0;  ///< 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
};

[[nodiscard]] generation_defaults read_generation_defaults(const std::filesystem::path& folder,
                                                           int vocab_size);
[[nodiscard]] generation_defaults parse_generation_defaults(std::string_view generation_text,
                                                            std::string_view config_text, int vocab_size,
                                                            std::string_view what);

}  // namespace qwen3_moe
