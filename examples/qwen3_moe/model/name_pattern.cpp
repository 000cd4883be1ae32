// SPDX-License-Identifier: Apache-2.0
#include "model/name_pattern.hpp"

#include "nibble/core/error.hpp"

namespace qwen3_moe {

name_pattern::name_pattern(std::string_view text) : text_(text) {
  if (text.starts_with("re:")) {
    parse_expression(text.substr(3));
    return;
  }
  if (text.ends_with(".weight")) text.remove_suffix(7);
  parse_glob(text);
}

void name_pattern::parse_glob(std::string_view glob) {
  for (const char c : glob) {
    if (c == '*')
      atoms_.push_back({atom::kind::any, 0, true, true});
    else if (c == '?')
      atoms_.push_back({atom::kind::any, 0, false, false});
    else if (c == '[' || c == ']' || c == '{' || c == '}')
      throw nibble::format_error("module pattern '" + text_ + "': '" + c + "' is not supported; use * and ?");
    else
      atoms_.push_back({atom::kind::literal, c, false, false});
  }
}

void name_pattern::parse_expression(std::string_view expression) {
  const auto refuse = [&](char c) {
    throw nibble::format_error("module pattern '" + text_ + "': '" + c +
                               "' is not supported; literals, . \\d * + ? ^ $ are");
  };
  if (expression.starts_with('^')) expression.remove_prefix(1);
  open_end_ = true;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '$') {
      if (i + 1 != expression.size()) refuse(c);
      open_end_ = false;
    } else if (c == '*' || c == '+' || c == '?') {
      if (atoms_.empty() || atoms_.back().repeats || atoms_.back().zero_allowed) refuse(c);
      atoms_.back().zero_allowed = c != '+';
      atoms_.back().repeats = c != '?';
    } else if (c == '.') {
      atoms_.push_back({atom::kind::any, 0, false, false});
    } else if (c == '\\') {
      if (++i == expression.size()) refuse(c);
      const char escaped = expression[i];
      const bool letter = (escaped >= 'a' && escaped <= 'z') || (escaped >= 'A' && escaped <= 'Z');
      const bool number = escaped >= '0' && escaped <= '9';
      if (escaped == 'd')
        atoms_.push_back({atom::kind::digit, 0, false, false});
      else if (letter || number)
        refuse(escaped);
      else
        atoms_.push_back({atom::kind::literal, escaped, false, false});
    } else if (std::string_view("()[]{}|^").find(c) != std::string_view::npos) {
      refuse(c);
    } else {
      atoms_.push_back({atom::kind::literal, c, false, false});
    }
  }
}

bool name_pattern::matches(std::string_view name) const {
  // The set of atoms that may come next, advanced one character at a time.
  std::vector<char> here(atoms_.size() + 1, 0), next;
  const auto skip_optional = [&](std::vector<char>& set) {
    for (std::size_t i = 0; i < atoms_.size(); ++i)
      if (set[i] && atoms_[i].zero_allowed) set[i + 1] = 1;
  };
  here[0] = 1;
  skip_optional(here);
  for (const char c : name) {
    if (open_end_ && here.back()) return true;
    next.assign(atoms_.size() + 1, 0);
    for (std::size_t i = 0; i < atoms_.size(); ++i) {
      if (!here[i]) continue;
      const atom& a = atoms_[i];
      const bool fits = a.what == atom::kind::any || (a.what == atom::kind::digit && c >= '0' && c <= '9') ||
                        (a.what == atom::kind::literal && c == a.character);
      if (!fits) continue;
      next[i + 1] = 1;
      if (a.repeats) next[i] = 1;
    }
    skip_optional(next);
    here.swap(next);
  }
  return here.back();
}

}  // namespace qwen3_moe
