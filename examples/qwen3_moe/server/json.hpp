// SPDX-License-Identifier: Apache-2.0
/// \file
/// Strict JSON in, valid JSON out.
#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace qwen3_moe {

namespace json = boost::json;

inline constexpr std::size_t json_max_depth = 64;  ///< arrays and objects inside each other

/// Parses one JSON text (RFC 8259) and nothing after it. Refused besides bad syntax: nesting past
/// json_max_depth, a key twice in an object, ill-formed UTF-8, lone surrogates, a byte order mark, numbers a
/// double cannot hold. Order of keys is kept. Throws api_error 400 whose text starts with `what`
/// ("the request body"); `param` names the field when the text came from one.
json::value parse_json(std::string_view text, std::string_view what,
                       std::optional<std::string> param = std::nullopt);

/// "a string", "an integer", …, for messages.
std::string_view kind_name(const json::value& value);

}  // namespace qwen3_moe
