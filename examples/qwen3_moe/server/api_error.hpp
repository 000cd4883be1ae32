// SPDX-License-Identifier: Apache-2.0
/// \file
/// Errors in the shape of OpenAI's API.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace qwen3_moe {

/// What a request is answered with when it cannot be served:
/// `{"error":{"message","type","param","code"}}`.
class api_error : public std::exception {
 public:
  api_error(int http_status, std::string text, std::string error_type = "invalid_request_error",
            std::optional<std::string> field = std::nullopt,
            std::optional<std::string> error_code = std::nullopt)
      : status(http_status),
        message(std::move(text)),
        type(std::move(error_type)),
        param(std::move(field)),
        code(std::move(error_code)) {}

  const char* what() const noexcept override { return message.c_str(); }

  /// The body, always valid JSON and UTF-8 whatever the texts hold.
  std::string body() const;

  int status;
  std::string message;
  std::string type;
  std::optional<std::string> param;  ///< path of the field, such as messages[2].content
  std::optional<std::string> code;
};

/// 400 for one field.
inline api_error bad_field(std::string path, const std::string& problem) {
  auto text = path + " " + problem;
  return {400, std::move(text), "invalid_request_error", std::move(path)};
}

/// An error for a status without a field: type and code follow from the status.
api_error error_of_status(int status, std::string_view message);

}  // namespace qwen3_moe
