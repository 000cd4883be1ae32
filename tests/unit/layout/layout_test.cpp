// SPDX-License-Identifier: Apache-2.0
#include "nibble/fp8/layout.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "nibble/core/error.hpp"
#include "nibble/fp8/e4m3.hpp"
#include "nibble/kernels/bf16_layout.hpp"
#include "nibble/nvfp4/e2m1.hpp"
#include "nibble/nvfp4/layout.hpp"
#include "support/catch.hpp"

using nibble::fused;
using nibble::matrix;
using nibble::resident_layout;
using nibble::row_order;
using nibble::weight_format;

namespace {

std::vector<std::uint8_t> random_bytes(std::size_t count, std::mt19937& random, bool finite_e4m3) {
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) do
      byte = static_cast<std::uint8_t>(random());
    while (finite_e4m3 && nibble::e4m3::is_nan(byte));
  return bytes;
}

std::vector<resident_layout> random_layouts(weight_format format, std::mt19937& random, int count) {
  std::vector<resident_layout> out = {
      {matrix(1, 16, format)}, {matrix(33, 464, format)}, {matrix(7, 2880, format)}};
  while (static_cast<int>(out.size()) < count) {
    const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
    const int k = 16 * pick(1, 30), kind = pick(0, 3), n = pick(1, 70);
    if (kind == 0) out.push_back({matrix(n, k, format)});
    if (kind == 1) out.push_back({fused(k, format, n, pick(1, 40), pick(1, 9))});
    if (kind == 2) out.push_back({fused(k, format, n, n), row_order::gate_up});
    if (kind == 3) out.push_back({fused(k, format, n, 1, 2, 16)});
  }
  return out;
}

double value_at(const std::vector<std::uint8_t>& codes, const std::vector<std::uint8_t>& scales,
                std::size_t i) {
  const unsigned code = i % 2 == 0 ? codes[i / 2] & 15u : codes[i / 2] >> 4;
  return static_cast<double>(nibble::e2m1::decode(code)) * nibble::e4m3::decode(scales[i / 16]);
}

}  // namespace

TEST_CASE("every stored word is reached once: the code maps are bijections") {
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) {
    const auto word = static_cast<std::uint32_t>(random());
    REQUIRE(nibble::nvfp4::word_of_codes(nibble::nvfp4::codes_of_word(word)) == word);
    REQUIRE(nibble::nvfp4::word_map(nibble::nvfp4::codes_of_word(word)) == word);
    REQUIRE(nibble::fp8::word_of_bytes(nibble::fp8::bytes_of_word(word)) == word);
  }
}

TEST_CASE("C005: every block scale is stored exactly, subnormal ones too, as scale · 2^119 in bf16") {
  std::set<int> seen;
  for (int magnitude = 0; magnitude < 127; ++magnitude) {
    const auto byte = static_cast<std::uint8_t>(magnitude);
    const std::uint8_t stored = nibble::nvfp4::stored_scale(byte);
    CHECK(nibble::nvfp4::scale_magnitude(stored) == byte);
    CHECK(seen.insert(stored).second);
    if (magnitude == 0) continue;
    const std::uint32_t bf16 =
        static_cast<std::uint32_t>(stored) << 4 | (nibble::nvfp4::scale_bits & 0xFFFFu);
    const auto scaled = nibble::bit_cast<float>(bf16 << 16);
    CHECK(static_cast<double>(scaled) * 0x1p-119 == static_cast<double>(nibble::e4m3::decode(byte)));
  }
}

TEST_CASE("a decoded code times a decoded scale is exact in bf16 for every code and scale") {
  for (unsigned code = 0; code < 16; ++code)
    for (int magnitude = 1; magnitude < 127; ++magnitude) {
      std::uint32_t pairs[4];
      nibble::nvfp4::decode_codes(nibble::nvfp4::word_of_codes(code), pairs);
      const double product = static_cast<double>(nibble::e2m1::decode(code)) *
                             nibble::e4m3::decode(static_cast<std::uint8_t>(magnitude));
      CHECK(static_cast<double>(nibble::bit_cast<float>(pairs[0] << 16)) * 0x1p126 ==
            nibble::e2m1::decode(code));
      const auto rounded = nibble::bit_cast<float>(
          nibble::bit_cast<std::uint32_t>(static_cast<float>(product)) & 0xFFFF'0000u);
      CHECK(static_cast<double>(rounded) == product);
    }
}

TEST_CASE("NVFP4 tiles give back the canonical matrix, over random geometries and dirty memory") {
  std::mt19937 random(2);
  for (const resident_layout& layout : random_layouts(weight_format::nvfp4, random, 150)) {
    CAPTURE(layout.shape.name());
    const auto codes = random_bytes(layout.shape.code_bytes(), random, false);
    auto scales = random_bytes(layout.shape.block_scale_bytes(), random, true);
    for (auto& s : scales)
      if (random() % 8 == 0) s = static_cast<std::uint8_t>(random() % 2 * 0x80);  // zero scales, both signs
    auto canonical_codes = codes, canonical_scales = scales;
    nibble::nvfp4::make_canonical(canonical_codes, canonical_scales);
    bool same_values = true;
    for (std::size_t i = 0; i < 2 * codes.size(); ++i)
      same_values &= value_at(codes, scales, i) == value_at(canonical_codes, canonical_scales, i);
    REQUIRE(same_values);

    std::vector<std::uint8_t> tiles(layout.bytes(), 0xFF), other(layout.bytes(), 0x00);
    nibble::nvfp4::pack(layout, codes, scales, tiles, 1);
    nibble::nvfp4::pack(layout, canonical_codes, canonical_scales, other, 3);
    REQUIRE(tiles == other);
    std::vector<std::uint8_t> codes_back(codes.size(), 0xAA), scales_back(scales.size(), 0xAA);
    nibble::nvfp4::unpack(layout, tiles, codes_back, scales_back);
    REQUIRE(codes_back == canonical_codes);
    REQUIRE(scales_back == canonical_scales);
  }
}

TEST_CASE("C008: padding of tiles is written: old bytes of the memory are never multiplied") {
  std::mt19937 random(8);
  for (const int n : {1, 7, 33})
    for (const int k : {16, 48, 464, 2880}) {
      const resident_layout layout{matrix(n, k, weight_format::nvfp4)};
      const auto count = static_cast<std::size_t>(n) * static_cast<std::size_t>(k);
      const auto codes = random_bytes(count / 2, random, false),
                 scales = random_bytes(count / 16, random, true);
      std::vector<std::uint8_t> dirty(layout.bytes(), 0xFF), clean(layout.bytes(), 0x00);
      nibble::nvfp4::pack(layout, codes, scales, dirty);
      nibble::nvfp4::pack(layout, codes, scales, clean);
      CHECK(dirty == clean);
    }
}

TEST_CASE("C011: packing writes its own bytes and none behind them") {
  std::mt19937 random(11);
  for (const int n : {1, 127, 128, 129, 1024})
    for (const int k : {16, 512}) {
      const resident_layout layout{matrix(n, k, weight_format::nvfp4)};
      const auto count = static_cast<std::size_t>(n) * static_cast<std::size_t>(k);
      const auto codes = random_bytes(count / 2, random, false),
                 scales = random_bytes(count / 16, random, true);
      constexpr std::size_t canary = 4096;
      std::vector<std::uint8_t> memory(layout.bytes() + canary, 0xA5);
      nibble::nvfp4::pack(layout, codes, scales, std::span(memory).first(layout.bytes()));
      CHECK(std::all_of(memory.end() - canary, memory.end(), [](auto byte) { return byte == 0xA5; }));
      CHECK_THROWS_AS(nibble::nvfp4::pack(layout, codes, scales, std::span(memory).first(layout.bytes() - 1)),
                      nibble::error);
    }
}

TEST_CASE("FP8 and bf16 tiles are permutations, over random geometries") {
  std::mt19937 random(3);
  for (const resident_layout& layout : random_layouts(weight_format::fp8, random, 80)) {
    CAPTURE(layout.shape.name());
    const auto weight = random_bytes(layout.shape.code_bytes(), random, false);
    std::vector<std::uint8_t> tiles(layout.bytes(), 0xFF), back(weight.size(), 0xAA);
    nibble::fp8::pack(layout, weight, tiles);
    nibble::fp8::unpack(layout, tiles, back);
    REQUIRE(back == weight);
  }
  for (const resident_layout& layout : random_layouts(weight_format::bf16, random, 80)) {
    CAPTURE(layout.shape.name());
    std::vector<std::uint16_t> weight(layout.shape.code_bytes() / 2), back(weight.size(), 0xAAAA);
    for (auto& w : weight) w = static_cast<std::uint16_t>(random());
    std::vector<std::uint8_t> tiles(layout.bytes(), 0xFF);
    nibble::bf16_weights::pack(layout, weight, tiles);
    nibble::bf16_weights::unpack(layout, tiles, back);
    REQUIRE(back == weight);
  }
}

TEST_CASE("matrices without zero or negative scales come back byte for byte") {
  std::mt19937 random(4);
  const resident_layout layout{matrix(48, 256, weight_format::nvfp4)};
  const auto codes = random_bytes(layout.shape.code_bytes(), random, false);
  std::vector<std::uint8_t> scales(layout.shape.block_scale_bytes());
  for (auto& s : scales) s = static_cast<std::uint8_t>(1 + random() % 126);
  std::vector<std::uint8_t> tiles(layout.bytes()), codes_back(codes.size()), scales_back(scales.size());
  nibble::nvfp4::pack(layout, codes, scales, tiles);
  nibble::nvfp4::unpack(layout, tiles, codes_back, scales_back);
  CHECK(layout.bytes() == codes.size() + scales.size());
  CHECK(codes_back == codes);
  CHECK(scales_back == scales);
}

TEST_CASE("C009: layouts that do not exist are refused with sizes") {
  std::vector<std::uint8_t> some(64);
  const auto text_of = [&](const resident_layout& layout) {
    try {
      nibble::nvfp4::pack(layout, some, some, some);
    } catch (const nibble::error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text_of({matrix(4, 24, weight_format::nvfp4)}).find("K a multiple of 16") != std::string::npos);
  CHECK(text_of({matrix(4, 16, weight_format::fp8)}).find("needs an nvfp4 matrix") != std::string::npos);
  CHECK(text_of({fused(16, weight_format::nvfp4, 4, 8), row_order::gate_up}).find("two equal segments") !=
        std::string::npos);
  CHECK(text_of({matrix(4, 16, weight_format::nvfp4)}).find("expected 32, 4 and 1152") != std::string::npos);
  CHECK_FALSE(resident_layout{matrix(4, 24, weight_format::fp8)}.valid());
}
