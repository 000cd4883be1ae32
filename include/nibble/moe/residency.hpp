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
  int limit = 0;
  int keep_layer = -1;
  std::span<const std::int32_t> keep_ids;
  bool keep_whole_layer = false;
  std::span<const fetch_entry> guesses;  ///< what the placement ahead of this layer brought
};

class host_residency {
 public:
  /// Throws nibble::error for a shape or a slot count that cannot be.
  host_residency(const residency_shape& shape, int slot_count)
      : shape_(shape),
        slot_of_(static_cast<std::size_t>(shape.valid() ? shape.total() : 0), -1),
        worth_(slot_of_.size(), worth_never) {
    if (!shape.valid()) throw error("residency: at most 1024 experts a layer and 32768 in all");
    if (slot_count < 1 || slot_count > shape.total())
      throw error("residency: " + std::to_string(slot_count) + " slots for " + std::to_string(shape.total()) +
                  " experts");
    expert_of_.assign(static_cast<std::size_t>(slot_count), -1);
    slot_key_.assign(static_cast<std::size_t>(slot_count), worth_never);
  }

  /// Tables as a device left them. Entries that contradict each other are not resident.
  [[nodiscard]] static host_residency of_tables(const residency_shape& shape,
                                                std::span<const std::int32_t> slot_of,
                                                std::span<const std::int32_t> expert_of,
                                                std::span<const std::uint32_t> slot_key,
                                                std::span<const std::uint32_t> worth, std::uint32_t clock) {
    host_residency made(shape, static_cast<int>(expert_of.size()));
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
  [[nodiscard]] int slot_count() const { return static_cast<int>(expert_of_.size()); }
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

  /// Another number of slots: what lay in those cut off is not resident any more.
  void resize(int slot_count) {
    if (slot_count < 1 || slot_count > shape_.total())
      throw error("residency: " + std::to_string(slot_count) + " slots");
    for (int s = slot_count; s < this->slot_count(); ++s) forget_slot(s);
    expert_of_.resize(static_cast<std::size_t>(slot_count), -1);
    slot_key_.resize(static_cast<std::size_t>(slot_count), worth_never);
  }
  /// What a fetch failed to bring is not resident.
  void forget(std::span<const fetch_entry> entries) {
    for (const fetch_entry& e : entries)
      if (e.slot >= 0 && e.slot < slot_count() && expert_of_[static_cast<std::size_t>(e.slot)] == e.number)
        forget_slot(e.slot);
  }

  /// Decides and rewrites the tables. \return what to fetch
  std::vector<fetch_entry> place(const place_request& request) {
    const auto experts = static_cast<std::size_t>(shape_.experts);
    const bool ahead = request.mode == place_mode::ahead, decode = request.mode == place_mode::decode;
    const std::size_t base = static_cast<std::size_t>(request.layer) * experts;
    std::vector<char> chosen(experts, request.whole_layer), kept(expert_of_.size(), 0);
    std::vector<std::size_t> order(experts, SIZE_MAX);
    if (!request.whole_layer)
      for (std::size_t i = 0; i < request.ids.size(); ++i) {
        const std::int32_t id = request.ids[i];
        if (id >= 0 && id < shape_.experts) {
          chosen[static_cast<std::size_t>(id)] = 1;
          order[static_cast<std::size_t>(id)] = std::min(order[static_cast<std::size_t>(id)], i);
        } else if (id != -1 && !ahead) {
          ++counts_.bad_ids;
        }
      }
    if (request.keep_layer >= 0) {
      const auto keep = [&](std::size_t id) {
        const int slot = slot_of_[static_cast<std::size_t>(request.keep_layer) * experts + id];
        if (slot >= 0) kept[static_cast<std::size_t>(slot)] = 1;
      };
      if (request.keep_whole_layer)
        for (std::size_t id = 0; id < experts; ++id) keep(id);
      for (const std::int32_t id : request.keep_ids)
        if (id >= 0 && id < shape_.experts) keep(static_cast<std::size_t>(id));
    }
    if (request.new_step) tick(request.ticks);
    std::vector<std::size_t> missing;
    std::size_t asked = 0;
    for (std::size_t id = 0; id < experts; ++id) {
      if (!chosen[id]) continue;
      ++asked;
      const int slot = slot_of_[base + id];
      if (slot < 0) {
        missing.push_back(id);
        continue;
      }
      kept[static_cast<std::size_t>(slot)] = 1;
      if (decode)
        slot_key_[static_cast<std::size_t>(slot)] = worth_[base + id] = worth_used(worth_[base + id], clock_);
    }
    if (!ahead) {
      counts_.hits += asked - missing.size();
      counts_.misses += missing.size();
      for (const fetch_entry& guess : request.guesses) {
        const auto id = static_cast<std::size_t>(guess.number) - base;
        if (id < experts && chosen[id]) ++counts_.ahead_used;
      }
    }
    if (ahead) {
      if (!request.whole_layer)
        std::sort(missing.begin(), missing.end(),
                  [&](std::size_t a, std::size_t b) { return order[a] < order[b]; });
      missing.resize(std::min(missing.size(), static_cast<std::size_t>(std::max(0, request.limit))));
    }
    const std::vector<int> victims = least_worthy(kept, missing.size());
    if (!ahead) counts_.unplaced += missing.size() - victims.size();
    std::vector<fetch_entry> out;
    for (std::size_t i = 0; i < victims.size(); ++i) {
      const auto number = static_cast<std::int32_t>(base + missing[i]);
      std::uint32_t& worth = worth_[static_cast<std::size_t>(number)];
      if (decode) worth = worth_used(worth, clock_);
      forget_slot(victims[i]);
      put(number, victims[i],
          worth == worth_protected || decode      ? worth
          : request.mode == place_mode::streaming ? worth_streamed
                                                  : std::max(worth, worth_least));
      out.push_back({number, victims[i]});
    }
    counts_.placed += out.size();
    if (ahead) counts_.ahead += out.size();
    return out;
  }

 private:
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
    for (int s = 0; s < slot_count(); ++s)
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
  std::vector<std::int32_t> slot_of_, expert_of_;
  std::vector<std::uint32_t> worth_, slot_key_;
  std::uint32_t clock_ = clock_start;
  residency_counts counts_;
};

}  // namespace nibble::moe
