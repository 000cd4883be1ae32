// SPDX-License-Identifier: Apache-2.0
/// \file
/// Routing of whole steps, made beforehand: what each layer chooses, and what is taken for it a layer early.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "nibble/core/error.hpp"
#include "unit/moe/traces.hpp"

namespace bench {

struct routing_options {
  int layers = 0, experts = 0, top_k = 0;
  double exponent = 0;  ///< of nibble::test::trace
  int steps = 0;
  double guess_right = 0.8;  ///< probability that a guess is among what the layer chooses, over all places
};

/// The same of the guess at a place, likeliest first. The trained tiny model's routers name .915 .842 .744
/// .578 right on their four places, .770 in all, over 48,000 generated tokens: so far from its mean is each
/// quarter of the places here, too.
[[nodiscard]] inline double right_at_place(double guess_right, int place, int top_k) {
  constexpr double off[4] = {0.145, 0.072, -0.026, -0.192};
  return std::clamp(guess_right + off[4 * place / top_k], 0.0, 1.0);
}

/// Choices of every step and layer, and guesses at them. A wrong guess is what the same layer chose in
/// another step, as a router that errs names an expert that is likely there. The ids of a row are distinct,
/// and wrong ones are rarest at its beginning.
class routing_trace {
 public:
  /// Throws nibble::error where a layer's choices are too alike for so many wrong guesses.
  explicit routing_trace(const routing_options& options)
      : o_(options),
        ids_(static_cast<std::size_t>(o_.steps) * static_cast<std::size_t>(planes() * o_.top_k)) {
    nibble::test::trace trace(o_.layers, o_.experts, o_.top_k, o_.exponent, 11);
    for (int step = 0; step < o_.steps; ++step)
      for (int layer = 0; layer < o_.layers; ++layer) {
        const std::vector<std::int32_t> chosen = trace.next(layer);
        std::copy(chosen.begin(), chosen.end(), row(step, layer).begin());
      }
    for (int step = 0; step < o_.steps; ++step)
      for (int layer = 1; layer < o_.layers; ++layer) guess(step, layer);
  }

  /// Rows of a step: what the layers choose, then guesses at what layers 1, 2, … choose.
  [[nodiscard]] int planes() const { return 2 * o_.layers - 1; }
  [[nodiscard]] int guess_plane(int layer) const { return o_.layers + layer - 1; }
  [[nodiscard]] const routing_options& options() const { return o_; }
  /// [steps][planes][top_k]
  [[nodiscard]] std::span<const std::int32_t> ids() const { return ids_; }

 private:
  [[nodiscard]] std::span<std::int32_t> row(int step, int plane) {
    const auto top_k = static_cast<std::size_t>(o_.top_k);
    const auto at =
        static_cast<std::size_t>(step) * static_cast<std::size_t>(planes()) + static_cast<std::size_t>(plane);
    return std::span(ids_).subspan(at * top_k, top_k);
  }
  void guess(int step, int layer) {
    const std::span<const std::int32_t> right = row(step, layer);
    const std::span<std::int32_t> out = row(step, guess_plane(layer));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double drawn = static_cast<double>(random_()) / 4294967296.0;
      out[i] = drawn < right_at_place(o_.guess_right, static_cast<int>(i), o_.top_k)
                   ? right[i]
                   : wrong(layer, right, out.first(i));
    }
  }
  [[nodiscard]] std::int32_t wrong(int layer, std::span<const std::int32_t> right,
                                   std::span<const std::int32_t> taken) {
    const auto among = [](std::span<const std::int32_t> ids, std::int32_t id) {
      return std::find(ids.begin(), ids.end(), id) != ids.end();
    };
    for (int tries = 0; tries < 100'000; ++tries) {
      const auto other = static_cast<int>(random_() % static_cast<unsigned>(o_.steps));
      const std::int32_t id = row(other, layer)[random_() % static_cast<unsigned>(o_.top_k)];
      if (!among(right, id) && !among(taken, id)) return id;
    }
    throw nibble::error("routing trace: a layer's choices are too alike for wrong guesses");
  }

  routing_options o_;
  std::mt19937 random_{12};
  std::vector<std::int32_t> ids_;
};

}  // namespace bench
