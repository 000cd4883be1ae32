// SPDX-License-Identifier: Apache-2.0
// Expressions.
#include <cmath>
#include <limits>

#include "../quote.hpp"
#include "../unicode.hpp"
#include "interpreter.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr wide_int lowest_integer = std::numeric_limits<std::int64_t>::min();
constexpr wide_int highest_integer = std::numeric_limits<std::uint64_t>::max();

std::string_view symbol_of(operation op) {
  switch (op) {
    case operation::add:
      return "+";
    case operation::subtract:
      return "-";
    case operation::multiply:
      return "*";
    case operation::divide:
      return "/";
    case operation::floor_divide:
      return "//";
    case operation::modulo:
      return "%";
    case operation::power:
      return "**";
    default:
      return "~";
  }
}

// Python's range of a slice over `size` things: first index, one past the last, stride.
struct slice_range {
  std::int64_t start, stop, stride;
};

slice_range clamp_slice(std::int64_t size, std::optional<std::int64_t> start,
                        std::optional<std::int64_t> stop, std::int64_t stride) {
  const std::int64_t low = stride < 0 ? -1 : 0, high = stride < 0 ? size - 1 : size;
  const auto place = [&](std::int64_t i) { return i < 0 ? std::max(i + size, low) : std::min(i, high); };
  return {start ? place(*start) : (stride < 0 ? high : low), stop ? place(*stop) : (stride < 0 ? low : high),
          stride};
}

}  // namespace

value interpreter::checked(position at, wide_int i) const {
  if (i < lowest_integer || i > highest_integer) fail_limit(at, "the number is too large");
  return value(i);
}

value interpreter::evaluate(const expression& e) {
  step(e.at);
  if (e.kind == expression_kind::literal) return e.literal;
  if (e.kind == expression_kind::name) {
    const value* v = find(e.id);
    return v ? *v : value::undefined(e.name);
  }
  if (evaluation_depth_ >= deepest_evaluation) fail_limit(e.at, "the template calls and nests too deeply");
  ++evaluation_depth_;
  value out = evaluate_inner(e);
  --evaluation_depth_;
  return out;
}

value interpreter::evaluate_inner(const expression& e) {
  switch (e.kind) {
    case expression_kind::list:
    case expression_kind::tuple: {
      std::vector<value> items;
      items.reserve(e.operands.size());
      for (const auto& o : e.operands) items.push_back(evaluate(*o));
      return make_sequence(e.at, std::move(items),
                           e.kind == expression_kind::list ? sequence_kind::list : sequence_kind::tuple);
    }
    case expression_kind::dict: {
      mapping m;
      for (std::size_t i = 0; i + 1 < e.operands.size(); i += 2) {
        value key = evaluate(*e.operands[i]);
        if (!key.is_string() && !key.is_number() && !key.is_none())
          fail(e.operands[i]->at, "a value of type " + type_name(key) + " cannot be a key");
        m.set(std::move(key), evaluate(*e.operands[i + 1]));
      }
      return make_mapping(e.at, std::move(m));
    }
    case expression_kind::negate:
    case expression_kind::plus: {
      const value v = evaluate(*e.operands[0]);
      if (!v.is_number()) fail(e.at, "bad operand type for unary sign: " + type_name(v));
      const bool minus = e.kind == expression_kind::negate;
      if (v.is_real()) return value(minus ? -v.as_real() : v.as_real());
      return checked(e.at, minus ? -v.as_integer() : v.as_integer());
    }
    case expression_kind::logical_not:
      return value(!truth(evaluate(*e.operands[0])));
    case expression_kind::logical_and:
    case expression_kind::logical_or: {
      const bool stop_at = e.kind == expression_kind::logical_or;
      value v;
      for (const auto& o : e.operands)
        if (v = evaluate(*o); truth(v) == stop_at) break;
      return v;
    }
    case expression_kind::conditional:
      if (truth(evaluate(*e.operands[1]))) return evaluate(*e.operands[0]);
      return e.operands[2] ? evaluate(*e.operands[2]) : value::undefined("the missing else branch");
    case expression_kind::chain: {
      value v = evaluate(*e.operands[0]);
      for (std::size_t i = 0; i < e.operations.size(); ++i)
        v = evaluate_binary(e.at, e.operations[i], v, evaluate(*e.operands[i + 1]));
      return v;
    }
    case expression_kind::compare:
      return value(evaluate_comparison(e));
    case expression_kind::postfix:
      return evaluate_postfix(e);
    case expression_kind::literal:
    case expression_kind::name:
      break;
  }
  return {};
}

bool interpreter::evaluate_comparison(const expression& e) {
  value left = evaluate(*e.operands[0]);
  for (std::size_t i = 0; i < e.operations.size(); ++i) {
    value right = evaluate(*e.operands[i + 1]);
    bool holds = false;
    switch (e.operations[i]) {
      case operation::equal:
        holds = equal(e.at, left, right);
        break;
      case operation::not_equal:
        holds = !equal(e.at, left, right);
        break;
      case operation::less:
        holds = less(e.at, left, right);
        break;
      case operation::greater:
        holds = less(e.at, right, left);
        break;
      // Not the negation of the other: both are false for a NaN.
      case operation::less_equal:
        holds = less(e.at, left, right) || equal(e.at, left, right);
        break;
      case operation::greater_equal:
        holds = less(e.at, right, left) || equal(e.at, left, right);
        break;
      case operation::in:
        holds = contains(e.at, right, left);
        break;
      default:
        holds = !contains(e.at, right, left);
        break;
    }
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

value interpreter::evaluate_binary(position at, operation op, const value& a, const value& b) {
  if (op == operation::concatenate) {
    text t = to_text(at, a);
    t.append(to_text(at, b));
    return make_string(at, std::move(t));
  }
  for (const value* v : {&a, &b})
    if (v->is_undefined()) fail(at, quote_text(v->undefined_name()) + " is undefined");
  if (a.is_number() && b.is_number()) return evaluate_arithmetic(at, op, a, b);
  if (op == operation::add && a.is_string() && b.is_string()) {
    text t = a.as_text();
    t.append(b.as_text());
    return make_string(at, std::move(t));
  }
  if (op == operation::add && a.is_sequence() && b.is_sequence() &&
      a.as_sequence().kind == b.as_sequence().kind && a.as_sequence().kind != sequence_kind::generator) {
    step(at, a.as_sequence().items.size() + b.as_sequence().items.size());
    std::vector<value> items = a.as_sequence().items;
    items.insert(items.end(), b.as_sequence().items.begin(), b.as_sequence().items.end());
    return make_sequence(at, std::move(items), a.as_sequence().kind);
  }
  if (op == operation::multiply && (a.is_string() || a.is_sequence() || b.is_string() || b.is_sequence())) {
    const bool swapped = a.is_number();
    const value& many = swapped ? b : a;
    const value& times = swapped ? a : b;
    if (times.is_number() && !times.is_real()) {
      const wide_int n = std::max<wide_int>(times.as_integer(), 0);
      const std::size_t size = many.is_string() ? many.as_text().size() : many.as_sequence().items.size();
      if (size > 0 && n > static_cast<wide_int>(limits_.string_bytes / size))
        fail_limit(at, "the repetition is too long");
      if (many.is_string()) {
        charge_string(at, size * static_cast<std::size_t>(n));
        text t;
        for (wide_int i = 0; i < n && size > 0; ++i) t.append(many.as_text());
        return value(std::move(t));
      }
      if (many.as_sequence().kind != sequence_kind::generator) {
        step(at, size * static_cast<std::size_t>(n));
        std::vector<value> items;
        for (wide_int i = 0; i < n && size > 0; ++i)
          items.insert(items.end(), many.as_sequence().items.begin(), many.as_sequence().items.end());
        return make_sequence(at, std::move(items), many.as_sequence().kind);
      }
    }
  }
  fail(at, "unsupported operand types for " + std::string(symbol_of(op)) + ": " + type_name(a) + " and " +
               type_name(b));
}

value interpreter::evaluate_arithmetic(position at, operation op, const value& a, const value& b) {
  const bool real = a.is_real() || b.is_real() || op == operation::divide;
  const bool divides = op == operation::divide || op == operation::floor_divide || op == operation::modulo;
  if (divides && (real ? b.as_real() == 0 : b.as_integer() == 0)) fail(at, "division by zero");
  if (real) {
    const double x = a.as_real(), y = b.as_real();
    switch (op) {
      case operation::add:
        return value(x + y);
      case operation::subtract:
        return value(x - y);
      case operation::multiply:
        return value(x * y);
      case operation::divide:
        return value(x / y);
      case operation::power:
        return value(std::pow(x, y));
      default: {
        // The remainder has the divisor's sign.
        double r = std::fmod(x, y);
        if (r != 0 && (r < 0) != (y < 0)) r += y;
        if (op == operation::modulo) return value(r == 0 ? std::copysign(0.0, y) : r);
        return value(std::round((x - r) / y));
      }
    }
  }
  const wide_int x = a.as_integer(), y = b.as_integer();
  switch (op) {
    case operation::add:
      return checked(at, x + y);
    case operation::subtract:
      return checked(at, x - y);
    case operation::multiply: {
      wide_int product = 0;
      if (__builtin_mul_overflow(x, y, &product)) fail_limit(at, "the number is too large");
      return checked(at, product);
    }
    case operation::power: {
      if (y < 0) return value(std::pow(a.as_real(), b.as_real()));
      if (y > 64 && x != 0 && x != 1 && x != -1) fail_limit(at, "the number is too large");
      wide_int product = 1;
      for (wide_int i = 0; i < (y > 64 ? y % 2 + 2 : y); ++i) product = checked(at, product * x).as_integer();
      return value(product);
    }
    default: {
      wide_int quotient = x / y, r = x % y;
      if (r != 0 && (r < 0) != (y < 0)) --quotient, r += y;
      return checked(at, op == operation::modulo ? r : quotient);
    }
  }
}

call_values interpreter::evaluate_arguments(const call_expressions& a) {
  call_values out;
  for (const auto& e : a.positional) out.positional.push_back(evaluate(*e));
  for (const auto& [name, e] : a.named) out.named.emplace_back(name, evaluate(*e));
  return out;
}

value interpreter::evaluate_postfix(const expression& e) {
  value v = evaluate(*e.operands[0]);
  for (const postfix_step& s : e.steps) {
    step(s.at);
    switch (s.kind) {
      case step_kind::attribute:
        v = attribute(s.at, v, s.name);
        break;
      case step_kind::item:
        v = item(s.at, v, evaluate(*s.index));
        break;
      case step_kind::slice:
        v = evaluate_slice(s, v);
        break;
      case step_kind::call:
        v = call(s.at, v, evaluate_arguments(s.arguments));
        break;
      case step_kind::filter:
        v = s.filter(*this, s.at, v, evaluate_arguments(s.arguments));
        break;
      case step_kind::test:
        v = value(s.test(*this, s.at, v, evaluate_arguments(s.arguments)) != s.negated);
        break;
    }
  }
  return v;
}

value interpreter::evaluate_slice(const postfix_step& s, const value& of) {
  const auto bound = [&](const expression_ptr& e) -> std::optional<std::int64_t> {
    if (!e) return std::nullopt;
    const value v = evaluate(*e);
    if (v.is_none()) return std::nullopt;
    const wide_int i = to_integer(s.at, v, "a slice's bound");
    constexpr wide_int far = std::numeric_limits<std::int64_t>::max() / 4;
    return static_cast<std::int64_t>(std::clamp(i, -far, far));
  };
  const auto start = bound(s.index), stop = bound(s.stop), stride = bound(s.stride);
  if (stride == 0) fail(s.at, "a slice's step cannot be zero");
  if (of.is_undefined()) fail(s.at, quote_text(of.undefined_name()) + " is undefined");
  if (of.is_sequence() && of.as_sequence().kind != sequence_kind::generator) {
    const auto& items = of.as_sequence().items;
    const slice_range r =
        clamp_slice(static_cast<std::int64_t>(items.size()), start, stop, stride.value_or(1));
    std::vector<value> out;
    for (std::int64_t i = r.start; r.stride > 0 ? i < r.stop : i > r.stop; i += r.stride)
      out.push_back(items[static_cast<std::size_t>(i)]);
    return make_sequence(s.at, std::move(out), of.as_sequence().kind);
  }
  if (!of.is_string()) fail(s.at, "a value of type " + type_name(of) + " cannot be sliced");
  const text& t = of.as_text();
  charge_string(s.at, t.size());
  std::vector<std::size_t> starts;  // of each character, and the end
  for (std::size_t at = 0; at < t.size(); at += decode_utf8(t.view(), at).bytes) starts.push_back(at);
  const auto size = static_cast<std::int64_t>(starts.size());
  starts.push_back(t.size());
  const slice_range r = clamp_slice(size, start, stop, stride.value_or(1));
  if (r.stride == 1)
    return value(r.start < r.stop ? t.slice(starts[static_cast<std::size_t>(r.start)],
                                            starts[static_cast<std::size_t>(r.stop)])
                                  : text());
  text out;
  for (std::int64_t i = r.start; r.stride > 0 ? i < r.stop : i > r.stop; i += r.stride)
    out.append(t, starts[static_cast<std::size_t>(i)], starts[static_cast<std::size_t>(i) + 1]);
  return value(std::move(out));
}

wide_int interpreter::to_integer(position at, const value& v, std::string_view what) {
  if (!v.is_number() || v.is_real())
    fail(at, std::string(what) + " must be a whole number, not " + type_name(v));
  return v.as_integer();
}

}  // namespace qwen3_moe::jinja
