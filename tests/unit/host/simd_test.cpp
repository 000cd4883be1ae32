// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nibble/core/error.hpp>

#include "kernel_test.hpp"

TEST_CASE("simd: targets can be chosen, wrong names are refused with the right ones") {
  const std::vector<std::string> names = nibble::host::simd_targets();
  REQUIRE_FALSE(names.empty());
  const std::string best = nibble::host::simd_target();
  CHECK(best == names.front());
  kernel_test::on_every_target([](const std::string& name) { CHECK(nibble::host::simd_target() == name); });
  CHECK(nibble::host::simd_target() == best);
  try {
    nibble::host::use_simd_target("MMX");
    FAIL("no exception");
  } catch (const nibble::error& e) {
    CHECK(std::string(e.what()).find("MMX") != std::string::npos);
    CHECK(std::string(e.what()).find(best) != std::string::npos);
  }
}
