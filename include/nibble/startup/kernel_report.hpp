// SPDX-License-Identifier: Apache-2.0
/// \file
/// What preloading a table did.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "nibble/plan/byte_size.hpp"

namespace nibble {

/// One kernel as it is resident.
struct kernel_entry {
  const char* name = "";
  int registers = 0;
  int threads = 0;
  int static_shared_bytes = 0;
  int dynamic_shared_bytes = 0;
};

struct kernel_report {
  std::size_t geometries = 0;  ///< distinct weight geometries
  std::size_t families = 0;
  int launched_rows = 0;              ///< representative launches ran at 1 and at this many rows; 0: none did
  std::vector<kernel_entry> kernels;  ///< each distinct kernel once
  double ms = 0;
  std::uint64_t bytes = 0;  ///< free memory before − after

  /// "6 distinct geometries, 48 kernels resident in 3 ms, 2.0 MiB".
  [[nodiscard]] std::string line() const {
    char text[160];
    std::snprintf(text, sizeof text, "%zu distinct geometr%s, %zu kernel%s resident in %.*f ms, %s",
                  geometries, geometries == 1 ? "y" : "ies", kernels.size(), kernels.size() == 1 ? "" : "s",
                  ms < 10 ? 1 : 0, ms, bytes_text(bytes).c_str());
    return text;
  }
  /// A table, one line a kernel.
  [[nodiscard]] std::string table() const {
    std::string text = "registers  threads  shared bytes  kernel\n";
    char row[200];
    for (const auto& k : kernels) {
      std::snprintf(row, sizeof row, "%9d  %7d  %12d  %s\n", k.registers, k.threads,
                    k.static_shared_bytes + k.dynamic_shared_bytes, k.name);
      text += row;
    }
    return text;
  }
};

}  // namespace nibble
