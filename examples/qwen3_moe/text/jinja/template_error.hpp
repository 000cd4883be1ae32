// SPDX-License-Identifier: Apache-2.0
/// \file
/// What goes wrong with a template, and whose fault it is.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "nibble/core/error.hpp"

namespace qwen3_moe {

enum class template_fault {
  syntax,      ///< the template itself: not Jinja, or a construct that is not supported; found while loading
  raised,      ///< the template called raise_exception(): the request breaks a rule of the model
  evaluation,  ///< an expression cannot be computed from what the request holds
  argument,    ///< a template argument that may not be set
  limit        ///< output, steps, memory or nesting went past an option
};

/// Text: "name:line:column: reason", but for template_fault::raised the template's own words alone. All but
/// `syntax` are a matter of the request (HTTP 400).
class template_error : public nibble::error {
 public:
  template_error(template_fault fault, const std::string& text, std::size_t line = 0, std::size_t column = 0)
      : nibble::error(text), fault_(fault), line_(line), column_(column) {}
  template_fault fault() const noexcept { return fault_; }
  std::size_t line() const noexcept { return line_; }      ///< from 1; 0 when there is none
  std::size_t column() const noexcept { return column_; }  ///< in characters, from 1; 0 when there is none

 private:
  template_fault fault_;
  std::size_t line_, column_;
};

}  // namespace qwen3_moe
