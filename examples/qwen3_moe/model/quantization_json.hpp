// SPDX-License-Identifier: Apache-2.0
/// \file
/// The quantisation part of a configuration.
#pragma once

#include <string_view>

#include "model/config_json.hpp"
#include "model/json_fields.hpp"

namespace qwen3_moe {

/// From config.json's quantization_config or, where that is absent, the text of hf_quant_config.json. When
/// both list quantized_layers, config.json's list counts.
[[nodiscard]] quantization_rules read_quantization_rules(const json_fields& config,
                                                         std::string_view quantization_text,
                                                         std::string_view what);

/// The declared format of each kind of matrix; a kind declared differently in different layers is refused.
[[nodiscard]] module_formats declared_formats(const model_config& config, const quantization_rules& rules,
                                              std::string_view what);

/// Refuses an NVFP4 matrix whose inner dimension is not a multiple of the block-scale group.
void check_inner_dimensions(const model_config& config, std::string_view what);

}  // namespace qwen3_moe
