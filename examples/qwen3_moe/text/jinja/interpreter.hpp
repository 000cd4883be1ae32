// SPDX-License-Identifier: Apache-2.0
/// \file
/// Runs a syntax tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ast.hpp"
#include "value.hpp"

namespace qwen3_moe::jinja {

/// What one rendering may cost; past a limit it ends in template_error (limit).
struct run_limits {
  std::size_t output_bytes = std::size_t{64} << 20;
  std::size_t steps = 8'000'000;                      ///< expressions, statements and elements looked at
  std::size_t string_bytes = std::size_t{512} << 20;  ///< of all strings made on the way, together
  std::size_t call_depth = 16;                        ///< macros inside macros
};

/// Expressions, statements and macro calls inside each other; about 800 bytes of stack each.
inline constexpr std::size_t deepest_evaluation = 200;

/// Arguments of a call, evaluated.
struct call_values {
  std::vector<value> positional;
  std::vector<std::pair<std::string, value>> named;
};

/// Methods and global functions, and macros of the template.
struct callable {
  enum class function {
    method,
    macro,
    raise_exception,
    name_space,
    range,
    dict,
    strftime_now,
    cycle,
    changed
  } what;
  std::string name;
  value self{};                      ///< of method, cycle, changed
  const statement* macro = nullptr;  ///< of macro
};

/// One rendering. Not copied, not shared.
class interpreter {
 public:
  interpreter(const template_source& source, const syntax_tree& tree, const run_limits& limits,
              std::optional<std::int64_t> now);

  void set_global(std::string_view name, value v);
  text run();

  [[noreturn]] void fail(position at, const std::string& reason) const;
  [[noreturn]] void fail_limit(position at, const std::string& reason) const;

  /// Counts work against the limits.
  void step(position at, std::size_t n = 1) {
    if (n > steps_left_)
      fail_limit(at, "the template takes more than " + std::to_string(limits_.steps) + " steps");
    steps_left_ -= n;
  }
  void charge_string(position at, std::size_t bytes) {
    if (bytes > string_bytes_left_)
      fail_limit(
          at, "the template makes more than " + std::to_string(limits_.string_bytes) + " bytes of strings");
    string_bytes_left_ -= bytes;
  }

  // Values, with their cost counted.
  value make_string(position at, text t);
  value make_string(position at, std::string s, bool trusted = false) {
    return make_string(at, text(std::move(s), trusted));
  }
  value make_sequence(position at, std::vector<value> items, sequence_kind kind = sequence_kind::list);
  value make_mapping(position at, mapping m);

  // Python's operations.
  bool equal(position at, const value& a, const value& b);
  bool less(position at, const value& a, const value& b);
  bool contains(position at, const value& in, const value& what);
  std::vector<value> elements(position at, const value& v);
  std::size_t length(position at, const value& v);
  value attribute(position at, const value& of, const std::string& name);
  value item(position at, const value& of, const value& index);
  value call_filter(position at, std::string_view name, const value& input, const call_values& arguments);
  bool call_test(position at, std::string_view name, const value& input, const call_values& arguments);
  value call_method(position at, const callable& method, const call_values& arguments);
  /// str(v): strings as they are, None as "None", undefined as nothing.
  text to_text(position at, const value& v);
  wide_int to_integer(position at, const value& v, std::string_view what);
  std::int64_t now() const;

  const template_source& source() const { return source_; }

 private:
  enum class flow { go_on, leave_loop, next_round };
  struct scope {
    scope* parent;
    std::vector<std::pair<name_id, value>> values;
  };

  flow run_block(const block& b);
  flow run_statement(const statement& s);
  flow run_for(const statement& s);
  void assign(const target& to, const value& v);
  void set_here(name_id id, value v);
  const value* find(name_id id) const;
  void emit(position at, const text& t);

  value evaluate(const expression& e);
  value evaluate_inner(const expression& e);
  value evaluate_binary(position at, operation op, const value& a, const value& b);
  bool evaluate_comparison(const expression& e);
  value evaluate_postfix(const expression& e);
  value evaluate_slice(const postfix_step& s, const value& of);
  value evaluate_arithmetic(position at, operation op, const value& a, const value& b);
  value checked(position at, wide_int i) const;
  void check_storable(position at, const value& v) const;
  call_values evaluate_arguments(const call_expressions& a);
  value call(position at, const value& what, const call_values& arguments);
  value call_macro(position at, const statement& m, const call_values& arguments);
  value call_global(position at, const callable& c, const call_values& arguments);

  struct deeper;

  const template_source& source_;
  const syntax_tree& tree_;
  run_limits limits_;
  std::optional<std::int64_t> now_;
  std::size_t steps_left_, string_bytes_left_, evaluation_depth_ = 0, call_depth_ = 0, loop_depth_ = 0;
  scope globals_{nullptr, {}}, root_{&globals_, {}};
  scope* here_ = &root_;
  text* out_ = nullptr;
  name_id loop_id_;
};

/// Puts arguments into the places of `names`. Fails for too many, unknown or doubled ones.
std::vector<std::optional<value>> bind(interpreter& run, position at, std::string_view function,
                                       const call_values& arguments,
                                       std::initializer_list<std::string_view> names);

/// Python's repr() of a value. The text counts as data.
std::string python_repr(interpreter& run, position at, const value& v);
/// Python's repr() of a float.
std::string python_float(double d);
std::string to_string(wide_int i);
/// Python's float(), int() of a string: spaces around and _ between digits allowed.
std::optional<double> parse_float(std::string_view s);
std::optional<wide_int> parse_integer(std::string_view s, int base = 10);

struct json_format {
  std::optional<std::string> indent;
  std::string item_separator = ", ", key_separator = ": ";
  bool ascii = false, sort_keys = false;
};
/// json.dumps() of a value, keys in order, nothing escaped for HTML.
std::string to_json(interpreter& run, position at, const value& v, const json_format& format);

/// White space as Python's str.strip() and str.split() see it.
bool is_python_space(char32_t c);
/// Byte range left after strip(); `chars` empty means white space. `sides`: 1 left, 2 right, 3 both.
std::pair<std::size_t, std::size_t> stripped_range(std::string_view s, std::optional<std::string_view> chars,
                                                   int sides);
text replaced(interpreter& run, position at, const text& in, const text& old, const text& by,
              std::int64_t count);
std::string upper(std::string_view s);
std::string lower(std::string_view s);
std::string capitalized(std::string_view s);
/// `python`: every letter behind a non-letter is made big, as str.title(); else words as the filter does.
std::string title(std::string_view s, bool python);

}  // namespace qwen3_moe::jinja
