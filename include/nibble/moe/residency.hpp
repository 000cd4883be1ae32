// SPDX-License-Identifier: Apache-2.0
/// \file
/// The tables of resident experts on the host: decides as the placement kernel does, to the bit. It makes the
/// tables that a device starts with, and replays traces to compare policies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nibble/core/error.hpp"
#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

/// One expert to bring: its number over all layers, and the slot that will hold it.
struct fetch_entry {
  std::int32_t number = -1;
  std::int32_t slot = -1;
  friend constexpr bool operator==(const fetch_entry&, const fetch_entry&) = default;
};

/// What place_params says, with host memory.
struct place_request {
  int layer = 0;
  std::span<const std::int32_t> ids;  ///< rows of top_k after each other
  bool whole_layer = false;           ///< every expert of the layer; `ids` is not read
  place_mode mode = place_mode::decode;
  bool new_step = false;
  std::uint32_t ticks = default_ticks;
  bool ahead = false;  ///< with guesses for the layer after
  std::span<const std::int32_t> ahead_ids;
  bool ahead_whole_layer = false;
  int ahead_row = 1, ahead_limit = 0;
  std::span<const fetch_entry> guesses, recent;
  std::span<const std::int32_t> fetch_of;  ///< empty: all are fetched
};

/// What to fetch.
struct placement {
  std::vector<fetch_entry> demand, ahead;
  std::vector<std::int32_t> on_host;  ///< ids of the layer left to the CPU
};

class host_residency {
 public:
  /// \param most_slots that resize() may ever open; 0: as many as now. Tables have a row for each; a slot
  /// that is closed is empty and has the key worth_protected, so that it is never filled. Throws
  /// nibble::error for a shape or slot counts that cannot be.
  host_residency(const residency_shape& shape, int slot_count, int most_slots = 0)
      : shape_(shape),
        open_(slot_count),
        slot_of_(static_cast<std::size_t>(shape.valid() ? shape.total() : 0), -1),
        worth_(slot_of_.size(), worth_never) {
    const int most = std::max(most_slots, slot_count);
    if (!shape.valid()) throw error("residency: at most 1024 experts a layer and 32768 in all");
    if (slot_count < 1 || most > shape.total())
      throw error("residency: " + std::to_string(slot_count) + " slots, " + std::to_string(most) +
                  " at most, for " + std::to_string(shape.total()) + " experts");
    expert_of_.assign(static_cast<std::size_t>(most), -1);
    slot_key_.assign(static_cast<std::size_t>(most), worth_protected);
    std::fill_n(slot_key_.begin(), slot_count, worth_never);
  }

  /// Tables as a device left them. Entries that contradict each other are not resident.
  [[nodiscard]] static host_residency of_tables(const residency_shape& shape,
                                                std::span<const std::int32_t> slot_of,
                                                std::span<const std::int32_t> expert_of,
                                                std::span<const std::uint32_t> slot_key,
                                                std::span<const std::uint32_t> worth, std::uint32_t clock) {
    std::size_t open = expert_of.size();
    while (open > 1 && open <= slot_key.size() && expert_of[open - 1] < 0 &&
           slot_key[open - 1] == worth_protected)
      --open;
    host_residency made(shape, static_cast<int>(open), static_cast<int>(expert_of.size()));
    if (slot_of.size() != made.slot_of_.size() || worth.size() != slot_of.size() ||
        slot_key.size() != expert_of.size())
      throw error("residency: tables of another shape");
    for (std::size_t s = 0; s < expert_of.size(); ++s) {
      const auto number = static_cast<std::size_t>(expert_of[s]);
      if (expert_of[s] >= 0 && number < slot_of.size() && slot_of[number] == static_cast<std::int32_t>(s))
        made.put(expert_of[s], static_cast<int>(s), slot_key[s]);
    }
    std::copy(worth.begin(), worth.end(), made.worth_.begin());
    made.clock_ = clock;
    return made;
  }

  [[nodiscard]] const residency_shape& shape() const { return shape_; }
  [[nodiscard]] int slot_count() const { return open_; }
  [[nodiscard]] int most_slots() const { return static_cast<int>(expert_of_.size()); }
  [[nodiscard]] std::span<const std::int32_t> slot_of() const { return slot_of_; }
  [[nodiscard]] std::span<const std::int32_t> expert_of() const { return expert_of_; }
  [[nodiscard]] std::span<const std::uint32_t> slot_key() const { return slot_key_; }
  [[nodiscard]] std::span<const std::uint32_t> worth() const { return worth_; }
  [[nodiscard]] std::uint32_t clock() const { return clock_; }
  [[nodiscard]] const residency_counts& counts() const { return counts_; }
  void set_clock(std::uint32_t now) { clock_ = now; }

  /// Takes over what is known of experts' worth and fills the slots with the worthiest, ties to the lower
  /// number; experts without worth fill the rest, evenly over the layers. \return what to bring, in slot
  /// order
  std::vector<fetch_entry> warm(std::span<const std::uint32_t> worth) {
    if (worth.size() != worth_.size()) throw error("residency: the worth of another number of experts");
    std::copy(worth.begin(), worth.end(), worth_.begin());
    std::fill(slot_of_.begin(), slot_of_.end(), -1);
    std::vector<std::int32_t> order(worth_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto turn = [&](std::int32_t n) { return n % shape_.experts * shape_.layers + n / shape_.experts; };
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      const auto wa = worth_[static_cast<std::size_t>(a)], wb = worth_[static_cast<std::size_t>(b)];
      if (wa != wb) return wa > wb;
      return wa == worth_never ? turn(a) < turn(b) : a < b;
    });
    std::vector<fetch_entry> out;
    for (int s = 0; s < slot_count(); ++s) {
      const std::int32_t number = order[static_cast<std::size_t>(s)];
      put(number, s, std::max(worth_[static_cast<std::size_t>(number)], worth_streamed));
      out.push_back({number, s});
    }
    return out;
  }

  /// Never to be refilled once resident. Leave as many slots open as one layer of a step can ask for.
  void protect(std::int32_t number) {
    worth_.at(static_cast<std::size_t>(number)) = worth_protected;
    if (const int slot = slot_of_[static_cast<std::size_t>(number)]; slot >= 0)
      slot_key_[static_cast<std::size_t>(slot)] = worth_protected;
  }

  /// Opens or closes slots at the end: what lay in those closed is not resident any more. Views and captured
  /// graphs stay valid, the tables have as many rows as before. Throws nibble::error.
  void resize(int slot_count) {
    if (slot_count < 1 || slot_count > most_slots())
      throw error("residency: " + std::to_string(slot_count) + " slots, the tables have " +
                  std::to_string(most_slots()));
    for (int s = slot_count; s < open_; ++s) {
      forget_slot(s);
      slot_key_[static_cast<std::size_t>(s)] = worth_protected;
    }
    for (int s = open_; s < slot_count; ++s) slot_key_[static_cast<std::size_t>(s)] = worth_never;
    open_ = slot_count;
  }
  /// Nothing is resident; what experts are worth stays known. After a step failed and no one knows which
  /// slots hold what.
  void forget_all() {
    for (int s = 0; s < open_; ++s) forget_slot(s);
  }
  /// What a fetch failed to bring is not resident.
  void forget(std::span<const fetch_entry> entries) {
    for (const fetch_entry& e : entries)
      if (e.slot >= 0 && e.slot < open_ && expert_of_[static_cast<std::size_t>(e.slot)] == e.number)
        forget_slot(e.slot);
  }

  /// Decides and rewrites the tables.
  placement place(const place_request& request) {
    const auto experts = static_cast<std::size_t>(shape_.experts);
    const bool decode = request.mode == place_mode::decode;
    const std::size_t base = static_cast<std::size_t>(request.layer) * experts, next = base + experts;
    std::vector<char> kept(expert_of_.size(), 0);
    const auto keep = [&](int slot) {
      if (slot >= 0) kept[static_cast<std::size_t>(slot)] = 1;
    };
    const std::vector<char> chosen = set_of(request.ids, request.whole_layer, &counts_.bad_ids);
    const std::vector<char> likely = request.ahead
                                         ? set_of(request.ahead_ids, request.ahead_whole_layer, nullptr)
                                         : std::vector<char>(experts, 0);
    if (request.new_step) tick(request.ticks);
    placement out;
    for (const fetch_entry& guess : request.guesses)
      if (chosen[static_cast<std::size_t>(guess.number) - base]) ++counts_.ahead_used;
    for (const fetch_entry& e : request.recent) keep(e.slot);
    std::vector<std::int32_t> missing;
    for (std::size_t id = 0; id < experts; ++id) {
      if (!chosen[id]) continue;
      const int slot = slot_of_[base + id];
      if (slot < 0) {
        missing.push_back(static_cast<std::int32_t>(base + id));
        ++counts_.misses;
        continue;
      }
      keep(slot);
      ++counts_.hits;
      if (decode)
        slot_key_[static_cast<std::size_t>(slot)] = worth_[base + id] = worth_used(worth_[base + id], clock_);
    }
    if (!request.fetch_of.empty() && !missing.empty() && missing.size() <= most_split_misses) {
      const auto fetched = static_cast<std::size_t>(
          std::clamp(request.fetch_of[missing.size()], 0, static_cast<int>(missing.size())));
      std::stable_sort(missing.begin(), missing.end(), [&](std::int32_t a, std::int32_t b) {
        return worth_[static_cast<std::size_t>(a)] > worth_[static_cast<std::size_t>(b)];
      });
      for (std::size_t i = fetched; i < missing.size(); ++i) {
        std::uint32_t& worth = worth_[static_cast<std::size_t>(missing[i])];
        if (decode) worth = worth_used(worth, clock_);
        out.on_host.push_back(missing[i] - static_cast<std::int32_t>(base));
      }
      counts_.on_host += out.on_host.size();
      missing.resize(fetched);
    }
    std::vector<std::int32_t> guessed;
    if (request.ahead) {
      for (std::size_t id = 0; id < experts; ++id)
        if (likely[id]) keep(slot_of_[next + id]);
      for (const std::int32_t id : candidates(request))
        if (slot_of_[next + static_cast<std::size_t>(id)] < 0 &&
            static_cast<int>(guessed.size()) < request.ahead_limit)
          guessed.push_back(static_cast<std::int32_t>(next) + id);
    }
    const std::vector<int> victims = least_worthy(kept, missing.size() + guessed.size());
    for (const int slot : victims) forget_slot(slot);
    for (std::size_t i = 0; i < victims.size(); ++i) {
      const bool demanded = i < missing.size();
      const std::int32_t number = demanded ? missing[i] : guessed[i - missing.size()];
      std::uint32_t& worth = worth_[static_cast<std::size_t>(number)];
      if (demanded && decode) worth = worth_used(worth, clock_);
      put(number, victims[i],
          decode || worth == worth_protected ? std::max(worth, worth_least) : worth_streamed);
      (demanded ? out.demand : out.ahead).push_back({number, victims[i]});
    }
    counts_.unplaced += missing.size() - out.demand.size();
    counts_.placed += victims.size();
    counts_.ahead += out.ahead.size();
    return out;
  }

 private:
  [[nodiscard]] std::vector<char> set_of(std::span<const std::int32_t> ids, bool whole,
                                         std::uint64_t* bad) const {
    std::vector<char> out(static_cast<std::size_t>(shape_.experts), whole);
    if (whole) return out;
    for (const std::int32_t id : ids)
      if (id >= 0 && id < shape_.experts)
        out[static_cast<std::size_t>(id)] = 1;
      else if (id != -1 && bad != nullptr)
        ++*bad;
    return out;
  }
  /// Ids worth a guess, each once: likeliest first, or the lower ones first where many are taken.
  [[nodiscard]] std::vector<std::int32_t> candidates(const place_request& request) const {
    std::vector<std::int32_t> out;
    if (request.ahead_whole_layer) {
      for (std::int32_t id = 0; id < shape_.experts; ++id) out.push_back(id);
      return out;
    }
    if (request.ahead_limit > most_guess_candidates) {
      const std::vector<char> set = set_of(request.ahead_ids, false, nullptr);
      for (std::int32_t id = 0; id < shape_.experts; ++id)
        if (set[static_cast<std::size_t>(id)]) out.push_back(id);
      return out;
    }
    const auto row = static_cast<std::size_t>(request.ahead_row), rows = request.ahead_ids.size() / row;
    for (std::size_t i = 0; i < std::min(request.ahead_ids.size(), std::size_t{most_guess_candidates}); ++i)
      if (const std::int32_t id = request.ahead_ids[i % rows * row + i / rows];
          id >= 0 && id < shape_.experts && std::find(out.begin(), out.end(), id) == out.end())
        out.push_back(id);
    return out;
  }
  void put(std::int32_t number, int slot, std::uint32_t key) {
    slot_of_[static_cast<std::size_t>(number)] = slot;
    expert_of_[static_cast<std::size_t>(slot)] = number;
    slot_key_[static_cast<std::size_t>(slot)] = key;
  }
  void forget_slot(int slot) {
    std::int32_t& number = expert_of_[static_cast<std::size_t>(slot)];
    if (number >= 0) slot_of_[static_cast<std::size_t>(number)] = -1;
    number = -1;
    slot_key_[static_cast<std::size_t>(slot)] = worth_never;
  }
  void tick(std::uint32_t ticks) {
    clock_ += ticks;
    if (clock_ < clock_limit) return;
    const std::uint32_t by = clock_ - clock_start;
    clock_ = clock_start;
    for (std::uint32_t& w : worth_) w = worth_rebased(w, by);
    for (std::uint32_t& w : slot_key_) w = worth_rebased(w, by);
  }
  /// The `count` open slots of least key, ties to the lower number, in the order of their numbers.
  [[nodiscard]] std::vector<int> least_worthy(const std::vector<char>& kept, std::size_t count) const {
    std::vector<std::pair<std::uint32_t, int>> open;
    for (int s = 0; s < open_; ++s)
      if (!kept[static_cast<std::size_t>(s)] && slot_key_[static_cast<std::size_t>(s)] != worth_protected)
        open.emplace_back(slot_key_[static_cast<std::size_t>(s)], s);
    count = std::min(count, open.size());
    std::nth_element(open.begin(), open.begin() + static_cast<std::ptrdiff_t>(count), open.end());
    std::vector<int> out;
    for (std::size_t i = 0; i < count; ++i) out.push_back(open[i].second);
    std::sort(out.begin(), out.end());
    return out;
  }

  residency_shape shape_;
  int open_;
  std::vector<std::int32_t> slot_of_, expert_of_;
  std::vector<std::uint32_t> worth_, slot_key_;
  std::uint32_t clock_ = clock_start;
  residency_counts counts_;
};

}  // namespace nibble::moe
