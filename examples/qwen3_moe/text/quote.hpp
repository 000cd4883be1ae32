// SPDX-License-Identifier: Apache-2.0
/// \file
/// Puts a piece of outside text into an error message.
#pragma once

#include <string>
#include <string_view>

namespace qwen3_moe {

/// `text` in double quotes, control characters and ill-formed bytes escaped, at most about 60 bytes of it.
std::string quote_text(std::string_view text);

}  // namespace qwen3_moe
