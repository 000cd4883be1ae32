// SPDX-License-Identifier: Apache-2.0
/// \file
/// What preloading a table did.
#pragma once

#include <algorithm>
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
  int local_bytes = 0;  ///< of a thread: registers that did not fit
};

struct kernel_report {
  std::size_t geometries = 0;  ///< distinct weight geometries
  std::size_t families = 0;
  int launched_rows = 0;              ///< representative launches ran at 1 and at this many rows; 0: none did
  std::vector<kernel_entry> kernels;  ///< each distinct kernel once
  double ms = 0;
  std::uint64_t bytes = 0;  ///< free memory before − after

  /// Kernels that use local memory.
  [[nodiscard]] std::size_t spilling() const {
    return static_cast<std::size_t>(
        std::count_if(kernels.begin(), kernels.end(), [](const auto& k) { return k.local_bytes > 0; }));
  }
  /// The most local memory of a thread of any kernel.
  [[nodiscard]] int local_bytes() const {
    int most = 0;
    for (const auto& k : kernels) most = std::max(most, k.local_bytes);
    return most;
  }
  /// "6 distinct geometries, 48 kernels resident in 3 ms, 2.0 MiB", and on architectures where kernels spill
  /// "; 1 kernel spills up to 48 bytes a thread".
  [[nodiscard]] std::string line() const {
    char text[224];
    std::snprintf(text, sizeof text, "%zu distinct geometr%s, %zu kernel%s resident in %.*f ms, %s",
                  geometries, geometries == 1 ? "y" : "ies", kernels.size(), kernels.size() == 1 ? "" : "s",
                  ms < 10 ? 1 : 0, ms, bytes_text(bytes).c_str());
    std::string line = text;
    if (const std::size_t count = spilling(); count > 0) {
      std::snprintf(text, sizeof text, "; %zu kernel%s up to %d bytes a thread", count,
                    count == 1 ? " spills" : "s spill", local_bytes());
      line += text;
    }
    return line;
  }
  /// A table, one line a kernel.
  [[nodiscard]] std::string table() const {
    std::string text = "registers  threads  shared bytes  local bytes  kernel\n";
    char row[200];
    for (const auto& k : kernels) {
      std::snprintf(row, sizeof row, "%9d  %7d  %12d  %11d  %s\n", k.registers, k.threads,
                    k.static_shared_bytes + k.dynamic_shared_bytes, k.local_bytes, k.name);
      text += row;
    }
    return text;
  }
};

}  // namespace nibble
