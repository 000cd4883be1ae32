// SPDX-License-Identifier: Apache-2.0
// Filters: value | name(arguments).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "../quote.hpp"
#include "../unicode.hpp"
#include "interpreter.hpp"
#include "parser.hpp"

namespace qwen3_moe::jinja {
namespace {

using args = const call_values&;

value filter_tojson(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "tojson", a, {"ensure_ascii", "indent", "separators", "sort_keys"});
  json_format f;
  f.ascii = b[0] && truth(*b[0]);
  f.sort_keys = b[3] && truth(*b[3]);
  if (b[1] && !b[1]->is_none()) {
    f.item_separator = ",";
    if (b[1]->is_string())
      f.indent = b[1]->as_text().bytes();
    else
      f.indent = std::string(
          static_cast<std::size_t>(std::clamp<wide_int>(run.to_integer(at, *b[1], "indent"), 0, 64)), ' ');
  }
  if (b[2] && !b[2]->is_none()) {
    const std::vector<value> pair = run.elements(at, *b[2]);
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string())
      run.fail(at, "separators must be two strings");
    f.item_separator = pair[0].as_text().bytes();
    f.key_separator = pair[1].as_text().bytes();
  }
  return value::string(to_json(run, at, v, f), false);
}

value filter_trim(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "trim", a, {"chars"});
  const text t = run.to_text(at, v);
  std::optional<std::string_view> chars;
  if (b[0] && !b[0]->is_none()) {
    if (!b[0]->is_string()) run.fail(at, "trim()'s characters must be a string");
    chars = b[0]->as_view();
    run.step(at, chars->size() * (t.size() / 16 + 1));
  }
  const auto [begin, end] = stripped_range(t.view(), chars, 3);
  return run.make_string(at, t.slice(begin, end));
}

value filter_length(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "length", a, {});
  return value::integer(run.length(at, v));
}

value filter_items(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "items", a, {});
  if (v.is_undefined()) return run.make_sequence(at, {}, sequence_kind::generator);
  if (!v.is_mapping()) run.fail(at, "items of a value of type " + type_name(v) + "; only a dict has them");
  std::vector<value> out;
  for (const auto& [key, x] : v.as_mapping().entries)
    out.push_back(run.make_sequence(at, {key, x}, sequence_kind::tuple));
  return run.make_sequence(at, std::move(out), sequence_kind::generator);
}

// An attribute's path: "a.b.0", or a number.
value follow(interpreter& run, position at, value v, const value& path) {
  if (!path.is_string()) return run.item(at, v, path);
  std::string_view rest = path.as_view();
  while (true) {
    const std::size_t dot = rest.find('.');
    const std::string_view name = rest.substr(0, dot);
    const auto number = !name.empty() && name.find_first_not_of("0123456789") == name.npos
                            ? parse_integer(name)
                            : std::nullopt;
    v = run.item(at, v, number ? value(*number) : value::string(std::string(name), false));
    if (dot == rest.npos) return v;
    rest.remove_prefix(dot + 1);
  }
}

value filter_join(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "join", a, {"d", "attribute"});
  const text between = b[0] ? run.to_text(at, *b[0]) : text();
  text out;
  bool first = true;
  for (const value& x : run.elements(at, v)) {
    if (!first) out.append(between);
    first = false;
    const text t = run.to_text(at, b[1] && !b[1]->is_none() ? follow(run, at, x, *b[1]) : x);
    run.charge_string(at, between.size() + t.size());
    out.append(t);
  }
  return value(std::move(out));
}

value filter_string(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "string", a, {});
  return v.is_string() ? v : value(run.to_text(at, v));
}

value filter_int(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "int", a, {"default", "base"});
  const value otherwise = b[0] ? *b[0] : value(wide_int{0});
  const wide_int base = b[1] ? run.to_integer(at, *b[1], "base") : 10;
  if (base < 2 || base > 36) run.fail(at, "base must be from 2 to 36");
  const auto from_real = [&](double d) {
    if (!std::isfinite(d)) return otherwise;
    if (std::abs(d) >= 9.2e18) run.fail_limit(at, "the number is too large");
    return value(static_cast<wide_int>(d));
  };
  if (v.is_real()) return from_real(v.as_real());
  if (v.is_number()) return value(v.as_integer());
  if (v.is_undefined()) run.fail(at, quote_text(v.undefined_name()) + " is undefined");
  if (!v.is_string()) return otherwise;
  if (const auto i = parse_integer(v.as_view(), static_cast<int>(base))) return value(*i);
  const auto d = parse_float(v.as_view());
  return d ? from_real(*d) : otherwise;
}

value filter_float(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "float", a, {"default"});
  if (v.is_number()) return value(v.as_real());
  if (v.is_undefined()) run.fail(at, quote_text(v.undefined_name()) + " is undefined");
  if (v.is_string())
    if (const auto d = parse_float(v.as_view())) return value(*d);
  return b[0] ? *b[0] : value(0.0);
}

value filter_default(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "default", a, {"default_value", "boolean"});
  if (!v.is_undefined() && !(b[1] && truth(*b[1]) && !truth(v))) return v;
  return b[0] ? *b[0] : value::string("", true);
}

value filter_first(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "first", a, {});
  const std::vector<value> x = run.elements(at, v);
  return x.empty() ? value::undefined("the first item of nothing") : x.front();
}

value filter_last(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "last", a, {});
  const std::vector<value> x = run.elements(at, v);
  return x.empty() ? value::undefined("the last item of nothing") : x.back();
}

value filter_list(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "list", a, {});
  return run.make_sequence(at, run.elements(at, v));
}

value filter_reverse(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "reverse", a, {});
  std::vector<value> x = run.elements(at, v);
  std::reverse(x.begin(), x.end());
  if (!v.is_string()) return run.make_sequence(at, std::move(x), sequence_kind::generator);
  text out;
  for (const value& c : x) out.append(c.as_text());
  return run.make_string(at, std::move(out));
}

value filter_replace(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "replace", a, {"old", "new", "count"});
  if (!b[0] || !b[1]) run.fail(at, "replace() needs what to replace and by what");
  const bool all = !b[2] || b[2]->is_none();
  const wide_int count = all ? -1
                             : std::clamp<wide_int>(run.to_integer(at, *b[2], "count"), -1,
                                                    std::numeric_limits<std::int64_t>::max());
  return value(replaced(run, at, run.to_text(at, v), run.to_text(at, *b[0]), run.to_text(at, *b[1]),
                        static_cast<std::int64_t>(count)));
}

template <class Change>
value changed(interpreter& run, position at, const value& v, args a, std::string_view name, Change change) {
  bind(run, at, name, a, {});
  const text t = run.to_text(at, v);
  return run.make_string(at, change(t.view()), t.all_trusted());
}

value filter_upper(interpreter& run, position at, const value& v, args a) {
  return changed(run, at, v, a, "upper", upper);
}
value filter_lower(interpreter& run, position at, const value& v, args a) {
  return changed(run, at, v, a, "lower", lower);
}
value filter_capitalize(interpreter& run, position at, const value& v, args a) {
  return changed(run, at, v, a, "capitalize", capitalized);
}
value filter_title(interpreter& run, position at, const value& v, args a) {
  return changed(run, at, v, a, "title", [](std::string_view s) { return title(s, false); });
}

value filter_safe(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "safe", a, {});
  return v.is_string() ? v : value(run.to_text(at, v));
}

value filter_abs(interpreter& run, position at, const value& v, args a) {
  bind(run, at, "abs", a, {});
  if (!v.is_number()) run.fail(at, "abs of a value of type " + type_name(v));
  if (v.is_real()) return value(std::abs(v.as_real()));
  return value(v.as_integer() < 0 ? -v.as_integer() : v.as_integer());
}

value filter_round(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "round", a, {"precision", "method"});
  if (!v.is_number()) run.fail(at, "round of a value of type " + type_name(v));
  const int precision =
      b[0] ? static_cast<int>(std::clamp<wide_int>(run.to_integer(at, *b[0], "precision"), 0, 20)) : 0;
  const std::string method = b[1] ? run.to_text(at, *b[1]).bytes() : "common";
  const double d = v.as_real(), scale = std::pow(10.0, precision);
  if (method == "ceil") return value(std::ceil(d * scale) / scale);
  if (method == "floor") return value(std::floor(d * scale) / scale);
  if (method != "common") run.fail(at, "round's method must be common, ceil or floor");
  if (!v.is_real()) return value(v.as_integer());
  if (!std::isfinite(d)) return value(d);
  char buffer[400];
  std::snprintf(buffer, sizeof buffer, "%.*f", precision, d);
  return value(parse_float(buffer).value_or(d));
}

// The rest of a call's arguments, handed on to a filter or test that is named by the first.
call_values rest_of(args a, std::size_t from) {
  call_values out;
  out.positional.assign(
      a.positional.begin() + static_cast<std::ptrdiff_t>(std::min(from, a.positional.size())),
      a.positional.end());
  out.named = a.named;
  return out;
}

value filter_map(interpreter& run, position at, const value& v, args a) {
  std::vector<value> out;
  if (a.positional.empty()) {
    const auto b = bind(run, at, "map", a, {"attribute", "default"});
    if (!b[0]) run.fail(at, "map() needs a filter's name or an attribute");
    for (const value& x : run.elements(at, v)) {
      value y = follow(run, at, x, *b[0]);
      out.push_back(y.is_undefined() && b[1] ? *b[1] : std::move(y));
    }
  } else {
    if (!a.positional[0].is_string()) run.fail(at, "map() needs a filter's name");
    const call_values rest = rest_of(a, 1);
    for (const value& x : run.elements(at, v))
      out.push_back(run.call_filter(at, a.positional[0].as_view(), x, rest));
  }
  return run.make_sequence(at, std::move(out), sequence_kind::generator);
}

value choose(interpreter& run, position at, const value& v, args a, bool by_attribute, bool wanted) {
  const std::size_t test_at = by_attribute ? 1 : 0;
  if (by_attribute && a.positional.empty()) run.fail(at, "the filter needs an attribute");
  std::vector<value> out;
  const bool plain = a.positional.size() <= test_at;
  if (!plain && !a.positional[test_at].is_string()) run.fail(at, "the filter needs a test's name");
  const call_values rest = rest_of(a, test_at + 1);
  for (const value& x : run.elements(at, v)) {
    const value subject = by_attribute ? follow(run, at, x, a.positional[0]) : x;
    const bool holds =
        plain ? truth(subject) : run.call_test(at, a.positional[test_at].as_view(), subject, rest);
    if (holds == wanted) out.push_back(x);
  }
  return run.make_sequence(at, std::move(out), sequence_kind::generator);
}

value filter_select(interpreter& run, position at, const value& v, args a) {
  return choose(run, at, v, a, false, true);
}
value filter_reject(interpreter& run, position at, const value& v, args a) {
  return choose(run, at, v, a, false, false);
}
value filter_selectattr(interpreter& run, position at, const value& v, args a) {
  return choose(run, at, v, a, true, true);
}
value filter_rejectattr(interpreter& run, position at, const value& v, args a) {
  return choose(run, at, v, a, true, false);
}

// What sorting and comparing look at: text without its case unless that matters.
value sort_key(interpreter& run, position at, const value& x, const std::optional<value>& attribute,
               bool case_sensitive) {
  const value v = attribute && !attribute->is_none() ? follow(run, at, x, *attribute) : x;
  return v.is_string() && !case_sensitive ? run.make_string(at, lower(v.as_view())) : v;
}

std::vector<value> sorted(interpreter& run, position at, const std::vector<value>& items,
                          const std::vector<value>& keys, bool reverse) {
  std::vector<std::size_t> order(items.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) {
    return reverse ? run.less(at, keys[y], keys[x]) : run.less(at, keys[x], keys[y]);
  });
  std::vector<value> out;
  for (const std::size_t i : order) out.push_back(items[i]);
  return out;
}

value filter_sort(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "sort", a, {"reverse", "case_sensitive", "attribute"});
  const std::vector<value> items = run.elements(at, v);
  std::vector<value> keys;
  for (const value& x : items) keys.push_back(sort_key(run, at, x, b[2], b[1] && truth(*b[1])));
  return run.make_sequence(at, sorted(run, at, items, keys, b[0] && truth(*b[0])));
}

value filter_dictsort(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "dictsort", a, {"case_sensitive", "by", "reverse"});
  if (!v.is_mapping()) run.fail(at, "dictsort of a value of type " + type_name(v));
  const bool by_value = b[1] && run.to_text(at, *b[1]).view() == "value";
  std::vector<value> items, keys;
  for (const auto& [key, x] : v.as_mapping().entries) {
    items.push_back(run.make_sequence(at, {key, x}, sequence_kind::tuple));
    keys.push_back(sort_key(run, at, by_value ? x : key, std::nullopt, b[0] && truth(*b[0])));
  }
  return run.make_sequence(at, sorted(run, at, items, keys, b[2] && truth(*b[2])));
}

value filter_unique(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "unique", a, {"case_sensitive", "attribute"});
  std::vector<value> out, seen;
  for (const value& x : run.elements(at, v)) {
    value key = sort_key(run, at, x, b[1], b[0] && truth(*b[0]));
    if (std::any_of(seen.begin(), seen.end(), [&](const value& s) { return run.equal(at, s, key); }))
      continue;
    seen.push_back(std::move(key));
    out.push_back(x);
  }
  return run.make_sequence(at, std::move(out), sequence_kind::generator);
}

value extreme(interpreter& run, position at, const value& v, args a, std::string_view name, bool largest) {
  const auto b = bind(run, at, name, a, {"case_sensitive", "attribute"});
  const std::vector<value> items = run.elements(at, v);
  if (items.empty()) return value::undefined("no item: the sequence is empty");
  std::size_t best = 0;
  value best_key;
  for (std::size_t i = 0; i < items.size(); ++i) {
    value key = sort_key(run, at, items[i], b[1], b[0] && truth(*b[0]));
    if (i > 0 && !(largest ? run.less(at, best_key, key) : run.less(at, key, best_key))) continue;
    best = i;
    best_key = std::move(key);
  }
  return items[best];
}

value filter_max(interpreter& run, position at, const value& v, args a) {
  return extreme(run, at, v, a, "max", true);
}
value filter_min(interpreter& run, position at, const value& v, args a) {
  return extreme(run, at, v, a, "min", false);
}

value filter_indent(interpreter& run, position at, const value& v, args a) {
  const auto b = bind(run, at, "indent", a, {"width", "first", "blank"});
  const bool first = b[1] && truth(*b[1]), blank = b[2] && truth(*b[2]);
  text by(std::string(4, ' '), true);
  if (b[0] && b[0]->is_string())
    by = b[0]->as_text();
  else if (b[0])
    by = text(
        std::string(
            static_cast<std::size_t>(std::clamp<wide_int>(run.to_integer(at, *b[0], "width"), 0, 1000)), ' '),
        true);
  text in = run.to_text(at, v), out;
  in.append("\n", true);  // so that every line has an end
  for (std::size_t begin = 0, line = 0; begin < in.size(); ++line) {
    const std::size_t end = in.view().find('\n', begin);
    if (line > 0) out.append("\n", in.all_trusted());
    if (line == 0 ? first : (blank || end > begin)) out.append(by);
    run.charge_string(at, by.size() + 1 + end - begin);
    out.append(in, begin, end);
    begin = end + 1;
  }
  return value(std::move(out));
}

struct named_filter {
  std::string_view name;
  filter_function function;
};

constexpr named_filter filters[] = {{"abs", filter_abs},
                                    {"capitalize", filter_capitalize},
                                    {"count", filter_length},
                                    {"d", filter_default},
                                    {"default", filter_default},
                                    {"dictsort", filter_dictsort},
                                    {"first", filter_first},
                                    {"float", filter_float},
                                    {"indent", filter_indent},
                                    {"int", filter_int},
                                    {"items", filter_items},
                                    {"join", filter_join},
                                    {"last", filter_last},
                                    {"length", filter_length},
                                    {"list", filter_list},
                                    {"lower", filter_lower},
                                    {"map", filter_map},
                                    {"max", filter_max},
                                    {"min", filter_min},
                                    {"reject", filter_reject},
                                    {"rejectattr", filter_rejectattr},
                                    {"replace", filter_replace},
                                    {"reverse", filter_reverse},
                                    {"round", filter_round},
                                    {"safe", filter_safe},
                                    {"select", filter_select},
                                    {"selectattr", filter_selectattr},
                                    {"sort", filter_sort},
                                    {"string", filter_string},
                                    {"title", filter_title},
                                    {"tojson", filter_tojson},
                                    {"trim", filter_trim},
                                    {"unique", filter_unique},
                                    {"upper", filter_upper}};

}  // namespace

filter_function find_filter(std::string_view name) {
  for (const named_filter& f : filters)
    if (f.name == name) return f.function;
  return nullptr;
}

value interpreter::call_filter(position at, std::string_view name, const value& input,
                               const call_values& arguments) {
  const filter_function f = find_filter(name);
  if (!f) fail(at, "the filter " + quote_text(name) + " is not supported");
  // map("map", …) and the like would recurse with the data's depth at most, but their arguments are the
  // template's.
  if (name == "map" || name.starts_with("select") || name.starts_with("reject"))
    fail(at, "the filter " + quote_text(name) + " cannot be used by another filter");
  step(at);
  return f(*this, at, input, arguments);
}

}  // namespace qwen3_moe::jinja
