// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nibble/core/bf16.hpp>

#include "support/catch.hpp"

namespace bf16 = nibble::bf16;

namespace {
float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
}  // namespace

TEST_CASE("bf16: known values") {
  CHECK(bf16::decode(0x0000) == 0.0f);
  CHECK(bf16::decode(0x3F80) == 1.0f);
  CHECK(bf16::decode(0xC000) == -2.0f);
  CHECK(bf16::decode(0x3FC0) == 1.5f);
  CHECK(bf16::decode(0x7F80) == std::numeric_limits<float>::infinity());
  CHECK(bf16::decode(0x0001) == 0x1p-133f);
  CHECK(std::signbit(bf16::decode(0x8000)));
  CHECK(bf16::encode(1.0f) == 0x3F80);
  CHECK(bf16::encode(-2.0f) == 0xC000);
  CHECK(bf16::encode(3.14159274f) == 0x4049);
  CHECK(bf16::encode(-0.0f) == 0x8000);
}

TEST_CASE("bf16: ties go to the even mantissa") {
  CHECK(bf16::encode(from_bits(0x3F808000)) == 0x3F80);
  CHECK(bf16::encode(from_bits(0x3F808001)) == 0x3F81);
  CHECK(bf16::encode(from_bits(0x3F818000)) == 0x3F82);
  CHECK(bf16::encode(from_bits(0x3F817FFF)) == 0x3F81);
  CHECK(bf16::encode(from_bits(0xBF818000)) == 0xBF82);
  CHECK(bf16::encode(from_bits(0x00008000)) == 0x0000);  // subnormal tie
  CHECK(bf16::encode(from_bits(0x00018000)) == 0x0002);
  CHECK(bf16::encode(from_bits(0x3FFF8000)) == 0x4000);  // carries into the exponent
}

TEST_CASE("bf16: the ends of the range") {
  CHECK(bf16::encode(std::numeric_limits<float>::max()) == 0x7F80);
  CHECK(bf16::encode(from_bits(0x7F7F7FFF)) == 0x7F7F);
  CHECK(bf16::encode(std::numeric_limits<float>::infinity()) == 0x7F80);
  CHECK(bf16::encode(-std::numeric_limits<float>::infinity()) == 0xFF80);
  CHECK(bf16::encode(from_bits(0x7F800001)) == 0x7FC0);  // a signalling NaN stays one, and becomes quiet
  CHECK(bf16::encode(from_bits(0xFFFFFFFF)) == 0xFFFF);
}

TEST_CASE("bf16: every pattern survives a round trip") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const bool nan = (bits & 0x7FFF) > 0x7F80;
    const std::uint16_t expected = nan ? static_cast<std::uint16_t>(pattern | 0x0040) : pattern;
    if (bf16::encode(bf16::decode(pattern)) != expected) {
      INFO("pattern " << bits);
      CHECK(bf16::encode(bf16::decode(pattern)) == expected);
    }
  }
  SUCCEED("65536 patterns compared");
}
