// SPDX-License-Identifier: Apache-2.0
// Statements, names and calls.
#include "interpreter.hpp"

#include <chrono>
#include <ctime>

#include "../quote.hpp"
#include "parser.hpp"

namespace qwen3_moe::jinja {
namespace {

constexpr wide_int longest_range = 100'000;

std::shared_ptr<const callable> global_function(callable::function what, std::string_view name) {
  return std::make_shared<const callable>(callable{what, std::string(name)});
}

}  // namespace

struct interpreter::deeper {
  deeper(interpreter& i, position at) : run(i) {
    if (run.evaluation_depth_ >= deepest_evaluation)
      run.fail_limit(at, "the template calls and nests too deeply");
    ++run.evaluation_depth_;
  }
  ~deeper() { --run.evaluation_depth_; }
  deeper(const deeper&) = delete;
  deeper& operator=(const deeper&) = delete;
  interpreter& run;
};

interpreter::interpreter(const template_source& source, const syntax_tree& tree, const run_limits& limits,
                         std::optional<std::int64_t> now)
    : source_(source),
      tree_(tree),
      limits_(limits),
      now_(now),
      steps_left_(limits.steps),
      string_bytes_left_(limits.string_bytes),
      loop_id_(static_cast<name_id>(tree.names.size())) {
  for (std::size_t i = 0; i < tree.names.size(); ++i)
    if (tree.names[i] == "loop") loop_id_ = static_cast<name_id>(i);
  using f = callable::function;
  for (const auto& [name, what] :
       {std::pair{"raise_exception", f::raise_exception}, std::pair{"namespace", f::name_space},
        std::pair{"range", f::range}, std::pair{"dict", f::dict}, std::pair{"strftime_now", f::strftime_now}})
    set_global(name, value(global_function(what, name)));
}

void interpreter::set_global(std::string_view name, value v) {
  for (std::size_t i = 0; i < tree_.names.size(); ++i)
    if (tree_.names[i] == name)
      return globals_.values.emplace_back(static_cast<name_id>(i), std::move(v)), void();
}

void interpreter::fail(position at, const std::string& reason) const {
  source_.fail(template_fault::evaluation, at, reason);
}
void interpreter::fail_limit(position at, const std::string& reason) const {
  source_.fail(template_fault::limit, at, reason);
}

text interpreter::run() {
  text out;
  out_ = &out;
  run_block(tree_.body);
  return out;
}

std::int64_t interpreter::now() const {
  return now_ ? *now_ : std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
}

// What can be changed could be made to hold itself, and would then never be freed.
void interpreter::check_storable(position at, const value& v) const {
  if (v.is_namespace() || v.is_loop() || v.is_callable())
    fail(at, "a value of type " + type_name(v) + " cannot be stored in another one");
}

value interpreter::make_string(position at, text t) {
  charge_string(at, t.size());
  return value(std::move(t));
}

value interpreter::make_sequence(position at, std::vector<value> items, sequence_kind kind) {
  step(at, items.size());
  for (const value& v : items) check_storable(at, v);
  auto s = std::make_shared<sequence>(sequence{std::move(items), kind, 1});
  for (const value& v : s->items) s->depth = std::max(s->depth, depth_of(v) + 1);
  if (s->depth > deepest_value) fail_limit(at, "values nest deeper than " + std::to_string(deepest_value));
  return value(std::shared_ptr<const sequence>(std::move(s)));
}

value interpreter::make_mapping(position at, mapping m) {
  step(at, m.entries.size());
  for (const auto& e : m.entries) check_storable(at, e.second);
  if (m.depth > deepest_value) fail_limit(at, "values nest deeper than " + std::to_string(deepest_value));
  return value(std::shared_ptr<const mapping>(std::make_shared<mapping>(std::move(m))));
}

const value* interpreter::find(name_id id) const {
  for (const scope* s = here_; s; s = s->parent)
    for (const auto& [name, v] : s->values)
      if (name == id) return &v;
  return nullptr;
}

void interpreter::set_here(name_id id, value v) {
  for (auto& [name, old] : here_->values) {
    if (name == id) {
      old = std::move(v);
      return;
    }
  }
  here_->values.emplace_back(id, std::move(v));
}

void interpreter::emit(position at, const text& t) {
  if (t.size() > limits_.output_bytes - out_->size())
    fail_limit(at, "the output is longer than " + std::to_string(limits_.output_bytes) + " bytes");
  out_->append(t);
}

void interpreter::assign(const target& to, const value& v) {
  if (!to.parts.empty()) {
    const std::vector<value> parts = elements(to.at, v);
    if (parts.size() != to.parts.size())
      fail(to.at, "expected " + std::to_string(to.parts.size()) + " values to unpack, got " +
                      std::to_string(parts.size()));
    for (std::size_t i = 0; i < parts.size(); ++i) assign(to.parts[i], parts[i]);
    return;
  }
  if (to.attribute.empty()) return set_here(to.id, v);
  const value* n = find(to.id);
  if (!n || !n->is_namespace())
    fail(to.at, "only a namespace's attributes can be set; " + quote_text(to.name) + " is none");
  check_storable(to.at, v);
  for (auto& [name, old] : n->as_namespace().attributes) {
    if (name == to.attribute) {
      old = v;
      return;
    }
  }
  n->as_namespace().attributes.emplace_back(to.attribute, v);
}

interpreter::flow interpreter::run_block(const block& b) {
  for (const auto& s : b)
    if (const flow f = run_statement(*s); f != flow::go_on) return f;
  return flow::go_on;
}

interpreter::flow interpreter::run_statement(const statement& s) {
  const deeper guard(*this, s.at);
  step(s.at);
  switch (s.kind) {
    case statement_kind::data:
      emit(s.at, s.data);
      break;
    case statement_kind::print: {
      const value v = evaluate(*s.subject);
      if (v.is_string())
        emit(s.at, v.as_text());
      else
        emit(s.at, to_text(s.at, v));
      break;
    }
    case statement_kind::set:
      assign(s.to, evaluate(*s.subject));
      break;
    case statement_kind::set_block: {
      text captured;
      text* const outer = std::exchange(out_, &captured);
      scope inner{here_, {}};
      here_ = &inner;
      const flow f = run_block(s.body);
      here_ = inner.parent;
      out_ = outer;
      assign(s.to, make_string(s.at, std::move(captured)));
      return f;
    }
    case statement_kind::if_chain:
      for (const auto& [test, body] : s.branches)
        if (!test || truth(evaluate(*test))) return run_block(body);
      break;
    case statement_kind::for_loop:
      return run_for(s);
    case statement_kind::macro: {
      auto m = std::make_shared<callable>(callable{callable::function::macro, s.to.name});
      m->macro = &s;
      set_here(s.to.id, value(std::shared_ptr<const callable>(std::move(m))));
      break;
    }
    case statement_kind::leave_loop:
      return flow::leave_loop;
    case statement_kind::next_round:
      return flow::next_round;
  }
  return flow::go_on;
}

interpreter::flow interpreter::run_for(const statement& s) {
  std::vector<value> items = elements(s.at, evaluate(*s.subject));
  scope inner{here_, {}};
  here_ = &inner;
  if (s.filter) {
    std::vector<value> kept;
    for (const value& v : items) {
      step(s.at);
      inner.values.clear();
      assign(s.to, v);
      if (truth(evaluate(*s.filter))) kept.push_back(v);
    }
    items = std::move(kept);
  }
  auto loop = std::make_shared<loop_state>();
  loop->items = std::make_shared<const sequence>(sequence{std::move(items)});
  loop->depth = loop_depth_++;
  const std::size_t count = loop->items->items.size();
  bool ended = false;
  for (std::size_t i = 0; i < count; ++i) {
    step(s.at);
    loop->index = i;
    inner.values.clear();
    inner.values.emplace_back(loop_id_, value(loop));
    assign(s.to, loop->items->items[i]);
    const flow f = run_block(s.body);
    // Jinja runs the else branch unless some round came to its end.
    ended |= f == flow::go_on;
    if (f == flow::leave_loop) break;
  }
  loop->last_changed.clear();
  --loop_depth_;
  here_ = inner.parent;
  if (ended) return flow::go_on;
  inner.values.clear();
  here_ = &inner;
  const flow f = run_block(s.otherwise);
  here_ = inner.parent;
  return f;
}

value interpreter::call(position at, const value& what, const call_values& arguments) {
  if (what.is_undefined()) fail(at, quote_text(what.undefined_name()) + " is undefined");
  if (!what.is_callable()) fail(at, "a value of type " + type_name(what) + " cannot be called");
  const callable& c = what.as_callable();
  if (c.what == callable::function::macro) return call_macro(at, *c.macro, arguments);
  if (c.what == callable::function::method) return call_method(at, c, arguments);
  return call_global(at, c, arguments);
}

value interpreter::call_macro(position at, const statement& m, const call_values& arguments) {
  if (call_depth_ >= limits_.call_depth)
    fail_limit(at, "macros call each other deeper than " + std::to_string(limits_.call_depth));
  const deeper guard(*this, at);
  if (arguments.positional.size() > m.parameters.size())
    fail(at, "macro " + quote_text(m.to.name) + " takes " + std::to_string(m.parameters.size()) +
                 " arguments, got " + std::to_string(arguments.positional.size()));
  scope inner{&root_, {}};
  for (const auto& [name, v] : arguments.named) {
    bool known = false;
    for (std::size_t i = 0; i < m.parameters.size(); ++i) {
      if (m.parameters[i].name != name) continue;
      if (i < arguments.positional.size())
        fail(at, "macro " + quote_text(m.to.name) + " got " + quote_text(name) + " twice");
      known = true;
    }
    if (!known) fail(at, "macro " + quote_text(m.to.name) + " has no parameter " + quote_text(name));
  }
  text captured;
  scope* const outer = std::exchange(here_, &inner);
  text* const outer_out = std::exchange(out_, &captured);
  ++call_depth_;
  for (std::size_t i = 0; i < m.parameters.size(); ++i) {
    const parameter& p = m.parameters[i];
    const value* given = i < arguments.positional.size() ? &arguments.positional[i] : nullptr;
    for (const auto& [name, v] : arguments.named)
      if (name == p.name) given = &v;
    if (given)
      inner.values.emplace_back(p.id, *given);
    else
      inner.values.emplace_back(p.id, p.otherwise ? evaluate(*p.otherwise) : value::undefined(p.name));
  }
  run_block(m.body);
  --call_depth_;
  here_ = outer;
  out_ = outer_out;
  return make_string(at, std::move(captured));
}

value interpreter::call_global(position at, const callable& c, const call_values& arguments) {
  switch (c.what) {
    case callable::function::raise_exception: {
      const auto a = bind(*this, at, c.name, arguments, {"message"});
      throw template_error(template_fault::raised,
                           a[0] ? to_text(at, *a[0]).bytes() : "the template refuses the request");
    }
    case callable::function::name_space: {
      auto n = std::make_shared<name_space>();
      if (arguments.positional.size() > 1) fail(at, "namespace() takes one argument and named ones");
      for (const value& v : arguments.positional) {
        if (!v.is_mapping()) fail(at, "namespace() of a value of type " + type_name(v) + " is not supported");
        step(at, v.as_mapping().entries.size());
        for (const auto& [key, x] : v.as_mapping().entries)
          n->attributes.emplace_back(to_text(at, key).bytes(), x);
      }
      for (const auto& [name, v] : arguments.named) {
        check_storable(at, v);
        n->attributes.emplace_back(name, v);
      }
      return value(std::move(n));
    }
    case callable::function::range: {
      const auto a = bind(*this, at, c.name, arguments, {"start", "stop", "step"});
      if (!a[0]) fail(at, "range() needs an argument");
      wide_int start = to_integer(at, *a[0], "range()'s argument"), stop = start, stride = 1;
      if (a[1])
        stop = to_integer(at, *a[1], "range()'s argument");
      else
        start = 0;
      if (a[2]) stride = to_integer(at, *a[2], "range()'s argument");
      if (stride == 0) fail(at, "range() with a step of 0");
      const wide_int span = stride > 0 ? stop - start : start - stop, each = stride > 0 ? stride : -stride;
      const wide_int count = span <= 0 ? 0 : (span + each - 1) / each;
      if (count > longest_range)
        fail_limit(at, "range() makes more than " + to_string(longest_range) + " numbers");
      std::vector<value> items;
      for (wide_int i = 0; i < count; ++i) items.emplace_back(start + i * stride);
      return make_sequence(at, std::move(items));
    }
    case callable::function::dict: {
      mapping m;
      if (arguments.positional.size() > 1) fail(at, "dict() takes one argument and named ones");
      if (!arguments.positional.empty()) {
        if (!arguments.positional[0].is_mapping())
          fail(at, "dict() of a value of type " + type_name(arguments.positional[0]) + " is not supported");
        m = arguments.positional[0].as_mapping();
        step(at, m.entries.size());
      }
      for (const auto& [name, v] : arguments.named) m.set(value::string(name, true), v);
      return make_mapping(at, std::move(m));
    }
    case callable::function::strftime_now: {
      const auto a = bind(*this, at, c.name, arguments, {"format"});
      if (!a[0] || !a[0]->is_string()) fail(at, "strftime_now() needs a format");
      const std::string& format = a[0]->as_text().bytes();
      if (format.empty()) return *a[0];
      if (format.size() > 200) fail_limit(at, "strftime_now()'s format is longer than 200 bytes");
      const std::time_t t = now();
      std::tm parts{};
      localtime_r(&t, &parts);
      char buffer[2048];
      const std::size_t n = std::strftime(buffer, sizeof buffer, format.c_str(), &parts);
      return make_string(at, std::string(buffer, n), a[0]->as_text().all_trusted());
    }
    case callable::function::cycle: {
      if (arguments.positional.empty()) fail(at, "loop.cycle() needs arguments");
      return arguments.positional[c.self.as_loop().index % arguments.positional.size()];
    }
    case callable::function::changed: {
      loop_state& l = c.self.as_loop();
      for (const value& v : arguments.positional) check_storable(at, v);
      bool same = l.changed_called && l.last_changed.size() == arguments.positional.size();
      for (std::size_t i = 0; same && i < l.last_changed.size(); ++i)
        same = equal(at, l.last_changed[i], arguments.positional[i]);
      l.changed_called = true;
      l.last_changed = arguments.positional;
      return value(!same);
    }
    case callable::function::method:
    case callable::function::macro:
      break;
  }
  fail(at, quote_text(c.name) + " cannot be called");
}

std::vector<std::optional<value>> bind(interpreter& run, position at, std::string_view function,
                                       const call_values& arguments,
                                       std::initializer_list<std::string_view> names) {
  std::vector<std::optional<value>> out(names.size());
  const std::string who(function);
  if (arguments.positional.size() > names.size())
    run.fail(at, who + "() takes at most " + std::to_string(names.size()) + " arguments, got " +
                     std::to_string(arguments.positional.size()));
  for (std::size_t i = 0; i < arguments.positional.size(); ++i) out[i] = arguments.positional[i];
  for (const auto& [name, v] : arguments.named) {
    std::size_t i = 0;
    while (i < names.size() && *(names.begin() + i) != name) ++i;
    if (i == names.size()) run.fail(at, who + "() has no argument " + quote_text(name));
    if (out[i]) run.fail(at, who + "() got " + quote_text(name) + " twice");
    out[i] = v;
  }
  return out;
}

}  // namespace qwen3_moe::jinja
