// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the planner knows of a machine, of a model, and of the user's wishes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nibble/core/error.hpp"
#include "nibble/plan/ledger.hpp"

namespace nibble {

/// What a step may carry. Workspaces follow from it.
struct step_limits {
  int step_tokens = 0;     ///< most tokens in one step
  int running = 0;         ///< most sequences in one step
  int context_tokens = 0;  ///< longest sequence
};

/// Bytes of a model, known from its type or its configuration; nothing here is measured.
struct memory_model {
  std::uint64_t weight_bytes = 0;  ///< resident whatever the split: all but the routed experts
  std::uint64_t kernel_bytes = 0;  ///< machine code
  /// Of the largest step. Must not fall when a limit rises.
  std::function<std::uint64_t(const step_limits&)> workspace_bytes;
  std::uint64_t graph_bytes = 0;  ///< of one captured size

  int max_context_tokens = 0;          ///< what the model was made for
  std::uint64_t state_slot_bytes = 0;  ///< recurrent state of one sequence, all layers; 0: none
  std::uint64_t kv_page_bytes = 0;     ///< keys and values of one page, all layers
  int page_tokens = 16;
  /// Whether padding rows write somewhere: one state slot and one page more than sequences use. False where
  /// they touch no cache.
  bool padding_writes = true;

  std::uint64_t expert_slot_bytes = 0;  ///< 0: no routed experts, or they are among the weights
  std::uint64_t experts = 0;            ///< routed experts of all layers
  std::uint64_t layer_experts = 0;      ///< of one layer
  std::uint64_t experts_per_token = 0;  ///< chosen in one layer
  /// What the device takes to address page-locked experts in host memory, where not all have slots.
  std::uint64_t expert_map_bytes = 0;
  /// What tables and buffers take, with so many slots that not all experts have one. Must not fall when slots
  /// rise. Empty: nothing.
  std::function<std::uint64_t(std::uint64_t slots)> expert_table_bytes;
  /// Whether experts that all have slots keep them when memory gets short: nothing else holds them then.
  bool all_experts_stay = false;
};

/// Device memory as read, or as supposed where there is no device.
struct machine_memory {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;     ///< free before anything of the model was there, the context being there
  std::uint64_t context_bytes = 0;  ///< what this process' context took before that
  /// Free now, if it was read again: what is missing beyond the model's own share was taken by others.
  std::optional<std::uint64_t> free_now_bytes;
  std::uint64_t held_bytes = 0;      ///< this process' own share since then, all of it
  std::uint64_t resident_bytes = 0;  ///< of that, weights and kernels as measured
  /// Where the operating system gives a process a budget (WDDM): the driver's free figure is then too good.
  std::optional<std::uint64_t> os_budget_bytes;
  std::uint64_t os_used_bytes = 0;
};

/// Wishes. What is set is kept or refused; what is not set follows from the memory there is.
struct plan_request {
  std::optional<std::uint64_t> vram_limit_bytes;  ///< all lines together, context and reserve included
  std::optional<int> context_tokens;
  std::optional<int> max_running;
  std::optional<int> step_tokens;
  std::optional<std::uint64_t> expert_slots;
  std::optional<std::uint64_t> kv_bytes;
  std::optional<std::uint64_t> reserve_bytes;

  int preferred_context_tokens = 32768;
  int least_context_tokens = 2048;
  int preferred_running = 4;
  int preferred_step_tokens = 1024;
  /// Preferred instead where not all experts fit, if it is more: every step of a long prompt brings nearly
  /// all that are missing, so few large steps bring less than many small ones. Halved while it takes more
  /// than an eighth of the expert slots. 0: no other preference.
  int preferred_step_tokens_fetching = 0;
  int least_step_tokens = 64;
  int state_snapshots = 0;  ///< states kept beside the running ones, by a prefix cache
  bool graphs = true;
  std::vector<int> captured_sizes;  ///< empty: 1, 2, 4, … and the sequences that run
  int most_captured_rows = 1024;    ///< larger batches run eagerly

  std::uint64_t granule_bytes = std::uint64_t{2} << 20;  ///< the device hands memory out in these
  std::uint64_t pinned_pages = 0;                  ///< KV pages 0 … n - 1 must stay, a dummy among them
  std::optional<int> most_context_tokens;          ///< no longer context, whatever memory there is
  std::optional<std::uint64_t> most_expert_slots;  ///< nor more slots
  std::optional<std::uint64_t> most_kv_pages;      ///< nor more pages
};

/// How experts that are not resident reach the device during prefill.
enum class expert_residency : std::uint8_t {
  none,          ///< the model has no slots
  all,           ///< every expert has its own slot
  two_layers,    ///< slots for two layers: one is fetched while the other computes
  one_layer,     ///< slots for one layer: no overlap
  part_of_layer  ///< fewer: a layer goes in pieces
};

/// The split.
struct memory_plan {
  std::uint64_t budget_bytes = 0;
  step_limits limits;
  std::uint64_t kv_pages = 0;     ///< ids 0 … kv_pages - 1; 0 is the dummy where padding_writes
  std::uint64_t state_slots = 0;  ///< ids 0 … state_slots - 1; 0 is the dummy where padding_writes
  std::uint64_t expert_slots = 0;
  expert_residency residency = expert_residency::none;
  std::vector<int> captured_sizes;  ///< empty without graphs
  ledger lines;
  std::vector<std::string> notes;  ///< what had to give way, and the formula of the reserve

  /// The page and the slot that padding rows write to, where they do. The first ones, so that they stay when
  /// caches shrink.
  static constexpr std::int32_t dummy_page = 0, dummy_slot = 0;
};

/// What a proposal changes: a number of plan_request by its name, or the memory there is.
enum class wish : std::uint8_t {
  context_tokens,
  max_running,
  step_tokens,
  expert_slots,
  kv_bytes,
  state_snapshots,
  vram_limit_bytes,
  more_memory_bytes  ///< beyond what the machine has
};
struct wish_change {
  wish what{};
  std::optional<std::uint64_t> value;  ///< nothing: the wish is to be dropped
};
/// Changes with which, all of them made and all else as it was, a request that was refused would fit.
struct plan_proposal {
  std::string text;  ///< "--context 8192 --max-running 2"
  std::vector<wish_change> changes;
};

/// A wish that no memory makes possible: more slots than experts, a context longer than the model's.
class wish_refused : public format_error {
 public:
  explicit wish_refused(const std::string& text, std::vector<plan_proposal> proposals = {})
      : format_error(text), proposals_(std::move(proposals)) {}
  /// Any one of them is enough, with the memory there is. None: none of few numbers was found.
  [[nodiscard]] const std::vector<plan_proposal>& proposals() const { return proposals_; }

 private:
  std::vector<plan_proposal> proposals_;
};

/// The model, with what was wished for, does not fit. The text shows the arithmetic and what would fit.
class plan_refused : public out_of_memory {
 public:
  plan_refused(const std::string& text, ledger wanted, std::uint64_t missing,
               std::vector<plan_proposal> proposals = {})
      : out_of_memory(text),
        lines_(std::move(wanted)),
        missing_bytes_(missing),
        proposals_(std::move(proposals)) {}
  [[nodiscard]] const ledger& lines() const { return lines_; }
  /// How much more memory the least plan needs; 0 when the device's readings make no sense.
  [[nodiscard]] std::uint64_t missing_bytes() const { return missing_bytes_; }
  /// Any one of them is enough; those of the text.
  [[nodiscard]] const std::vector<plan_proposal>& proposals() const { return proposals_; }

 private:
  ledger lines_;
  std::uint64_t missing_bytes_;
  std::vector<plan_proposal> proposals_;
};

}  // namespace nibble
