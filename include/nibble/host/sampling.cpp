// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <nibble/host/activation.hpp>
#include <nibble/host/sampling.hpp>

namespace nibble::host {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
/// Up to here a temperature means greedy: dividing by it would only turn rounding into choices.
constexpr float greedy_temperature = 1e-5f;

/// The largest logit, or NaN where the row holds NaN or +inf, or nothing above -inf.
float checked_largest(std::span<const float> logits) {
  bool bad = false;
  float largest = -infinity;
  for (const float value : logits) {
    bad = bad || !(value < infinity);
    largest = value > largest ? value : largest;
  }
  return bad || largest == -infinity ? std::numeric_limits<float>::quiet_NaN() : largest;
}

/// Orders tokens by falling value, equals by rising id.
struct likelier {
  const float* value;
  bool operator()(std::int32_t a, std::int32_t b) const {
    return value[a] > value[b] || (value[a] == value[b] && a < b);
  }
};

/// The `count` first tokens of `row` in likelier order, sorted, in `order`. One pass with a heap whose top is
/// the worst one kept.
void select_best(std::span<const float> row, std::size_t count, std::vector<std::int32_t>& order) {
  order.clear();
  const likelier before{row.data()};
  count = std::min(count, row.size());
  for (std::size_t i = 0; i < row.size(); ++i) {
    const auto token = static_cast<std::int32_t>(i);
    if (order.size() < count) {
      order.push_back(token);
      std::push_heap(order.begin(), order.end(), before);
    } else if (count > 0 && before(token, order.front())) {
      std::pop_heap(order.begin(), order.end(), before);
      order.back() = token;
      std::push_heap(order.begin(), order.end(), before);
    }
  }
  std::sort_heap(order.begin(), order.end(), before);
}

/// weights[i] = e^{(l_i - largest) / temperature}, at most 1.
void tempered_weights(std::span<const float> logits, float largest, float temperature,
                      std::vector<float>& weights) {
  weights.resize(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) weights[i] = (logits[i] - largest) / temperature;
  exponential(weights.data(), weights.data(), weights.size());
}

/// Sorts as many tokens of `order` to its front as are needed to reach `mass`, and returns how many those
/// are. Works in growing steps, so a peaked distribution over a large vocabulary costs one selection.
std::size_t sorted_prefix(const std::vector<float>& weights, double mass, std::vector<std::int32_t>& order) {
  const likelier before{weights.data()};
  double reached = 0;
  std::size_t sorted = 0;
  for (std::size_t step = 256; sorted < order.size(); step *= 8) {
    const std::size_t end = order.size() - sorted > step ? sorted + step : order.size();
    const auto first = order.begin() + static_cast<std::ptrdiff_t>(sorted);
    const auto last = order.begin() + static_cast<std::ptrdiff_t>(end);
    if (end < order.size()) std::nth_element(first, last, order.end(), before);
    std::sort(first, last, before);
    for (std::size_t i = sorted; i < end; ++i) {
      reached += weights[static_cast<std::size_t>(order[i])];
      if (reached >= mass) return i + 1;
    }
    sorted = end;
  }
  return sorted;
}

std::uint64_t mix(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace

sample_result argmax(std::span<const float> logits) {
  const float largest = checked_largest(logits);
  if (std::isnan(largest)) return {sample_status::not_finite, -1};
  const auto at = std::find(logits.begin(), logits.end(), largest);
  return {sample_status::ok, static_cast<std::int32_t>(at - logits.begin())};
}

sample_status sampling_candidates(std::span<const float> logits, const sampling_params& params,
                                  sampling_workspace& workspace) {
  workspace.candidates.clear();
  const float largest = checked_largest(logits);
  if (std::isnan(largest)) return sample_status::not_finite;
  if (!(params.temperature > greedy_temperature)) {
    workspace.candidates.push_back({argmax(logits).token, 1.0f});
    return sample_status::ok;
  }
  std::vector<float>& weights = workspace.weights;
  std::vector<std::int32_t>& order = workspace.order;
  tempered_weights(logits, largest, params.temperature, weights);
  double mass = 0;
  if (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < logits.size()) {
    // Among the logits: weights may have lost the order of small ones.
    select_best(logits, static_cast<std::size_t>(params.top_k), order);
    for (const std::int32_t token : order) mass += weights[static_cast<std::size_t>(token)];
  } else {
    order.clear();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      mass += weights[i];
      order.push_back(static_cast<std::int32_t>(i));
    }
  }
  // min_p cuts the same falling order, so the two cuts commute: the cheap one goes first. The largest weight
  // is 1.
  std::erase_if(order, [&](std::int32_t token) {
    const float weight = weights[static_cast<std::size_t>(token)];
    return weight <= 0 || weight < std::min(params.min_p, 1.0f);
  });
  const double wanted = params.top_p < 1.0f ? std::max(0.0, static_cast<double>(params.top_p)) * mass
                                            : std::numeric_limits<double>::infinity();
  order.resize(sorted_prefix(weights, wanted, order));
  double left = 0;
  for (const std::int32_t token : order) left += weights[static_cast<std::size_t>(token)];
  for (const std::int32_t token : order)
    workspace.candidates.push_back(
        {token, static_cast<float>(weights[static_cast<std::size_t>(token)] / left)});
  return sample_status::ok;
}

double uniform_draw(std::uint64_t seed, std::uint64_t step) noexcept {
  // Two rounds: the key is spread before the counter enters, so near seeds and near steps are unrelated.
  const std::uint64_t key = mix(seed + 0x9E3779B97F4A7C15u);
  const std::uint64_t bits = mix(key + mix(step * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

sample_result sample(std::span<const float> logits, const sampling_params& params, std::uint64_t step,
                     sampling_workspace& workspace) {
  const double uniform = uniform_draw(params.seed, step);
  const bool filters = params.top_p < 1.0f || params.min_p > 0.0f ||
                       (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < logits.size());
  if (filters || !(params.temperature > greedy_temperature)) {
    if (const sample_status status = sampling_candidates(logits, params, workspace);
        status != sample_status::ok)
      return {status, -1};
    double reached = 0;
    for (const candidate& c : workspace.candidates) {
      reached += c.probability;
      if (reached > uniform) return {sample_status::ok, c.token};
    }
    return {sample_status::ok, workspace.candidates.back().token};
  }
  // The whole distribution: no order is needed.
  const float largest = checked_largest(logits);
  if (std::isnan(largest)) return {sample_status::not_finite, -1};
  tempered_weights(logits, largest, params.temperature, workspace.weights);
  double mass = 0, reached = 0;
  for (const float weight : workspace.weights) mass += weight;
  std::int32_t last = -1;
  for (std::size_t i = 0; i < workspace.weights.size(); ++i) {
    if (workspace.weights[i] <= 0) continue;
    last = static_cast<std::int32_t>(i);
    reached += workspace.weights[i];
    if (reached > uniform * mass) break;
  }
  return {sample_status::ok, last};
}

token_counter::seen_token& token_counter::find(std::int32_t token) {
  const auto [at, added] = index_.try_emplace(token, seen_.size());
  if (added) seen_.push_back({token, 0});
  return seen_[at->second];
}

void token_counter::add_prompt(std::span<const std::int32_t> tokens) {
  for (const std::int32_t token : tokens) find(token);
}

void token_counter::add_generated(std::int32_t token) { ++find(token).generated; }

void apply_penalties(std::span<float> logits, std::span<const token_counter::seen_token> seen,
                     const penalties& penalty) {
  for (const token_counter::seen_token& entry : seen) {
    if (entry.token < 0 || static_cast<std::size_t>(entry.token) >= logits.size()) continue;
    float& logit = logits[static_cast<std::size_t>(entry.token)];
    logit = logit > 0 ? logit / penalty.repetition : logit * penalty.repetition;
    if (entry.generated > 0)
      logit -= penalty.presence + penalty.frequency * static_cast<float>(entry.generated);
  }
}

void apply_logit_bias(std::span<float> logits, std::span<const token_bias> biases) {
  for (const token_bias& entry : biases)
    if (entry.token >= 0 && static_cast<std::size_t>(entry.token) < logits.size())
      logits[static_cast<std::size_t>(entry.token)] += entry.bias;
}

logprobs_result logprobs(std::span<const float> logits, std::int32_t token, int top) {
  logprobs_result result;
  const float largest = checked_largest(logits);
  if (std::isnan(largest)) {
    result.status = sample_status::not_finite;
    return result;
  }
  double sum = 0;
  for (const float value : logits) sum += std::exp(static_cast<double>(value) - largest);
  const double shift = largest + std::log(sum);
  const auto at = [&](std::int32_t id) {
    return token_logprob{id, static_cast<float>(logits[static_cast<std::size_t>(id)] - shift)};
  };
  if (token >= 0 && static_cast<std::size_t>(token) < logits.size()) result.chosen = at(token);
  std::vector<std::int32_t> order;
  select_best(logits, static_cast<std::size_t>(std::max(top, 0)), order);
  for (const std::int32_t id : order) result.top.push_back(at(id));
  return result;
}

}  // namespace nibble::host
