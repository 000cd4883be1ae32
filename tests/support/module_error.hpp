// SPDX-License-Identifier: Apache-2.0
/// \file
/// How far a backend with bf16 activations is from one in fp32, module by module, and how far it may be.
///
/// The model of rounding. bf16 keeps 8 bits: a value x = m·2^e, 1 ≤ m < 2, is off by at most h = 2^-8·2^e,
/// evenly spread, so h/√3 in root mean square. Over values of all sizes √(mean m²) = √(1.5/ln 2) = 1.47:
/// one rounding costs u = 2^-8/√3/1.47 = 1.53e-3 of a tensor's root mean square. A value that passes n
/// independent roundings (its input, what a kernel keeps in bf16 on the way, its output) is off by u·√n,
/// since sums of random terms keep relative errors as they are. fp32 sums add about 2^-24·√k and are left
/// out. Where a module's result is added to the residual stream, the error is taken relative to the module's
/// own result, and the sum's rounding counts with the sum's size:
///     rms(error) / rms(result)  <=  3 u √(n + rms(sum)² / rms(result)²)
///     max|error| / rms(result)  <=  ((1 + n) 2^-8 max|value| + 24 u √n rms(result)) / rms(result)
/// 3 is the margin for values that are not random; 24 = 3 · 8 standard deviations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace qwen3_moe::test {

/// Root mean square of what one rounding to bf16 changes, relative to the values'.
inline constexpr double one_rounding = 0x1p-8 / 1.7320508 / 1.4711;

struct module_error {
  std::string module, kind;
  int rows = 0;       ///< of a step
  int roundings = 0;  ///< n above
  std::int64_t values = 0, not_finite = 0;
  double error_squares = 0, result_squares = 0, sum_squares = 0;  ///< sum_squares: 0 where nothing is added
  double largest_error = 0, largest_value = 0;

  [[nodiscard]] double scale() const {
    return std::sqrt(std::max(result_squares, 1e-60) /
                     static_cast<double>(std::max<std::int64_t>(values, 1)));
  }
  [[nodiscard]] double rms_relative() const {
    return std::sqrt(error_squares / std::max(result_squares, 1e-60));
  }
  [[nodiscard]] double max_relative() const { return largest_error / scale(); }
  [[nodiscard]] double rms_bound() const {
    return 3 * one_rounding * std::sqrt(roundings + sum_squares / std::max(result_squares, 1e-60));
  }
  [[nodiscard]] double max_bound() const {
    if (roundings == 0) return 0;
    return (1 + roundings) * 0x1p-8 * largest_value / scale() +
           24 * one_rounding * std::sqrt(static_cast<double>(roundings));
  }
  [[nodiscard]] bool good() const {
    return values > 0 && not_finite == 0 && rms_relative() <= rms_bound() && max_relative() <= max_bound();
  }
};

/// Which experts rows went to. A choice may differ only where rounding decides.
struct routing_error {
  std::string kind;
  int rows = 0;
  std::int64_t routed = 0;  ///< rows in all
  std::int64_t other = 0;   ///< rows with another set
  std::int64_t wrong = 0;   ///< of those, rows where the logits lie further apart than rounding explains
};

class module_errors {
 public:
  /// \param base what the module added its result to; empty where it did not
  void add(const std::string& module, const std::string& kind, int rows, int roundings,
           std::span<const float> result, std::span<const float> got, std::span<const float> base = {}) {
    module_error& e = entry(module, kind, rows, roundings);
    if (result.size() != got.size() || (!base.empty() && base.size() != got.size())) {
      ++e.not_finite;
      return;
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double sum = base.empty() ? static_cast<double>(result[i])
                                      : static_cast<double>(base[i]) + static_cast<double>(result[i]);
      const double error = std::fabs(static_cast<double>(got[i]) - sum);
      if (!std::isfinite(error)) {
        ++e.not_finite;
        continue;
      }
      e.error_squares += error * error;
      e.result_squares += static_cast<double>(result[i]) * static_cast<double>(result[i]);
      if (!base.empty()) e.sum_squares += sum * sum;
      e.largest_error = std::max(e.largest_error, error);
      e.largest_value = std::max(e.largest_value, std::fabs(sum));
    }
    e.values += static_cast<std::int64_t>(got.size());
  }

  /// Compares the experts of rows: `logits` [rows][experts] in fp32, `ids` [rows][top_k]. A logit of a row
  /// rounded once is off by u times the row's size; two of them by √2 of that, and 8 standard deviations are
  /// allowed. \return for each row whether the sets are equal
  std::vector<bool> add_routing(const std::string& kind, int rows, int experts, int top_k,
                                std::span<const float> logits, std::span<const std::int32_t> expected,
                                std::span<const std::int32_t> ids) {
    routing_error& e = routing_entry(kind, rows);
    std::vector<bool> same(static_cast<std::size_t>(rows));
    for (int r = 0; r < rows; ++r) {
      const auto row = logits.subspan(static_cast<std::size_t>(r) * static_cast<std::size_t>(experts),
                                      static_cast<std::size_t>(experts));
      const auto set_of = [&](std::span<const std::int32_t> from) {
        const auto* first = from.data() + static_cast<std::ptrdiff_t>(r) * top_k;
        std::vector<std::int32_t> set(first, first + top_k);
        std::sort(set.begin(), set.end());
        return set;
      };
      const auto wanted = set_of(expected), got = set_of(ids);
      ++e.routed;
      same[static_cast<std::size_t>(r)] = wanted == got;
      if (wanted == got) continue;
      ++e.other;
      double squares = 0, least = 1e300;
      for (const float v : row) squares += static_cast<double>(v) * static_cast<double>(v);
      for (const auto id : wanted)
        least = std::min(least, static_cast<double>(row[static_cast<std::size_t>(id)]));
      const double room = 8 * 1.4142136 * one_rounding * std::sqrt(squares / experts);
      bool explained = std::adjacent_find(got.begin(), got.end()) == got.end();
      for (const auto id : got)
        explained = explained && id >= 0 && id < experts &&
                    static_cast<double>(row[static_cast<std::size_t>(id)]) >= least - room;
      e.wrong += !explained;
    }
    return same;
  }

  [[nodiscard]] std::span<const module_error> modules() const { return modules_; }
  [[nodiscard]] std::span<const routing_error> routings() const { return routings_; }

  /// One JSON row each; `facts` are further fields, ",\"name\":value…". \return how many are out of bounds
  int print(const std::string& facts) const {
    int bad = 0;
    for (const auto& e : modules_) {
      std::printf(
          "{\"bench\":\"module_error\",\"module\":\"%s\",\"kind\":\"%s\",\"rows\":%d,\"values\":%lld,\"rms_"
          "relative\":%.3e,"
          "\"max_relative\":%.3e,\"roundings\":%d,\"rms_bound\":%.3e,\"max_bound\":%.3e%s}\n",
          e.module.c_str(), e.kind.c_str(), e.rows, static_cast<long long>(e.values), e.rms_relative(),
          e.max_relative(), e.roundings, e.rms_bound(), e.max_bound(), facts.c_str());
      if (e.good()) continue;
      ++bad;
      std::printf(
          "FAILED %s, %s of %d rows: %.3e and %.3e, allowed %.3e and %.3e; %lld of %lld are not numbers\n",
          e.module.c_str(), e.kind.c_str(), e.rows, e.rms_relative(), e.max_relative(), e.rms_bound(),
          e.max_bound(), static_cast<long long>(e.not_finite), static_cast<long long>(e.values));
    }
    for (const auto& e : routings_) {
      std::printf(
          "{\"bench\":\"module_error\",\"module\":\"choice of "
          "experts\",\"kind\":\"%s\",\"rows\":%d,\"routed\":%lld,\"other\":%lld,"
          "\"wrong\":%lld%s}\n",
          e.kind.c_str(), e.rows, static_cast<long long>(e.routed), static_cast<long long>(e.other),
          static_cast<long long>(e.wrong), facts.c_str());
      if (e.wrong == 0) continue;
      ++bad;
      std::printf("FAILED choice of experts, %s of %d rows: %lld of %lld rows went elsewhere without need\n",
                  e.kind.c_str(), e.rows, static_cast<long long>(e.wrong), static_cast<long long>(e.routed));
    }
    return bad;
  }

 private:
  module_error& entry(const std::string& module, const std::string& kind, int rows, int roundings) {
    for (auto& e : modules_)
      if (e.module == module && e.kind == kind && e.rows == rows) return e;
    module_error& made = modules_.emplace_back();
    made.module = module, made.kind = kind, made.rows = rows, made.roundings = roundings;
    return made;
  }
  routing_error& routing_entry(const std::string& kind, int rows) {
    for (auto& e : routings_)
      if (e.kind == kind && e.rows == rows) return e;
    routing_error& made = routings_.emplace_back();
    made.kind = kind, made.rows = rows;
    return made;
  }

  std::vector<module_error> modules_;
  std::vector<routing_error> routings_;
};

}  // namespace qwen3_moe::test
