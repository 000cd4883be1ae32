// SPDX-License-Identifier: Apache-2.0
// Tests: value is name(arguments).
#include <cmath>

#include "../quote.hpp"
#include "interpreter.hpp"
#include "parser.hpp"

namespace qwen3_moe::jinja {
namespace {

using args = const call_values&;

value operand(interpreter& run, position at, args a) {
  const auto b = bind(run, at, "the test", a, {"other"});
  if (!b[0]) run.fail(at, "the test needs a value to hold against");
  return *b[0];
}

template <bool (*Holds)(const value&)>
bool test_type(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "the test", a, {});
  return Holds(v);
}

bool is_defined(const value& v) { return !v.is_undefined(); }
bool is_undefined(const value& v) { return v.is_undefined(); }
bool is_none(const value& v) { return v.is_none(); }
bool is_string(const value& v) { return v.is_string(); }
bool is_mapping(const value& v) { return v.is_mapping(); }
bool is_generator(const value& v) {
  return v.is_sequence() && v.as_sequence().kind == sequence_kind::generator;
}
bool is_sequence(const value& v) {
  return (v.is_sequence() && !is_generator(v)) || v.is_mapping() || v.is_string() || v.is_undefined();
}
bool is_iterable(const value& v) {
  return v.is_sequence() || v.is_mapping() || v.is_string() || v.is_undefined() || v.is_loop();
}
bool is_number(const value& v) { return v.is_number(); }
bool is_integer(const value& v) { return v.is_integer(); }
bool is_float(const value& v) { return v.is_real(); }
bool is_boolean(const value& v) { return v.is_bool(); }
bool is_true(const value& v) { return v.is_bool() && v.as_bool(); }
bool is_false(const value& v) { return v.is_bool() && !v.as_bool(); }
bool is_callable(const value& v) { return v.is_callable(); }

bool remainder_is_zero(interpreter& run, position at, const value& v, wide_int by) {
  if (!v.is_number()) run.fail(at, "a value of type " + type_name(v) + " has no remainder");
  if (by == 0) run.fail(at, "division by zero");
  return v.is_real() ? std::fmod(v.as_real(), static_cast<double>(by)) == 0 : v.as_integer() % by == 0;
}

bool test_even(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "even", a, {});
  return remainder_is_zero(run, at, v, 2);
}
bool test_odd(interpreter& run, position at, const value& v, args a) { return !test_even(run, at, v, a); }
bool test_divisibleby(interpreter& run, position at, const value& v, args a) {
  return remainder_is_zero(run, at, v, run.to_integer(at, operand(run, at, a), "divisibleby's argument"));
}
bool test_eq(interpreter& run, position at, const value& v, args a) {
  return run.equal(at, v, operand(run, at, a));
}
bool test_ne(interpreter& run, position at, const value& v, args a) { return !test_eq(run, at, v, a); }
bool test_lt(interpreter& run, position at, const value& v, args a) {
  return run.less(at, v, operand(run, at, a));
}
bool test_gt(interpreter& run, position at, const value& v, args a) {
  return run.less(at, operand(run, at, a), v);
}
bool test_le(interpreter& run, position at, const value& v, args a) {
  return test_lt(run, at, v, a) || test_eq(run, at, v, a);
}
bool test_ge(interpreter& run, position at, const value& v, args a) {
  return test_gt(run, at, v, a) || test_eq(run, at, v, a);
}
bool test_in(interpreter& run, position at, const value& v, args a) {
  return run.contains(at, operand(run, at, a), v);
}
bool test_sameas(interpreter& run, position at, const value& v, args a) {
  return v.same_as(operand(run, at, a));
}
bool test_lower(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "lower", a, {});
  const text t = run.to_text(at, v);
  return lower(t.view()) == t.view() && upper(t.view()) != lower(t.view());
}
bool test_upper(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "upper", a, {});
  const text t = run.to_text(at, v);
  return upper(t.view()) == t.view() && upper(t.view()) != lower(t.view());
}

struct named_test {
  std::string_view name;
  test_function function;
};

constexpr named_test tests[] = {{"boolean", test_type<is_boolean>},
                                {"callable", test_type<is_callable>},
                                {"defined", test_type<is_defined>},
                                {"divisibleby", test_divisibleby},
                                {"eq", test_eq},
                                {"equalto", test_eq},
                                {"even", test_even},
                                {"false", test_type<is_false>},
                                {"float", test_type<is_float>},
                                {"ge", test_ge},
                                {"greaterthan", test_gt},
                                {"gt", test_gt},
                                {"in", test_in},
                                {"integer", test_type<is_integer>},
                                {"iterable", test_type<is_iterable>},
                                {"le", test_le},
                                {"lessthan", test_lt},
                                {"lower", test_lower},
                                {"lt", test_lt},
                                {"mapping", test_type<is_mapping>},
                                {"ne", test_ne},
                                {"none", test_type<is_none>},
                                {"number", test_type<is_number>},
                                {"odd", test_odd},
                                {"sameas", test_sameas},
                                {"sequence", test_type<is_sequence>},
                                {"string", test_type<is_string>},
                                {"true", test_type<is_true>},
                                {"undefined", test_type<is_undefined>},
                                {"upper", test_upper},
                                {"==", test_eq},
                                {"!=", test_ne},
                                {"<", test_lt},
                                {"<=", test_le},
                                {">", test_gt},
                                {">=", test_ge}};

}  // namespace

test_function find_test(std::string_view name) {
  for (const named_test& t : tests)
    if (t.name == name) return t.function;
  return nullptr;
}

bool interpreter::call_test(position at, std::string_view name, const value& input,
                            const call_values& arguments) {
  const test_function t = find_test(name);
  if (!t) fail(at, "the test " + quote_text(name) + " is not supported");
  step(at);
  return t(*this, at, input, arguments);
}

}  // namespace qwen3_moe::jinja
