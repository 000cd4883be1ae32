// SPDX-License-Identifier: Apache-2.0
#include "model/device_probe.hpp"

#include "support/catch.hpp"

using namespace qwen3_moe;

namespace {
bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
}  // namespace

TEST_CASE("C020: a device that the build has no code for is told how to get some") {
  CHECK(missing_architecture("RTX 4070", 89) ==
        "RTX 4070 is sm_89, which this build has no code for; build with -DCMAKE_CUDA_ARCHITECTURES=89");
  CHECK(contains(missing_architecture("RTX 5090", 120), "-DCMAKE_CUDA_ARCHITECTURES=120a"));
  CHECK(contains(missing_architecture("H200", 90), "-DCMAKE_CUDA_ARCHITECTURES=90a"));
  CHECK(contains(missing_architecture("Orin", 87), "-DCMAKE_CUDA_ARCHITECTURES=86"));
  CHECK(contains(missing_architecture("Spark", 121), "Spark is sm_121, which this build has no code for"));
  CHECK_FALSE(contains(missing_architecture("RTX 2080", 75), "CMAKE_CUDA_ARCHITECTURES"));
  CHECK(contains(missing_architecture("RTX 2080", 75), "nibble has kernels for sm_80, 86, 87, 89, 90"));
}
