# SPDX-License-Identifier: Apache-2.0
"""Renders small templates with jinja2, set up as the transformers library does, and writes tests/data/text/jinja.json.

    python tests/oracles/text_jinja.py > tests/data/text/jinja.json

The file is {"variables": V, "cases": […]}. A case is {"t": template, "o": output} or, where jinja2 refuses, {"t", "e":
"syntax" | "raised" | "evaluation"}, with the message of raise_exception under "m". Variables are V, or the case's own "v".
"""
import json
import sys

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Raised(Exception):
    pass


def raise_exception(message):
    raise Raised(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


V = {
    "a": 3, "b": 4, "z": 0, "neg": -7, "f": 2.5, "big": 9007199254740993, "huge": 18446744073709551615, "s": "Hello, World",
    "u": "grüße 日本 👍🏽 é", "ws": " \t x y \n", "e": "", "t": True, "no": False, "n": None, "l": [1, 2, 3, "x", None], "el": [],
    "d": {"k": 1, "b": [1, {"c": "ü<>&'\"\\/\n"}], "items": "own", "x y": 2.0}, "ed": {},
    "m": [{"role": "user", "content": "hi", "n": 2}, {"role": "tool", "content": "r", "n": 1}, {"role": "user", "content": None, "n": 3}],
    "lines": "one\n\n two\nthree\n", "q": "it's", "qq": "say \"it's\"", "ctl": "\u0001\u007f\u200b\u00a0\u2028", "floats": [1.0, 0.1, 1e16, 1e15, 123456789.125, 1e-4, 1e-5, 5e-324, 1.7976931348623157e308, -0.0, 1e22, 3.0e-10],
}

EXPRESSIONS = r"""
a + b|a - b|a * b|a / b|a // b|a % b|neg // b|neg % b|a // -2|a % -2|2 ** 10|a ** 2|2 ** -1|-a ** 2|f * 2|f + a|f // 1|-f % 1|7.5 // 2|a / 2|1 / 3|10 / 5
a == 3|a != 3|a < b|a <= 3|a > b|b >= 4|1 < 2 < 3|1 < 3 < 2|"a" < "b"|[1, 2] < [1, 3]|1 == 1.0|1 == true|"1" == 1|none == none|l == [1, 2, 3, "x", none]|d == {}|(1, 2) == [1, 2]
a in l|"x" in l|"ell" in s|"k" in d|"zz" in d|4 not in l|"x" not in s|"a" in missing|not a in l|e in s
a and b|z and b|z or b|e or "fallback"|not z|not a|a and not z or b|n or el or "end"|missing or 1
"yes" if a else "no"|"yes" if z else "no"|"yes" if z|(1 if a else 2) + 1|a if z else b if n else f|"x" if missing is defined
s ~ a|a ~ b|n ~ true|1.0 ~ none|"a" ~ missing ~ "b"|1 + 2 ~ 3 + 4|"a" "b" 'c'
s + "!"|[1] + [2]|(1,) + (2,)|"ab" * 3|3 * "ab"|[0] * 2|"ab" * 0|"ab" * -1
a|big|huge|f|t|no|n|l|d|el|ed|()|(1,)|(1, 2)|[1, 'a', "it's", none, true, 1.5]|{"a": 1, 2: "b", none: [], true: 1.5}|1, 2|missing|floats
s[0]|s[-1]|s[1:3]|s[:3]|s[3:]|s[::-1]|s[::2]|s[-3:]|s[10:2]|s[99]|u[6]|u[:7]|u[::-1]|l[0]|l[-1]|l[1:]|l[::-1]|l[1::2]|l[99]|l["x"]|d["k"]|d["nope"]|d.k|d["b"][1].c|d.b.0|d["x y"]|l[1:99]|l[-99:2]|l[::-2]|s[5:1:-1]|(1,2,3)[1:]|d["items"]|s.nope|s["upper"]()
d.items() | list|d.keys() | list|d.values() | list|d.get("k")|d.get("no")|d.get("no", 5)|ed.items() | list|d | items | list|d | length
s.upper()|s.lower()|u.upper()|u.title()|s.title()|"hELLO wORLD it's".title()|"hELLO wORLD".capitalize()|s.startswith("Hell")|s.startswith(("x", "H"))|s.endswith("d")|s.endswith("x")|s.find("World")|s.find("zz")|u.find("日")|s.rfind("o")|s.count("l")|s.replace("l", "L")|s.replace("l", "L", 2)|s.replace("", "-")|"aaa".replace("aa", "b")|u.replace("日", "x")
ws.strip()|ws.lstrip()|ws.rstrip()|"xxaxx".strip("x")|"xyaxy".lstrip("xy")|"\n\na\n".strip("\n")|"日本日".strip("日")|s.strip("")|"\x1c a\u3000".strip()
s.split()|s.split(",")|s.split(", ")|"a,b,,c".split(",")|"a,b,c".split(",", 1)|"a,b,c".rsplit(",", 1)|" a  b c ".split(none, 1)|" a  b c ".rsplit(none, 1)|"".split()|"".split(",")|"  ".split()|" a b ".split(none, 0)|" a b ".rsplit(none, 0)|" a b c ".split(none, 9)|"a b".rsplit(none, 2)|"a</think>b</think>c".split("</think>")[-1]|"a</think>b".split("</think>")[0].split("<think>")[-1]|" a b ".split(" ")|"a b c d".split(maxsplit=2)|"a b c d".rsplit(maxsplit=2)
lines.splitlines()|lines.splitlines(true)|"a\r\nb\rc".splitlines()|"".splitlines()|",".join(["a", "b"])|"".join([])|s.isdigit()|"123".isdigit()|"".isdigit()|"abc".isalpha()|" \n".isspace()|"abc".islower()|"ABC".isupper()|"a1".isupper()|"prefix-x".removeprefix("prefix-")|"x.py".removesuffix(".py")|l.count(1)|l.index("x")
s | length|u | length|l | count|d | length|missing | length|ws | trim|a | trim|"xxaxx" | trim("x")|s | upper|s | lower|u | upper|"hello wORLD foo-bar (baz)" | title|"hello WORLD" | capitalize
d | tojson|l | tojson|u | tojson|ctl | tojson|floats | tojson|d | tojson(indent=2)|ed | tojson(indent=2)|el | tojson(indent=2)|[[], {}, [1]] | tojson(indent=1)|d | tojson(ensure_ascii=true)|"👍\x7f" | tojson(ensure_ascii=true)|d | tojson(separators=(",", ":"))|{"b": 1, "a": 2} | tojson(sort_keys=true)|(1, 2) | tojson|{1: 2, none: 3, true: 4, 1.5: 5} | tojson|none | tojson|big | tojson|huge | tojson|"<a href='x'>&" | tojson|"\u2028" | tojson
l | join(",")|l | join|m | join(", ", attribute="role")|["a", "b"] | join("")|"abc" | join("-")|el | join(",")
"12" | int|" 12 " | int|"1_000" | int|"12.7" | int|"x" | int|"x" | int(5)|f | int|-2.5 | int|true | int|none | int|"ff" | int(base=16)|"0xff" | int(base=16)|"1e3" | int|missing | int|"-7" | int|"+7" | int
"1.5" | float|"x" | float|missing | float|"x" | float(2.5)|3 | float|"1e5" | float|" 2 " | float|"inf" | float|"1e400" | float
a | string|n | string|l | string|missing | string|true | string|f | string
missing | default("d")|e | default("d")|e | default("d", true)|n | default("d")|n | default("d", boolean=true)|missing | d("x")|missing | default
l | first|l | last|s | first|s | last|el | first|el | last|d | first|d | list|s | list|l | reverse | list|s | reverse|u | reverse
s | replace("l", "L")|s | replace("l", "L", 1)|a | replace(3, "three")|"aaa" | replace("a", "b", count=2)|s | safe
neg | abs|f | abs|2.5 | round|3.5 | round|2.675 | round(2)|-2.5 | round|2.1 | round(0, "ceil")|2.9 | round(method="floor")|7 | round|7 | round(1, "ceil")|true | round|12345.678 | round(1)
m | map(attribute="role") | list|m | map(attribute="role") | join(",")|m | map(attribute="nope", default="?") | list|["a", "b"] | map("upper") | list|[1, 2] | map("string") | join("+")|["1", "x"] | map("int", default=9) | list|[[1, 2], [3]] | map("length") | list|[" a ", "b "] | map("trim") | list
m | selectattr("role", "equalto", "user") | list | length|m | selectattr("content") | map(attribute="n") | list|m | rejectattr("role", "equalto", "user") | map(attribute="role") | list|m | selectattr("n", "gt", 1) | map(attribute="n") | list|m | selectattr("content", "none") | list|m | selectattr("role", "in", ["tool"]) | list|m | selectattr("nope", "defined") | list
[1, 2, 3, 4] | select("odd") | list|[1, 2, 3] | reject("odd") | list|[0, 1, "", "x"] | select | list|[0, 1] | reject | list|["a", 1, none] | select("string") | list|[1, 2, 3] | select("gt", 1) | list|[1, 5, 9] | select(">=", 5) | list
[3, 1, 2] | sort|["b", "A", "c"] | sort|["b", "A", "c"] | sort(case_sensitive=true)|[3, 1, 2] | sort(reverse=true)|m | sort(attribute="n") | map(attribute="n") | list|[1, 2, 1, 3] | unique | list|["a", "A", "b"] | unique | list|[3, 1, 2] | max|[3, 1, 2] | min|["b", "A"] | max|el | max|{"b": 1, "a": 2} | dictsort|{"b": 1, "a": 2} | dictsort(by="value")|{"b": 1, "A": 2} | dictsort(false, "key", true)
lines | indent|lines | indent(2)|lines | indent(2, true)|lines | indent(2, blank=true)|lines | indent("> ")|"one" | indent(4, first=true)|lines | indent(width=1, first=true, blank=true)
a is defined|missing is defined|missing is undefined|missing is not defined|n is none|a is not none|s is string|a is string|missing is string|d is mapping|l is mapping|l is sequence|s is sequence|d is sequence|a is sequence|missing is sequence|(1,) is sequence|l is iterable|s is iterable|a is iterable|missing is iterable|d is iterable|n is iterable|a is number|f is number|t is number|s is number|a is integer|t is integer|f is integer|f is float|t is boolean|a is boolean|t is true|no is false|a is true|1 is true|t is false|a is odd|b is even|9 is divisibleby 3|9 is divisibleby(4)|a is eq 3|a is equalto(3)|a is ne 4|a is lt 4|a is ge(3)|a is in [3, 4]|"x" is in l|a is not in [1]|n is sameas none|t is sameas true|1 is sameas true|"abc" is lower|"ABC" is upper|"123" is lower|range is callable|a is callable
not a is defined|not missing is defined and a|a is defined and b is defined|a is number and a > 2|s is string and s | length > 3|(a if a is defined else b) ~ "x"|-a | abs|(-a) | abs|- a|+a|--a|not not a|2 + 3 * 4|(2 + 3) * 4|10 - 3 - 2|2 ** 3 ** 2|100 / 10 / 2|7 % 4 % 2|1 + 1 == 2 and 2 > 1|"a" + "b" in "xaby"|1 in [1] == true|a in [3] and true
range(3) | list|range(1, 4) | list|range(5, 0, -2) | list|range(0) | list|range(2, 2) | list|dict(a=1, b="x")|dict({"a": 1}, b=2)|namespace(a=1).a|[1, 2, 3,]|{"a": 1,}|{}|[[1, [2]], {"x": {"y": ()}}]
"\n\t\\\'\"\x41\u00e9\U0001F44D\101\q\
z"|'a"b'|"a'b"|q|[q]|[qq]|[ctl]|[u]|["\n\t\\"]|"{{"|"}}"|'%}'|{"a": {"b": 1}}["a"]["b"]|1_000|1.5e3|1e-7|1.0|0.1 + 0.2|1e100|100000000000000000.0|123456789012345678|-0.0|2.50|1e16|1e15|12345678.9|0.0001|0.00001|1.5e300 * 1e10
"""

TEMPLATES = [
    "", "plain", "plain\n", "plain\n\n", "a\r\nb\rc\n", "{{ a }}\n", "{{a}}{{ b }}", "{{- a -}}", " {{- a -}} x", "x \n {{- a }} \n {{ b -}} \n y",
    "{% if t %}\nyes\n{% endif %}\nend", "  {% if t %}\n  yes\n  {% endif %}\nend", "  {%+ if t %}\n  yes\n  {%+ endif +%}\nend", "x  {% if t %} y {% endif %}  z",
    "a\n\n  {%- if t -%}  \n b \n {%- endif -%} \n\n c", "{# comment #}\nx", "  {# c #}\nx", "a {#- c -#} b", "a\n  {# c +#}\nb", "{#-#}x", "{# {{ a }} #}{{ a }}", "\t{% set x = 1 %}\n{{ x }}\n\n",
    "x\n\u00a0{% if t %}y{% endif %}", "{% if t %}\n\n{% endif %}", "{%if t%}a{%else%}b{%endif%}", "a{% if t -%}\n  b\n{%- endif %}\nc", "{{ a }}  \n{% if t %}x{% endif %}", "{% if t %}{% endif %}\n  {% if t %}x{% endif %}", "  {{ a }}", "\n\n{{ a }}\n\n",
    "{% raw %}{{ a }}{% endraw %}", "x {%- raw -%} {{ a }} {%- endraw -%} y", "{% raw %}\n{% x %}\n{% endraw %}\nz", "  {% raw %}\n  a\n  {% endraw %}\n", "{%+ raw %} a {%+ endraw +%}\nb",
    "{% if a == 3 %}three{% elif a == 4 %}four{% else %}other{% endif %}", "{% if z %}z{% elif e %}e{% elif b %}b{% endif %}", "{% if z %}x{% endif %}", "{% if missing %}x{% else %}y{% endif %}", "{% if el %}x{% else %}y{% endif %}{% if 0.0 %}x{% else %}y{% endif %}",
    "{% for x in l %}{{ x }},{% endfor %}", "{% for x in el %}{{ x }}{% else %}none{% endfor %}", "{% for x in missing %}{{ x }}{% else %}none{% endfor %}", "{% for c in 'añ👍' %}[{{ c }}]{% endfor %}", "{% for k in d %}{{ k }};{% endfor %}", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d | items %}{{ k }};{% endfor %}", "{% for k, v in d|dictsort %}{{ k }};{% endfor %}",
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }} {% endfor %}", "{% for x in [1, 2, 3] %}{{ loop.previtem }}-{{ loop.nextitem }};{% endfor %}", "{% for x in [1, 2, 3] %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}", "{% for x in l %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }};{% endfor %}",
    "{% for x in [1, 2, 3, 4] if x % 2 == 0 %}{{ x }}:{{ loop.index }}/{{ loop.length }};{% endfor %}", "{% for x in [1, 3] if x % 2 == 0 %}{{ x }}{% else %}none{% endfor %}", "{% for m in m if m.role == 'user' %}{{ m.n }}{% endfor %}", "{% for a in [[1, 2], [3, 4]] %}{% for b in a %}{{ b }}{{ loop.index }}{% endfor %}|{{ loop.index }};{% endfor %}", "{% for a, b in [[1, 2], [3, 4]] %}{{ a }}{{ b }};{% endfor %}", "{% for (a, b), c in [[[1, 2], 3]] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "{% for x in 1, 2, 3 %}{{ x }}{% endfor %}",
    "{% for x in [1, 2, 3, 4] %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in [1] %}{% break %}{% else %}else{% endfor %}", "{% for x in [1, 2] %}{% for y in [1, 2] %}{% break %}{% endfor %}{{ x }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}", "{% for i in [1, 2] %}{% set q2 = i %}{% endfor %}{{ q2 is defined }}", "{% set ns = namespace(x=0) %}{% for i in [1, 2, 3] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "{% if t %}{% set y = 5 %}{% endif %}{{ y }}", "{% set x, y = 1, 2 %}{{ x }}{{ y }}", "{% set (x, y) = [1, 2] %}{{ y }}", "{% set x = 1, 2 %}{{ x }}", "{% set ns = namespace() %}{{ ns.q }}{% set ns.q = 'v' %}{{ ns.q }}", "{% set ns = namespace(a=1, b='x') %}{{ ns.a }}{{ ns.b }}{{ ns.c is defined }}", "{% set ns = namespace({'a': 1}) %}x",
    "{% set x %}a{{ a }}b{% endset %}[{{ x }}]{{ x | length }}", "{% set x %}\n  a\n{% endset %}\n[{{ x }}]", "{% set x %}{% set y = 1 %}{% endset %}{{ y is defined }}", "{% for i in [1] %}{% set x %}{{ i }}{% endset %}{{ x }}{% endfor %}", "{% for x in [1, 2] %}{{ x }}{% endfor %}{{ x is defined }}", "{% set a = 10 %}{{ a }}", "{% for a in [7] %}{{ a }}{% endfor %}{{ a }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{{ f('a') }}{{ f() }}", "{% macro f(x, y=2, z=none) %}{{ x }}{{ y }}{{ z }}{% endmacro %}{{ f(1) }};{{ f(1, 3) }};{{ f(1, z=4) }};{{ f(x=5, y=6) }}", "{% macro f(x) -%}\n  {{ x }}\n{%- endmacro %}[{{ f(1) }}]", "{% set g = 1 %}{% macro f() %}{{ g }}{% endmacro %}{% set g = 2 %}{{ f() }}", "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "{% macro f(x) %}{% set x = x + 1 %}{{ x }}{% endmacro %}{{ f(1) }}{{ f(5) }}", "{% macro g(x) %}({{ x }}){% endmacro %}{% macro f(x) %}{{ g(x) ~ g(x) }}{% endmacro %}{{ f(1) | length }}{{ f(2) | trim }}", "{% for i in [1, 2] %}{{ g9 is defined }}{% endfor %}{% macro g9() %}{% endmacro %}{{ g9 is defined }}", "{% for x in [1, 2] %}{% continue %}{% else %}else{% endfor %}", "{% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{% else %}else{% endfor %}", "{% macro f(x, y=x) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}{{ f(1, 2) }}", "{% macro f() %}{{ a }}{% endmacro %}{% for a in [9] %}{{ f() }}{% endfor %}", "{% macro f(x) %}{% for i in x %}{{ loop.index }}{{ i }}{% endfor %}{% endmacro %}{{ f([5, 6]) }}", "{% macro f() %}{% endmacro %}{{ f() | length }}{{ f() is string }}",
    "{{ raise_exception('no: ' ~ a) }}", "{% if a %}{{- raise_exception('bad role: ' + m[0].role) }}{% endif %}", "{% for x in l %}{{ x if x is string else (x | tojson) }}{% endfor %}", "{{ m | map(attribute='content') | select('string') | join('|') }}", "{{ (m | selectattr('role', 'equalto', 'user') | list)[-1].n }}", "{%- for message in m %}{{- message.role + '\\n' }}{%- if not loop.last %}{{- ',' }}{% endif %}{% endfor %}", "{%- set ns = namespace(last=m|length - 1, go=true) %}{%- for message in m[::-1] %}{%- set index = (m|length - 1) - loop.index0 %}{%- if ns.go and message.role == 'tool' %}{%- set ns.go = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{{ ns.last }}",
    "{{ m[0]['role'] }}{{ m[0].get('role') }}{{ m[0].nope }}{{ m[0].nope is defined }}{{ m[5] }}{{ m[5] is defined }}", "{{ m[0].content.split('i') }}", "{{ {'a': 1} | items | list }}", "{% set parts = 'a|b'.split('|') %}{{ parts[0] }}{{ parts | length }}", "{{ [1, 2, 3] | length > 2 }}", "{{ a if a > 2 else b }} {{ 'x' ~ ('y' if t else 'n') }}", "{{ '<|' ~ 'im' ~ '|>' }}", "{{ d.b[1]['c'] }}", "{{ none is none and missing is not defined }}", "{{ 'a' is string and 1 is number }}", "{{ ('a', 'b') | join('/') }}",
    "{{ u | length }} {{ u[0:3] | upper }} {{ u.split() | length }}", "{{ (1, 'a', none) }}", "{{ [] is sequence }}{{ {} is mapping }}", "{{ missing.x is defined }}", "{{ d.x.y }}", "{{ missing }}", "{{ missing + 1 }}", "{{ missing() }}", "{{ a() }}", "{{ a.b.c }}", "{{ n.x }}", "{{ n.x.y }}", "{{ 1 + 'a' }}", "{{ 'a' + 1 }}", "{{ none + 1 }}", "{{ 1 < 'a' }}", "{{ none < 1 }}", "{{ 1 in 2 }}", "{{ 1 in 'a' }}", "{{ a | length }}", "{{ n | length }}", "{% for x in 5 %}{% endfor %}", "{% for x in none %}{% endfor %}", "{% for x, y in [1] %}{% endfor %}", "{% for x, y in [[1, 2, 3]] %}{% endfor %}", "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{{ 1.0 / 0 }}", "{{ missing | tojson }}", "{{ range | tojson }}", "{{ s.nope() }}", "{{ s.split('') }}", "{{ s.index('zz') }}", "{{ m | join(',') | length > 5 }}", "{{ s | items | list }}", "{{ l[::0] }}", "{{ -s }}", "{{ {}[[]] }}", "{{ {[]: 1} }}", "{% set x.y = 1 %}", "{% set a.y = 1 %}", "{{ range(1, 2, 0) }}", "{{ dict(1) }}", "{% macro f(x) %}{% endmacro %}{{ f(1, 2) }}", "{% macro f(x) %}{% endmacro %}{{ f(y=2) }}", "{% macro f(x) %}{% endmacro %}{{ f(1, x=2) }}", "{{ s | trim(1) }}", "{{ d.pop('k') }}", "{{ l.append(1) }}", "{{ s | replace }}", "{{ s | int(zz=1) }}", "{{ 'a' | round }}", "{{ l | sort }}", "{{ range(1000000) }}", "{{ s.__class__ }}", "{{ ''.__class__.__mro__ }}", "{{ ed.__len__ }}",
    "{{ }}", "{{ a", "{% if a", "{% if a %}", "{% endif %}", "{% for %}", "{% for x %}{% endfor %}", "{% for x in %}{% endfor %}", "{% for 1 in l %}{% endfor %}", "{% if %}{% endif %}", "{{ a b }}", "{{ a + }}", "{{ (a }}", "{{ a) }}", "{{ [a }}", "{{ {'a': } }}", "{{ {'a' 1} }}", "{{ 'a }}", "{{ a | }}", "{{ a | nofilter }}", "{{ a is notest }}", "{{ a is }}", "{{ a. }}", "{{ a[ }}", "{% nostatement %}", "{% set %}", "{% set x %}", "{% set 1 = 2 %}", "{% set true = 2 %}", "{% set x = %}", "{% macro %}{% endmacro %}", "{% macro f %}{% endmacro %}", "{% macro f( %}{% endmacro %}", "{% macro f(x=1, y) %}{% endmacro %}", "{% else %}", "{# open", "{% raw %}x", "{{ a ? b : c }}", "{{ a && b }}", "{{ !a }}", "{{ a = 1 }}", "{{ f(a=1, 2) }}", "{{ not }}", "{{ 1 if }}", "{{ a not b }}", "{% if a %}{% for x in l %}{% endif %}{% endfor %}", "{{ 'a' 1 }}", "{{ 01 }}", "{{ \u00e4\u00df }}x" if False else "{{ $ }}", "{% set x = 1 }}", "{{ a %}", "{{ '\\ud83d' }}" if False else "{{ @ }}",
    "{% generation %}x{% endgeneration %}" if False else "{{ a ~ '' }}",
]

DEEP = {
    "arguments": {"city": "Köln", "days": 3, "opts": {"x": [1, 2.5, True, None, "q\"'"]}},
    "tools": [{"type": "function", "function": {"name": "f", "description": "<b>&'\"", "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z"]}}}],
}
MORE = [
    ("{% for k, v in arguments|items %}{{ k }}={{ v if v is string else v|tojson }};{% endfor %}", DEEP), ("{{ tools | tojson }}", DEEP), ("{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}", DEEP), ("{{ arguments }}", DEEP),
    ("{{ tools[0].function.parameters.properties | length }}{{ tools[0]['function']['name'] }}", DEEP), ("{{ arguments | tojson | length }}", DEEP), ("{%- if tools is iterable and tools is not mapping %}y{% endif %}", DEEP), ("{{ arguments.items() | list }}", DEEP),
]


def main():
    env, out = environment(), []
    cases = [(t, V) for t in TEMPLATES]
    for line in EXPRESSIONS.strip().replace("\\q\\\nz", "\\q\\\\NEWLINE").split("\n"):
        for part in split_expressions(line.replace("\\\\NEWLINE", "\\\nz")):
            cases.append(("{{ " + part + " }}", V))
    cases += MORE
    for template, variables in cases:
        entry = {"t": template} if variables is V else {"t": template, "v": variables}
        try:
            entry["o"] = env.from_string(template).render(**variables)
        except Raised as e:
            entry |= {"e": "raised", "m": str(e)}
        except jinja2.TemplateSyntaxError:
            entry["e"] = "syntax"
        except Exception as e:
            entry["e"] = "evaluation"
        out.append(entry)
    print('{"variables": ' + json.dumps(V, ensure_ascii=False) + ',\n"cases": [')
    print(",\n".join(json.dumps(x, ensure_ascii=False) for x in out) + "]}")
    print(len(out), "cases", file=sys.stderr)


def split_expressions(line):
    """Expressions are separated by a bar without spaces; a filter's bar has spaces around it."""
    parts, at = [], 0
    for i, c in enumerate(line):
        if c == "|" and not (i > 0 and line[i - 1] == " ") and not (i + 1 < len(line) and line[i + 1] == " "):
            parts.append(line[at:i])
            at = i + 1
    parts.append(line[at:])
    return [p for p in parts if p]


main()
