// SPDX-License-Identifier: Apache-2.0
/// \file
/// Typed, bounded access to the fields of a configuration file.
#pragma once

#include <boost/json.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "nibble/core/error.hpp"

namespace qwen3_moe {

/// An object of a configuration with the name to give it in errors: "config.json: text_config".
class json_fields {
 public:
  json_fields(const boost::json::object& object, std::string what)
      : object_(object), what_(std::move(what)) {}

  /// Parses a whole document that must be an object. Depth is bounded, bytes after the end are refused.
  [[nodiscard]] static boost::json::object parse(std::string_view text, std::string_view what) {
    boost::json::parse_options options;
    options.max_depth = 64;
    boost::json::error_code failure;
    const boost::json::value value = boost::json::parse({text.data(), text.size()}, failure, {}, options);
    if (failure) throw nibble::format_error(std::string(what) + ": not valid JSON: " + failure.message());
    if (!value.is_object()) throw nibble::format_error(std::string(what) + ": is not a JSON object");
    return value.get_object();
  }

  [[noreturn]] void fail(std::string_view field, const std::string& why) const {
    throw nibble::format_error(what_ + ": " + std::string(field) + " " + why);
  }
  /// The field, or null where it is missing or null.
  [[nodiscard]] const boost::json::value* find(std::string_view field) const {
    const auto* value = object_.if_contains({field.data(), field.size()});
    return value == nullptr || value->is_null() ? nullptr : value;
  }
  [[nodiscard]] json_fields child(std::string_view field) const {
    const auto* value = find(field);
    if (value == nullptr || !value->is_object()) fail(field, "is not an object");
    return {value->get_object(), what_ + ": " + std::string(field)};
  }

  [[nodiscard]] int integer(std::string_view field, std::int64_t least, std::int64_t most) const {
    const auto* value = find(field);
    if (value == nullptr) fail(field, "is missing");
    const bool fits = value->is_int64() && value->get_int64() >= least && value->get_int64() <= most;
    if (!fits)
      fail(field, "is " + boost::json::serialize(*value) + ", expected an integer from " +
                      std::to_string(least) + " to " + std::to_string(most));
    return static_cast<int>(value->get_int64());
  }
  [[nodiscard]] int integer_or(std::string_view field, int otherwise, std::int64_t least,
                               std::int64_t most) const {
    return find(field) == nullptr ? otherwise : integer(field, least, most);
  }
  [[nodiscard]] double number(std::string_view field, double least, double most) const {
    const auto* value = find(field);
    if (value == nullptr) fail(field, "is missing");
    const double got = value->is_double()  ? value->get_double()
                       : value->is_int64() ? static_cast<double>(value->get_int64())
                                           : std::nan("");
    if (!(got >= least && got <= most))
      fail(field, "is " + boost::json::serialize(*value) + ", expected a number from " +
                      std::to_string(least) + " to " + std::to_string(most));
    return got;
  }
  [[nodiscard]] double number_or(std::string_view field, double otherwise, double least, double most) const {
    return find(field) == nullptr ? otherwise : number(field, least, most);
  }
  [[nodiscard]] bool boolean_or(std::string_view field, bool otherwise) const {
    const auto* value = find(field);
    if (value == nullptr) return otherwise;
    if (!value->is_bool()) fail(field, "is " + boost::json::serialize(*value) + ", expected true or false");
    return value->get_bool();
  }
  [[nodiscard]] std::string text_or(std::string_view field, std::string_view otherwise) const {
    const auto* value = find(field);
    if (value == nullptr) return std::string(otherwise);
    if (!value->is_string()) fail(field, "is " + boost::json::serialize(*value) + ", expected text");
    return std::string(value->get_string());
  }

 private:
  const boost::json::object& object_;
  std::string what_;
};

}  // namespace qwen3_moe
