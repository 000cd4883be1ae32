// SPDX-License-Identifier: Apache-2.0
#include "model/name_pattern.hpp"

#include "nibble/core/error.hpp"

namespace qwen3_moe {

name_pattern::name_pattern(std::string_view text) : text_(text) {
  if (text.size() > length_limit)
    throw nibble::format_error("module pattern of " + std::to_string(text.size()) +
                               " characters, the limit is " + std::to_string(length_limit));
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
  bool open_end = true;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '$') {
      if (i + 1 != expression.size()) refuse(c);
      open_end = false;
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
  if (open_end) atoms_.push_back({atom::kind::any, 0, true, true});
  for (const atom& a : atoms_)
    if ((a.repeats || a.zero_allowed) && !(a.what == atom::kind::any && a.repeats && a.zero_allowed))
      is_glob_ = false;
}

std::optional<std::string> name_pattern::plain_name() const {
  std::string name;
  for (const atom& a : atoms_) {
    if (a.what != atom::kind::literal || a.repeats || a.zero_allowed) return std::nullopt;
    name.push_back(a.character);
  }
  return name;
}

bool name_pattern::fits(const atom& a, char c) {
  return a.what == atom::kind::any || (a.what == atom::kind::digit && c >= '0' && c <= '9') ||
         (a.what == atom::kind::literal && c == a.character);
}

bool name_pattern::matches(std::string_view name) const {
  return is_glob_ ? matches_glob(name) : matches_any_atoms(name);
}

/// Only the last "any run" ever needs to be taken longer, so one place to return to is enough.
bool name_pattern::matches_glob(std::string_view name) const {
  std::size_t i = 0, p = 0, star = atoms_.size(), resume = 0;
  while (i < name.size()) {
    if (p < atoms_.size() && atoms_[p].repeats) {
      star = p++;
      resume = i;
    } else if (p < atoms_.size() && fits(atoms_[p], name[i])) {
      ++p;
      ++i;
    } else if (star < atoms_.size()) {
      p = star + 1;
      i = ++resume;
    } else {
      return false;
    }
  }
  while (p < atoms_.size() && atoms_[p].repeats) ++p;
  return p == atoms_.size();
}

/// Advances the set of atoms that may come next, one character at a time.
bool name_pattern::matches_any_atoms(std::string_view name) const {
  std::vector<char> here(atoms_.size() + 1, 0), next;
  const auto skip_optional = [&](std::vector<char>& set) {
    for (std::size_t i = 0; i < atoms_.size(); ++i)
      if (set[i] && atoms_[i].zero_allowed) set[i + 1] = 1;
  };
  here[0] = 1;
  skip_optional(here);
  for (const char c : name) {
    next.assign(atoms_.size() + 1, 0);
    for (std::size_t i = 0; i < atoms_.size(); ++i) {
      if (!here[i] || !fits(atoms_[i], c)) continue;
      next[i + 1] = 1;
      if (atoms_[i].repeats) next[i] = 1;
    }
    skip_optional(next);
    here.swap(next);
  }
  return here.back();
}

}  // namespace qwen3_moe
