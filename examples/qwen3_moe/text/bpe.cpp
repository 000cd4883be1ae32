// SPDX-License-Identifier: Apache-2.0
#include "bpe.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace qwen3_moe {
namespace {

constexpr std::uint64_t no_key = ~std::uint64_t{0};  // ids are never negative, so no pair has this key
constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
constexpr std::size_t short_piece_tokens = 48;

constexpr std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

// A short piece: look for the lowest rank again and again. Quadratic in at most short_piece_tokens.
std::size_t apply_to_short(std::span<std::int32_t> tokens, const merge_table& table,
                           std::vector<std::uint32_t>& ranks) {
  std::size_t n = tokens.size();
  const auto rank_at = [&](std::size_t i) {
    const merge_rule* rule = i + 1 < n ? table.find(tokens[i], tokens[i + 1]) : nullptr;
    return rule ? rule->rank : none;
  };
  ranks.resize(n);
  for (std::size_t i = 0; i < n; ++i) ranks[i] = rank_at(i);
  while (n > 1) {
    const auto best = std::min_element(ranks.begin(), ranks.begin() + (n - 1));
    if (*best == none) break;
    const auto i = static_cast<std::size_t>(best - ranks.begin());
    tokens[i] = table.find(tokens[i], tokens[i + 1])->result;
    std::copy(tokens.begin() + (i + 2), tokens.begin() + n, tokens.begin() + (i + 1));
    std::copy(ranks.begin() + (i + 2), ranks.begin() + n, ranks.begin() + (i + 1));
    --n;
    ranks[i] = rank_at(i);
    if (i > 0) ranks[i - 1] = rank_at(i - 1);
  }
  return n;
}

// A long piece: a heap of candidates over a linked list. A candidate is stale when its tokens have changed.
std::size_t apply_to_long(std::span<std::int32_t> tokens, const merge_table& table, merge_scratch& s) {
  const auto n = static_cast<std::uint32_t>(tokens.size());
  const auto later = [](const merge_scratch::candidate& a, const merge_scratch::candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  s.previous.resize(n), s.next.resize(n);
  for (std::uint32_t i = 0; i < n; ++i) s.previous[i] = i - 1, s.next[i] = i + 1;  // `none` before the first
  s.next[n - 1] = none;
  s.heap.clear();
  const auto candidate_at = [&](std::uint32_t at) {
    if (const merge_rule* rule = table.find(tokens[at], tokens[s.next[at]]))
      s.heap.push_back({rule->rank, at, tokens[at], tokens[s.next[at]]});
    else
      return false;
    return true;
  };
  for (std::uint32_t i = 0; i + 1 < n; ++i) candidate_at(i);
  std::make_heap(s.heap.begin(), s.heap.end(), later);
  while (!s.heap.empty()) {
    std::pop_heap(s.heap.begin(), s.heap.end(), later);
    const merge_scratch::candidate c = s.heap.back();
    s.heap.pop_back();
    if (tokens[c.at] != c.left || s.next[c.at] == none || tokens[s.next[c.at]] != c.right) continue;
    const std::uint32_t right = s.next[c.at];
    tokens[c.at] = table.find(c.left, c.right)->result;
    tokens[right] = -1;
    s.next[c.at] = s.next[right];
    if (s.next[right] != none) s.previous[s.next[right]] = c.at;
    if (s.next[c.at] != none && candidate_at(c.at)) std::push_heap(s.heap.begin(), s.heap.end(), later);
    if (s.previous[c.at] != none && candidate_at(s.previous[c.at]))
      std::push_heap(s.heap.begin(), s.heap.end(), later);
  }
  const auto end = std::remove(tokens.begin(), tokens.end(), -1);
  return static_cast<std::size_t>(end - tokens.begin());
}

}  // namespace

merge_table::merge_table(std::size_t count)
    : slots_(std::bit_ceil(count * 2 + 2), slot{no_key, {}}), mask_(slots_.size() - 1) {}

std::size_t merge_table::place_of(std::uint64_t key) const noexcept {
  std::uint64_t h = key * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
  h ^= h >> 32;
  std::size_t at = static_cast<std::size_t>(h) & mask_;
  while (slots_[at].key != key && slots_[at].key != no_key) at = (at + 1) & mask_;
  return at;
}

void merge_table::add(std::int32_t left, std::int32_t right, merge_rule rule) {
  const std::uint64_t key = key_of(left, right);
  slots_[place_of(key)] = {key, rule};
}

const merge_rule* merge_table::find(std::int32_t left, std::int32_t right) const noexcept {
  const slot& s = slots_[place_of(key_of(left, right))];
  return s.key == no_key ? nullptr : &s.rule;
}

std::size_t apply_merges(std::span<std::int32_t> tokens, const merge_table& table, merge_scratch& scratch) {
  if (tokens.size() < 2) return tokens.size();
  return tokens.size() <= short_piece_tokens ? apply_to_short(tokens, table, scratch.ranks)
                                             : apply_to_long(tokens, table, scratch);
}

}  // namespace qwen3_moe
