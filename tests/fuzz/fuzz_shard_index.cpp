// SPDX-License-Identifier: Apache-2.0
// Text → the shard index parser; what it accepts names plain files.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "nibble/io/shard_index.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto index = nibble::io::parse_shard_index({reinterpret_cast<const char*>(data), size}, "index");
    for (const auto& [tensor, shard] : index.shard_of)
      if (shard.find('/') != std::string::npos || shard.starts_with('.')) std::abort();
  } catch (const nibble::format_error&) {
  }
  return 0;
}
