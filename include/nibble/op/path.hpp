// SPDX-License-Identifier: Apache-2.0
/// \file
/// The name of the place a walk is at.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace nibble {

/// A dotted path, "layers.3.mlp", grown and cut back by the walker.
class op_path {
 public:
  op_path() = default;
  explicit op_path(std::string root) : text_(std::move(root)) {}

  [[nodiscard]] const std::string& text() const { return text_; }
  /// This path with one more name.
  [[nodiscard]] std::string joined(std::string_view name) const {
    if (text_.empty()) return std::string(name);
    return name.empty() ? text_ : text_ + "." + std::string(name);
  }

  /// Appends a name for as long as the returned guard lives; an empty name appends nothing.
  class scope {
   public:
    scope(op_path& path, std::string_view name) : path_(path), length_(path.text_.size()) {
      path.text_ = path.joined(name);
    }
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;
    ~scope() { path_.text_.resize(length_); }

   private:
    op_path& path_;
    std::size_t length_;
  };

 private:
  std::string text_;
};

}  // namespace nibble
