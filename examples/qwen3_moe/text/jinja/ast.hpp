// SPDX-License-Identifier: Apache-2.0
/// \file
/// The syntax tree of a template. The parser bounds its depth; chains of operators are flat.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lexer.hpp"
#include "value.hpp"

namespace qwen3_moe::jinja {

class interpreter;
struct call_values;
using filter_function = value (*)(interpreter&, position, const value& input, const call_values&);
using test_function = bool (*)(interpreter&, position, const value& input, const call_values&);

/// A name, as a number that is the same throughout one template.
using name_id = std::uint32_t;

struct expression;
using expression_ptr = std::unique_ptr<expression>;

struct call_expressions {
  std::vector<expression_ptr> positional;
  std::vector<std::pair<std::string, expression_ptr>> named;
};

enum class operation {
  add,
  subtract,
  multiply,
  divide,
  floor_divide,
  modulo,
  power,
  concatenate,
  equal,
  not_equal,
  less,
  less_equal,
  greater,
  greater_equal,
  in,
  not_in
};

enum class step_kind { attribute, item, slice, call, filter, test };

/// One of the things that may follow an operand: .name [index] [a:b:c] (…) |filter is test
struct postfix_step {
  step_kind kind{};
  position at = 0;
  std::string name{};
  expression_ptr index{}, stop{},
      stride{};  // of item; of slice, where `index` is the start and each may be absent
  call_expressions arguments{};
  filter_function filter = nullptr;
  test_function test = nullptr;
  bool negated = false;
};

enum class expression_kind {
  literal,
  name,
  list,
  tuple,
  dict,
  negate,
  plus,
  logical_not,  // operands[0]
  chain,        // operands[0] op operands[1] op …, from the left
  compare,      // the same, each pair held against its neighbour
  logical_and,
  logical_or,
  conditional,  // operands: then, test, else (may be absent)
  postfix       // operands[0], steps
};

struct expression {
  expression_kind kind;
  position at;
  value literal{};
  name_id id = 0;
  std::string name{};
  std::vector<expression_ptr> operands{};  // of dict: key, value, key, value, …
  std::vector<operation> operations{};
  std::vector<postfix_step> steps{};
};

struct statement;
using block = std::vector<std::unique_ptr<statement>>;

/// A place to assign to: a name, an attribute of a namespace, or several.
struct target {
  position at = 0;
  name_id id = 0;
  std::string name{}, attribute{};
  std::vector<target> parts{};
};

struct parameter {
  name_id id;
  std::string name;
  expression_ptr otherwise;  // absent: undefined
};

enum class statement_kind { data, print, set, set_block, for_loop, if_chain, macro, leave_loop, next_round };

struct statement {
  statement_kind kind;
  position at;
  text data{};
  expression_ptr subject{};                                  // of print, set; what a for walks over
  target to{};                                               // of set, set_block, for, macro
  expression_ptr filter{};                                   // of for
  std::vector<std::pair<expression_ptr, block>> branches{};  // of if; the else branch has no test
  block body{}, otherwise{};
  std::vector<parameter> parameters{};
};

struct syntax_tree {
  block body;
  std::vector<std::string> names;  // by name_id
};

}  // namespace qwen3_moe::jinja
