// SPDX-License-Identifier: Apache-2.0
#include "added_tokens.hpp"

#include <algorithm>

namespace qwen3_moe {
namespace {

// First byte at or behind `from` that is not trusted.
std::size_t trusted_until(std::span<const prompt_segment> segments, std::size_t from, std::size_t size) {
  auto s = std::upper_bound(segments.begin(), segments.end(), from,
                            [](std::size_t at, const prompt_segment& x) { return at < x.end; });
  while (s != segments.end() && s->trusted) ++s;
  return s == segments.end() ? size : std::max(s->begin, from);
}

}  // namespace

std::uint32_t added_token_matcher::child(std::uint32_t of, unsigned char byte) const noexcept {
  const auto& c = nodes_[of].children;
  const auto at =
      std::lower_bound(c.begin(), c.end(), byte, [](const auto& x, unsigned char b) { return x.first < b; });
  return at != c.end() && at->first == byte ? at->second : 0;
}

void added_token_matcher::add(std::string_view content, std::int32_t id, bool special) {
  std::uint32_t at = 0;
  for (const char c : content) {
    const auto byte = static_cast<unsigned char>(c);
    std::uint32_t to = child(at, byte);
    if (to == 0) {
      to = static_cast<std::uint32_t>(nodes_.size());
      auto& children = nodes_[at].children;
      children.insert(std::upper_bound(children.begin(), children.end(), byte,
                                       [](unsigned char b, const auto& x) { return b < x.first; }),
                      {byte, to});
      nodes_.emplace_back();
    }
    at = to;
  }
  nodes_[at].id = id;
  nodes_[at].special = special;
  starts_[static_cast<unsigned char>(content.front())] = true;
}

added_token_match added_token_matcher::find(std::string_view text, std::size_t from, added_tokens_mode mode,
                                            std::span<const prompt_segment> segments) const {
  const added_token_match nothing{text.size(), text.size(), -1};
  if (mode == added_tokens_mode::none) return nothing;
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<unsigned char>(text[begin])]) continue;
    const std::size_t limit = segments.empty() ? text.size() : trusted_until(segments, begin, text.size());
    added_token_match best = nothing;
    std::uint32_t at = 0;
    for (std::size_t end = begin; end < text.size();) {
      at = child(at, static_cast<unsigned char>(text[end++]));
      if (at == 0) break;
      const node& n = nodes_[at];
      if (n.id < 0 || (n.special && (mode == added_tokens_mode::not_special || end > limit))) continue;
      best = {begin, end, n.id};
    }
    if (best.id >= 0) return best;
  }
  return nothing;
}

}  // namespace qwen3_moe
