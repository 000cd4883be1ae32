// SPDX-License-Identifier: Apache-2.0
#include "schema.hpp"

#include <cstdio>
#include <limits>

namespace qwen3_moe {
namespace schema_detail {
namespace {

std::string got(const json::value& value) {
  if (value.is_int64()) return std::to_string(value.get_int64());
  if (value.is_uint64()) return std::to_string(value.get_uint64());
  if (value.is_double()) return number_text(value.get_double());
  return std::string(kind_name(value));
}

}  // namespace

std::string number_text(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

double checked_number(const json::value& value, const std::string& path, double low, double high,
                      bool open_low) {
  double number = std::numeric_limits<double>::quiet_NaN();
  if (value.is_double()) number = value.get_double();
  if (value.is_int64()) number = static_cast<double>(value.get_int64());
  if (value.is_uint64()) number = static_cast<double>(value.get_uint64());
  if (!(number >= low && number <= high) || (open_low && number == low))
    throw bad_field(path, "must be a number " +
                              (open_low ? "above " + number_text(low) + " and at most " + number_text(high)
                                        : "between " + number_text(low) + " and " + number_text(high)) +
                              ", got " + got(value));
  return number;
}

std::int64_t checked_integer(const json::value& value, const std::string& path, std::int64_t low,
                             std::int64_t high) {
  std::optional<std::int64_t> number;
  if (value.is_int64()) number = value.get_int64();
  if (value.is_double()) {
    const double exact = value.get_double();
    if (std::abs(exact) <= 9007199254740992.0 && exact == std::floor(exact))
      number = static_cast<std::int64_t>(exact);
  }
  if (!number || *number < low || *number > high)
    throw bad_field(path, "must be an integer between " + std::to_string(low) + " and " +
                              std::to_string(high) + ", got " + got(value));
  return *number;
}

bool checked_boolean(const json::value& value, const std::string& path) {
  if (!value.is_bool()) throw bad_field(path, "must be true or false, got " + got(value));
  return value.get_bool();
}

std::string checked_string(const json::value& value, const std::string& path, std::size_t max_bytes) {
  if (!value.is_string()) throw bad_field(path, "must be a string, got " + got(value));
  const auto& text = value.get_string();
  if (text.size() > max_bytes)
    throw bad_field(path, "has " + std::to_string(text.size()) + " bytes, at most " +
                              std::to_string(max_bytes) + " are allowed");
  return {text.data(), text.size()};
}

}  // namespace schema_detail

std::string field_path(std::string_view parent, std::string_view name) {
  if (parent.empty()) return std::string(name);
  return std::string(parent) + "." + std::string(name);
}

std::string item_path(std::string_view parent, std::size_t index) {
  return std::string(parent) + "[" + std::to_string(index) + "]";
}

const json::object& checked_object(const json::value& value, const std::string& path) {
  if (!value.is_object()) throw bad_field(path, "must be an object, got " + std::string(kind_name(value)));
  return value.get_object();
}

const json::array& checked_array(const json::value& value, const std::string& path, std::size_t max_items) {
  if (!value.is_array()) throw bad_field(path, "must be an array, got " + std::string(kind_name(value)));
  const auto& items = value.get_array();
  if (items.size() > max_items)
    throw bad_field(path, "has " + std::to_string(items.size()) + " items, at most " +
                              std::to_string(max_items) + " are allowed");
  return items;
}

}  // namespace qwen3_moe
