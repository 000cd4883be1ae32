// SPDX-License-Identifier: Apache-2.0
/// \file
/// One answer generated in this process and waited for.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "answer_stream.hpp"
#include "answer_writer.hpp"
#include "engine/engine.hpp"

namespace qwen3_moe {

/// Runs `request` to its end and hands out each delta as it comes, on the calling thread. When `interrupted`
/// returns true the answer ends early; it is asked about ten times a second. Throws nibble::error when the
/// engine refuses or fails.
choice_text local_answer(engine& target, const tokenizer& tokens, generation_request request,
                         answer_options options, const std::function<void(const answer_delta&)>& show,
                         const std::function<bool()>& interrupted);

}  // namespace qwen3_moe
