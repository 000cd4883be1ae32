// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nibble/nvfp4/e2m1.hpp>

#include "support/catch.hpp"

namespace e2m1 = nibble::e2m1;

namespace {

constexpr float table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct rounding {
  float value;
  int code;
};

// Every midpoint and its two neighbours, and the clamps.
constexpr rounding roundings[] = {
    {0.0f, 0},        {0.1f, 0},  {0.25f, 0},       {0.25000003f, 1}, {0.24999999f, 0}, {0.5f, 1},
    {0.74999994f, 1}, {0.75f, 2}, {0.75000006f, 2}, {1.0f, 2},        {1.2499999f, 2},  {1.25f, 2},
    {1.2500001f, 3},  {1.5f, 3},  {1.7499999f, 3},  {1.75f, 4},       {1.7500001f, 4},  {2.0f, 4},
    {2.4999998f, 4},  {2.5f, 4},  {2.5000002f, 5},  {3.0f, 5},        {3.4999998f, 5},  {3.5f, 6},
    {3.5000002f, 6},  {4.0f, 6},  {4.9999995f, 6},  {5.0f, 6},        {5.0000005f, 7},  {6.0f, 7},
    {7.0f, 7},        {1e30f, 7}, {0x1p-149f, 0},
};

static_assert(e2m1::decode(5) == 3.0f && e2m1::encode(5.0f) == 6 && e2m1::pack(1, 2) == 0x21);

}  // namespace

TEST_CASE("E2M1: all codes decode to the written values") {
  for (unsigned code = 0; code < 16; ++code) {
    INFO("code " << code);
    CHECK(std::bit_cast<std::uint32_t>(e2m1::decode(code)) == std::bit_cast<std::uint32_t>(table[code]));
    CHECK(e2m1::encode(table[code]) == code);
  }
}

TEST_CASE("E2M1: ties go to the even code, beyond 6 saturates, the sign is kept") {
  for (const rounding& r : roundings) {
    INFO("value " << r.value);
    CHECK(e2m1::encode(r.value) == r.code);
    CHECK(e2m1::encode(-r.value) == (r.code | 8));
  }
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(e2m1::encode(infinity) == 7);
  CHECK(e2m1::encode(-infinity) == 15);
  CHECK(e2m1::encode(std::numeric_limits<float>::quiet_NaN()) == 7);
}

TEST_CASE("E2M1: all 256 pairs, the even element in the low nibble") {
  // Row: odd element's code, column: even element's code.
  for (unsigned odd = 0; odd < 16; ++odd)
    for (unsigned even = 0; even < 16; ++even) {
      const auto byte = static_cast<std::uint8_t>(16 * odd + even);
      INFO("byte " << unsigned{byte});
      CHECK(e2m1::pack(even, odd) == byte);
      CHECK(e2m1::unpack_even(byte) == even);
      CHECK(e2m1::unpack_odd(byte) == odd);
      CHECK(e2m1::decode(e2m1::unpack_even(byte)) == table[even]);
      CHECK(e2m1::decode(e2m1::unpack_odd(byte)) == table[odd]);
    }
  CHECK(e2m1::decode(e2m1::unpack_even(0x72)) == 1.0f);
  CHECK(e2m1::decode(e2m1::unpack_odd(0x72)) == 6.0f);
  CHECK(e2m1::decode(e2m1::unpack_even(0x9F)) == -6.0f);
  CHECK(e2m1::decode(e2m1::unpack_odd(0x9F)) == -0.5f);
}
