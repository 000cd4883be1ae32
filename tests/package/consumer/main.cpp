// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nibble/host/linear.hpp>
#include <nibble/host/thread_pool.hpp>
#include <nibble/nvfp4/quantize.hpp>
#include <nibble/op/load.hpp>
#include <nibble/op/type_visitors.hpp>
#include <vector>

std::size_t geometries_of_second();

int main() {
  const auto q = nibble::nvfp4::quantize(std::vector<float>(16, 3.0f), 1, 16);
  nibble::host::thread_pool pool(1);
  const std::vector<float> x(16, 1.0f);
  float y = 0;
  nibble::host::linear(pool,
                       nibble::host::nvfp4_view{q.codes.data(), q.block_scales.data(), q.global_scale, 1, 16},
                       x.data(), 1, &y);
  std::printf("%zu geometry, y = %.0f\n", geometries_of_second(), y);
}
