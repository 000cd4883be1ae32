// SPDX-License-Identifier: Apache-2.0
/// \file
/// Tables that say which fields a JSON object may have, and one reader for all of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "api_error.hpp"
#include "json.hpp"

namespace qwen3_moe {

/// A finite number; with `open_low` the lower end itself is refused.
template <class Object>
struct number_field {
  double low, high;
  std::optional<float> Object::*member;
  bool open_low = false;
};

/// An integer, also when written as 3.0 or 3e0.
template <class Object>
struct integer_field {
  std::int64_t low, high;
  std::optional<std::int64_t> Object::*member;
};

template <class Object>
struct boolean_field {
  std::optional<bool> Object::*member;
};

template <class Object>
struct string_field {
  std::size_t max_bytes;
  std::optional<std::string> Object::*member;
};

/// What the other kinds cannot express. `path` is the field's own.
template <class Object>
struct custom_field {
  void (*read)(const json::value& value, const std::string& path, Object& out);
};

template <class Object>
struct field {
  std::string_view name;
  std::variant<number_field<Object>, integer_field<Object>, boolean_field<Object>, string_field<Object>,
               custom_field<Object>>
      rule;
};

namespace schema_detail {

std::string number_text(double value);
double checked_number(const json::value& value, const std::string& path, double low, double high,
                      bool open_low);
std::int64_t checked_integer(const json::value& value, const std::string& path, std::int64_t low,
                             std::int64_t high);
bool checked_boolean(const json::value& value, const std::string& path);
std::string checked_string(const json::value& value, const std::string& path, std::size_t max_bytes);

template <class... Functions>
struct overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
overloaded(Functions...) -> overloaded<Functions...>;

}  // namespace schema_detail

/// "a.b" or "b" when `parent` is empty; "messages[2].content".
std::string field_path(std::string_view parent, std::string_view name);
std::string item_path(std::string_view parent, std::size_t index);

/// The value as an object or array, or bad_field.
const json::object& checked_object(const json::value& value, const std::string& path);
const json::array& checked_array(const json::value& value, const std::string& path, std::size_t max_items);

/// Reads the fields that `table` names into `out`. A field that is missing or null keeps its default, since
/// client libraries send null for what was not set; fields the table does not name are ignored. Throws
/// api_error 400 with the path of the first field that breaks its rule, in the table's order.
template <class Object>
void read_fields(const json::object& object, std::string_view parent, std::span<const field<Object>> table,
                 Object& out) {
  namespace detail = schema_detail;
  for (const auto& [name, rule] : table) {
    const auto* value = object.if_contains(json::string_view(name.data(), name.size()));
    if (!value || value->is_null()) continue;
    const auto path = field_path(parent, name);
    std::visit(
        detail::overloaded{
            [&](const number_field<Object>& r) {
              out.*r.member =
                  static_cast<float>(detail::checked_number(*value, path, r.low, r.high, r.open_low));
            },
            [&](const integer_field<Object>& r) {
              out.*r.member = detail::checked_integer(*value, path, r.low, r.high);
            },
            [&](const boolean_field<Object>& r) { out.*r.member = detail::checked_boolean(*value, path); },
            [&](const string_field<Object>& r) {
              out.*r.member = detail::checked_string(*value, path, r.max_bytes);
            },
            [&](const custom_field<Object>& r) { r.read(*value, path, out); }},
        rule);
  }
}

}  // namespace qwen3_moe
