// SPDX-License-Identifier: Apache-2.0
/// \file
/// What every attention shape is checked for.
#pragma once

#include "attention_scene.cuh"

using namespace nibble;
using device_test::attention_scene;
using device_test::sequence_plan;

namespace {

constexpr attention_shape qwen36(kv_format f) { return {16, 2, 256, 64, true, true, 16, f}; }
constexpr attention_shape qwen3(kv_format f) { return {32, 4, 128, 128, false, false, 16, f}; }
constexpr attention_shape tiny(kv_format f) { return {4, 2, 64, 16, true, true, 16, f}; }
constexpr attention_shape thirds(kv_format f) { return {6, 2, 128, 32, true, false, 32, f}; }
constexpr attention_shape sixteenths(kv_format f) { return {16, 1, 64, 64, false, true, 64, f}; }

constexpr double decode_limit = 4e-3;
// Prefill rounds its queries to the cache's arithmetic: bf16 or f16.
template <attention_shape S>
constexpr double prefill_limit = S.format == kv_format::fp8 ? 4e-3 : 1e-2;

template <attention_shape S>
void check_decode(std::uint64_t seed) {
  const attention_scene<S> scene({{0, 1},
                                  {1, 1},
                                  {15, 1},
                                  {16, 1},
                                  {-1, 1},
                                  {17, 1},
                                  {63, 1},
                                  {64, 1},
                                  {65, 1},
                                  {511, 1},
                                  {513, 1},
                                  {4097, 1}},
                                 seed);
  const auto all = scene.run(true);
  scene.check_pool(all.pool);
  scene.check_output(all, decode_limit);
  for (int i = 0; i < S.output_width(); ++i) NIBBLE_CHECK(scene.output_rows(all, 4, 1)[i] == 0);
  // The same launch again writes the same tokens again: bits must not change, counters must have been reset.
  NIBBLE_CHECK(scene.run(true, {}, 3).out == all.out);
  // Alone, and among strangers in another order, on another grid.
  for (const int s : {0, 2, 8, 10, 11})
    NIBBLE_CHECK(scene.run(true, {s}).out == scene.output_rows(all, s, 1));
  const std::vector<int> order = {11, 3, 10, 9, 0, 5, 8, 4};
  const auto mixed = scene.run(true, order);
  const auto few = scene.template run<7>(true, order);
  for (std::size_t i = 0; i < order.size(); ++i)
    NIBBLE_CHECK(scene.output_rows(mixed, static_cast<int>(i), 1) == scene.output_rows(all, order[i], 1));
  NIBBLE_CHECK(few.out == mixed.out);
}

template <attention_shape S>
void check_prefill(std::uint64_t seed) {
  const attention_scene<S> scene(
      {{0, 1}, {0, 17}, {5, 64}, {-1, 3}, {0, 130}, {64, 33}, {511, 3}, {0, 63}, {1000, 77}}, seed);
  const auto all = scene.run(false);
  scene.check_pool(all.pool);
  scene.check_output(all, prefill_limit<S>);
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < scene.ldo(); ++i)
      NIBBLE_CHECK(scene.output_rows(all, scene.first_row(3) + r, 1)[i] == 0xFFFF);
  // Rows depend on nobody else.
  for (const int s : {1, 5, 8}) {
    const auto alone = scene.run(false, {s});
    const int count = scene.first_row(s + 1) - scene.first_row(s);
    NIBBLE_CHECK(alone.out == scene.output_rows(all, scene.first_row(s), count));
  }
}

double distance(const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b, int ld, int width) {
  double worst = 0;
  for (std::size_t row = 0; row * static_cast<std::size_t>(ld) < a.size(); ++row) {
    double error = 0, norm = 0;
    for (int i = 0; i < width; ++i) {
      const double x = bf16::decode(a[row * ld + i]), y = bf16::decode(b[row * ld + i]);
      error += (x - y) * (x - y), norm += y * y;
    }
    const double relative = std::sqrt(error / norm);
    if (!(relative <= worst)) worst = relative;
  }
  return worst;
}

/// A prompt in pieces leaves the same cache bit for bit and the same rows up to rounding; single rows also
/// through decode.
template <attention_shape S>
void check_pieces(std::uint64_t seed) {
  constexpr int rows = 150;
  const std::vector<sequence_plan> plan = {{37, rows}};
  const attention_scene<S> scene(plan, seed);
  const auto whole = scene.run(false);
  scene.check_output(whole, prefill_limit<S>);
  for (const int piece : {1, 7, 32, 64, 149}) {
    attention_scene<S> part(plan, seed);
    std::vector<std::uint16_t> out;
    std::vector<std::uint8_t> pool;
    for (int done = 0; done < rows; done += piece) {
      const int count = std::min(piece, rows - done);
      if (done == 0)
        part.cut(count);
      else
        part.advance(piece, pool, count);
      auto result = part.run(piece == 1 && done % 2 == 0);
      out.insert(out.end(), result.out.begin(), result.out.end());
      pool = std::move(result.pool);
    }
    NIBBLE_CHECK(pool == whole.pool);
    NIBBLE_CHECK(distance(out, whole.out, scene.ldo(), S.output_width()) < prefill_limit<S>);
  }
}

template <attention_shape S>
void check_far(std::uint64_t seed) {
  // Rounding of positions, pages and angles far out; a second level of partial results with whole groups.
  const attention_scene<S> scene({{131072, 1}, {20000, 1}, {131071, 1}}, seed);
  const auto all = scene.run(true);
  scene.check_pool(all.pool);
  scene.check_output(all, decode_limit);
  NIBBLE_CHECK(scene.run(true, {2}).out == scene.output_rows(all, 2, 1));
  const attention_scene<S> prompt({{131000, 80}}, seed + 1);
  const auto rows = prompt.run(false);
  prompt.check_pool(rows.pool);
  prompt.check_output(rows, prefill_limit<S>);
}

/// What devices with little shared memory run: four warps a chunk, 64 rows a block.
template <attention_shape S>
void check_small(std::uint64_t seed) {
  static_assert(select_attention(S, 132, 99 * 1024).decode_warps == 4);
  const attention_scene<S> decode({{0, 1}, {17, 1}, {700, 1}, {5000, 1}}, seed);
  const auto rows = decode.template run<0, true>(true);
  decode.check_pool(rows.pool);
  decode.check_output(rows, decode_limit);
  const auto alone = decode.template run<5, true>(true, {3});
  NIBBLE_CHECK(alone.out == decode.output_rows(rows, 3, 1));
  const attention_scene<S> prompt({{0, 70}, {300, 9}}, seed + 1);
  const auto prefill = prompt.template run<0, true>(false);
  prompt.check_pool(prefill.pool);
  prompt.check_output(prefill, prefill_limit<S>);
}

/// A NaN in one sequence stays there.
template <attention_shape S>
void check_nan(std::uint64_t seed) {
  attention_scene<S> scene({{40, 1}, {41, 1}, {200, 1}}, seed);
  const auto clean = scene.run(true);
  const std::size_t row = scene.qkv().size() / 3;
  for (int d = 0; d < 3; ++d) scene.qkv()[row + S.q_width() + d] = 0x7FC0;  // the second sequence's new key
  const auto dirty = scene.run(true);
  NIBBLE_CHECK(scene.output_rows(clean, 0, 1) == scene.output_rows(dirty, 0, 1));
  NIBBLE_CHECK(scene.output_rows(clean, 2, 1) == scene.output_rows(dirty, 2, 1));
  NIBBLE_CHECK(std::isnan(bf16::decode(scene.output_rows(dirty, 1, 1)[0])));
}

void check_refusals() {
  constexpr attention_shape s = tiny(kv_format::bf16);
  using decode = attention_decode_family<s>;
  attention_params p;
  NIBBLE_CHECK(decode::launch(p, {device_test::stream()}).code == status_code::invalid_argument);
  NIBBLE_CHECK(attention_prefill_family<s>::launch(p, {device_test::stream()}).code ==
               status_code::invalid_argument);
  NIBBLE_CHECK(attention_append_family<s>::launch(p, {device_test::stream()}).code ==
               status_code::invalid_argument);
  static_assert(!attention_shape{6, 4, 128, 32, false, false}.valid());
  static_assert(!attention_shape{8, 2, 96, 32, false, false}.valid());
  static_assert(!attention_shape{8, 2, 128, 48, false, false}.valid());
  static_assert(!attention_shape{8, 2, 128, 64, false, false, 8}.valid());
  static_assert(tiny(kv_format::fp8).valid() && qwen36(kv_format::bf16).valid() &&
                qwen3(kv_format::fp8).valid());
}

template <attention_shape S>
void add_shape(const char* name, std::uint64_t seed) {
  const std::string n = std::string(name) + (S.format == kv_format::fp8 ? " fp8" : " bf16");
  device_test::add("decode", n, [seed] { check_decode<S>(seed); });
  device_test::add("prefill", n, [seed] { check_prefill<S>(seed + 1); });
  device_test::add("pieces", n, [seed] { check_pieces<S>(seed + 2); });
  device_test::add("nan", n, [seed] { check_nan<S>(seed + 3); });
}

}  // namespace
