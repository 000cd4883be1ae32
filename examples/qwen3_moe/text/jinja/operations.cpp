// SPDX-License-Identifier: Apache-2.0
// What Python does with its values: comparing, looking into them, writing them out.
#include <algorithm>

#include "../quote.hpp"
#include "../unicode.hpp"
#include "interpreter.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr std::string_view dict_methods[] = {"clear", "copy",    "fromkeys",   "get",    "items", "keys",
                                             "pop",   "popitem", "setdefault", "update", "values"};
constexpr std::string_view string_methods[] = {
    "capitalize",   "count",   "endswith", "find",   "index",  "isalpha", "isdigit",
    "islower",      "isspace", "isupper",  "join",   "lower",  "lstrip",  "removeprefix",
    "removesuffix", "replace", "rfind",    "rsplit", "rstrip", "split",   "splitlines",
    "startswith",   "strip",   "title",    "upper"};
constexpr std::string_view list_methods[] = {"count", "index"};

template <std::size_t N>
bool is_one_of(std::string_view name, const std::string_view (&list)[N]) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

value method(const value& self, const std::string& name) {
  return value(std::make_shared<const callable>(callable{callable::function::method, name, self}));
}

}  // namespace

bool interpreter::equal(position at, const value& a, const value& b) {
  step(at);
  if (a.is_number() && b.is_number()) {
    if (!a.is_real() && !b.is_real()) return a.as_integer() == b.as_integer();
    return a.as_real() == b.as_real();
  }
  if (a.is_string() && b.is_string()) return a.as_view() == b.as_view();
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.is_sequence() && b.is_sequence() && a.as_sequence().kind == b.as_sequence().kind &&
      a.as_sequence().kind != sequence_kind::generator) {
    const auto &x = a.as_sequence().items, &y = b.as_sequence().items;
    if (x.size() != y.size()) return false;
    for (std::size_t i = 0; i < x.size(); ++i)
      if (!equal(at, x[i], y[i])) return false;
    return true;
  }
  if (a.is_mapping() && b.is_mapping()) {
    if (a.as_mapping().entries.size() != b.as_mapping().entries.size()) return false;
    for (const auto& [key, v] : a.as_mapping().entries) {
      const value* other = b.as_mapping().find(key);
      if (!other || !equal(at, v, *other)) return false;
    }
    return true;
  }
  return a.same_as(b);
}

bool interpreter::less(position at, const value& a, const value& b) {
  step(at);
  if (a.is_number() && b.is_number()) {
    if (!a.is_real() && !b.is_real()) return a.as_integer() < b.as_integer();
    return a.as_real() < b.as_real();
  }
  if (a.is_string() && b.is_string()) return a.as_view() < b.as_view();
  if (a.is_sequence() && b.is_sequence() && a.as_sequence().kind == b.as_sequence().kind &&
      a.as_sequence().kind != sequence_kind::generator) {
    const auto &x = a.as_sequence().items, &y = b.as_sequence().items;
    for (std::size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!equal(at, x[i], y[i])) return less(at, x[i], y[i]);
    return x.size() < y.size();
  }
  for (const value* v : {&a, &b})
    if (v->is_undefined()) fail(at, quote_text(v->undefined_name()) + " is undefined");
  fail(at, "values of type " + type_name(a) + " and " + type_name(b) + " have no order");
}

bool interpreter::contains(position at, const value& in, const value& what) {
  if (in.is_undefined()) return false;
  if (in.is_string()) {
    if (!what.is_string()) fail(at, "\"in\" a string needs a string, not " + type_name(what));
    step(at, in.as_text().size() / 16 + 1);
    return in.as_view().find(what.as_view()) != std::string_view::npos;
  }
  if (in.is_mapping()) return in.as_mapping().find(what) != nullptr;
  if (in.is_sequence()) {
    for (const value& v : in.as_sequence().items)
      if (v.same_as(what) || equal(at, v, what)) return true;
    return false;
  }
  fail(at, "a value of type " + type_name(in) + " holds nothing");
}

std::vector<value> interpreter::elements(position at, const value& v) {
  std::vector<value> out;
  if (v.is_undefined()) return out;
  if (v.is_sequence()) {
    step(at, v.as_sequence().items.size());
    return v.as_sequence().items;
  }
  if (v.is_mapping()) {
    step(at, v.as_mapping().entries.size());
    for (const auto& e : v.as_mapping().entries) out.push_back(e.first);
    return out;
  }
  if (v.is_string()) {
    const text& t = v.as_text();
    for (std::size_t i = 0; i < t.size();) {
      const std::size_t end = i + decode_utf8(t.view(), i).bytes;
      step(at);
      out.push_back(value(t.slice(i, end)));
      i = end;
    }
    return out;
  }
  fail(at, "a value of type " + type_name(v) + " cannot be iterated over");
}

std::size_t interpreter::length(position at, const value& v) {
  if (v.is_undefined()) return 0;
  if (v.is_string()) {
    step(at, v.as_text().size() / 16 + 1);
    return count_characters(v.as_view());
  }
  if (v.is_mapping()) return v.as_mapping().entries.size();
  if (v.is_sequence() && v.as_sequence().kind != sequence_kind::generator)
    return v.as_sequence().items.size();
  fail(at, "a value of type " + type_name(v) + " has no length");
}

value interpreter::attribute(position at, const value& of, const std::string& name) {
  if (of.is_undefined()) fail(at, quote_text(of.undefined_name()) + " is undefined");
  if (of.is_mapping()) {
    if (is_one_of(name, dict_methods)) return method(of, name);
    const value* v = of.as_mapping().find(name);
    return v ? *v : value::undefined(name);
  }
  if (of.is_namespace()) {
    for (const auto& [key, v] : of.as_namespace().attributes)
      if (key == name) return v;
    return value::undefined(name);
  }
  if (of.is_string() && is_one_of(name, string_methods)) return method(of, name);
  if (of.is_string() && (name == "format" || name == "encode"))
    fail(at, "the string method " + quote_text(name) + " is not supported");
  if (of.is_sequence() && of.as_sequence().kind != sequence_kind::generator && is_one_of(name, list_methods))
    return method(of, name);
  if (of.is_loop()) {
    const loop_state& l = of.as_loop();
    const auto& items = l.items->items;
    const std::size_t n = items.size(), i = l.index;
    if (name == "index") return value::integer(i + 1);
    if (name == "index0") return value::integer(i);
    if (name == "revindex") return value::integer(n - i);
    if (name == "revindex0") return value::integer(n - i - 1);
    if (name == "first") return value(i == 0);
    if (name == "last") return value(i + 1 == n);
    if (name == "length") return value::integer(n);
    if (name == "depth") return value::integer(1);
    if (name == "depth0") return value::integer(0);
    if (name == "previtem") return i > 0 ? items[i - 1] : value::undefined("there is no previous item");
    if (name == "nextitem") return i + 1 < n ? items[i + 1] : value::undefined("there is no next item");
    if (name == "cycle")
      return value(std::make_shared<const callable>(callable{callable::function::cycle, name, of}));
    if (name == "changed")
      return value(std::make_shared<const callable>(callable{callable::function::changed, name, of}));
  }
  return value::undefined(name);
}

value interpreter::item(position at, const value& of, const value& index) {
  if (of.is_undefined()) fail(at, quote_text(of.undefined_name()) + " is undefined");
  const auto missing = [&] {
    return value::undefined(index.is_string()    ? std::string(index.as_view().substr(0, 60))
                            : index.is_integer() ? to_string(index.as_integer())
                                                 : "item");
  };
  if (of.is_mapping()) {
    if (const value* v = of.as_mapping().find(index)) return *v;
  } else if (of.is_sequence() || of.is_string()) {
    if (index.is_number() && !index.is_real() &&
        !(of.is_sequence() && of.as_sequence().kind == sequence_kind::generator)) {
      const bool string = of.is_string();
      const auto n = static_cast<wide_int>(string ? length(at, of) : of.as_sequence().items.size());
      wide_int i = index.as_integer();
      if (i < 0) i += n;
      if (i < 0 || i >= n) return missing();
      if (!string) return of.as_sequence().items[static_cast<std::size_t>(i)];
      const text& t = of.as_text();
      std::size_t begin = 0;
      for (; i > 0; --i) begin += decode_utf8(t.view(), begin).bytes;
      return value(t.slice(begin, begin + decode_utf8(t.view(), begin).bytes));
    }
  }
  if (index.is_string()) return attribute(at, of, std::string(index.as_view()));
  return missing();
}

text interpreter::to_text(position at, const value& v) {
  if (v.is_string()) return v.as_text();
  if (v.is_undefined()) return {};
  std::string s = python_repr(*this, at, v);
  charge_string(at, s.size());
  return {std::move(s), false};
}

}  // namespace qwen3_moe::jinja
