// SPDX-License-Identifier: Apache-2.0
#include "model/memory_plan.hpp"

#include <algorithm>
#include <boost/json.hpp>
#include <cstdio>
#include <filesystem>

#include "model/device_memory_model.hpp"
#include "nibble/io/file.hpp"

namespace qwen3_moe {

namespace {

constexpr std::uint64_t config_limit_bytes = 16u << 20;

bool has_tensors(const std::filesystem::path& folder) {
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable))
    if (entry.path().extension() == ".safetensors") return true;
  return false;
}

struct found_model {
  model_config config;
  int max_positions;
  std::vector<std::string> warnings;
};

found_model find_model_named(const std::string& model, std::span<const compiled_model> models) {
  const std::filesystem::path path = model;
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) {
    if (has_tensors(path)) {
      auto summary = summarize(path, models);
      return {summary.parsed.config, summary.parsed.max_positions, std::move(summary.warnings)};
    }
    const auto parsed = read_config(path);
    return {parsed.config,
            parsed.max_positions,
            {path.string() + ": has no tensors; formats are those that config.json declares"}};
  }
  if (std::filesystem::is_regular_file(path, none)) {
    const auto quantization =
        nibble::io::file::read_optional_text(path.parent_path() / "hf_quant_config.json", config_limit_bytes)
            .value_or("");
    const auto parsed =
        parse_config(nibble::io::file::read_text(path, config_limit_bytes), quantization, path.string());
    return {parsed.config, parsed.max_positions, {}};
  }
  for (const auto& compiled : models)
    if (compiled.name == model)
      return {
          *compiled.config,
          compiled.max_positions,
          {"a context of " + std::to_string(compiled.max_positions) +
           " tokens is assumed, as in the config.json it was compiled from; a checkpoint's folder may say "
           "another"}};
  std::string text =
      model + ": neither a checkpoint's folder, nor a config.json, nor a compiled model; those are ";
  for (std::size_t i = 0; i < models.size(); ++i) text += (i == 0 ? "" : ", ") + std::string(models[i].name);
  throw nibble::format_error(text);
}

std::string graphs_text(const std::vector<int>& sizes) {
  if (sizes.empty()) return "no graphs";
  std::string text;
  for (const int rows : sizes) text += (text.empty() ? "" : ", ") + std::to_string(rows);
  return "graphs for batches of " + text;
}
std::string count(int number, std::string_view what) {
  return nibble::counted(static_cast<std::uint64_t>(number), what);
}

}  // namespace

nibble::plan_request plan_request_of(const load_options& options) {
  nibble::plan_request r;
  if (options.cuda.vram_limit_bytes != 0) r.vram_limit_bytes = options.cuda.vram_limit_bytes;
  if (options.cuda.kv_bytes != 0) r.kv_bytes = options.cuda.kv_bytes;
  if (options.cuda.expert_slots != 0) r.expert_slots = static_cast<std::uint64_t>(options.cuda.expert_slots);
  if (options.context_tokens != 0) r.context_tokens = options.context_tokens;
  r.preferred_running = std::max(1, options.max_running);
  if (!options.fewer_may_run) r.max_running = r.preferred_running;
  r.preferred_step_tokens = std::max(1, options.step_tokens);
  r.preferred_step_tokens_fetching = options.fetching_step_tokens;
  if (!options.steps_may_shrink) r.step_tokens = r.preferred_step_tokens;
  r.graphs = options.cuda.largest_graph > 0;
  r.most_captured_rows = options.cuda.largest_graph;
  return r;
}

paper_model find_paper_model(const std::string& model, nibble::kv_format kv, const expert_keeping& keeping,
                             std::span<const compiled_model> models) {
  found_model found = find_model_named(model, models);
  if (const auto refusal = device_refusal(found.config); !refusal.empty())
    throw nibble::format_error(
        model +
        ": the GPU kernels do not run this model, so it needs no GPU memory: " + std::string(refusal));
  return {found.config, device_memory_model(found.config, found.max_positions, kv, keeping),
          std::move(found.warnings)};
}

paper_plan plan_on_paper(const std::string& model, std::uint64_t vram_bytes, const load_options& options,
                         std::span<const compiled_model> models) {
  paper_model found = find_paper_model(
      model, options.cuda.kv_fp8 ? nibble::kv_format::fp8 : nibble::kv_format::bf16, options.experts, models);
  nibble::machine_memory machine;
  machine.total_bytes = vram_bytes;
  machine.context_bytes = usual_context_bytes;
  machine.free_bytes = vram_bytes - std::min(usual_context_bytes, vram_bytes);
  paper_plan paper;
  paper.plan = nibble::plan_memory(machine, found.bytes, plan_request_of(options));
  paper.model = model;
  paper.config = found.config;
  paper.vram_bytes = vram_bytes;
  paper.bytes = std::move(found.bytes);
  paper.warnings = std::move(found.warnings);
  return paper;
}

std::string paper_plan::text() const {
  const auto& limits = plan.limits;
  std::string out = model + ": " + describe(config) + "; " + describe(config.formats) + "\n" +
                    plan.lines.text() + "context " + count(limits.context_tokens, "token") + ", " +
                    count(limits.running, "sequence") + " at once, " + count(limits.step_tokens, "token") +
                    " a step, " + graphs_text(plan.captured_sizes) + "\n";
  if (plan.residency == nibble::expert_residency::all) {
    out += "all " + std::to_string(plan.expert_slots) + " experts are resident\n";
  } else if (bytes.experts > 0) {
    char share[32];
    std::snprintf(share, sizeof share, "%.1f",
                  100.0 * static_cast<double>(plan.expert_slots) / static_cast<double>(bytes.experts));
    out += std::to_string(plan.expert_slots) + " of " + std::to_string(bytes.experts) + " experts (" + share +
           " %) are resident at a time; host memory holds all of them, " +
           nibble::bytes_text(bytes.experts * bytes.expert_slot_bytes) + "\n";
  }
  for (const auto& note : plan.notes) out += note + "\n";
  for (const auto& warning : warnings) out += "warning: " + warning + "\n";
  return out;
}

std::string paper_plan::json() const {
  namespace json = boost::json;
  json::object out;
  out["model"] = model;
  out["vram_bytes"] = vram_bytes;
  out["budget_bytes"] = plan.budget_bytes;
  out["planned_bytes"] = plan.lines.planned_total();
  out["context_tokens"] = plan.limits.context_tokens;
  out["max_running"] = plan.limits.running;
  out["step_tokens"] = plan.limits.step_tokens;
  out["page_tokens"] = bytes.page_tokens;
  out["kv_pages"] = plan.kv_pages;
  out["kv_page_bytes"] = bytes.kv_page_bytes;
  out["state_slots"] = plan.state_slots;
  out["state_slot_bytes"] = bytes.state_slot_bytes;
  out["expert_slots"] = plan.expert_slots;
  out["expert_slot_bytes"] = bytes.expert_slot_bytes;
  const bool fetches = plan.expert_slots < bytes.experts;
  out["expert_table_bytes"] =
      fetches && bytes.expert_table_bytes ? bytes.expert_table_bytes(plan.expert_slots) : 0;
  out["expert_map_bytes"] = fetches ? bytes.expert_map_bytes : 0;
  out["experts"] = bytes.experts;
  out["captured_sizes"] = json::array(plan.captured_sizes.begin(), plan.captured_sizes.end());
  out["lines"] = json::parse(plan.lines.json_rows());
  out["notes"] = json::array(plan.notes.begin(), plan.notes.end());
  out["warnings"] = json::array(warnings.begin(), warnings.end());
  return json::serialize(out);
}

namespace {

boost::json::value option_value(const nibble::wish_change& change) {
  if (!change.value) return nullptr;
  return boost::json::string(std::to_string(*change.value));
}
/// What to put beside `plan MODEL`; by the request's name where there is no option.
std::string option_name(nibble::wish what) {
  switch (what) {
    case nibble::wish::context_tokens:
      return "--context";
    case nibble::wish::max_running:
      return "--max-running";
    case nibble::wish::expert_slots:
      return "--expert-slots";
    case nibble::wish::kv_bytes:
      return "--kv-bytes";
    case nibble::wish::vram_limit_bytes:
      return "--vram-limit";
    case nibble::wish::more_memory_bytes:
      return "--vram";
    case nibble::wish::step_tokens:
      return "step_tokens";
    case nibble::wish::state_snapshots:
      return "state_snapshots";
  }
  return "";
}
boost::json::array proposals_json(const std::vector<nibble::plan_proposal>& proposals,
                                  std::uint64_t vram_bytes) {
  boost::json::array out;
  for (const auto& proposal : proposals) {
    boost::json::object options;
    for (auto change : proposal.changes) {
      if (change.what == nibble::wish::more_memory_bytes)
        change.value = nibble::saturating_add(vram_bytes, change.value.value_or(0));
      options[option_name(change.what)] = option_value(change);
    }
    out.push_back({{"text", proposal.text}, {"options", std::move(options)}});
  }
  return out;
}
template <class Refusal>
boost::json::object refusal_object(const std::string& model, std::uint64_t vram_bytes,
                                   const Refusal& refused) {
  boost::json::object out;
  out["model"] = model;
  out["vram_bytes"] = vram_bytes;
  out["refused"] = refused.what();
  out["proposals"] = proposals_json(refused.proposals(), vram_bytes);
  out["missing_bytes"] = nullptr;
  out["lines"] = nullptr;
  return out;
}

}  // namespace

std::string refusal_json(const std::string& model, std::uint64_t vram_bytes,
                         const nibble::plan_refused& refused) {
  auto out = refusal_object(model, vram_bytes, refused);
  out["missing_bytes"] = refused.missing_bytes();
  out["lines"] = boost::json::parse(refused.lines().json_rows());
  return boost::json::serialize(out);
}
std::string refusal_json(const std::string& model, std::uint64_t vram_bytes,
                         const nibble::wish_refused& refused) {
  return boost::json::serialize(refusal_object(model, vram_bytes, refused));
}

}  // namespace qwen3_moe
