// SPDX-License-Identifier: Apache-2.0
/// \file
/// The tools of a request, and how an argument written as text becomes JSON.
#pragma once

#include <boost/json/array.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace qwen3_moe {

/// JSON types that a parameter's schema allows, as bits.
enum argument_type : std::uint8_t {
  string_argument = 1,
  integer_argument = 2,
  number_argument = 4,
  boolean_argument = 8,
  object_argument = 16,
  array_argument = 32,
  null_argument = 64
};

/// The declared functions with their parameters' types. Reads `type` (one or a list), else `anyOf`, `oneOf`,
/// `allOf`, `enum`, `const`, `properties`, `items`; a schema that says nothing means string.
class tool_set {
 public:
  tool_set() = default;
  /// `tools` as in an OpenAI request: {"type": "function", "function": {"name", "parameters"}}, or the inner
  /// object alone. What has another form declares nothing.
  explicit tool_set(const boost::json::array& tools);

  bool empty() const noexcept { return functions_.empty(); }
  bool declares(std::string_view function) const;
  /// The types of a parameter; string for one that is not declared.
  std::uint8_t types_of(std::string_view function, std::string_view parameter) const;

 private:
  std::map<std::string, std::map<std::string, std::uint8_t, std::less<>>, std::less<>> functions_;
};

/// The JSON for an argument's text: the text itself, trimmed, where it reads as one of `types` (numbers keep
/// all their digits), else a JSON string of the text as it stands. null, booleans and numbers must be spelled
/// as JSON spells them and be finite; objects and arrays may nest 64 deep.
std::string argument_json(std::string_view text, std::uint8_t types);

/// Appends `text` as the inside of a JSON string, without quotes. `text` is UTF-8.
void append_json_escaped(std::string& out, std::string_view text);
std::string json_string(std::string_view text);

/// A complete JSON object as text: the name of a call and the text of its arguments ("{}" where there are
/// none), or nothing when it is not {"name": string, "arguments": object, or string that holds an object}.
struct json_call {
  std::string name, arguments;
};
std::optional<json_call> read_json_call(std::string_view object);

}  // namespace qwen3_moe
