// SPDX-License-Identifier: Apache-2.0
#include "chat_messages.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "schema.hpp"

namespace qwen3_moe::chat_messages {
namespace {

std::string_view text_of(const json::value& value) {
  const auto& text = value.get_string();
  return {text.data(), text.size()};
}

const json::value* present(const json::object& object, std::string_view name) {
  const auto* value = object.if_contains(json::string_view(name.data(), name.size()));
  return value && !value->is_null() ? value : nullptr;
}

std::string required_text(const json::object& object, const std::string& parent, std::string_view name) {
  const auto path = field_path(parent, name);
  const auto* value = present(object, name);
  if (!value) throw bad_field(path, "is missing");
  return schema_detail::checked_string(*value, path, std::string::npos);
}

// A string, or a list of text parts, which are joined as they stand.
std::string content_text(const json::value& value, const std::string& path) {
  if (value.is_string()) return std::string(text_of(value));
  if (!value.is_array())
    throw bad_field(path, "must be a string or an array of text parts, got " + std::string(kind_name(value)));
  std::string text;
  const auto& parts = checked_array(value, path, request_limits::content_parts);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto part_path = item_path(path, i);
    const auto& part = checked_object(parts[i], part_path);
    if (const auto type = required_text(part, part_path, "type"); type != "text")
      throw bad_field(field_path(part_path, "type"), "must be \"text\"; this model reads no other content");
    text += required_text(part, part_path, "text");
  }
  return text;
}

json::object tool_call(const json::value& value, const std::string& path) {
  const auto& call = checked_object(value, path);
  if (const auto* type = present(call, "type"))
    if (schema_detail::checked_string(*type, field_path(path, "type"), 64) != "function")
      throw bad_field(field_path(path, "type"), "must be \"function\"");
  const auto function_path = field_path(path, "function");
  const auto* function_value = present(call, "function");
  if (!function_value) throw bad_field(function_path, "is missing");
  const auto& function = checked_object(*function_value, function_path);
  json::object result;
  if (const auto* id = present(call, "id"))
    result["id"] = schema_detail::checked_string(*id, field_path(path, "id"), std::string::npos);
  result["type"] = "function";
  json::object plain;
  plain["name"] = required_text(function, function_path, "name");
  // Clients carry the arguments as JSON inside a string; templates walk them as an object.
  const auto arguments_path = field_path(function_path, "arguments");
  const auto* arguments = present(function, "arguments");
  if (!arguments || (arguments->is_string() && arguments->get_string().empty())) {
    plain["arguments"] = json::object();
  } else if (arguments->is_object()) {
    plain["arguments"] = *arguments;
  } else {
    const auto text = schema_detail::checked_string(*arguments, arguments_path, std::string::npos);
    auto parsed = parse_json(text, arguments_path, arguments_path);
    if (!parsed.is_object())
      throw bad_field(arguments_path, "must hold a JSON object, got " + std::string(kind_name(parsed)));
    plain["arguments"] = std::move(parsed);
  }
  result["function"] = std::move(plain);
  return result;
}

json::object message(const json::value& value, const std::string& path) {
  const auto& sent = checked_object(value, path);
  auto role = required_text(sent, path, "role");
  if (role == "developer") role = "system";
  constexpr std::array<std::string_view, 4> roles{"system", "user", "assistant", "tool"};
  if (std::find(roles.begin(), roles.end(), role) == roles.end())
    throw bad_field(field_path(path, "role"), "must be system, developer, user, assistant or tool");
  json::object result;
  result["role"] = role;
  const auto content_path = field_path(path, "content");
  if (const auto* content = present(sent, "content"))
    result["content"] = content_text(*content, content_path);
  else if (role == "assistant")
    result["content"] = "";
  else
    throw bad_field(content_path, "is missing");
  if (role == "assistant") {
    for (const auto name : {"reasoning_content", "reasoning"})
      if (const auto* reasoning = present(sent, name); reasoning && !result.contains("reasoning_content"))
        result["reasoning_content"] =
            schema_detail::checked_string(*reasoning, field_path(path, name), std::string::npos);
    if (const auto* calls = present(sent, "tool_calls")) {
      const auto calls_path = field_path(path, "tool_calls");
      const auto& list = checked_array(*calls, calls_path, request_limits::tool_calls);
      json::array plain;
      for (std::size_t i = 0; i < list.size(); ++i)
        plain.push_back(tool_call(list[i], item_path(calls_path, i)));
      if (!plain.empty()) result["tool_calls"] = std::move(plain);
    }
    if (present(sent, "function_call"))
      throw bad_field(field_path(path, "function_call"), "is the old form; send tool_calls");
  }
  for (const auto name : {"name", "tool_call_id"})
    if (const auto* text = present(sent, name))
      result[name] = schema_detail::checked_string(*text, field_path(path, name), std::string::npos);
  return result;
}

bool is_tool_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), fits);
}

}  // namespace

void read_messages(const json::value& value, const std::string& path, chat_request& out) {
  const auto& list = checked_array(value, path, request_limits::messages);
  if (list.empty()) throw bad_field(path, "must hold at least one message");
  for (std::size_t i = 0; i < list.size(); ++i) out.messages.push_back(message(list[i], item_path(path, i)));
}

void read_tools(const json::value& value, const std::string& path, chat_request& out) {
  const auto& list = checked_array(value, path, request_limits::tools);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto tool_path = item_path(path, i);
    const auto& tool = checked_object(list[i], tool_path);
    if (required_text(tool, tool_path, "type") != "function")
      throw bad_field(field_path(tool_path, "type"), "must be \"function\"");
    const auto function_path = field_path(tool_path, "function");
    const auto* function_value = present(tool, "function");
    if (!function_value) throw bad_field(function_path, "is missing");
    const auto& function = checked_object(*function_value, function_path);
    if (!is_tool_name(required_text(function, function_path, "name")))
      throw bad_field(field_path(function_path, "name"), "must be 1 to 64 letters, digits, '_', '-' or '.'");
    if (const auto* description = present(function, "description"))
      schema_detail::checked_string(*description, field_path(function_path, "description"),
                                    std::string::npos);
    if (const auto* parameters = present(function, "parameters"))
      checked_object(*parameters, field_path(function_path, "parameters"));
    out.tools.push_back(list[i]);
  }
}

void read_tool_choice(const json::value& value, const std::string& path, chat_request& out) {
  if (value.is_string() && value.get_string() == "auto") return;
  if (value.is_string() && value.get_string() == "none") {
    out.use_tools = false;
    return;
  }
  throw bad_field(path, "must be \"auto\" or \"none\"; this server cannot force a tool call");
}

void read_template_arguments(const json::value& value, const std::string& path, chat_request& out) {
  const auto& object = checked_object(value, path);
  if (object.size() > request_limits::template_arguments)
    throw bad_field(path, "has " + std::to_string(object.size()) + " entries, at most " +
                              std::to_string(request_limits::template_arguments) + " are allowed");
  constexpr std::array<std::string_view, 8> internal{
      "messages",        "tools",        "documents", "add_generation_prompt",
      "raise_exception", "strftime_now", "namespace", "loop"};
  for (const auto& item : object) {
    const std::string name(item.key());
    const auto fits = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    };
    if (name.empty() || name.size() > 64 || !std::all_of(name.begin(), name.end(), fits))
      throw bad_field(path, "has a name that is not 1 to 64 letters, digits or '_'");
    if (std::find(internal.begin(), internal.end(), name) != internal.end())
      throw bad_field(field_path(path, name), "is set by the server itself");
    if (item.value().is_structured())
      throw bad_field(field_path(path, name), "must be a string, a number, a boolean or null");
    if (name == "enable_thinking" && !item.value().is_bool())
      throw bad_field(field_path(path, name), "must be true or false");
    out.template_arguments[item.key()] = item.value();
  }
}

}  // namespace qwen3_moe::chat_messages
