// SPDX-License-Identifier: Apache-2.0
#include "tool_arguments.hpp"

#include <boost/json.hpp>
#include <charconv>

namespace qwen3_moe {

namespace json = boost::json;

namespace {

constexpr std::string_view white_space = " \t\r\n";
constexpr std::size_t deepest_json = 64;

std::string_view trimmed(std::string_view s) {
  const std::size_t begin = s.find_first_not_of(white_space);
  if (begin == s.npos) return {};
  return s.substr(begin, s.find_last_not_of(white_space) - begin + 1);
}

std::optional<json::value> parsed(std::string_view text) {
  json::parse_options options;
  options.max_depth = deepest_json;
  json::error_code ec;
  json::value v = json::parse(text, ec, {}, options);
  if (ec) return std::nullopt;
  return v;
}

std::uint8_t type_bit(std::string_view name) {
  if (name == "string") return string_argument;
  if (name == "integer") return integer_argument;
  if (name == "number") return number_argument;
  if (name == "boolean") return boolean_argument;
  if (name == "object") return object_argument;
  if (name == "array") return array_argument;
  if (name == "null") return null_argument;
  return 0;
}

std::uint8_t type_of(const json::value& v) {
  switch (v.kind()) {
    case json::kind::null:
      return null_argument;
    case json::kind::bool_:
      return boolean_argument;
    case json::kind::int64:
    case json::kind::uint64:
      return integer_argument;
    case json::kind::double_:
      return number_argument;
    case json::kind::string:
      return string_argument;
    case json::kind::array:
      return array_argument;
    case json::kind::object:
      break;
  }
  return object_argument;
}

// 0 when the schema says nothing. `left` bounds the recursion into anyOf.
std::uint8_t types_in(const json::value& schema, int left) {
  if (!schema.is_object() || left == 0) return 0;
  const json::object& o = schema.get_object();
  std::uint8_t types = 0;
  if (const json::value* t = o.if_contains("type")) {
    if (t->is_string()) types |= type_bit(t->get_string());
    if (t->is_array())
      for (const json::value& x : t->get_array())
        if (x.is_string()) types |= type_bit(x.get_string());
  }
  if (types) return types;
  for (const std::string_view key : {"anyOf", "oneOf", "allOf"})
    if (const json::value* list = o.if_contains(key); list && list->is_array())
      for (const json::value& x : list->get_array()) types |= types_in(x, left - 1);
  if (types) return types;
  if (const json::value* list = o.if_contains("enum"); list && list->is_array())
    for (const json::value& x : list->get_array()) types |= type_of(x);
  if (const json::value* x = o.if_contains("const")) types |= type_of(*x);
  if (types) return types;
  if (o.contains("properties")) return object_argument;
  if (o.contains("items")) return array_argument;
  if (o.contains("$ref")) return object_argument | array_argument | string_argument;
  return 0;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// JSON's grammar of numbers, finite as a double.
bool is_json_number(std::string_view s) {
  std::size_t at = !s.empty() && s[0] == '-' ? 1 : 0;
  const auto digits = [&] {
    const std::size_t from = at;
    while (at < s.size() && is_digit(s[at])) ++at;
    return at > from;
  };
  if (at < s.size() && s[at] == '0')
    ++at;
  else if (!digits())
    return false;
  if (at < s.size() && s[at] == '.') {
    ++at;
    if (!digits()) return false;
  }
  if (at < s.size() && (s[at] == 'e' || s[at] == 'E')) {
    ++at;
    if (at < s.size() && (s[at] == '+' || s[at] == '-')) ++at;
    if (!digits()) return false;
  }
  double d = 0;
  return at == s.size() && std::from_chars(s.data(), s.data() + s.size(), d).ec == std::errc();
}

// Zero or more digits of a whole number, perhaps spelled 7.0.
bool is_json_integer(std::string_view s) {
  const std::size_t dot = s.find('.');
  if (dot == s.npos) return s.find_first_of("eE") == s.npos;
  return s.find_first_not_of('0', dot + 1) == s.npos;
}

}  // namespace

tool_set::tool_set(const json::array& tools) {
  for (const json::value& tool : tools) {
    if (!tool.is_object()) continue;
    const json::object* f = &tool.get_object();
    if (const json::value* inner = f->if_contains("function"); inner && inner->is_object())
      f = &inner->get_object();
    const json::value* name = f->if_contains("name");
    if (!name || !name->is_string()) continue;
    auto& parameters = functions_[std::string(name->get_string())];
    const json::value* schema = f->if_contains("parameters");
    if (!schema || !schema->is_object()) continue;
    const json::value* properties = schema->get_object().if_contains("properties");
    if (!properties || !properties->is_object()) continue;
    for (const auto& [key, v] : properties->get_object()) {
      const std::uint8_t types = types_in(v, 8);
      parameters.emplace(key, types ? types : std::uint8_t{string_argument});
    }
  }
}

bool tool_set::declares(std::string_view function) const {
  return functions_.find(function) != functions_.end();
}

std::uint8_t tool_set::types_of(std::string_view function, std::string_view parameter) const {
  const auto f = functions_.find(function);
  if (f == functions_.end()) return string_argument;
  const auto p = f->second.find(parameter);
  return p == f->second.end() ? std::uint8_t{string_argument} : p->second;
}

std::string argument_json(std::string_view text, std::uint8_t types) {
  const std::string_view s = trimmed(text);
  const bool number = is_json_number(s);
  if (((types & null_argument) && s == "null") ||
      ((types & boolean_argument) && (s == "true" || s == "false")) ||
      ((types & integer_argument) && number && is_json_integer(s)) || ((types & number_argument) && number))
    return std::string(s);
  const char open = s.empty() ? '\0' : s[0];
  if (((types & object_argument) && open == '{') || ((types & array_argument) && open == '['))
    if (parsed(s)) return std::string(s);
  return json_string(text);
}

void append_json_escaped(std::string& out, std::string_view text) {
  constexpr char hex[] = "0123456789abcdef";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (byte < 0x20) {
          out += "\\u00";
          out += hex[byte >> 4];
          out += hex[byte & 15];
        } else {
          out += c;
        }
    }
  }
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  append_json_escaped(out, text);
  return out + '"';
}

std::optional<json_call> read_json_call(std::string_view object) {
  const auto root = parsed(object);
  if (!root || !root->is_object()) return std::nullopt;
  const json::value* name = root->get_object().if_contains("name");
  if (!name || !name->is_string()) return std::nullopt;
  json_call out{std::string(name->get_string()), "{}"};
  const json::value* arguments = root->get_object().if_contains("arguments");
  if (!arguments || arguments->is_null()) return out;
  if (arguments->is_string()) {
    const auto inner = parsed(arguments->get_string());
    if (!inner || !inner->is_object()) return std::nullopt;
    out.arguments = trimmed(arguments->get_string());
    return out;
  }
  if (!arguments->is_object()) return std::nullopt;
  out.arguments = json::serialize(*arguments);  // for a key spelled with escapes
  // The value's own text keeps every digit. The object is known to be valid, so finding its end is counting
  // brackets outside strings. A key given twice has its last value, as in the parsed form.
  int depth = 0;
  bool in_string = false;
  std::size_t string_begin = 0, value_begin = 0;
  std::string_view key;
  for (std::size_t i = 0; i < object.size(); ++i) {
    const char c = object[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') {
        in_string = false;
        if (depth == 1 && value_begin == 0) key = object.substr(string_begin + 1, i - string_begin - 1);
      }
    } else if (c == '"') {
      in_string = true;
      string_begin = i;
    } else if (c == ':' && depth == 1) {
      value_begin = i + 1;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']' || (c == ',' && depth == 1)) {
      if (c != ',') --depth;
      if (value_begin && (depth == 0 || (c == ',' && depth == 1))) {
        if (key == "arguments") out.arguments = trimmed(object.substr(value_begin, i - value_begin));
        value_begin = 0;
      }
    }
  }
  return out;
}

}  // namespace qwen3_moe
