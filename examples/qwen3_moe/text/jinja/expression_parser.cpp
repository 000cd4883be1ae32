// SPDX-License-Identifier: Apache-2.0
#include "expression_parser.hpp"

#include <optional>

#include "../quote.hpp"
#include "parser.hpp"

namespace qwen3_moe::jinja {
namespace {

expression_ptr make(expression_kind kind, position at) {
  return std::make_unique<expression>(expression{kind, at});
}

std::optional<operation> comparison_of(std::string_view s) {
  if (s == "==") return operation::equal;
  if (s == "!=") return operation::not_equal;
  if (s == "<") return operation::less;
  if (s == "<=") return operation::less_equal;
  if (s == ">") return operation::greater;
  if (s == ">=") return operation::greater_equal;
  return std::nullopt;
}

// Operators that join from the left, loosest first.
std::optional<operation> binary_of(int level, std::string_view s) {
  switch (level) {
    case 0:
      if (s == "+") return operation::add;
      if (s == "-") return operation::subtract;
      break;
    case 1:
      if (s == "~") return operation::concatenate;
      break;
    case 2:
      if (s == "*") return operation::multiply;
      if (s == "/") return operation::divide;
      if (s == "//") return operation::floor_divide;
      if (s == "%") return operation::modulo;
      break;
    default:
      if (s == "**") return operation::power;
  }
  return std::nullopt;
}
constexpr int binary_levels = 4;

bool is_reserved(std::string_view s) {
  for (const std::string_view r :
       {"true", "false", "none", "True", "False", "None", "and", "or", "not", "in", "is", "if", "else"})
    if (s == r) return true;
  return false;
}

}  // namespace

expression_parser::nesting::nesting(expression_parser& parser) : p(parser) {
  if (p.depth_ >= p.deepest_)
    p.fail(p.peek().at, "the template nests deeper than the limit of " + std::to_string(p.deepest_));
  ++p.depth_;
}

std::string expression_parser::describe(const token& t) const {
  switch (t.kind) {
    case token_kind::end:
      return "the end of the template";
    case token_kind::print_end:
      return "\"}}\"";
    case token_kind::block_end:
      return "\"%}\"";
    case token_kind::string:
      return "a string";
    case token_kind::integer:
    case token_kind::real:
      return "a number";
    case token_kind::name:
    case token_kind::symbol:
      return quote_text(t.symbol);
    case token_kind::data:
    case token_kind::print_begin:
    case token_kind::block_begin:
      break;
  }
  return "text";
}

const token& expression_parser::next() {
  const token& t = peek();
  if (at_ + 1 < tokens_.size()) ++at_;
  return t;
}

const token& expression_parser::expect(token_kind kind, std::string_view what) {
  if (peek().kind != kind) fail(peek().at, "expected " + std::string(what) + ", found " + describe(peek()));
  return next();
}

bool expression_parser::skip_symbol(std::string_view s) {
  if (!at_symbol(s)) return false;
  next();
  return true;
}

bool expression_parser::skip_name(std::string_view s) {
  if (!at_name(s)) return false;
  next();
  return true;
}

void expression_parser::expect_symbol(std::string_view s) {
  if (!skip_symbol(s)) fail(peek().at, "expected " + quote_text(s) + ", found " + describe(peek()));
}

void expression_parser::check_assignable(const token& name) const {
  if (is_reserved(name.symbol) || name.symbol == "loop")
    fail(name.at, quote_text(name.symbol) + " cannot be assigned to");
}

name_id expression_parser::id_of(std::string_view name) {
  const auto [at, added] = ids_.emplace(std::string(name), static_cast<name_id>(names_.size()));
  if (added) names_.emplace_back(name);
  return at->second;
}

expression_ptr expression_parser::parse_tuple(bool conditional) {
  const position start = peek().at;
  expression_ptr first = conditional ? parse_conditional() : parse_or();
  if (!at_symbol(",")) return first;
  expression_ptr all = make(expression_kind::tuple, start);
  all->operands.push_back(std::move(first));
  while (skip_symbol(",")) {
    const token& t = peek();
    if (t.kind == token_kind::print_end || t.kind == token_kind::block_end || at_symbol(")") ||
        at_symbol("]"))
      break;
    all->operands.push_back(conditional ? parse_conditional() : parse_or());
  }
  return all;
}

expression_ptr expression_parser::parse_conditional() {
  const nesting guard(*this);
  expression_ptr e = parse_or();
  std::size_t wrapped = 0;
  while (at_name("if")) {
    const position at = next().at;
    // a if b if c … makes one level more each time
    if (++wrapped + depth_ > deepest_)
      fail(at, "the template nests deeper than the limit of " + std::to_string(deepest_));
    expression_ptr c = make(expression_kind::conditional, at);
    c->operands.push_back(std::move(e));
    c->operands.push_back(parse_or());
    c->operands.push_back(skip_name("else") ? parse_conditional() : nullptr);
    e = std::move(c);
  }
  return e;
}

expression_ptr expression_parser::parse_or() {
  expression_ptr first = parse_and();
  if (!at_name("or")) return first;
  expression_ptr all = make(expression_kind::logical_or, peek().at);
  all->operands.push_back(std::move(first));
  while (skip_name("or")) all->operands.push_back(parse_and());
  return all;
}

expression_ptr expression_parser::parse_and() {
  expression_ptr first = parse_not();
  if (!at_name("and")) return first;
  expression_ptr all = make(expression_kind::logical_and, peek().at);
  all->operands.push_back(std::move(first));
  while (skip_name("and")) all->operands.push_back(parse_not());
  return all;
}

expression_ptr expression_parser::parse_not() {
  if (!at_name("not")) return parse_compare();
  const nesting guard(*this);
  expression_ptr e = make(expression_kind::logical_not, next().at);
  e->operands.push_back(parse_not());
  return e;
}

expression_ptr expression_parser::parse_compare() {
  expression_ptr first = parse_binary(0);
  expression_ptr all;
  while (true) {
    std::optional<operation> op;
    if (peek().kind == token_kind::symbol) op = comparison_of(peek().symbol);
    if (at_name("in")) op = operation::in;
    const bool not_in = at_name("not") && peek(1).kind == token_kind::name && peek(1).symbol == "in";
    if (not_in) op = operation::not_in;
    if (!op) return all ? std::move(all) : std::move(first);
    if (!all) {
      all = make(expression_kind::compare, peek().at);
      all->operands.push_back(std::move(first));
    }
    next();
    if (not_in) next();
    all->operations.push_back(*op);
    all->operands.push_back(parse_binary(0));
  }
}

expression_ptr expression_parser::parse_binary(int level) {
  const auto operand = [&] {
    return level + 1 == binary_levels ? parse_unary(true) : parse_binary(level + 1);
  };
  const auto here = [&] {
    return peek().kind == token_kind::symbol ? binary_of(level, peek().symbol) : std::nullopt;
  };
  expression_ptr first = operand();
  if (!here()) return first;
  expression_ptr all = make(expression_kind::chain, peek().at);
  all->operands.push_back(std::move(first));
  while (const std::optional<operation> op = here()) {
    next();
    all->operations.push_back(*op);
    all->operands.push_back(operand());
  }
  return all;
}

expression_ptr expression_parser::parse_unary(bool with_filter) {
  const nesting guard(*this);
  expression_ptr e;
  if (at_symbol("-") || at_symbol("+")) {
    const token& sign = next();
    e = make(sign.symbol == "-" ? expression_kind::negate : expression_kind::plus, sign.at);
    e->operands.push_back(parse_unary(false));
  } else {
    e = parse_primary();
  }
  return parse_postfix(std::move(e), with_filter);
}

expression_ptr expression_parser::parse_primary() {
  const token& t = peek();
  switch (t.kind) {
    case token_kind::name: {
      next();
      const std::string_view s = t.symbol;
      if (s == "true" || s == "True" || s == "false" || s == "False" || s == "none" || s == "None") {
        expression_ptr e = make(expression_kind::literal, t.at);
        if (s != "none" && s != "None") e->literal = value(s == "true" || s == "True");
        return e;
      }
      if (is_reserved(s)) fail(t.at, "unexpected " + quote_text(s));
      expression_ptr e = make(expression_kind::name, t.at);
      e->name = s;
      e->id = id_of(s);
      return e;
    }
    case token_kind::string: {
      expression_ptr e = make(expression_kind::literal, t.at);
      text all;
      while (peek().kind == token_kind::string) all.append(next().content);
      e->literal = value(std::move(all));
      return e;
    }
    case token_kind::integer:
    case token_kind::real: {
      expression_ptr e = make(expression_kind::literal, t.at);
      e->literal = next().number;
      return e;
    }
    case token_kind::symbol:
      if (t.symbol == "(") {
        const position at = next().at;
        if (skip_symbol(")")) return make(expression_kind::tuple, at);
        expression_ptr e = parse_tuple(true);
        expect_symbol(")");
        return e;
      }
      if (t.symbol == "[") return parse_list();
      if (t.symbol == "{") return parse_dict();
      break;
    default:
      break;
  }
  fail(t.at, "expected an expression, found " + describe(t));
}

expression_ptr expression_parser::parse_list() {
  expression_ptr e = make(expression_kind::list, next().at);
  while (!skip_symbol("]")) {
    if (!e->operands.empty()) {
      expect_symbol(",");
      if (skip_symbol("]")) break;
    }
    e->operands.push_back(parse_conditional());
  }
  return e;
}

expression_ptr expression_parser::parse_dict() {
  expression_ptr e = make(expression_kind::dict, next().at);
  while (!skip_symbol("}")) {
    if (!e->operands.empty()) {
      expect_symbol(",");
      if (skip_symbol("}")) break;
    }
    e->operands.push_back(parse_conditional());
    expect_symbol(":");
    e->operands.push_back(parse_conditional());
  }
  return e;
}

expression_ptr expression_parser::parse_postfix(expression_ptr base, bool with_filter) {
  std::vector<postfix_step> steps;
  bool filtered = false;  // behind a filter or test only filters, tests and calls follow
  while (true) {
    postfix_step step;
    step.at = peek().at;
    if (!filtered && (at_symbol(".") || at_symbol("["))) {
      parse_subscript(step);
    } else if (at_symbol("(")) {
      step.kind = step_kind::call;
      step.arguments = parse_arguments();
    } else if (with_filter && skip_symbol("|")) {
      filtered = true;
      const token& name = expect(token_kind::name, "a filter's name");
      step.kind = step_kind::filter;
      step.at = name.at;
      step.name = name.symbol;
      step.filter = find_filter(name.symbol);
      if (!step.filter) fail(name.at, "the filter " + quote_text(name.symbol) + " is not supported");
      if (at_symbol("(")) step.arguments = parse_arguments();
    } else if (with_filter && at_name("is")) {
      filtered = true;
      parse_test(step);
    } else {
      break;
    }
    steps.push_back(std::move(step));
  }
  if (steps.empty()) return base;
  expression_ptr e = make(expression_kind::postfix, base->at);
  e->operands.push_back(std::move(base));
  e->steps = std::move(steps);
  return e;
}

void expression_parser::parse_subscript(postfix_step& step) {
  if (skip_symbol(".")) {
    const token& t = next();
    if (t.kind == token_kind::name) {
      step.kind = step_kind::attribute;
      step.name = t.symbol;
    } else if (t.kind == token_kind::integer) {
      step.kind = step_kind::item;
      step.index = make(expression_kind::literal, t.at);
      step.index->literal = t.number;
    } else {
      fail(t.at, "expected a name or a number, found " + describe(t));
    }
    return;
  }
  next();
  step.kind = step_kind::item;
  if (!at_symbol(":")) step.index = parse_tuple(true);
  if (skip_symbol(":")) {
    step.kind = step_kind::slice;
    if (!at_symbol("]") && !at_symbol(":")) step.stop = parse_conditional();
    if (skip_symbol(":") && !at_symbol("]")) step.stride = parse_conditional();
  }
  expect_symbol("]");
}

void expression_parser::parse_test(postfix_step& step) {
  next();
  step.kind = step_kind::test;
  step.negated = skip_name("not");
  const token& name = expect(token_kind::name, "a test's name");
  step.at = name.at;
  step.name = name.symbol;
  step.test = find_test(name.symbol);
  if (!step.test) fail(name.at, "the test " + quote_text(name.symbol) + " is not supported");
  if (at_symbol("(")) {
    step.arguments = parse_arguments();
    return;
  }
  // One argument may stand without parentheses: x is divisibleby 3
  const token& t = peek();
  const bool operand = t.kind == token_kind::string || t.kind == token_kind::integer ||
                       t.kind == token_kind::real || at_symbol("[") || at_symbol("{");
  const bool word = t.kind == token_kind::name && t.symbol != "else" && t.symbol != "or" &&
                    t.symbol != "and" && t.symbol != "if" && t.symbol != "is" && t.symbol != "in" &&
                    t.symbol != "not" && t.symbol != "recursive";
  if (operand || word) {
    const nesting guard(*this);
    step.arguments.positional.push_back(parse_postfix(parse_primary(), false));
  }
}

call_expressions expression_parser::parse_arguments() {
  const nesting guard(*this);
  call_expressions out;
  expect_symbol("(");
  bool first = true;
  while (!skip_symbol(")")) {
    if (!first) {
      expect_symbol(",");
      if (skip_symbol(")")) break;
    }
    first = false;
    if (at_symbol("*") || at_symbol("**")) fail(peek().at, "unpacking arguments is not supported");
    if (peek().kind == token_kind::name && peek(1).kind == token_kind::symbol && peek(1).symbol == "=") {
      std::string name(next().symbol);
      next();
      out.named.emplace_back(std::move(name), parse_conditional());
    } else {
      if (!out.named.empty()) fail(peek().at, "a positional argument follows a named one");
      out.positional.push_back(parse_conditional());
    }
  }
  return out;
}

}  // namespace qwen3_moe::jinja
