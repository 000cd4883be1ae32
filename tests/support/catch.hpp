// SPDX-License-Identifier: Apache-2.0
/// \file
/// Catch2, version 2 (Debian bookworm) or 3 (Ubuntu 24.04).
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <cstdio>
#include <string>

namespace nibble::test {

/// Reports the running case as skipped; return after the call. CTest recognises the line, not the exit code:
/// Catch2 2 exits with the number of failures, so any code could be one.
inline void skip_case(const std::string& why) {
  std::printf("nibble: test skipped: %s\n", why.c_str());
  std::fflush(stdout);
}

}  // namespace nibble::test
