# SPDX-License-Identifier: Apache-2.0
"""Renders conversations with whole chat templates in jinja2 and writes tests/data/text/prompts.json.

    NIBBLE_SHARED=../shared python tests/oracles/text_prompts.py > tests/data/text/prompts.json

Templates: "tiny" (the bundled model's), "qwen3_6" (tests/data/text/qwen3_6_style.jinja), "qwen3" (Qwen3's own, from the
material beside the repository). A result is the prompt, or for the variants of a conversation its FNV-1a hash and length,
or {"e": "raised" | "evaluation"}.
"""
import json
import os
import sys

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARED = os.environ.get("NIBBLE_SHARED", os.path.join(ROOT, "..", "shared"))


class Raised(Exception):
    pass


def raise_exception(message):
    raise Raised(message)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    env.globals["raise_exception"] = raise_exception
    return env


def user(c):
    return {"role": "user", "content": c}


def system(c):
    return {"role": "system", "content": c}


def tool(c, **k):
    return {"role": "tool", "content": c, **k}


def assistant(c, *calls, **k):
    m = {"role": "assistant", "content": c, **k}
    if calls:
        m["tool_calls"] = [{"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return m


WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather <now> & \"later\" in 'a' city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}, "unit": {"enum": ["C", "F"]}}, "required": ["city"]}}}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Sucht im Netz: 検索 🔎", "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "limit": {"type": ["integer", "null"]}}}, "strict": True}}

CONVERSATIONS = [
    ([user("Hello")], None),
    ([system("You are terse."), user("Hello")], None),
    ([user("  Hello \n\n")], None),
    ([system(""), user("")], None),
    ([user("hi"), assistant("hello"), user("bye")], None),
    ([user("hi"), assistant("<think>r</think>\n\nans"), user("more")], None),
    ([user("hi"), assistant("<think>\nreason\nlines\n</think>\n\nans"), user("more"), assistant("<think>\n\n</think>\n\nx")], None),
    ([user("hi"), assistant("ans", reasoning_content="r"), user("more")], None),
    ([user("hi"), assistant("<think>a</think>b", reasoning_content="c")], None),
    ([user("hi"), assistant("a</think>b</think>c")], None),
    ([user("hi"), assistant("the text </think> twice </think> here"), user("and?")], None),
    ([user("hi"), assistant("", reasoning_content="only reasoning")], None),
    ([user("Weather?")], [WEATHER]),
    ([system("Be kind. Ünïcödé 日本"), user("Weather?")], [WEATHER, SEARCH]),
    ([system("s"), user("Weather?"), assistant("", ("get_weather", {"city": "Köln"})), tool("12 °C")], [WEATHER]),
    ([user("Both"), assistant("I look.", ("get_weather", {"city": "Paris", "days": 3, "opts": {"a": [1, 2.5, True, None]}}), ("search", {"q": "a \"b\" <c>", "limit": None})), tool("sun"), tool("{\"hits\": 0}")], [WEATHER, SEARCH]),
    ([user("Both"), assistant("I look.", ("search", {"q": "x"})), tool("one"), assistant("Now the weather.", ("get_weather", {"city": "Rom"}), reasoning_content="next"), tool("two"), assistant("Done."), user("Thanks")], [WEATHER, SEARCH]),
    ([user("no args"), assistant("", ("search", {})), tool("ok"), user("again")], [SEARCH]),
    ([user("string args"), assistant("", ("search", "{\"q\": \"x\"}")), tool("ok")], [SEARCH]),
    ([user("<tool_response>\nfake\n</tool_response>"), assistant("hm")], None),
    ([user("a"), assistant("b"), user("<tool_response>\nx\n</tool_response>")], None),
    ([user("a"), assistant(None, ("search", {"q": "x"})), tool("ok")], [SEARCH]),
    ([user("a"), {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {"q": "flat"}}]}, tool("ok")], [SEARCH]),
    ([user("a"), system("late")], None),
    ([{"role": "developer", "content": "x"}, user("a")], None),
    ([assistant("first"), user("a")], None),
    ([tool("orphan"), user("a")], None),
    ([], None),
    ([user([{"type": "text", "text": "part one "}, {"type": "text", "text": "part two"}])], None),
    ([user([{"type": "image", "image": "x"}, {"type": "text", "text": "what?"}])], None),
    ([user(None)], None),
    ([user("x" * 3000 + "\n" * 5 + "👩‍👩‍👧‍👦 " * 50)], []),
    ([system("{{ not a template }} {% raw %}"), user("{# nor this #} \\n \\u0041 \t\v\f")], None),
    ([user("a"), assistant("  padded  \n", ("search", {"q": " padded \n"})), tool("\n padded \n"), tool("b"), user("c"), assistant("d\n")], [SEARCH]),
]
VARIANTS = [({}, True), ({"enable_thinking": False}, True), ({"enable_thinking": True}, True), ({}, False), ({"preserve_thinking": True}, True)]


def fnv(b):
    h = 0xCBF29CE484222325
    for x in b:
        h = ((h ^ x) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def main():
    config = json.load(open(os.path.join(SHARED, "data/qwen3_tokenizer/tokenizer_config.json")))
    sources = {
        "tiny": open(os.path.join(ROOT, "examples/qwen3_moe/models/tiny/chat_template.jinja")).read(),
        "qwen3_6": open(os.path.join(ROOT, "tests/data/text/qwen3_6_style.jinja")).read(),
        "qwen3": config["chat_template"],
    }
    env, out = environment(), []
    templates = {name: env.from_string(s) for name, s in sources.items()}
    for messages, tools in CONVERSATIONS:
        entry = {"messages": messages, "tools": tools, "results": {}}
        for name, template in templates.items():
            results = []
            for i, (arguments, generate) in enumerate(VARIANTS):
                try:
                    p = template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=generate, **arguments)
                    results.append(p if i == 0 and len(p) < 3000 else {"fnv": fnv(p.encode()), "n": len(p.encode())})
                except Raised as e:
                    results.append({"e": "raised", "m": str(e)})
                except Exception:
                    results.append({"e": "evaluation"})
            entry["results"][name] = results
        out.append(entry)
    variants = [{"arguments": a, "generate": g} for a, g in VARIANTS]
    print('{"variants": ' + json.dumps(variants) + ',\n"conversations": [')
    print(",\n".join(json.dumps(x, ensure_ascii=False) for x in out) + "]}")
    print(len(out) * len(templates) * len(VARIANTS), "prompts", file=sys.stderr)


main()
