// SPDX-License-Identifier: Apache-2.0
/// \file
/// How far a kernel of the delta rule may be from fp64: gates by their logits' sizes, the recurrence by the
/// sizes that went into it. Both are models of fp32, not of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "device_test.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/kernels/delta_types.hpp"
#include "nibble/ref/activation.hpp"
#include "nibble/ref/delta_rule.hpp"

namespace delta_test {

using namespace nibble;

/// The largest error in units of what is tolerated, and where.
struct worst_case {
  double ratio = 0, got = 0, want = 0, tolerance = 0;
  int row = 0, head = 0, column = 0;
  bool wrong = false;  ///< a number that is none, or is out of all bounds

  void add(double g, double w, double tolerated, int r, int h, int c) {
    const double now = std::fabs(g - w) / tolerated;
    if (!wrong && (!(now <= ratio) || !(std::fabs(g) < 1e30))) {
      wrong = !(now < 1e300) || !(std::fabs(g) < 1e30);
      ratio = now, got = g, want = w, tolerance = tolerated, row = r, head = h, column = c;
    }
  }
  /// Says what was wrong, if anything was.
  [[nodiscard]] bool good(const char* of, int first) const {
    if (!wrong && ratio <= 1) return true;
    std::printf("  %s %d+%d, head %d, column %d: got %.9g, want %.9g ± %.3g (%.3g times that)\n", of, first,
                row, head, column, got, want, tolerance, ratio);
    return false;
  }
};

struct expectation {
  std::vector<double> out, tolerance;  ///< [rows][value_heads · value_dim]
};

/// decay and β [rows][value_heads], and how far a kernel's may be away.
struct gates {
  std::vector<double> decay, beta, decay_tolerance, beta_tolerance;

  /// Checks a kernel's gates, and puts them in place of those of fp64. \param from (decay, β) pairs in fp32
  void take(const delta_shape& s, const std::byte* from, int first, int rows) {
    const auto heads = static_cast<std::size_t>(s.value_heads);
    worst_case decays, betas;
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows) * heads; ++i) {
      float pair[2];
      std::memcpy(pair, from + 8 * (static_cast<std::size_t>(first) * heads + i), 8);
      const int row = static_cast<int>(i / heads), head = static_cast<int>(i % heads);
      decays.add(pair[0], decay[i], decay_tolerance[i], row, head, 0);
      betas.add(pair[1], beta[i], beta_tolerance[i], row, head, 0);
      decay[i] = pair[0], beta[i] = pair[1];
    }
    NIBBLE_CHECK(decays.good("decay: row", first));
    NIBBLE_CHECK(betas.good("beta: row", first));
  }
};

/// A logit, a sum of products, is off by 2^-20 of the sum of their sizes at most; everything behind it by a
/// few units in the last place of what it is.
inline gates gates_of(const delta_shape& s, const std::vector<double>& x,
                      const std::vector<std::uint16_t>& ba, const std::vector<double>& a_log,
                      const std::vector<double>& dt_bias, int rows) {
  constexpr double smallest = 0x1p-125;  // below, fp32 or its exponential may flush
  const auto heads = static_cast<std::size_t>(s.value_heads), hidden = static_cast<std::size_t>(s.hidden);
  gates g;
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r)
    for (std::size_t h = 0; h < heads; ++h) {
      double sum[2] = {}, lost[2] = {};
      for (std::size_t which = 0; which < 2; ++which)
        for (std::size_t i = 0; i < hidden; ++i) {
          const double product = x[r * hidden + i] * bf16::decode(ba[(which * heads + h) * hidden + i]);
          sum[which] += product, lost[which] += std::fabs(product) * 0x1p-20;
        }
      const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
      g.beta.push_back(sigmoid(sum[0]));
      // The slope grows by e^lost at most on the way.
      g.beta_tolerance.push_back(g.beta.back() * sigmoid(-sum[0]) * lost[0] * std::exp(lost[0]) +
                                 0x1p-21 * g.beta.back() + smallest);
      const double at = sum[1] + dt_bias[h], rate = std::exp(a_log[h]), log_decay = -rate * ref::softplus(at);
      const double off = lost[1] + 0x1p-23 * std::fabs(at);
      g.decay.push_back(std::exp(log_decay));
      g.decay_tolerance.push_back(
          g.decay.back() *
              (std::expm1(rate * sigmoid(at) * off * std::exp(off) - 0x1p-20 * log_decay) + 0x1p-21) +
          smallest);
    }
  return g;
}

/// What the state of a sequence may have lost, a column at a time.
///
/// A token's update is S ← e^g (S − β k̂ k̂ᵀS) + β k̂ vᵀ, and no column of S grows by its first part: what a
/// column lost earlier does not grow either. What each token adds is a share of the largest number that took
/// part: a term of v, or the column as it was at any token of the chunk, as a chunk's products go back to
/// where it began (k̂ᵀS of a token is then a difference of numbers as large as before the tokens between).
/// Losses of different tokens have nothing to do with each other: their squares add up.
///
/// In a chunk a column has one scale, and numbers below 2^-33 of the column's largest are lost even where
/// that comes later.
class delta_error {
 public:
  /// q̂, k̂ and v come from exponentials and reciprocal roots of a few units in the last place, and products
  /// keep 22 bits.
  static constexpr double share = 0x1p-20;
  static constexpr double floor = 0x1p-32;

  explicit delta_error(const delta_shape& s)
      : largest_(static_cast<std::size_t>(s.value_width())), squares_(largest_.size()) {}

  /// Of row `row` and the next token's position: the largest sizes of v behind it in its chunk.
  [[nodiscard]] std::vector<double> largest_to_come(const delta_shape& s, const std::vector<double>& sizes,
                                                    int row, int rows) const {
    std::vector<double> largest(largest_.size());
    const int left = delta_chunk - 1 - static_cast<int>(position_ % delta_chunk);
    for (int r = row + 1; r < std::min(rows, row + 1 + left); ++r)
      for (std::size_t c = 0; c < largest.size(); ++c)
        largest[c] = std::max(largest[c], sizes[static_cast<std::size_t>(r) * s.value_width() + c]);
    return largest;
  }
  /// A token later. \param unsure the kernel's gates may be off by their tolerances
  /// \param sizes of v  \param largest_to_come of them, in later rows of the chunk  \param state after it
  /// \return how far the token's o may be away
  std::vector<double> after(const delta_shape& s, const gates& g, int row, bool unsure,
                            const std::vector<double>& sizes, const std::vector<double>& largest_to_come,
                            const std::vector<double>& state) {
    const bool begins = position_++ % delta_chunk == 0;
    std::vector<double> lost(largest_.size());
    for (int h = 0; h < s.value_heads; ++h) {
      const std::size_t gate = static_cast<std::size_t>(row) * s.value_heads + h;
      for (int c = 0; c < s.value_dim; ++c) {
        const std::size_t at = static_cast<std::size_t>(h) * s.value_dim + c;
        double norm = 0;
        for (int i = 0; i < s.key_dim; ++i) {
          const double e = state[(static_cast<std::size_t>(h) * s.key_dim + i) * s.value_dim + c];
          norm += e * e;
        }
        norm = std::sqrt(norm);
        largest_[at] = std::max({begins ? before(at) : largest_[at], norm, sizes[at]});
        before(at) = norm;
        const double gates_lost = unsure ? g.decay_tolerance[gate] + 2 * g.beta_tolerance[gate] : 0;
        squares_[at] =
            g.decay[gate] * g.decay[gate] * squares_[at] + std::pow((share + gates_lost) * largest_[at], 2);
        // |q̂| is key_dim^-1/2.
        lost[at] = (of_state(static_cast<int>(at)) + floor * largest_to_come[at]) / std::sqrt(s.key_dim);
      }
    }
    return lost;
  }
  [[nodiscard]] double of_state(int column) const {
    return std::sqrt(squares_[static_cast<std::size_t>(column)]) + 1e-30;
  }

 private:
  double& before(std::size_t at) {
    before_.resize(largest_.size());
    return before_[at];
  }
  std::int64_t position_ = 0;
  std::vector<double> largest_, squares_, before_;  ///< by head and column
};

/// What is tolerated behind the gated norm where o may be off by `lost`: 1.01 halves of a bf16 step, its own
/// error, and what the norm's factor changes if all of the row's o are off.
inline std::vector<double> gated_tolerance(const delta_shape& s, const std::vector<double>& o,
                                           const std::vector<double>& lost, const std::vector<double>& z,
                                           const std::vector<double>& norm, double eps) {
  std::vector<double> tolerance(o.size());
  const auto dim = static_cast<std::size_t>(s.value_dim);
  for (std::size_t first = 0; first < o.size(); first += dim) {
    double squares = 0, off = 0;
    for (std::size_t c = first; c < first + dim; ++c) squares += o[c] * o[c], off += lost[c] * lost[c];
    const double rms = std::sqrt(squares / s.value_dim), rms_off = std::sqrt(off / s.value_dim);
    const double factor = 1 / std::sqrt(rms * rms + eps);
    const double most = 1 / std::sqrt(std::pow(std::max(rms - rms_off, 0.0), 2) + eps);
    for (std::size_t c = 0; c < dim; ++c) {
      const double by = std::fabs(norm[c] * ref::silu(z[first + c]));
      const double value = std::fabs(o[first + c]);
      tolerance[first + c] =
          0x1.02p-8 * value * factor * by + by * (most * lost[first + c] + (most - factor) * value) + 1e-30;
    }
  }
  return tolerance;
}

}  // namespace delta_test
