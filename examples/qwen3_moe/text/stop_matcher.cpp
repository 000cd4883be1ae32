// SPDX-License-Identifier: Apache-2.0
#include "stop_matcher.hpp"

#include <algorithm>
#include <utility>

namespace qwen3_moe {

stop_matcher::stop_matcher(std::vector<std::string> stops) {
  for (std::string& stop : stops) {
    if (stop.empty()) continue;
    pattern p{std::move(stop), {}, 0};
    p.border.resize(p.stop.size());
    for (std::size_t i = 1, k = 0; i < p.stop.size(); ++i) {
      while (k > 0 && p.stop[i] != p.stop[k]) k = p.border[k - 1];
      if (p.stop[i] == p.stop[k]) ++k;
      p.border[i] = k;
    }
    patterns_.push_back(std::move(p));
  }
}

std::string stop_matcher::push(std::string_view text) {
  if (found_) return {};
  std::string out = std::move(held_);
  held_.clear();
  for (const char c : text) {
    out += c;
    const pattern* longest = nullptr;
    for (pattern& p : patterns_) {
      while (p.matched > 0 && p.stop[p.matched] != c) p.matched = p.border[p.matched - 1];
      if (p.stop[p.matched] == c) ++p.matched;
      if (p.matched == p.stop.size() && (!longest || p.stop.size() > longest->stop.size())) longest = &p;
    }
    if (longest) {
      found_ = longest->stop;
      out.resize(out.size() - longest->stop.size());
      return out;
    }
  }
  std::size_t hold = 0;
  for (const pattern& p : patterns_) hold = std::max(hold, p.matched);
  held_ = out.substr(out.size() - hold);
  out.resize(out.size() - hold);
  return out;
}

std::string stop_matcher::finish() {
  for (pattern& p : patterns_) p.matched = 0;
  return std::exchange(held_, {});
}

}  // namespace qwen3_moe
