// SPDX-License-Identifier: Apache-2.0
/// \file
/// The conversation and tools of a chat request, made plain for the template.
#pragma once

#include <string>

#include "chat_request.hpp"

namespace qwen3_moe::chat_messages {

/// Readers for the schema table. Throw api_error 400 that names the field.
void read_messages(const json::value& value, const std::string& path, chat_request& out);
void read_tools(const json::value& value, const std::string& path, chat_request& out);
void read_tool_choice(const json::value& value, const std::string& path, chat_request& out);
void read_template_arguments(const json::value& value, const std::string& path, chat_request& out);

}  // namespace qwen3_moe::chat_messages
