// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which experts are in the device's slots: what the tables hold, how an expert's worth is reckoned, what a
/// placement is asked. Shared by the kernel and by its copy on the host, which decide alike to the bit.
///
/// Expert e of layer l has the number l · experts + e. One pool of slots serves all layers.
///
/// Worth. An expert that was used at the times t₁, t₂, … is worth Σ 2^((tᵢ - now) / half-life) uses:
/// frequency whose weight halves with age. The order of two sums does not change as both age, so nothing has
/// to be aged: kept is log₂ Σ 2^(tᵢ / half-life), in fixed point, which grows with the clock. Worth is
/// remembered for experts that are not resident too. The slot of least worth is the one to be filled anew.
/// With a short half-life this is LRU, with a long one LFU (the family is known as LRFU: D. Lee et al., IEEE
/// Trans. Computers 50(12), 2001).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nibble/core/config.hpp"
#include "nibble/moe/fetch_engine_types.hpp"

namespace nibble::moe {

struct residency_shape {
  int layers = 0;
  int experts = 0;  ///< of a layer
  int top_k = 0;

  friend constexpr bool operator==(const residency_shape&, const residency_shape&) = default;
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr int total() const { return layers * experts; }
  /// One block of threads holds a key for every slot in registers, so there are at most 32768.
  [[nodiscard]] NIBBLE_HOST_DEVICE constexpr bool valid() const {
    return layers > 0 && layers <= 32768 && experts > 0 && experts <= 1024 && top_k > 0 && top_k <= experts &&
           total() <= 32768;
  }
};

/// Worth is kept in 1/1024 of an octave.
inline constexpr int worth_octave = 1024;
inline constexpr std::uint32_t worth_never = 0;     ///< of an expert never used; key of an empty slot
inline constexpr std::uint32_t worth_streamed = 1;  ///< key of a slot filled by a streaming placement
inline constexpr std::uint32_t worth_least = 2;     ///< of whatever was used
inline constexpr std::uint32_t worth_protected = 0xFFFF'FFFFu;  ///< once resident, never to go out again
/// The clock starts here, high enough for a warm start to rank what it loads below the first use.
inline constexpr std::uint32_t clock_start = 1u << 20;
/// When the clock passes this, every worth is moved down by clock_limit - clock_start.
inline constexpr std::uint32_t clock_limit = 1u << 31;
/// Default ticks of a step: the weight of a use halves in worth_octave / ticks = 128 steps.
inline constexpr std::uint32_t default_ticks = 8;

/// 1024 · log₂(1 + 2^(-d / 1024)) within 2 %, in integers: the same on every machine. d = 0 gives 1024.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint32_t worth_added(std::uint32_t d) {
  if (d >= 10u * 1024u) return 0;
  // 2^(-f), 0 ≤ f < 1, in 1/65536: half of 2^(1 - f), whose curve a parabola follows.
  const std::uint32_t f = d & 1023u, g = 1024u - f;
  const std::uint32_t power = (65536u + 64u * g - ((22485u * ((g * f) >> 10)) >> 10)) / 2u;
  const std::uint32_t x = power >> (d >> 10);  // 1/65536
  // log₂(1 + x) ≈ x + 0.3437 x (1 - x)
  const std::uint32_t bend = (((x >> 1) * ((65536u - x) >> 1)) >> 14) * 22525u >> 16;
  return (x + bend + 32u) >> 6;
}

/// Worth after a use at `now`.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint32_t worth_used(std::uint32_t worth, std::uint32_t now) {
  if (worth < worth_least) return now;
  if (worth == worth_protected) return worth;
  const std::uint32_t high = worth > now ? worth : now, low = worth > now ? now : worth;
  return high + worth_added(high - low);
}

/// Worth after the clock was moved down by `by`.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::uint32_t worth_rebased(std::uint32_t worth,
                                                                       std::uint32_t by) {
  if (worth <= worth_streamed || worth == worth_protected) return worth;
  return worth > by + worth_least ? worth - by : worth_least;
}

/// How the missing experts of a placement are treated.
enum class place_mode : int {
  decode,     ///< what is used gains worth
  streaming,  ///< prefill: no worth is gained, and what comes in is the first to go out again
};

/// What happened so far; only ever added to.
struct residency_counts {
  std::uint64_t hits = 0;        ///< distinct experts of a layer call that were resident
  std::uint64_t misses = 0;      ///< that were not
  std::uint64_t placed = 0;      ///< brought in, guesses included
  std::uint64_t ahead = 0;       ///< guesses among `placed`
  std::uint64_t ahead_used = 0;  ///< guesses that came true
  std::uint64_t on_host = 0;     ///< misses left to the CPU
  std::uint64_t unplaced = 0;    ///< missing experts for which every slot was taken: the step has failed
  std::uint64_t bad_ids = 0;     ///< ids outside [0, experts) other than -1: the step has failed
  std::uint64_t failed = 0;      ///< experts that a fetch could not deliver: the step has failed

  /// Whether every step so far had all its experts.
  [[nodiscard]] constexpr bool good() const { return unplaced == 0 && bad_ids == 0 && failed == 0; }
  friend constexpr bool operator==(const residency_counts&, const residency_counts&) = default;
};

/// A list of experts to fetch, in device memory: words[0] is the number of entries; entry i is
/// words[4 + 2i] = expert number, words[5 + 2i] = slot.
[[nodiscard]] NIBBLE_HOST_DEVICE constexpr std::size_t fetch_list_words(int experts) {
  return (4 + 2 * static_cast<std::size_t>(experts) + 63) / 64 * 64;
}

/// Where the tables lie. All memory is the device's; sizes in elements.
struct residency_view {
  std::int32_t* slot_of = nullptr;       ///< [layers][experts], -1: not resident
  std::int32_t* expert_of = nullptr;     ///< [slots], -1: empty
  std::uint32_t* slot_key = nullptr;     ///< [slots], what refilling goes by
  std::uint32_t* worth = nullptr;        ///< [layers][experts]
  float* slot_scales = nullptr;          ///< [slots][3]
  const float* expert_scales = nullptr;  ///< [layers][experts][3]
  std::uint32_t* clock = nullptr;        ///< [1]
  residency_counts* counts = nullptr;    ///< [1]
  std::int32_t* lists = nullptr;         ///< [2 · layers][fetch_list_words]: demand lists, then lists ahead
  int slot_count = 0;

  [[nodiscard]] NIBBLE_HOST_DEVICE std::int32_t* demand_list(const residency_shape& s, int layer) const {
    return lists + static_cast<std::size_t>(layer) * fetch_list_words(s.experts);
  }
  [[nodiscard]] NIBBLE_HOST_DEVICE std::int32_t* ahead_list(const residency_shape& s, int layer) const {
    return lists + static_cast<std::size_t>(s.layers + layer) * fetch_list_words(s.experts);
  }
};

/// Byte offsets of a residency_view's arrays in one block, each a multiple of 256.
struct residency_layout {
  std::size_t slot_of = 0, expert_of = 0, slot_key = 0, worth = 0, slot_scales = 0, expert_scales = 0,
              clock = 0, counts = 0, lists = 0;
  std::size_t bytes = 0;
};

/// \param most_slots slots that the pool may ever grow to
[[nodiscard]] constexpr residency_layout residency_layout_of(const residency_shape& s, int most_slots) {
  residency_layout l;
  const auto take = [&l](std::size_t bytes) {
    const std::size_t at = l.bytes;
    l.bytes = (at + bytes + 255) / 256 * 256;
    return at;
  };
  const auto total = static_cast<std::size_t>(s.total()), slots = static_cast<std::size_t>(most_slots);
  l.slot_of = take(4 * total);
  l.expert_of = take(4 * slots);
  l.slot_key = take(4 * slots);
  l.worth = take(4 * total);
  l.slot_scales = take(12 * slots);
  l.expert_scales = take(12 * total);
  l.clock = take(4);
  l.counts = take(sizeof(residency_counts));
  l.lists = take(4 * 2 * static_cast<std::size_t>(s.layers) * fetch_list_words(s.experts));
  return l;
}

[[nodiscard]] inline residency_view residency_view_of(const residency_layout& l, std::byte* base,
                                                      int slot_count) {
  residency_view v;
  const auto at = [base]<class T>(T*& pointer, std::size_t offset) {
    pointer = reinterpret_cast<T*>(base + offset);
  };
  at(v.slot_of, l.slot_of);
  at(v.expert_of, l.expert_of);
  at(v.slot_key, l.slot_key);
  at(v.worth, l.worth);
  at(v.slot_scales, l.slot_scales);
  float* scales = nullptr;
  at(scales, l.expert_scales);
  v.expert_scales = scales;
  at(v.clock, l.clock);
  at(v.counts, l.counts);
  at(v.lists, l.lists);
  v.slot_count = slot_count;
  return v;
}

/// Threads of the placement kernel: at least as many as a layer has experts.
struct residency_policy {
  int threads = 1024;

  friend constexpr bool operator==(const residency_policy&, const residency_policy&) = default;
};
[[nodiscard]] constexpr residency_policy select_residency(const residency_shape& s) {
  return {s.experts <= 512 && s.total() <= 16384 ? 512 : 1024};
}

/// More misses of one layer than this are all fetched.
inline constexpr int most_split_misses = 32;

/// Where the CPU takes a share: how many of so many misses are fetched, and behind it the list of those that
/// the CPU computes. Offset and length in words of 4 bytes.
inline constexpr std::size_t host_list_word = (most_split_misses + 1 + 63) / 64 * 64;
inline constexpr std::size_t host_split_words = host_list_word + (4 + most_split_misses + 63) / 64 * 64;

/// Slots with which a decode step of `rows` rows may look ahead: what a layer and the next one ask for,
/// guesses that are coming and new ones have room beside each other, so that guesses never take what is
/// demanded.
[[nodiscard]] constexpr int slots_to_look_ahead(const residency_shape& s, int rows, int limit) {
  const int asked = rows * s.top_k < s.experts ? rows * s.top_k : s.experts;
  return 2 * asked + 2 * limit;
}
/// Most rows of a step that looks ahead; more miss so much that little is won.
inline constexpr int most_ahead_rows = 16;
/// Most guesses that may be asked for at once.
inline constexpr int most_ahead = 4;

/// Guesses are taken from the first so many ids, likeliest of all rows first.
inline constexpr int most_guess_candidates = 32;

/// One placement: makes the experts that `ids` name resident, as far as the tables go. Their bytes are
/// brought by a fetch of the list.
struct place_params {
  residency_view state;
  int layer = 0;
  const std::int32_t* ids =
      nullptr;          ///< [assignments], rows of top_k, likeliest first; null: the whole layer
  int assignments = 0;  ///< rows · top_k
  place_mode mode = place_mode::decode;
  bool new_step = false;  ///< the first placement of a decode step: the clock ticks
  std::uint32_t ticks = default_ticks;
  std::int32_t* list = nullptr;  ///< [fetch_list_words(experts)] out

  /// Guesses for layer + 1: what its router may ask for is kept where it is resident, and of the missing ones
  /// the likeliest are given slots and listed in ahead_list. Null: no guesses.
  std::int32_t* ahead_list = nullptr;       ///< [fetch_list_words(experts)] out
  const std::int32_t* ahead_ids = nullptr;  ///< [ahead_assignments], as `ids`; null: the whole layer
  int ahead_assignments = 0;
  int ahead_row = 1;    ///< ids of a row: top_k
  int ahead_limit = 0;  ///< most guesses; more than most_guess_candidates: any, the lower ids first

  /// The ahead_list of the layer before, whose guesses were for this one: those that came true are counted.
  /// Null: there were none.
  const std::int32_t* guesses = nullptr;
  /// A list whose slots are not refilled by this placement, because their bytes may still be coming: that of
  /// `guesses`. Null: none.
  const std::int32_t* recent = nullptr;

  /// Misses left to the CPU: of k ≤ most_split_misses misses the fetch_of[k] of most worth are fetched, ties
  /// to the lower id, and the ids of the others listed: host_list[0] is their number, they follow from word 4
  /// on. Their experts stay out. Null: all are fetched.
  const std::int32_t* fetch_of = nullptr;  ///< [most_split_misses + 1]
  std::int32_t* host_list = nullptr;       ///< [4 + most_split_misses] out

  /// Where the list, and ahead_list behind it, are published for the copy engine. Null: a kernel reads them.
  engine_link engine;

  /// The tables are older than the kernel just before: they are read before waiting for it. False where two
  /// placements follow each other directly.
  bool tables_settled = true;
};

/// Rows of a step that can be placed for sure: the distinct experts of one layer that they can ask for find
/// room. More rows than that are to be split; 0 means that not even one fits.
/// \param kept slots that are protected or taken by guesses
[[nodiscard]] constexpr int largest_placed_rows(const residency_shape& s, int slot_count, int kept = 0) {
  const int room = slot_count - kept;
  if (room >= s.experts) return 1 << 30;
  return room < 0 ? 0 : room / s.top_k;
}

}  // namespace nibble::moe
