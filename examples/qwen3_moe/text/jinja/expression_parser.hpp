// SPDX-License-Identifier: Apache-2.0
/// \file
/// Expressions by precedence: if-else, or, and, not, comparison, + -, ~, * / // %, **, unary and postfix.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ast.hpp"

namespace qwen3_moe::jinja {

class expression_parser {
 protected:
  expression_parser(const template_source& source, std::size_t deepest)
      : source_(source), tokens_(tokenize(source)), deepest_(deepest) {}

  /// Counts nesting while it lives.
  struct nesting {
    explicit nesting(expression_parser& parser);
    ~nesting() { --p.depth_; }
    nesting(const nesting&) = delete;
    nesting& operator=(const nesting&) = delete;
    expression_parser& p;
  };

  [[noreturn]] void fail(position at, const std::string& reason) const {
    source_.fail(template_fault::syntax, at, reason);
  }
  const token& peek(std::size_t ahead = 0) const {
    return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
  }
  const token& next();
  const token& expect(token_kind kind, std::string_view what);
  bool at_symbol(std::string_view s) const { return peek().kind == token_kind::symbol && peek().symbol == s; }
  bool at_name(std::string_view s) const { return peek().kind == token_kind::name && peek().symbol == s; }
  bool skip_symbol(std::string_view s);
  bool skip_name(std::string_view s);
  void expect_symbol(std::string_view s);
  void check_assignable(const token& name) const;
  name_id id_of(std::string_view name);
  std::vector<std::string> take_names() { return std::move(names_); }

  /// An expression, or several with commas between them: a tuple. `conditional`: a if b else c is part of it.
  expression_ptr parse_tuple(bool conditional);
  expression_ptr parse_conditional();

 private:
  std::string describe(const token& t) const;
  expression_ptr parse_or();
  expression_ptr parse_and();
  expression_ptr parse_not();
  expression_ptr parse_compare();
  expression_ptr parse_binary(int level);
  expression_ptr parse_unary(bool with_filter);
  expression_ptr parse_primary();
  expression_ptr parse_list();
  expression_ptr parse_dict();
  expression_ptr parse_postfix(expression_ptr base, bool with_filter);
  void parse_subscript(postfix_step& step);
  void parse_test(postfix_step& step);
  call_expressions parse_arguments();

  const template_source& source_;
  std::vector<token> tokens_;
  std::size_t at_ = 0, depth_ = 0, deepest_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, name_id> ids_;
};

}  // namespace qwen3_moe::jinja
