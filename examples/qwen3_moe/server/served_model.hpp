// SPDX-License-Identifier: Apache-2.0
/// \file
/// All that the routes need to know of a model that is ready.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chat_request.hpp"
#include "engine/engine.hpp"
#include "text_model.hpp"

namespace qwen3_moe {

struct served_model {
  std::vector<std::string> names;  ///< the first is the one that answers carry
  const text_model* text = nullptr;
  qwen3_moe::engine* engine = nullptr;
  sampling_defaults sampling;
  std::vector<std::int32_t> stop_tokens;  ///< ids that end an answer
  std::int64_t created = 0;               ///< seconds since 1970

  const std::string& name() const { return names.front(); }
  bool answers_to(std::string_view wanted) const {
    for (const auto& name : names)
      if (name == wanted) return true;
    return false;
  }
};

}  // namespace qwen3_moe
