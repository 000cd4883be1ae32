// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the kernel tests share: fresh random inputs with a printed seed, every instruction set of the
/// machine, poisoned outputs, and comparisons.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <nibble/core/bf16.hpp>
#include <nibble/host/linear.hpp>
#include <nibble/host/simd.hpp>
#include <nibble/host/thread_pool.hpp>
#include <nibble/ref/matrix.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace kernel_test {

using floats = std::vector<float>;
using doubles = std::vector<double>;

inline constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

/// NIBBLE_TEST_SEED repeats a run; otherwise every run has inputs of its own.
inline std::uint64_t test_seed() {
  if (const char* text = std::getenv("NIBBLE_TEST_SEED")) return std::strtoull(text, nullptr, 10);
  return std::random_device{}();
}

/// A generator, and its seed in the message of every failure: INFO(random.seed_text()).
class random_source {
 public:
  random_source() : seed_(test_seed()), engine_(seed_) {}
  std::string seed_text() const { return "NIBBLE_TEST_SEED=" + std::to_string(seed_); }
  std::mt19937_64& engine() { return engine_; }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  float normal(float scale = 1) { return scale * std::normal_distribution<float>()(engine_); }
  floats normals(std::size_t n, float scale = 1) {
    floats out(n);
    for (float& v : out) v = normal(scale);
    return out;
  }
  std::vector<std::uint8_t> bytes(std::size_t n) {
    std::vector<std::uint8_t> out(n);
    for (auto& b : out) b = static_cast<std::uint8_t>(integer(0, 255));
    return out;
  }

 private:
  std::uint64_t seed_;
  std::mt19937_64 engine_;
};

/// Runs body(name) on every instruction set that this machine has, and restores the best one, also when a
/// REQUIRE throws.
template <class Body>
void on_every_target(const Body& body) {
  struct restore {
    ~restore() { nibble::host::use_simd_target(""); }
  } guard;
  for (const std::string& name : nibble::host::simd_targets()) {
    nibble::host::use_simd_target(name);
    INFO("instruction set " << name);
    body(name);
  }
}

inline bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }
inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

/// The largest |got - expected| / (1 + |expected|), infinity where either is NaN or the sizes differ.
inline double largest_error(std::span<const float> got, std::span<const double> expected) {
  if (got.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(got[i] - expected[i]) / (1 + std::abs(expected[i]));
    if (!(error <= worst)) worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }
  return worst;
}

/// The largest |got - expected| of a row over the largest |expected| of that row: for results of several
/// products in a row, whose small elements are what is left of large ones.
inline double largest_row_error(std::span<const float> got, std::span<const double> expected, int columns) {
  if (got.size() != expected.size()) return std::numeric_limits<double>::infinity();
  const auto width = static_cast<std::size_t>(columns);
  double worst = 0;
  for (std::size_t row = 0; row < got.size(); row += width) {
    double error = 0, size = 1e-30;
    for (std::size_t i = row; i < row + width; ++i) {
      const double difference = std::abs(got[i] - expected[i]);
      error = difference <= error
                  ? error
                  : (std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference);
      size = std::max(size, std::abs(expected[i]));
    }
    worst = std::max(worst, error / size);
  }
  return worst;
}

/// A random weight with the memory behind it, exactly as large as the view needs, and its fp64 values.
struct random_weight {
  std::vector<std::uint8_t> data, scales;
  nibble::host::weight_view view;
  nibble::ref::matrix exact;
};

/// `scale` is the size of the values. NVFP4 blocks take every scale byte but NaN, negative and subnormal too.
inline random_weight make_weight(random_source& random, nibble::weight_format format, int n, int k,
                                 float scale) {
  using nibble::weight_format;
  random_weight w;
  const std::size_t values = static_cast<std::size_t>(n) * static_cast<std::size_t>(k);
  if (format == weight_format::nvfp4) {
    w.data = random.bytes(values / 2);
    w.scales = random.bytes(values / 16);
    for (auto& b : w.scales)
      if ((b & 0x7F) == 0x7F) b = 0x30;
    const float global = scale / 64;
    w.view = nibble::host::nvfp4_view{w.data.data(), w.scales.data(), global, n, k};
    w.exact = nibble::ref::decode_nvfp4(w.data, w.scales, global, n, k);
  } else if (format == weight_format::fp8) {
    w.data = random.bytes(values);
    for (auto& b : w.data)
      if ((b & 0x7F) == 0x7F) b = 0x01;
    w.view = nibble::host::fp8_view{w.data.data(), scale / 64, n, k};
    w.exact = nibble::ref::decode_fp8(w.data, scale / 64, n, k);
  } else {
    std::vector<std::uint16_t> bits(values);
    for (auto& b : bits) b = nibble::bf16::encode(random.normal(scale));
    w.data.resize(values * 2);
    if (values > 0) std::memcpy(w.data.data(), bits.data(), values * 2);
    w.view.format = format;
    w.view.data = w.data.data();
    w.view.n = n;
    w.view.k = k;
    w.exact = nibble::ref::decode_bf16(bits, n, k);
  }
  return w;
}

inline const char* format_name(nibble::weight_format format) {
  using nibble::weight_format;
  return format == weight_format::nvfp4 ? "nvfp4" : format == weight_format::fp8 ? "fp8" : "bf16";
}

}  // namespace kernel_test
