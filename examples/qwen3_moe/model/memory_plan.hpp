// SPDX-License-Identifier: Apache-2.0
/// \file
/// The split of a GPU's memory for a model: as the start asks for it, and on paper, with no GPU there.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/registry.hpp"
#include "nibble/kernels/step.hpp"
#include "nibble/plan/planner.hpp"

namespace qwen3_moe {

/// What the options ask of the planner.
[[nodiscard]] nibble::plan_request plan_request_of(const load_options& options);

/// Bytes that a CUDA context takes, measured on an H200 with driver 580; other cards take less.
inline constexpr std::uint64_t usual_context_bytes = std::uint64_t{524} << 20;

struct paper_plan {
  std::string model;    ///< as it was named
  model_config config;  ///< formats as stored, or as declared where there are no tensors to look at
  std::uint64_t vram_bytes = 0;
  nibble::memory_model bytes;
  nibble::memory_plan plan;
  std::vector<std::string> warnings;

  /// The ledger and what it means, for people.
  [[nodiscard]] std::string text() const;
  /// One JSON object on one line.
  [[nodiscard]] std::string json() const;
};

/// A model's configuration found by name, and what the device would hold of it.
struct paper_model {
  model_config config;
  nibble::memory_model bytes;
  std::vector<std::string> warnings;
};

/// \param model a checkpoint's folder, a config.json, or the name of a compiled model
/// Reads headers and configurations, no weights. Throws nibble::format_error.
[[nodiscard]] paper_model find_paper_model(const std::string& model, nibble::kv_format kv,
                                           const expert_keeping& keeping = {},
                                           std::span<const compiled_model> models = compiled_models());

/// The plan of a card of `vram_bytes` that nobody else uses. Throws nibble::plan_refused, which shows the
/// arithmetic.
[[nodiscard]] paper_plan plan_on_paper(const std::string& model, std::uint64_t vram_bytes,
                                       const load_options& options,
                                       std::span<const compiled_model> models = compiled_models());

/// A refusal as the JSON object that `plan --json` writes: the text as `refused`; as `missing_bytes` and
/// `lines` what there is too little of, null where a wish cannot be with any memory; as `proposals`, any one
/// of which would fit, each with its `text` and the `options` to give instead, null for one to leave out.
[[nodiscard]] std::string refusal_json(const std::string& model, std::uint64_t vram_bytes,
                                       const nibble::plan_refused& refused);
[[nodiscard]] std::string refusal_json(const std::string& model, std::uint64_t vram_bytes,
                                       const nibble::wish_refused& refused);

}  // namespace qwen3_moe
