// SPDX-License-Identifier: Apache-2.0
/// \file
/// The compiled models, and loading a checkpoint into the one that fits it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model_runner.hpp"
#include "model/config_json.hpp"
#include "model/expert_keeping.hpp"
#include "nibble/core/device_class.hpp"
#include "nibble/geometry/geometry.hpp"
#include "nibble/host/thread_pool.hpp"
#include "nibble/io/checkpoint.hpp"
#include "nibble/op/bind.hpp"

namespace qwen3_moe {

enum class device_choice : std::uint8_t { automatic, host, cuda };

/// What only a GPU asks for. Zero: the planner decides.
struct cuda_options {
  std::uint64_t vram_limit_bytes = 0;  ///< of this process, context and kernels included
  std::uint64_t kv_bytes = 0;
  int expert_slots = 0;
  bool kv_fp8 = false;    ///< KV pages in E4M3 instead of bf16
  int largest_graph = 8;  ///< decode batches up to this are captured as graphs; 0: none

  friend bool operator==(const cuda_options&, const cuda_options&) = default;
};

struct load_options {
  device_choice device = device_choice::automatic;
  cuda_options cuda{};
  int threads = 0;         ///< 0: as many as the machine has cores
  int context_tokens = 0;  ///< longest sequence; 0: what the model was made for, at most 32768
  int max_running = 8;     ///< sequences at once
  int step_tokens = 512;   ///< most tokens in one step
  /// The same on a GPU that does not hold all experts, if it is more: each step of a long prompt fetches
  /// nearly all that are missing. Halved while it would take more than an eighth of the expert slots.
  int fetching_step_tokens = 8192;
  bool fewer_may_run = true;     ///< on a GPU with little memory max_running may become smaller
  bool steps_may_shrink = true;  ///< and so may step_tokens
  int page_tokens = 16;
  /// Tokens that the KV pages hold over all sequences; 0: context × max_running, but at most 4 GiB and at
  /// least one full context.
  std::int64_t kv_tokens = 0;
  nibble::load_mode mode = nibble::load_mode::copy;
  expert_keeping experts{};  ///< of those that do not fit on a GPU
  /// Takes lines that come after the start, of caches that changed; null: stderr.
  std::function<void(std::string_view)> log;
};

/// A checkpoint in memory, ready to run.
class loaded_model {
 public:
  virtual ~loaded_model() = default;
  [[nodiscard]] virtual model_runner& runner() = 0;
  [[nodiscard]] virtual std::uint64_t weight_bytes() const = 0;

  std::string compiled_name;  ///< of the model it was compiled as
  model_config config;
  int max_positions = 0;
  generation_defaults generation;
  std::vector<std::string> warnings;
  double load_seconds = 0;
  std::vector<std::string> notes;  ///< what the start decided: kernels, the ledger
  std::string device;              ///< "cuda (NVIDIA H200)" or "host", and why where nobody asked for it
  std::shared_ptr<const void> mapped_files;  ///< what matrices point into under load_mode::map
};

/// What a backend needs besides the options to load a checkpoint.
struct load_request {
  nibble::io::checkpoint& source;
  const nibble::bind_options& binding;
  int max_positions;
};
using cuda_loader = std::unique_ptr<loaded_model> (*)(const load_request& request,
                                                      const load_options& options);

/// A model's device code for one class of devices.
struct cuda_build {
  nibble::device_class device;
  cuda_loader load;  ///< null where the device kernels do not serve the model
};

/// One model that this program was compiled for.
struct compiled_model {
  std::string_view name;
  const model_config* config;
  int max_positions;  ///< of the config.json it was compiled from; its checkpoints may say something else
  std::span<const nibble::geometry> geometries;  ///< distinct ones, sorted
  std::uint64_t weight_bytes;
  std::unique_ptr<loaded_model> (*load)(nibble::io::checkpoint& source, const nibble::bind_options& options,
                                        const runner_limits& limits, nibble::load_mode mode, int threads);
  std::span<const cuda_build> cuda;  ///< one for each architecture of the build; empty without device code
};

/// All models compiled into this program, by name.
[[nodiscard]] std::span<const compiled_model> compiled_models();

/// What a checkpoint is, from its configuration and headers alone.
struct checkpoint_summary {
  parsed_config parsed;         ///< formats as stored
  const compiled_model* model;  ///< nothing when none fits
  std::uint64_t tensors;
  std::vector<std::string> warnings;
};
[[nodiscard]] checkpoint_summary summarize(const std::filesystem::path& folder,
                                           std::span<const compiled_model> models = compiled_models());

/// Loads a checkpoint into the compiled model of its shapes and formats, on the device that the options ask
/// for. Throws nibble::format_error; with no fitting model the error names those there are and how to add
/// this one. The automatic choice takes the GPU where there is one that this program has code for and that
/// the model fits, and otherwise says in `device` why not.
[[nodiscard]] std::unique_ptr<loaded_model> load_model(
    const std::filesystem::path& folder, const load_options& options,
    std::span<const compiled_model> models = compiled_models());

/// How fresh logits compare with a file of `N.input_ids` (I32 [tokens]) and `N.logits` (F32 [tokens, vocab]).
struct verify_result {
  int prompts = 0;
  std::int64_t positions = 0;
  double largest_difference = 0;
  double mean_kl_divergence = 0;  ///< of the reference's softmax from ours, in nats
  double top1_agreement = 0;      ///< share of positions with the same most likely token
};
[[nodiscard]] verify_result verify(loaded_model& model, const std::filesystem::path& reference);

}  // namespace qwen3_moe
