// SPDX-License-Identifier: Apache-2.0
/// \file
/// Routing traces and plain policies to compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <numeric>
#include <random>
#include <unordered_map>
#include <vector>

namespace nibble::test {

/// Expert ids of one token in one layer: `top_k` distinct ones, drawn without replacement with weights
/// 1 / rank^exponent (0: uniform), ranks shuffled anew for each layer and each topic.
class trace {
 public:
  trace(int layers, int experts, int top_k, double exponent, std::uint64_t seed)
      : layers_(layers),
        experts_(experts),
        top_k_(top_k),
        random_(seed),
        weights_(static_cast<std::size_t>(experts)) {
    for (int e = 0; e < experts; ++e) weights_[static_cast<std::size_t>(e)] = std::pow(e + 1.0, -exponent);
    new_topic();
  }
  /// Other experts become the likely ones.
  void new_topic() {
    ranks_.assign(static_cast<std::size_t>(layers_), {});
    for (auto& row : ranks_) {
      row.resize(static_cast<std::size_t>(experts_));
      std::iota(row.begin(), row.end(), 0);
      std::shuffle(row.begin(), row.end(), random_);
    }
  }
  std::vector<std::int32_t> next(int layer) {
    // Exponential clocks: the top_k that ring first are a draw without replacement.
    std::vector<std::pair<double, std::int32_t>> rings;
    std::exponential_distribution<double> ring(1.0);
    for (int e = 0; e < experts_; ++e)
      rings.emplace_back(ring(random_) / weights_[static_cast<std::size_t>(e)],
                         ranks_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(e)]);
    std::partial_sort(rings.begin(), rings.begin() + top_k_, rings.end());
    std::vector<std::int32_t> ids;
    for (int i = 0; i < top_k_; ++i) ids.push_back(rings[static_cast<std::size_t>(i)].second);
    return ids;
  }

 private:
  int layers_, experts_, top_k_;
  std::mt19937_64 random_;
  std::vector<double> weights_;
  std::vector<std::vector<std::int32_t>> ranks_;
};

/// Least recently used, over all layers.
class lru {
 public:
  explicit lru(std::size_t slots) : slots_(slots) {}
  bool use(std::int32_t number) {
    const auto found = where_.find(number);
    const bool hit = found != where_.end();
    if (hit) order_.erase(found->second);
    order_.push_front(number);
    where_[number] = order_.begin();
    if (order_.size() > slots_) {
      where_.erase(order_.back());
      order_.pop_back();
    }
    return hit;
  }

 private:
  std::size_t slots_;
  std::list<std::int32_t> order_;
  std::unordered_map<std::int32_t, std::list<std::int32_t>::iterator> where_;
};

}  // namespace nibble::test
