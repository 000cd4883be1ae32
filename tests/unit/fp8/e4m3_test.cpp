// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nibble/fp8/e4m3.hpp>

#include "support/catch.hpp"

namespace e4m3 = nibble::e4m3;

namespace {

constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

// The values of bytes 0x00 … 0x7F, one row for each exponent. Bytes from 0x80 on are their negatives.
constexpr float table[128] = {
    0.0f,      0.001953125f, 0.00390625f, 0.005859375f, 0.0078125f, 0.009765625f, 0.01171875f, 0.013671875f,
    0.015625f, 0.017578125f, 0.01953125f, 0.021484375f, 0.0234375f, 0.025390625f, 0.02734375f, 0.029296875f,
    0.03125f,  0.03515625f,  0.0390625f,  0.04296875f,  0.046875f,  0.05078125f,  0.0546875f,  0.05859375f,
    0.0625f,   0.0703125f,   0.078125f,   0.0859375f,   0.09375f,   0.1015625f,   0.109375f,   0.1171875f,
    0.125f,    0.140625f,    0.15625f,    0.171875f,    0.1875f,    0.203125f,    0.21875f,    0.234375f,
    0.25f,     0.28125f,     0.3125f,     0.34375f,     0.375f,     0.40625f,     0.4375f,     0.46875f,
    0.5f,      0.5625f,      0.625f,      0.6875f,      0.75f,      0.8125f,      0.875f,      0.9375f,
    1.0f,      1.125f,       1.25f,       1.375f,       1.5f,       1.625f,       1.75f,       1.875f,
    2.0f,      2.25f,        2.5f,        2.75f,        3.0f,       3.25f,        3.5f,        3.75f,
    4.0f,      4.5f,         5.0f,        5.5f,         6.0f,       6.5f,         7.0f,        7.5f,
    8.0f,      9.0f,         10.0f,       11.0f,        12.0f,      13.0f,        14.0f,       15.0f,
    16.0f,     18.0f,        20.0f,       22.0f,        24.0f,      26.0f,        28.0f,       30.0f,
    32.0f,     36.0f,        40.0f,       44.0f,        48.0f,      52.0f,        56.0f,       60.0f,
    64.0f,     72.0f,        80.0f,       88.0f,        96.0f,      104.0f,       112.0f,      120.0f,
    128.0f,    144.0f,       160.0f,      176.0f,       192.0f,     208.0f,       224.0f,      240.0f,
    256.0f,    288.0f,       320.0f,      352.0f,       384.0f,     416.0f,       448.0f,      quiet_nan};

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

static_assert(e4m3::decode(0x38) == 1.0f && e4m3::encode(1.0f) == 0x38, "usable in constant expressions");

}  // namespace

TEST_CASE("E4M3: all 256 bytes decode to the written values") {
  for (int byte = 0; byte < 256; ++byte) {
    INFO("byte " << byte);
    const float value = e4m3::decode(static_cast<std::uint8_t>(byte));
    if ((byte & 0x7F) == 0x7F) {
      CHECK(std::isnan(value));
      CHECK(std::signbit(value) == (byte >= 0x80));
      CHECK(e4m3::is_nan(static_cast<std::uint8_t>(byte)));
    } else {
      const float expected = byte < 0x80 ? table[byte] : -table[byte & 0x7F];
      CHECK(same_bits(value, expected));
      CHECK_FALSE(e4m3::is_nan(static_cast<std::uint8_t>(byte)));
    }
  }
}

TEST_CASE("E4M3: the bytes that field reports name") {
  CHECK(e4m3::decode(0x01) == 0.001953125f);  // subnormal, not 0.0087890625
  CHECK(e4m3::decode(0x7E) == 448.0f);
  CHECK(same_bits(e4m3::decode(0x80), -0.0f));
  CHECK(e4m3::decode(0x81) == -0.001953125f);
  CHECK(e4m3::decode(0xB8) == -1.0f);  // a set sign bit is negative, never a larger positive value
  CHECK(std::isnan(e4m3::decode(0x7F)));
  CHECK(std::isnan(e4m3::decode(0xFF)));
}

TEST_CASE("E4M3: every value encodes to its own byte") {
  for (int byte = 0; byte < 0x7F; ++byte) {
    INFO("byte " << byte);
    CHECK(e4m3::encode(table[byte]) == byte);
    CHECK(e4m3::encode(-table[byte]) == (byte | 0x80));
  }
}

TEST_CASE("E4M3: a value halfway between two goes to the even byte, and to the nearer one beside it") {
  for (int byte = 0; byte < 0x7E; ++byte) {
    INFO("between bytes " << byte << " and " << byte + 1);
    const float middle = (table[byte] + table[byte + 1]) / 2;  // exact
    const int even = byte % 2 == 0 ? byte : byte + 1;
    CHECK(e4m3::encode(middle) == even);
    CHECK(e4m3::encode(-middle) == (even | 0x80));
    CHECK(e4m3::encode(std::nextafter(middle, 0.0f)) == byte);
    CHECK(e4m3::encode(std::nextafter(middle, 1000.0f)) == byte + 1);
  }
}

TEST_CASE("E4M3: named roundings and clamps") {
  CHECK(e4m3::encode(0.0009765625f) == 0x00);  // 2^-10, halfway to the smallest: even is zero
  CHECK(e4m3::encode(0.0009765626f) == 0x01);
  CHECK(e4m3::encode(0.0029296875f) == 0x02);  // 1.5 · 2^-9
  CHECK(e4m3::encode(0.0146484375f) == 0x08);  // between the largest subnormal and the smallest normal
  CHECK(e4m3::encode(1.0625f) == 0x38);
  CHECK(e4m3::encode(1.1875f) == 0x3A);
  CHECK(e4m3::encode(432.0f) == 0x7E);  // between 416 (0x7D) and 448 (0x7E)
  CHECK(e4m3::encode(431.9f) == 0x7D);
  CHECK(e4m3::encode(448.1f) == 0x7E);
  CHECK(e4m3::encode(464.0f) == 0x7E);  // would round to the NaN byte's place
  CHECK(e4m3::encode(1e30f) == 0x7E);
  CHECK(e4m3::encode(infinity) == 0x7E);
  CHECK(e4m3::encode(-infinity) == 0xFE);
  CHECK(e4m3::encode(-1000.0f) == 0xFE);
  CHECK(e4m3::encode(quiet_nan) == 0x7F);
  CHECK(e4m3::encode(-quiet_nan) == 0x7F);
  CHECK(e4m3::encode(0.0f) == 0x00);
  CHECK(e4m3::encode(-0.0f) == 0x80);
  CHECK(e4m3::encode(-1e-30f) == 0x80);
  CHECK(e4m3::encode(std::numeric_limits<float>::denorm_min()) == 0x00);
}
