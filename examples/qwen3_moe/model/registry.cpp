// SPDX-License-Identifier: Apache-2.0
#include "model/registry.hpp"

#include <algorithm>
#include <chrono>

#include "model/checkpoint_names.hpp"
#include "model/device_probe.hpp"
#include "nibble/core/checked.hpp"

namespace qwen3_moe {

namespace {

constexpr int default_context_limit_tokens = 32768;
constexpr std::uint64_t default_kv_limit_bytes = std::uint64_t{4} << 30;

[[noreturn]] void fail_without_model(const std::filesystem::path& folder, const model_config& config,
                                     std::span<const compiled_model> models) {
  std::string text = folder.string() + ": no compiled model fits: it has " + describe(config) + "; " +
                     describe(config.formats) + ". ";
  for (const auto& model : models)
    if (same_shapes(*model.config, config)) {
      text += "The model " + std::string(model.name) + " has these shapes, but stores " +
              describe(model.config->formats) + ". ";
      break;
    }
  text += "Compiled: ";
  for (std::size_t i = 0; i < models.size(); ++i) text += (i == 0 ? "" : ", ") + std::string(models[i].name);
  const auto path = std::filesystem::absolute(folder / "config.json").lexically_normal();
  throw nibble::format_error(text + ". To add it: cmake -B build -DNIBBLE_MODELS=\"" + path.string() +
                             "\" && cmake --build build");
}

runner_limits limits_for(const model_config& config, int max_positions, const load_options& options) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most)
      throw nibble::format_error(std::string(name) + " is " + std::to_string(value) + ", expected " +
                                 std::to_string(least) + " to " + std::to_string(most));
  };
  runner_limits limits{};
  limits.vocab_size = config.vocab_size;
  limits.context_tokens = options.context_tokens == 0 ? std::min(max_positions, default_context_limit_tokens)
                                                      : options.context_tokens;
  check("context", limits.context_tokens, 2, max_positions);  // one token in, one out
  check("max-running", options.max_running, 1, 1024);
  check("step tokens", options.step_tokens, 1, 1 << 16);
  check("page tokens", options.page_tokens, 1, 1024);
  limits.slots = options.max_running;
  limits.page_tokens = options.page_tokens;
  limits.step_tokens = std::max(options.step_tokens, options.max_running);
  const auto context = static_cast<std::int64_t>(limits.context_tokens);
  std::int64_t kv_tokens = options.kv_tokens;
  if (kv_tokens == 0) {
    const auto token_bytes = std::uint64_t{8} * static_cast<std::uint64_t>(config.kv_width()) *
                             static_cast<std::uint64_t>(std::max(config.full_layers(), 1));
    const auto affordable = static_cast<std::int64_t>(default_kv_limit_bytes / token_bytes);
    kv_tokens = std::max(context, std::min(context * limits.slots, affordable));
  }
  check("kv tokens", kv_tokens, context, std::int64_t{1} << 30);
  // One page more for each sequence: a sequence's last page is rarely full.
  limits.pages = static_cast<int>(nibble::divide_up(static_cast<std::uint64_t>(kv_tokens),
                                                    static_cast<std::uint64_t>(limits.page_tokens))) +
                 limits.slots;
  return limits;
}

struct opened_checkpoint {
  explicit opened_checkpoint(const std::filesystem::path& folder)
      : parsed(read_config(folder)), source(folder), names(source, parsed.config.tied_embeddings) {
    parsed.config.formats = names.stored_formats(source, parsed.config);
  }
  parsed_config parsed;
  nibble::io::checkpoint source;
  checkpoint_names names;
};

/// Loads on the GPU, or says in `why_not` why the host has to do where the choice is free.
std::unique_ptr<loaded_model> load_on_cuda(const compiled_model& compiled, opened_checkpoint& opened,
                                           const nibble::bind_options& binding, const load_options& options,
                                           std::string& why_not) {
  const auto probe = probe_cuda_device();
  const cuda_build* const build = nibble::best_build(compiled.cuda, probe.compute_capability);
  why_not = probe.reason;
  if (probe.usable && compiled.cuda.empty())
    why_not = "this build has no device code for the model " + std::string(compiled.name);
  else if (probe.usable && build == nullptr)
    why_not = missing_architecture(probe.name, probe.compute_capability);
  else if (probe.usable && build->load == nullptr)
    why_not = "the GPU kernels do not run the model " + std::string(compiled.name);
  if (!why_not.empty()) {
    if (options.device == device_choice::cuda) throw nibble::format_error("--device cuda: " + why_not);
    return nullptr;
  }
  try {
    auto model = build->load({opened.source, binding, opened.parsed.max_positions}, options);
    model->device = "cuda (" + probe.name + ")";
    return model;
  } catch (const nibble::out_of_memory& refused) {
    // Whoever asked for a GPU, or for a split of its memory, wants to know and not to be served slowly.
    const cuda_options untouched{};
    if (options.device == device_choice::cuda || !(options.cuda == untouched)) throw;
    why_not = refused.what();
    why_not = why_not.substr(0, why_not.find('\n'));
    return nullptr;
  }
}

const compiled_model* find_model(const model_config& config, std::span<const compiled_model> models) {
  for (const auto& model : models)
    if (*model.config == config) return &model;
  return nullptr;
}

}  // namespace

checkpoint_summary summarize(const std::filesystem::path& folder, std::span<const compiled_model> models) {
  opened_checkpoint opened(folder);
  return {opened.parsed, find_model(opened.parsed.config, models), opened.source.names().size(),
          opened.source.warnings()};
}

std::unique_ptr<loaded_model> load_model(const std::filesystem::path& folder, const load_options& options,
                                         std::span<const compiled_model> models) {
  const auto begin = std::chrono::steady_clock::now();
  const auto opening = std::make_shared<opened_checkpoint>(folder);
  opened_checkpoint& opened = *opening;
  const model_config& config = opened.parsed.config;
  const compiled_model* compiled = find_model(config, models);
  if (compiled == nullptr) fail_without_model(folder, config, models);
  auto generation = read_generation_defaults(folder, config.vocab_size);
  const runner_limits limits = limits_for(config, opened.parsed.max_positions, options);
  const auto binding = opened.names.bind_options(opened.parsed.rules);
  std::unique_ptr<loaded_model> model;
  std::string why_host;
  if (options.device != device_choice::host)
    model = load_on_cuda(*compiled, opened, binding, options, why_host);
  if (model == nullptr) {
    model = compiled->load(opened.source, binding, limits, options.mode, options.threads);
    model->device = options.device == device_choice::host ? "host, as asked" : "host, because " + why_host;
    if (options.mode == nibble::load_mode::map) model->mapped_files = opening;
    const expert_keeping& experts = options.experts;
    if (!(options.cuda == cuda_options{}) || experts.cache_file || experts.ahead ||
        experts.fetch != expert_fetch::measured || experts.lock_limit_bytes != UINT64_MAX)
      model->notes.push_back(
          "options about a GPU's memory and how its experts come (--vram-limit, --kv-bytes, --kv-fp8, "
          "--expert-slots, --expert-cache, --expert-ahead, --expert-fetch, --lock-limit) have no effect on "
          "the CPU");
  }
  model->compiled_name = compiled->name;
  model->config = config;
  model->max_positions = opened.parsed.max_positions;
  model->generation = std::move(generation);
  model->warnings = opened.source.warnings();
  model->load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return model;
}

}  // namespace qwen3_moe
