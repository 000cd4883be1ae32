// SPDX-License-Identifier: Apache-2.0
// Packing on the device gives the bytes that packing on the host gives, over dirty memory.
#include "device_test.cuh"
#include "nibble/nvfp4/repack.cuh"
#include "random_matrix.hpp"

using namespace nibble;
using device_test::buffer;

namespace {

void check_repack(const resident_layout& layout, std::uint64_t seed) {
  const device_test::random_matrix w(layout, seed);
  const buffer<std::uint8_t> weight(w.codes),
      scales(w.block_scales.empty() ? std::vector<std::uint8_t>(1) : w.block_scales);
  const buffer<std::uint8_t> tiles(layout.bytes());
  NIBBLE_GOOD(launch_repack(layout, weight.data(), scales.data(), tiles.data(),
                            launch_options{device_test::stream()}));
  device_test::check(tiles.read() == w.tiles(), layout.shape.name().c_str(), __FILE__, __LINE__);
}

const bool registered = device_test::add("repack", "C008: equals packing on the host, over dirty memory", [] {
  for (const weight_format format : {weight_format::nvfp4, weight_format::fp8})
    for (const int n : {1, 7, 16, 33, 1000})
      for (const int k : {16, 48, 128, 464, 2048}) {
        check_repack({matrix(n, k, format)}, static_cast<std::uint64_t>(n + k));
        check_repack({fused(k, format, n, n), row_order::gate_up}, static_cast<std::uint64_t>(n + k + 1));
        check_repack({fused(k, format, n, 3, 20)}, static_cast<std::uint64_t>(n + k + 2));
      }
});
const bool refused = device_test::add("repack", "refuses what it cannot pack", [] {
  const buffer<std::uint8_t> some(4096);
  const launch_options options{device_test::stream()};
  NIBBLE_CHECK(
      launch_repack({matrix(4, 24, weight_format::nvfp4)}, some.data(), some.data(), some.data(), options)
          .code == status_code::invalid_argument);
  NIBBLE_CHECK(
      launch_repack({matrix(4, 16, weight_format::bf16)}, some.data(), some.data(), some.data(), options)
          .code == status_code::invalid_argument);
  NIBBLE_CHECK(
      launch_repack({matrix(4, 16, weight_format::nvfp4)}, some.data(), nullptr, some.data(), options).code ==
      status_code::invalid_argument);
});
}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
