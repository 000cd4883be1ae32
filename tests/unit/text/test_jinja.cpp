// SPDX-License-Identifier: Apache-2.0
// The template interpreter against jinja2 (tests/oracles/text_jinja.py), its error positions and its bounds.
#include <pthread.h>

#include <cstdlib>
#include <thread>

#include "text/chat_template.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

std::string render(std::string_view source, const json::object& variables = {},
                   const template_options& options = {}) {
  return chat_template(source, "t", {}, options).render_variables(variables).text;
}

template_fault fault_of(std::string_view source, const json::object& variables = {},
                        const template_options& options = {}) {
  try {
    render(source, variables, options);
  } catch (const template_error& e) {
    return e.fault();
  }
  throw std::runtime_error("no error for " + std::string(source));
}

std::string place_of(std::string_view source) {
  try {
    render(source);
  } catch (const template_error& e) {
    return std::to_string(e.line()) + ":" + std::to_string(e.column());
  }
  return "none";
}

// Sanitizers make frames several times larger.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
constexpr std::size_t small_stack_bytes = std::size_t{2} << 20;
#else
constexpr std::size_t small_stack_bytes = std::size_t{256} << 10;
#endif

}  // namespace

TEST_CASE("small templates render as jinja2 renders them") {
  const json::value golden = read_json(source_path("tests/data/text/jinja.json"));
  const json::object& shared = golden.at("variables").as_object();
  std::size_t cases = 0, refused = 0;
  for (const json::value& v : golden.at("cases").as_array()) {
    const json::object& c = v.as_object();
    const std::string source(c.at("t").as_string());
    const json::object& variables = c.contains("v") ? c.at("v").as_object() : shared;
    CAPTURE(source);
    ++cases;
    if (c.contains("o")) {
      std::string got;
      try {
        got = render(source, variables);
      } catch (const template_error& e) {
        got = std::string("error: ") + e.what();
      }
      CHECK(got == std::string(c.at("o").as_string()));
      continue;
    }
    ++refused;
    std::string kind = "none", message;
    try {
      render(source, variables);
    } catch (const template_error& e) {
      message = e.what();
      kind = e.fault() == template_fault::syntax   ? "syntax"
             : e.fault() == template_fault::raised ? "raised"
                                                   : "evaluation";
    }
    CHECK(kind == std::string(c.at("e").as_string()));
    if (kind == "raised") CHECK(message == std::string(c.at("m").as_string()));
  }
  CHECK(cases > 650);
  CHECK(refused > 90);
}

TEST_CASE("what is not supported is refused while loading, with line and column") {
  CHECK(place_of("a\n {% include 'x' %}") == "2:5");
  CHECK(place_of("{% extends 'x' %}") == "1:4");
  CHECK(place_of("{% import 'x' as y %}") == "1:4");
  CHECK(place_of("{% block a %}{% endblock %}") == "1:4");
  CHECK(place_of("{% call f() %}{% endcall %}") == "1:4");
  CHECK(place_of("{% filter upper %}x{% endfilter %}") == "1:4");
  CHECK(place_of("{% with a = 1 %}{% endwith %}") == "1:4");
  CHECK(place_of("{% do x %}") == "1:4");
  CHECK(place_of("{% for x in y recursive %}{% endfor %}") == "1:15");
  CHECK(place_of("{% for x in y %}{% macro f() %}{% endmacro %}{% endfor %}") == "1:20");
  CHECK(place_of("{{ f(*a) }}") == "1:6");
  CHECK(place_of("ä\n日本 {{ x | nosuch }}") == "2:11");
  CHECK(place_of("{{ x is nosuch }}") == "1:9");
  CHECK(place_of("{% set x | upper %}{% endset %}") == "1:10");
  CHECK(place_of("line\r\nline\r{{ 'open }}") == "3:4");
  CHECK(place_of("{{ '\\ud83d' }}") == "1:5");
  CHECK(place_of("{{ '\\N{DASH}' }}") == "1:5");
  CHECK(place_of("{{ x | escape }}") == "1:8");
  CHECK(place_of("{{ 99999999999999999999 }}") == "1:4");
  CHECK(place_of("\n\n{{ [1, (2 }}") == "3:11");
  CHECK(message_of<template_error>([] { render("{{ x | nosuch }}"); }) ==
        "t:1:8: the filter \"nosuch\" is not supported");
  CHECK(message_of<template_error>([] { render("\xff"); }) == "t:1:1: the template is not valid UTF-8");
}

TEST_CASE("errors while rendering point at their expression") {
  CHECK(place_of("a\n{{ x.y }}") == "2:5");
  CHECK(message_of<template_error>([] { render("{{ 'a' + 1 }}"); }) ==
        "t:1:8: unsupported operand types for +: str and int");
  CHECK(message_of<template_error>([] {
          render("{{ m.role + 'x' }}", {{"m", json::object{}}});
        }) == "t:1:11: \"role\" is undefined");
}

TEST_CASE("generation blocks are transparent and strftime_now takes the time it is given") {
  CHECK(render("a{% generation %}b{% endgeneration %}c") == "abc");
  template_options options;
  options.now = 1'700'000'000;  // 2023-11-14 22:13:20 UTC
  setenv("TZ", "UTC", 1);
  CHECK(render("{{ strftime_now('%Y-%m-%d %H:%M') }}", {}, options) == "2023-11-14 22:13");
  CHECK(render("{{ strftime_now('') }}|") == "|");
}

TEST_CASE("rendering is bounded") {
  template_options options;
  options.steps = 10'000;
  CHECK(fault_of("{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}", {},
                 options) == template_fault::limit);
  CHECK(fault_of(
            "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            {}, options) == template_fault::limit);
  // Forty levels of sharing make 2^40 elements to write or to compare.
  const std::string shared =
      "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
  CHECK(fault_of(shared + "{{ ns.x | tojson }}", {}, options) == template_fault::limit);
  CHECK(fault_of(shared + "{{ ns.x }}", {}, options) == template_fault::limit);
  CHECK(fault_of(shared + "{% set a = ns.x %}" + shared + "{{ a == ns.x }}", {}, options) ==
        template_fault::limit);
  options = {};
  options.output_bytes = 1000;
  CHECK(fault_of("{% for i in range(1001) %}x{% endfor %}", {}, options) == template_fault::limit);
  CHECK(render("{% for i in range(1000) %}x{% endfor %}", {}, options).size() == 1000);
  options = {};
  options.string_bytes = 100'000;
  CHECK(fault_of("{{ 'x' * 100001 }}", {}, options) == template_fault::limit);
  CHECK(fault_of("{{ 'x' * 9223372036854775807 }}", {}, options) == template_fault::limit);
  CHECK(fault_of(
            "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            {}, options) == template_fault::limit);
  CHECK(fault_of("{{ ('x' * 1000).replace('', 'y' * 1000) }}", {}, options) == template_fault::limit);
  CHECK(fault_of("{{ [[1]] | tojson(indent='x' * 90000) }}", {}, options) == template_fault::limit);
}

TEST_CASE("nesting is bounded") {
  const auto repeated = [](std::string_view s, std::size_t n) {
    std::string out;
    while (n--) out += s;
    return out;
  };
  CHECK(render("{{ " + repeated("(", 20) + "1" + repeated(")", 20) + " }}") == "1");
  for (const std::size_t n : {1000u, 100'000u}) {
    CHECK(fault_of("{{ " + repeated("(", n) + "1" + repeated(")", n) + " }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("[", n) + repeated("]", n) + " }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("{1:", n) + "1" + repeated("}", n) + " }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("-", n) + "1 }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("not ", n) + "1 }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("a if b else ", n) + "1 }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("a if ", n) + "1 }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("a[", n) + "1" + repeated("]", n) + " }}") == template_fault::syntax);
    CHECK(fault_of("{{ " + repeated("f(", n) + repeated(")", n) + " }}") == template_fault::syntax);
    CHECK(fault_of(repeated("{% if a %}", n) + repeated("{% endif %}", n)) == template_fault::syntax);
    CHECK(fault_of("{% set " + repeated("(", n) + "a" + repeated(")", n) + " = 1 %}") ==
          template_fault::syntax);
  }
  // Chains are flat, so they may be long.
  CHECK(render("{{ 0" + repeated(" + 1", 20'000) + " }}") == "20000");
  CHECK(render("{{ 'a'" + repeated(" | trim", 20'000) + " }}") == "a");
  CHECK(render("{% if false %}" + repeated("{% elif false %}", 20'000) + "{% else %}x{% endif %}") == "x");
  // Values and calls.
  CHECK(fault_of(
            "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}") ==
        template_fault::limit);
  CHECK(fault_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}") == template_fault::limit);
  json::value deep = 1;
  for (int i = 0; i < 500; ++i) deep = json::array{std::move(deep)};
  CHECK(fault_of("{{ x }}", {{"x", deep}}) == template_fault::limit);
  // Nothing may be made to hold itself.
  CHECK(fault_of("{% set ns = namespace() %}{% set ns.x = ns %}") == template_fault::evaluation);
  CHECK(fault_of("{% set ns = namespace() %}{% set ns.x = [ns] %}") == template_fault::evaluation);
  CHECK(fault_of("{% for i in [1] %}{% set x = [loop] %}{% endfor %}") == template_fault::evaluation);
}

TEST_CASE("whole numbers keep their digits or refuse") {
  CHECK(render("{{ x }}", {{"x", 18446744073709551615u}}) == "18446744073709551615");
  CHECK(render("{{ x - 1 }}", {{"x", 18446744073709551615u}}) == "18446744073709551614");
  CHECK(fault_of("{{ x + 1 }}", {{"x", 18446744073709551615u}}) == template_fault::limit);
  CHECK(fault_of("{{ 9223372036854775807 * 9223372036854775807 }}") == template_fault::limit);
  CHECK(fault_of("{{ 9 ** 99 }}") == template_fault::limit);
  CHECK(render("{{ 2 ** 63 }} {{ -2 ** 63 }} {{ 1 ** 9999999 }} {{ (-1) ** 9999999 }}") ==
        "9223372036854775808 -9223372036854775808 1 -1");
}

TEST_CASE("a template argument cannot replace what the server sets") {
  const chat_template t("{{ messages | length }}{{ x }}", "t", {{"eos_token", "</s>"}});
  const json::array messages{json::object{{"role", "user"}}};
  CHECK(t.render(messages, nullptr, true, {{"x", 5}}).text == "15");
  for (const char* name : {"messages", "tools", "documents", "add_generation_prompt", "raise_exception",
                           "namespace", "range", "dict", "strftime_now", "loop", "eos_token"}) {
    CAPTURE(name);
    try {
      t.render(messages, nullptr, true, {{name, 1}});
      FAIL("accepted");
    } catch (const template_error& e) {
      CHECK(e.fault() == template_fault::argument);
      CHECK(std::string(e.what()).find(name) != std::string::npos);
    }
  }
}

TEST_CASE("a prompt knows which bytes the template wrote") {
  const auto untrusted = [](std::string_view source, const json::object& variables) {
    const rendered_prompt p = chat_template(source).render_variables(variables);
    std::string out;
    std::size_t at = 0;
    for (const prompt_segment& s : p.segments) {
      CHECK(s.begin == at);
      CHECK(s.end > s.begin);
      at = s.end;
      if (!s.trusted) out += "[" + p.text.substr(s.begin, s.end - s.begin) + "]";
    }
    CHECK(at == p.text.size());
    return out;
  };
  const json::object v{{"x", " user "}, {"l", {"a", "b"}}, {"d", {{"k", "v"}}}};
  CHECK(untrusted("<{{ x }}>{{ 'lit' }}", v) == "[ user ]");
  CHECK(untrusted("{{ ('<' + x + '>') | trim }}", v) == "[ user ]");
  CHECK(untrusted("{{ ('<' + x + '>')[3:] }}", v) == "[ser ]");
  CHECK(untrusted("{{ x | trim }}{{ x.split('s')[1] }}{{ x.replace('s', 'S') }}", v) == "[userer  u][er ]");
  CHECK(untrusted("{{ l | join(', ') }}{{ ', '.join(l) }}", v) == "[a][ba][b]");
  CHECK(untrusted("{{ d | tojson }}{{ x | upper }}{{ 'y' | upper }}", v) == "[{\"k\": \"v\"} USER ]");
  CHECK(untrusted("{% for k in d %}{{ k }}:{% endfor %}", v) == "[k]");
  CHECK(untrusted("{% macro f(c) %}<{{ c }}>{% endmacro %}{{ f(x) | trim }}", v) == "[ user ]");
  CHECK(untrusted("{% set s %}<{{ x }}>{% endset %}{{ s[::-1] }}", v) == "[ resu ]");
  CHECK(untrusted("{{ 1 ~ 'a' }}{{ x ~ 'a' }}", {{"x", "q"}}) == "[1][q]");
}

TEST_CASE("several threads render one template") {
  const chat_template t(
      "{% for m in messages %}{{ m.role ~ loop.index ~ 'x' }}{% endfor %}{% macro f(x) %}{{ x }}{% endmacro "
      "%}{{ f('y') }}");
  const json::array messages{{{"role", "user"}}, {{"role", "tool"}}};
  std::vector<std::thread> threads;
  std::vector<int> right(4);
  for (std::size_t k = 0; k < right.size(); ++k)
    threads.emplace_back([&, k] {
      for (int i = 0; i < 300; ++i) right[k] += t.render(messages, nullptr, true).text == "user1xtool2xy";
    });
  for (auto& thread : threads) thread.join();
  for (const int n : right) CHECK(n == 300);
}

TEST_CASE("the deepest evaluation fits into a small stack") {
  // As deep as the parser allows, again and again through a macro, until the evaluation's own limit stops it.
  std::string source = "{% macro f() %}{{ ";
  for (int i = 0; i < 45; ++i) source += "[";
  source += "f()";
  for (int i = 0; i < 45; ++i) source += "]";
  source += " }}{% endmacro %}{{ f() }}";
  template_fault fault{};
  pthread_attr_t attributes;
  REQUIRE(pthread_attr_init(&attributes) == 0);
  REQUIRE(pthread_attr_setstacksize(&attributes, small_stack_bytes) == 0);
  auto work = [&] { fault = fault_of(source); };
  pthread_t thread;
  REQUIRE(pthread_create(
              &thread, &attributes,
              [](void* w) -> void* {
                (*static_cast<decltype(work)*>(w))();
                return nullptr;
              },
              &work) == 0);
  REQUIRE(pthread_join(thread, nullptr) == 0);
  CHECK(fault == template_fault::limit);
}
