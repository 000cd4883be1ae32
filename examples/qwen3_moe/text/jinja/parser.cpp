// SPDX-License-Identifier: Apache-2.0
#include "parser.hpp"

#include <initializer_list>
#include <optional>
#include <unordered_map>

#include "../quote.hpp"
#include "expression_parser.hpp"

namespace qwen3_moe::jinja {
namespace {

class statement_parser : expression_parser {
 public:
  statement_parser(const template_source& source, std::size_t deepest) : expression_parser(source, deepest) {}

  syntax_tree run() {
    syntax_tree tree;
    tree.body = parse_block({});
    tree.names = take_names();
    return tree;
  }

 private:
  using names = std::initializer_list<std::string_view>;

  // Statements up to one of the `ends`, whose block_begin and name are consumed; stopped_at_ says which.
  block parse_block(names ends) {
    const nesting guard(*this);
    block out;
    while (true) {
      const token& t = peek();
      if (t.kind == token_kind::end) {
        if (ends.size() == 0) return out;
        fail(t.at, "the template ends inside a block; expected " + quote_text(*(ends.end() - 1)));
      }
      if (t.kind == token_kind::data) {
        auto s = make(statement_kind::data, t.at);
        s->data = t.content;
        out.push_back(std::move(s));
        next();
      } else if (t.kind == token_kind::print_begin) {
        auto s = make(statement_kind::print, t.at);
        next();
        s->subject = parse_tuple(true);
        expect(token_kind::print_end, "\"}}\"");
        out.push_back(std::move(s));
      } else {
        next();
        const token word = expect(token_kind::name, "a statement");
        for (const std::string_view e : ends) {
          if (word.symbol == e) {
            stopped_at_ = e;
            return out;
          }
        }
        parse_statement(word, out);
      }
    }
  }

  static std::unique_ptr<statement> make(statement_kind kind, position at) {
    return std::make_unique<statement>(statement{kind, at});
  }

  void end_tag() { expect(token_kind::block_end, "\"%}\""); }

  void parse_statement(const token& word, block& out) {
    if (word.symbol == "set") return out.push_back(parse_set(word));
    if (word.symbol == "for") return out.push_back(parse_for(word));
    if (word.symbol == "if") return out.push_back(parse_if(word));
    if (word.symbol == "macro") return out.push_back(parse_macro(word));
    if (word.symbol == "generation") {  // marks what a trainer counts; transparent here
      end_tag();
      block inner = parse_block({"endgeneration"});
      end_tag();
      for (auto& s : inner) out.push_back(std::move(s));
      return;
    }
    if (word.symbol == "break" || word.symbol == "continue") {
      if (loops_ == 0) fail(word.at, quote_text(word.symbol) + " outside a loop");
      end_tag();
      return out.push_back(
          make(word.symbol == "break" ? statement_kind::leave_loop : statement_kind::next_round, word.at));
    }
    fail(word.at,
         "the statement " + quote_text(word.symbol) +
             " is not supported here; supported: set, for, if, macro, generation, break, continue, raw");
  }

  target parse_target(bool may_be_attribute) {
    target t;
    if (peek().kind == token_kind::symbol && peek().symbol == "(") {
      next();
      t = parse_targets(may_be_attribute);
      expect_symbol(")");
      return t;
    }
    const token name = expect(token_kind::name, "a name to assign to");
    check_assignable(name);
    t.at = name.at;
    t.name = name.symbol;
    t.id = id_of(name.symbol);
    if (may_be_attribute && skip_symbol("."))
      t.attribute = expect(token_kind::name, "the attribute's name").symbol;
    return t;
  }

  target parse_targets(bool may_be_attribute) {
    const nesting guard(*this);
    target first = parse_target(may_be_attribute);
    if (!at_symbol(",")) return first;
    target all;
    all.at = first.at;
    all.parts.push_back(std::move(first));
    while (skip_symbol(",")) {
      if (peek().kind != token_kind::name && !at_symbol("(")) break;
      all.parts.push_back(parse_target(may_be_attribute));
    }
    return all;
  }

  std::unique_ptr<statement> parse_set(const token& word) {
    auto s = make(statement_kind::set, word.at);
    s->to = parse_targets(true);
    if (skip_symbol("=")) {
      s->subject = parse_tuple(true);
      end_tag();
      return s;
    }
    if (!s->to.parts.empty()) fail(peek().at, "expected \"=\"");
    s->kind = statement_kind::set_block;
    if (peek().kind != token_kind::block_end)
      fail(peek().at, "expected \"=\" or \"%}\"; a set block with a filter is not supported");
    end_tag();
    s->body = parse_block({"endset"});
    end_tag();
    return s;
  }

  std::unique_ptr<statement> parse_for(const token& word) {
    auto s = make(statement_kind::for_loop, word.at);
    s->to = parse_targets(false);
    if (!skip_name("in")) fail(peek().at, "expected \"in\"");
    s->subject = parse_tuple(false);
    if (skip_name("if")) s->filter = parse_conditional();
    if (at_name("recursive")) fail(peek().at, "recursive loops are not supported");
    end_tag();
    ++loops_;
    s->body = parse_block({"else", "endfor"});
    --loops_;
    if (stopped_at_ == "else") {
      end_tag();
      s->otherwise = parse_block({"endfor"});
    }
    end_tag();
    return s;
  }

  std::unique_ptr<statement> parse_if(const token& word) {
    auto s = make(statement_kind::if_chain, word.at);
    while (true) {
      expression_ptr test = parse_tuple(true);
      end_tag();
      block body = parse_block({"elif", "else", "endif"});
      s->branches.emplace_back(std::move(test), std::move(body));
      if (stopped_at_ == "elif") continue;
      if (stopped_at_ == "else") {
        end_tag();
        s->branches.emplace_back(nullptr, parse_block({"endif"}));
      }
      end_tag();
      return s;
    }
  }

  std::unique_ptr<statement> parse_macro(const token& word) {
    if (loops_ > 0 || in_macro_) fail(word.at, "a macro inside a loop or a macro is not supported");
    auto s = make(statement_kind::macro, word.at);
    s->to = parse_target(false);
    expect_symbol("(");
    while (!skip_symbol(")")) {
      if (!s->parameters.empty()) expect_symbol(",");
      const token name = expect(token_kind::name, "a parameter's name");
      check_assignable(name);
      parameter p{id_of(name.symbol), std::string(name.symbol), nullptr};
      if (skip_symbol("="))
        p.otherwise = parse_conditional();
      else if (!s->parameters.empty() && s->parameters.back().otherwise)
        fail(name.at, "a parameter without a default follows one with a default");
      s->parameters.push_back(std::move(p));
    }
    end_tag();
    in_macro_ = true;
    s->body = parse_block({"endmacro"});
    in_macro_ = false;
    if (peek().kind == token_kind::name && peek().symbol == s->to.name) next();
    end_tag();
    return s;
  }

  std::string_view stopped_at_;
  std::size_t loops_ = 0;
  bool in_macro_ = false;
};

}  // namespace

syntax_tree parse(const template_source& source, std::size_t deepest) {
  return statement_parser(source, deepest).run();
}

}  // namespace qwen3_moe::jinja
