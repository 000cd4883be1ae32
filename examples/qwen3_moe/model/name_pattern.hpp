// SPDX-License-Identifier: Apache-2.0
/// \file
/// Patterns of quantisation configurations that name modules: plain names, globs and `re:` expressions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace qwen3_moe {

/// One entry of `ignore`, `exclude_modules` or `quantized_layers`.
///
/// A plain name matches itself. In a glob `*` is any run of characters, dots included, and `?` is one: so
/// "layers.1.*" does not match layer 10, "layers.1*" does. "re:" begins an expression matched from the start
/// of the name, with literals, `.`, `\.` and other escaped punctuation, `\d`, `*`, `+`, `?`, `^` in front and
/// `$` at the end; anything else throws nibble::format_error. A trailing ".weight" of a pattern is ignored.
/// Matching costs at most name × pattern steps, and about name steps for patterns met in practice.
class name_pattern {
 public:
  static constexpr std::size_t length_limit = 512;

  explicit name_pattern(std::string_view text);
  [[nodiscard]] bool matches(std::string_view name) const;
  [[nodiscard]] const std::string& text() const { return text_; }
  /// The one name it matches, where it is a plain name; otherwise nothing.
  [[nodiscard]] std::optional<std::string> plain_name() const;

 private:
  struct atom {
    enum class kind : char { literal, any, digit } what;
    char character;
    bool zero_allowed;  ///< may match nothing
    bool repeats;       ///< may match more than once
  };
  [[nodiscard]] static bool fits(const atom& a, char c);
  [[nodiscard]] bool matches_glob(std::string_view name) const;
  [[nodiscard]] bool matches_any_atoms(std::string_view name) const;
  void parse_glob(std::string_view glob);
  void parse_expression(std::string_view expression);

  std::string text_;
  std::vector<atom> atoms_;
  bool is_glob_ = true;  ///< nothing repeats but "any character", so that no set of states is needed
};

}  // namespace qwen3_moe
