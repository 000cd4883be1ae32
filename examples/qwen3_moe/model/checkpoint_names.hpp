// SPDX-License-Identifier: Apache-2.0
/// \file
/// How checkpoints in the wild name and stack the tensors of the op tree.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "model/config_json.hpp"
#include "nibble/io/checkpoint.hpp"
#include "nibble/op/bind.hpp"

namespace qwen3_moe {

/// Name prefixes, fused expert tensors, tensors to pass over, and the stored formats of one checkpoint.
class checkpoint_names {
 public:
  /// Finds out which prefix the decoder's tensors have ("model.language_model.", "model." or
  /// "language_model.model."). Throws nibble::format_error with names found and names expected.
  checkpoint_names(nibble::io::checkpoint& source, bool tied_embeddings);

  /// "model.layers.3.…" of the tree → the checkpoint's name.
  [[nodiscard]] std::string of(std::string_view tree_name) const;
  /// Vision towers, multi-token-prediction heads and rotary tables, which a text decoder does not use.
  [[nodiscard]] bool skipped(std::string_view name) const;
  /// The part of `experts.gate_up_proj` [E, 2I, H] or `experts.down_proj` [E, H, I] that stands for
  /// "….experts.E.gate_proj.weight" and its like.
  [[nodiscard]] static std::optional<nibble::io::tensor_slice> fused_expert(nibble::io::checkpoint& source,
                                                                            std::string_view name);
  /// The formats found in the tensors, which decide; where a tensor is missing, the configuration's. They are
  /// checked against each other on binding.
  [[nodiscard]] module_formats stored_formats(nibble::io::checkpoint& source,
                                              const model_config& config) const;
  /// Everything load_weights wants to know. `this` and `rules` must outlive the result.
  [[nodiscard]] nibble::bind_options bind_options(const quantization_rules& rules) const;

 private:
  /// Overwrites `format` by that of the stored tensor, where there is one.
  void find_format(nibble::io::checkpoint& source, std::string_view tree_module, weight_format& format) const;

  std::string decoder_prefix_;
  std::string head_prefix_;
  bool tied_ = false;
};

}  // namespace qwen3_moe
