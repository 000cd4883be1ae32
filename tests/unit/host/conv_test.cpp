// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/conv.hpp>
#include <nibble/ref/conv.hpp>

#include "kernel_test.hpp"

using namespace kernel_test;
using nibble::host::sequence_span;
using nibble::host::thread_pool;
using nibble::ref::widen;

TEST_CASE("conv: widths and channels against fp64; any cut gives the same bits and the same state") {
  random_source random;
  INFO(random.seed_text());
  thread_pool pool, one(1);
  on_every_target([&](const std::string&) {
    for (const int width : {1, 2, 4, 8})
      for (const int channels : {1, 17, 64, 1100}) {
        INFO("width " << width << ", channels " << channels);
        const int rows = 23, taps = width - 1, slots = 3, slot = 1;
        const auto state_size = static_cast<std::size_t>(slots * taps * channels);
        const floats x = random.normals(static_cast<std::size_t>(rows * channels));
        const floats weight =
            random.normals(static_cast<std::size_t>(width * channels));  // [channels][width]
        floats transposed(weight.size());
        for (int c = 0; c < channels; ++c)
          for (int j = 0; j < width; ++j)
            transposed[static_cast<std::size_t>(j * channels + c)] =
                weight[static_cast<std::size_t>(c * width + j)];
        const floats start = random.normals(state_size);
        const auto slot_of = [&](const floats& state) {
          return floats(state.begin() + slot * taps * channels, state.begin() + (slot + 1) * taps * channels);
        };

        floats state = start, y(x.size(), quiet_nan);
        const std::vector<sequence_span> whole{{0, rows, 0, slot, nullptr}};
        causal_conv_silu(pool, whole, x.data(), channels, transposed.data(), width, channels, state.data(),
                         y.data(), channels);
        doubles exact_state = widen(slot_of(start));
        const doubles expected =
            nibble::ref::causal_conv_silu(widen(x), widen(weight), width, channels, exact_state);
        CHECK(largest_error(y, expected) <= 2e-6);
        CHECK(largest_error(slot_of(state), exact_state) == 0);
        // Other slots are not touched.
        for (std::size_t i = 0; i < state_size; ++i)
          if (static_cast<int>(i) / std::max(taps * channels, 1) != slot && !same_bits(state[i], start[i])) {
            CHECK(same_bits(state[i], start[i]));
          }

        floats cut_state = start, cut(x.size(), quiet_nan);
        for (int at = 0; at < rows;) {
          const int count = std::min(rows - at, random.integer(1, 5));
          // As the second span of a step whose first is empty.
          const std::vector<sequence_span> spans{{0, 0, 0, 0, nullptr}, {at, count, at, slot, nullptr}};
          causal_conv_silu(one, spans, x.data(), channels, transposed.data(), width, channels,
                           cut_state.data(), cut.data(), channels);
          at += count;
        }
        CHECK(same_bits(cut, y));
        CHECK(same_bits(cut_state, state));
      }
  });
}
