// SPDX-License-Identifier: Apache-2.0
/// \file
/// `model.safetensors.index.json`: which shard holds which tensor.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "nibble/core/error.hpp"
#include "nibble/io/json_scan.hpp"

namespace nibble::io {

struct shard_index {
  std::map<std::string, std::string, std::less<>> shard_of;  ///< tensor name → file name
  std::optional<std::uint64_t> total_bytes;                  ///< metadata.total_size, where given
};

/// Parses the index. A shard must be a plain file name ending in .safetensors: no folder, no "..", so that
/// an index cannot reach outside its directory. A tensor named twice is refused. `what` names it in errors.
[[nodiscard]] inline shard_index parse_shard_index(std::string_view text, std::string_view what) {
  const auto fail = [&](const std::string& why) { throw format_error(std::string(what) + ": " + why); };
  shard_index index;
  json_reader json(text, what);
  std::string key, name, shard;
  bool map_seen = false;
  json.enter_object();
  while (json.next_key(key)) {
    if (key == "weight_map") {
      if (map_seen) fail("weight_map twice");
      map_seen = true;
      json.enter_object();
      while (json.next_key(name)) {
        json.read_string(shard);
        if (shard.empty() || shard.find('/') != std::string::npos || shard.find('\\') != std::string::npos ||
            shard.find('\0') != std::string::npos || shard.front() == '.' || !shard.ends_with(".safetensors"))
          fail("tensor " + name + " is said to be in '" + shard +
               "'; a shard must be a file name ending in .safetensors, without a folder");
        if (!index.shard_of.emplace(name, shard).second) fail("duplicate tensor name " + name);
      }
    } else if (key == "metadata" && json.peek() == '{') {
      json.enter_object();
      while (json.next_key(name)) {
        const char c = json.peek();
        if (name == "total_size" && c >= '0' && c <= '9')
          index.total_bytes = json.read_uint();
        else
          json.skip_value();
      }
    } else {
      json.skip_value();
    }
  }
  json.finish();
  if (!map_seen) fail("has no weight_map");
  return index;
}

}  // namespace nibble::io
