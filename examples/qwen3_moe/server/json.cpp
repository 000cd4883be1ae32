// SPDX-License-Identifier: Apache-2.0
#include "json.hpp"

#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_stack.hpp>
#include <cmath>
#include <set>
#include <vector>

#include "api_error.hpp"
#include "text/unicode.hpp"

namespace qwen3_moe {
namespace {

using boost::system::error_code;
using view = json::string_view;

// Builds a value and keeps the keys of each open object, since the value itself would drop the first of two
// equal keys without a word.
class strict_handler {
 public:
  static constexpr std::size_t max_object_size = json::object::max_size();
  static constexpr std::size_t max_array_size = json::array::max_size();
  static constexpr std::size_t max_key_size = json::string::max_size();
  static constexpr std::size_t max_string_size = json::string::max_size();

  json::value_stack stack;
  std::string problem;

  bool on_document_begin(error_code&) { return true; }
  bool on_document_end(error_code&) { return true; }
  bool on_object_begin(error_code&) {
    keys_.emplace_back();
    return true;
  }
  bool on_object_end(std::size_t n, error_code&) {
    keys_.pop_back();
    stack.push_object(n);
    return true;
  }
  bool on_array_begin(error_code&) { return true; }
  bool on_array_end(std::size_t n, error_code&) {
    stack.push_array(n);
    return true;
  }
  bool on_key_part(view s, std::size_t, error_code&) {
    key_.append(s.data(), s.size());
    stack.push_chars(s);
    return true;
  }
  bool on_key(view s, std::size_t, error_code& ec) {
    key_.append(s.data(), s.size());
    stack.push_key(s);
    if (!keys_.back().insert(key_).second) {
      problem = "holds the key \"" + key_.substr(0, 64) + "\" twice in one object";
      ec = boost::json::error::syntax;
      return false;
    }
    key_.clear();
    return true;
  }
  bool on_string_part(view s, std::size_t, error_code&) {
    stack.push_chars(s);
    return true;
  }
  bool on_string(view s, std::size_t, error_code&) {
    stack.push_string(s);
    return true;
  }
  bool on_number_part(view, error_code&) { return true; }
  bool on_int64(std::int64_t i, view, error_code&) {
    stack.push_int64(i);
    return true;
  }
  bool on_uint64(std::uint64_t u, view, error_code&) {
    stack.push_uint64(u);
    return true;
  }
  bool on_double(double d, view, error_code& ec) {
    if (!std::isfinite(d)) {
      problem = "holds a number too large for a double";
      ec = boost::json::error::syntax;
      return false;
    }
    stack.push_double(d);
    return true;
  }
  bool on_bool(bool b, error_code&) {
    stack.push_bool(b);
    return true;
  }
  bool on_null(error_code&) {
    stack.push_null();
    return true;
  }
  bool on_comment_part(view, error_code&) { return true; }
  bool on_comment(view, error_code&) { return true; }

 private:
  std::string key_;
  std::vector<std::set<std::string, std::less<>>> keys_;
};

}  // namespace

json::value parse_json(std::string_view text, std::string_view what, std::optional<std::string> param) {
  json::parse_options options;
  options.max_depth = json_max_depth;
  json::basic_parser<strict_handler> parser(options);
  parser.handler().stack.reset();
  error_code ec;
  const auto used = parser.write_some(false, text.data(), text.size(), ec);
  if (!ec && used < text.size()) ec = json::error::extra_data;
  if (!ec && !parser.done()) ec = json::error::incomplete;
  if (!ec) return parser.handler().stack.release();
  auto message = std::string(what) + " ";
  if (ec == json::error::too_deep)
    message += "has a nesting deeper than " + std::to_string(json_max_depth) + " levels";
  else if (!parser.handler().problem.empty())
    message += to_valid_utf8(parser.handler().problem);
  else
    message += "is not valid JSON at byte " + std::to_string(used) + ": " + ec.message();
  throw api_error(400, std::move(message), "invalid_request_error", std::move(param));
}

std::string_view kind_name(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null:
      return "null";
    case json::kind::bool_:
      return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
      return "an integer";
    case json::kind::double_:
      return "a number";
    case json::kind::string:
      return "a string";
    case json::kind::array:
      return "an array";
    default:
      return "an object";
  }
}

std::string api_error::body() const {
  const auto text = [](const std::optional<std::string>& value) -> json::value {
    if (!value) return nullptr;
    return json::value(to_valid_utf8(*value));
  };
  return json::serialize(json::object{{"error", json::object{{"message", to_valid_utf8(message)},
                                                             {"type", type},
                                                             {"param", text(param)},
                                                             {"code", text(code)}}}});
}

api_error error_of_status(int status, std::string_view message) {
  switch (status) {
    case 401:
      return {401, std::string(message), "authentication_error", std::nullopt, "invalid_api_key"};
    case 429:
      return {429, std::string(message), "rate_limit_error", std::nullopt, "queue_full"};
    case 500:
      return {500, std::string(message), "server_error", std::nullopt, "internal_error"};
    case 503:
      return {503, std::string(message), "server_error", std::nullopt, "unavailable"};
    default:
      return {status, std::string(message), status < 500 ? "invalid_request_error" : "server_error"};
  }
}

}  // namespace qwen3_moe
