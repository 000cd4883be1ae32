// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nibble/nvfp4/quantize.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace nvfp4 = nibble::nvfp4;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

std::vector<float> floats_of(const std::string& line) {
  std::istringstream stream(line);
  std::vector<float> out;
  std::uint32_t bits;
  while (stream >> std::hex >> bits) out.push_back(std::bit_cast<float>(bits));
  return out;
}

std::vector<std::uint8_t> bytes_of(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::uint8_t> out;
  unsigned value;
  while (stream >> std::hex >> value) out.push_back(static_cast<std::uint8_t>(value));
  return out;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> out;
  for (const float v : values) out.push_back(std::bit_cast<std::uint32_t>(v));
  return out;
}

/// One row of 16, and the message of what quantize throws for it ("" for none).
std::string refusal(std::vector<float> row) {
  try {
    (void)nvfp4::quantize(row, 1, 16);
  } catch (const nibble::error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("NVFP4: quantisation equals the golden file bit for bit") {
  std::ifstream file(NIBBLE_SOURCE_DIR "/tests/data/nvfp4/golden.txt");
  REQUIRE(file);
  int cases = 0;
  for (std::string head; std::getline(file, head);) {
    std::istringstream words(head);
    std::string word, name, global;
    int n = 0, k = 0;
    words >> word >> name >> n >> k >> global;
    REQUIRE(word == "case");
    std::string weights, codes, scales, values;
    REQUIRE(std::getline(file, weights));
    REQUIRE(std::getline(file, codes));
    REQUIRE(std::getline(file, scales));
    REQUIRE(std::getline(file, values));
    INFO(name);
    const nvfp4::quantized_matrix q = nvfp4::quantize(floats_of(weights), n, k);
    CHECK(std::bit_cast<std::uint32_t>(q.global_scale) == bits_of(floats_of(global)).at(0));
    CHECK(q.codes == bytes_of(codes));
    CHECK(q.block_scales == bytes_of(scales));
    CHECK(bits_of(nvfp4::dequantize(q)) == bits_of(floats_of(values)));
    ++cases;
  }
  CHECK(cases == 10);
}

TEST_CASE("C014: NVFP4: magnitudes decide the scales, not the largest signed value") {
  std::vector<float> row(16, -8.0f);
  row[15] = 1.0f;
  const nvfp4::quantized_matrix q = nvfp4::quantize(row, 1, 16);
  CHECK(q.global_scale == 8.0f / 2688.0f);
  CHECK(q.block_scales[0] == 0x7E);
  const std::vector<float> back = nvfp4::dequantize(q);
  for (int i = 0; i < 15; ++i) CHECK(back[static_cast<std::size_t>(i)] == Approx(-8.0f).epsilon(1e-6));
  CHECK(back[15] == Approx(8.0f / 6).epsilon(1e-6));  // 0.75 of a step is a tie: to 1, the even code
}

TEST_CASE("C014: NVFP4: zeros stay zeros") {
  const nvfp4::quantized_matrix q = nvfp4::quantize(std::vector<float>(32, 0.0f), 2, 16);
  CHECK(q.global_scale == 1e-12f);
  CHECK(q.block_scales == std::vector<std::uint8_t>{0x01, 0x01});
  for (const float v : nvfp4::dequantize(q)) CHECK(v == 0.0f);
}

TEST_CASE(
    "C015: NVFP4: block scales clamp to [2^-9, 448] and elements are rounded against the stored scale") {
  // Global scale 1: a block's scale is a sixth of its largest value.
  CHECK(nvfp4::block_scale_of(6 * 0.0009f, 1.0f) == 0x01);
  CHECK(nvfp4::block_scale_of(6 * 0.00195f, 1.0f) == 0x01);
  CHECK(nvfp4::block_scale_of(1e-30f, 1.0f) == 0x01);
  CHECK(nvfp4::block_scale_of(0.0f, 1.0f) == 0x01);
  CHECK(nvfp4::block_scale_of(1e30f, 1.0f) == 0x7E);
  CHECK(nvfp4::block_scale_of(6 * 448.0f, 1.0f) == 0x7E);
  CHECK(nvfp4::block_scale_of(6.0f, 1.0f) == 0x38);
  CHECK(nvfp4::block_scale_of(6 * 1.0625f, 1.0f) == 0x38);  // a tie between 1 and 1.125
  // 6.375 / 6 = 1.0625 is stored as 1: 2.52 is 2.37 steps before rounding the scale, 2.52 steps after.
  CHECK(nvfp4::code_of(2.52f, nvfp4::block_scale_of(6.375f, 1.0f), 1.0f) == 5);
  CHECK(nibble::e2m1::encode(2.52f / 1.0625f) == 4);
  // A block far below the smallest scale becomes zeros, with their signs.
  CHECK(nvfp4::code_of(1e-30f, 0x01, 1.0f) == 0);
  CHECK(nvfp4::code_of(-1e-30f, 0x01, 1.0f) == 8);
}

TEST_CASE("C015: NVFP4: what cannot be quantised is refused with its place") {
  std::vector<float> row(16, 1.0f);
  CHECK(refusal(row).empty());
  row[5] = infinity;
  CHECK(refusal(row).find("row 0, column 5") != std::string::npos);
  row[5] = std::numeric_limits<float>::quiet_NaN();
  CHECK(refusal(row).find("not finite") != std::string::npos);
  CHECK_THROWS_AS(nvfp4::quantize(std::vector<float>(24), 1, 24), nibble::error);
  CHECK_THROWS_AS(nvfp4::quantize(std::vector<float>(15), 1, 16), nibble::error);
  CHECK_THROWS_AS(nvfp4::quantize(std::vector<float>(16), -1, 16), nibble::error);
  CHECK_THROWS_AS(nvfp4::dequantize(std::vector<std::uint8_t>(8), std::vector<std::uint8_t>(2), 1, 1, 16),
                  nibble::error);
  CHECK(nvfp4::quantize(std::vector<float>{}, 0, 16).codes.empty());
}

TEST_CASE("NVFP4: all 256 code pairs under all 256 scales are the exact product") {
  constexpr double code_values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  for (int scale = 0; scale < 256; ++scale) {
    if ((scale & 0x7F) == 0x7F) continue;
    // (-1)^s (8 + m) 2^(e-10), or m 2^-9
    const int e = (scale >> 3) & 15, m = scale & 7;
    const double factor = (scale & 0x80 ? -1 : 1) * (e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10));
    for (int byte = 0; byte < 256; ++byte) {
      const std::vector<std::uint8_t> codes(8, static_cast<std::uint8_t>(byte)),
          scales(1, static_cast<std::uint8_t>(scale));
      const std::vector<float> values = nvfp4::dequantize(codes, scales, 1.0f, 1, 16);
      const bool right = values[0] == code_values[byte & 15] * factor &&
                         values[1] == code_values[byte >> 4] * factor && values[14] == values[0] &&
                         values[15] == values[1];
      if (!right) {
        INFO("scale " << scale << ", byte " << byte);
        CHECK(right);
      }
    }
  }
  SUCCEED("254 scales by 256 bytes compared");
}
