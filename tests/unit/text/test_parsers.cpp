// SPDX-License-Identifier: Apache-2.0
// Reasoning and tool calls: what models write, right and wrong, at every cut.
#include "text/reasoning_parser.hpp"
#include "text/tool_call_parser.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

reasoning_delta split(std::string_view text, bool inside, std::size_t size) {
  reasoning_parser p(inside);
  reasoning_delta all;
  const auto add = [&](const reasoning_delta& d) { all.reasoning += d.reasoning, all.content += d.content; };
  for (std::size_t i = 0; i < text.size(); i += size) add(p.push(text.substr(i, size)));
  add(p.finish());
  return all;
}

void check_split(std::string_view text, bool inside, const reasoning_delta& expected) {
  CAPTURE(text, inside);
  for (std::size_t size = 1; size <= text.size() + 1; ++size) {
    const reasoning_delta got = split(text, inside, size);
    CHECK(got.reasoning == expected.reasoning);
    CHECK(got.content == expected.content);
  }
}

const json::array& tools() {
  static const json::array t = json::parse(R"([
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
      "city": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "typed", "parameters": {"type": "object", "properties": {
      "code": {"type": "string"}, "options": {"type": "object"}, "items": {"type": "array"}, "count": {"type": "integer"},
      "active": {"type": "boolean"}, "empty": {"type": "null"}, "ratio": {"type": "number"}, "maybe": {"type": ["string", "null"]},
      "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "untyped": {}, "choice": {"enum": [1, 2]}}}}},
    {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object", "properties": {
      "path": {"type": "string"}, "content": {"type": "string"}}}}},
    {"name": "none"}])")
                                   .as_array();
  return t;
}

struct parsed_call {
  std::string name, arguments;
  bool operator==(const parsed_call&) const = default;
};

struct parsed_answer {
  std::string content;
  std::vector<parsed_call> calls;
  bool operator==(const parsed_answer&) const = default;
};

std::ostream& operator<<(std::ostream& out, const parsed_answer& a) {
  out << "content <" << a.content << ">";
  for (const auto& c : a.calls) out << " call " << c.name << " " << c.arguments;
  return out;
}

// Also checks the order of events and that arguments are valid JSON.
parsed_answer parse(const std::vector<std::string>& pieces, const json::array& declared = tools()) {
  tool_call_parser p{tool_set(declared)};
  parsed_answer out;
  bool open = false;
  const auto take = [&](const std::vector<tool_event>& events) {
    for (const tool_event& e : events) {
      switch (e.kind) {
        case tool_event_kind::content:
          CHECK_FALSE(open);
          CHECK_FALSE(e.text.empty());
          out.content += e.text;
          break;
        case tool_event_kind::call_begin:
          CHECK_FALSE(open);
          CHECK(e.index == out.calls.size());
          out.calls.push_back({e.text, ""});
          open = true;
          break;
        case tool_event_kind::arguments:
          CHECK(open);
          CHECK(e.index + 1 == out.calls.size());
          out.calls.back().arguments += e.text;
          break;
        case tool_event_kind::call_end:
          CHECK(open);
          open = false;
          break;
      }
    }
  };
  for (const std::string& s : pieces) take(p.push(s));
  take(p.finish());
  CHECK_FALSE(open);
  CHECK(p.calls() == out.calls.size());
  for (const auto& c : out.calls) {
    json::error_code ec;
    const json::value v = json::parse(c.arguments, ec, {}, json::parse_options{.max_depth = 100});
    INFO(c.arguments);
    CHECK_FALSE(ec);
    CHECK(v.is_object());
  }
  return out;
}

std::vector<std::string> cut(std::string_view text, std::size_t size) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < text.size(); i += size) out.emplace_back(text.substr(i, size));
  return out;
}

// Every way to cut in two, and equal pieces of every size, give the same answer.
void check(const std::string& text, const parsed_answer& expected, const json::array& declared = tools()) {
  CAPTURE(text);
  CHECK(parse({text}, declared) == expected);
  for (std::size_t size = 1; size < std::min<std::size_t>(text.size(), 40); ++size)
    CHECK(parse(cut(text, size), declared) == expected);
  for (std::size_t at = 0; at <= text.size(); ++at)
    CHECK(parse({text.substr(0, at), text.substr(at)}, declared) == expected);
}

std::string xml_call(const std::string& name,
                     const std::vector<std::pair<std::string, std::string>>& parameters) {
  std::string s = "<tool_call>\n<function=" + name + ">\n";
  for (const auto& [key, v] : parameters) s += "<parameter=" + key + ">\n" + v + "\n</parameter>\n";
  return s + "</function>\n</tool_call>";
}

std::string typed(const std::string& key, const std::string& v) {
  const parsed_answer a = parse({xml_call("typed", {{key, v}})});
  REQUIRE(a.calls.size() == 1);
  return a.calls[0].arguments.substr(key.size() + 4, a.calls[0].arguments.size() - key.size() - 5);
}

}  // namespace

TEST_CASE("does a prompt end inside reasoning") {
  CHECK(ends_inside_reasoning("<|im_start|>assistant\n<think>\n"));
  CHECK(ends_inside_reasoning("<think>"));
  CHECK_FALSE(ends_inside_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  CHECK_FALSE(ends_inside_reasoning("<|im_start|>assistant\n"));
  CHECK_FALSE(ends_inside_reasoning("user: what is <think>?\nassistant: "));
  CHECK_FALSE(ends_inside_reasoning(""));
  CHECK_FALSE(ends_inside_reasoning(" \n"));
}

TEST_CASE("reasoning and content, at every cut") {
  check_split("weighing it</think>Answer.", true, {"weighing it", "Answer."});
  check_split("weighing it\n</think>\n\nAnswer.\n", true, {"weighing it", "Answer.\n"});
  check_split("\n a\n\n b \n</think>\n\n  Answer", true, {"a\n\n b", "  Answer"});
  check_split("cut while thinking", true, {"cut while thinking", ""});
  check_split("cut in the tag </thi", true, {"cut in the tag </thi", ""});
  check_split("trailing space \n", true, {"trailing space", ""});
  check_split("</think>x", true, {"", "x"});
  check_split("", true, {"", ""});
  check_split("a < b </thinx> </think", true, {"a < b </thinx> </think", ""});
  check_split("a</think>b</think>c<think>d", true, {"a", "b</think>c<think>d"});
  check_split("x</think><tool_call>\n<function=f>", true, {"x", "<tool_call>\n<function=f>"});
  check_split("<think>\nr\n</think>\n\nans", false, {"r", "ans"});
  check_split("\n <think>r</think>ans", false, {"r", "ans"});
  check_split("<think>\n\n</think>\n\nans", false, {"", "ans"});
  check_split("all content", false, {"", "all content"});
  check_split("\n  all content \n", false, {"", "\n  all content \n"});
  check_split("say <think> here </think> there", false, {"", "say <think> here </think> there"});
  check_split("<thin", false, {"", "<thin"});
  check_split("<thinking>", false, {"", "<thinking>"});
  check_split(" \n", false, {"", " \n"});
  check_split("\xE6\x97\xA5\xE6\x9C\xAC</think>\xF0\x9F\x98\x8A", true,
              {"\xE6\x97\xA5\xE6\x9C\xAC", "\xF0\x9F\x98\x8A"});
}

TEST_CASE("a lone < in reasoning waits for the next piece only") {
  reasoning_parser p(true);
  CHECK(p.push("a <").reasoning == "a");
  CHECK(p.push(" b").reasoning == " < b");
  CHECK(p.inside());
  CHECK(p.push("</think>").reasoning == "");
  CHECK_FALSE(p.inside());
  CHECK(p.push("\n").content == "");
  CHECK(p.push("x").content == "x");
  CHECK(p.push(" <think>").content == " <think>");
}

TEST_CASE("where tags are tokens, the same text from other tokens is text") {
  for (std::size_t size : {1u, 2u, 5u, 100u}) {
    const std::string before = "quote `</think>` here", after = "</think>\n\nAnswer </think>.";
    reasoning_parser p(true, true);
    p.announce_tag(before.size());
    reasoning_delta all;
    const std::string text = before + after;
    for (std::size_t i = 0; i < text.size(); i += size) {
      const auto d = p.push(text.substr(i, size));
      all.reasoning += d.reasoning, all.content += d.content;
    }
    const auto d = p.finish();
    all.reasoning += d.reasoning, all.content += d.content;
    CHECK(all == reasoning_delta{"quote `</think>` here", "Answer </think>."});
  }
  reasoning_parser p(false, true);
  CHECK(p.push("<think>r</think>x").content == "<think>r</think>x");
  reasoning_parser q(false, true);
  q.announce_tag(1);
  q.announce_tag(9);
  CHECK(q.push("\n<think>r</think>x") == reasoning_delta{"r", "x"});
}

TEST_CASE("long reasoning costs linear time") {
  reasoning_parser p(true);
  std::string got;
  for (int i = 0; i < 200'000; ++i) got += p.push("word ").reasoning;
  for (int i = 0; i < 200'000; ++i) got += p.push("\n").reasoning;
  got += p.push("end</think>").reasoning;
  CHECK(got.size() == 1'000'000 + 200'000 + 3);
}

TEST_CASE("XML calls") {
  check(xml_call("get_weather", {{"city", "K\xC3\xB6ln"}, {"days", "3"}}),
        {"", {{"get_weather", "{\"city\":\"K\xC3\xB6ln\",\"days\":3}"}}});
  check(xml_call("none", {}), {"", {{"none", "{}"}}});
  check(xml_call("none", {}) + "\n" + xml_call("get_weather", {{"city", "a"}}),
        {"", {{"none", "{}"}, {"get_weather", "{\"city\":\"a\"}"}}});
  check(xml_call("none", {}) + xml_call("none", {}), {"", {{"none", "{}"}, {"none", "{}"}}});
  check("Let me see.\n\n" + xml_call("none", {}), {"Let me see.", {{"none", "{}"}}});
  check("Let me see.\n\n" + xml_call("none", {}) + "\nDone. ", {"Let me see.\nDone. ", {{"none", "{}"}}});
  check(xml_call("none", {}) + "\nDone. ", {"Done. ", {{"none", "{}"}}});
  check(xml_call("none", {}) + "\n\n", {"", {{"none", "{}"}}});
  check("  text only \n", {"  text only \n", {}});
  check("", {"", {}});
  check("if a < b then <b> <tool", {"if a < b then <b> <tool", {}});
  check("<tool_call><function=none></function></tool_call>", {"", {{"none", "{}"}}});
  check(
      "<tool_call>\r\n<function=get_weather>\r\n<parameter=city>\r\nx\r\n</parameter>\r\n</function>\r\n</"
      "tool_call>",
      {"", {{"get_weather", "{\"city\":\"x\"}"}}});
  check(xml_call("get_weather", {{"city", ""}}), {"", {{"get_weather", "{\"city\":\"\"}"}}});
  check(xml_call("get_weather", {{"city", "\n\n a \n\n"}}),
        {"", {{"get_weather", "{\"city\":\"\\n\\n a \\n\\n\"}"}}});
  check("<tool_call>\n<function=get_weather>\n<parameter=city>x</parameter>\n</function>\n</tool_call>",
        {"", {{"get_weather", "{\"city\":\"x\"}"}}});
  check("<tool_call>\n<function=get_weather>\n<parameter=city>\n</parameter>\n</function>\n</tool_call>",
        {"", {{"get_weather", "{\"city\":\"\"}"}}});
  check(xml_call("get_weather", {{"other", "5"}}), {"", {{"get_weather", "{\"other\":\"5\"}"}}});
}

TEST_CASE("values are not escaped by the model and are escaped for JSON") {
  check(xml_call("write_file", {{"content", "a & b < c && \"d\" > 'e' \\ \t\x01 </p> <x>"}}),
        {"", {{"write_file", "{\"content\":\"a & b < c && \\\"d\\\" > 'e' \\\\ \\t\\u0001 </p> <x>\"}"}}});
  check(xml_call("write_file", {{"content", "a\r\nb\rc"}}),
        {"", {{"write_file", "{\"content\":\"a\\r\\nb\\rc\"}"}}});
  check(xml_call("write_file", {{"we\"ird \\ key", "1"}}),
        {"", {{"write_file", "{\"we\\\"ird \\\\ key\":\"1\"}"}}});
}

TEST_CASE("missing closing tags are supplied") {
  const std::string head = "<tool_call>\n<function=get_weather>\n<parameter=city>\nx";
  const parsed_answer two{"", {{"get_weather", "{\"city\":\"x\",\"days\":2}"}}},
      one{"", {{"get_weather", "{\"city\":\"x\"}"}}};
  check(head + "\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", two);
  check(head + "\n</parameter>\n<parameter=days>\n2\n</function>\n</tool_call>", two);
  check(head + "\n</function>\n</tool_call>", one);
  check(head + "</function></tool_call>", one);
  check(head + "\n</tool_call>", one);
  check(head, one);
  check(head + "\n", one);
  check(head + "\n</par", one);
  check(head + "\n</parameter>", one);
  check(head + "\n</parameter>\n</function>", one);
  check(head + "\n</parameter>\n</function>\n</tool_c", one);
  check(head + "\n</parameter>\n</tool_call> text", {"text", {{"get_weather", "{\"city\":\"x\"}"}}});
  check("<tool_call>\n<function=none>", {"", {{"none", "{}"}}});
  check("<tool_call>\n<function=get_weather>\n<parameter=ci", {"", {{"get_weather", "{}"}}});
  check("<tool_call>\n<function=none>\n</tool_call><tool_call>\n<function=none>\n",
        {"", {{"none", "{}"}, {"none", "{}"}}});
  check("<tool_call>\n<function=none>\n</function>\n<tool_call>\n<function=none>\n</function>",
        {"", {{"none", "{}"}, {"none", "{}"}}});
  check("<tool_call>\n<function=none>\n</function>\n<function=none>\n</function>\n</tool_call>",
        {"", {{"none", "{}"}, {"none", "{}"}}});
  check("<tool_call>\n<function=none>\n</function>\nand text", {"and text", {{"none", "{}"}}});
  check(head + " <", {"", {{"get_weather", "{\"city\":\"x <\"}"}}});
}

TEST_CASE("malformed parameters are dropped and the arguments stay valid JSON") {
  const std::string head = "<tool_call>\n<function=get_weather>\n",
                    tail = "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>";
  const parsed_answer expected{"", {{"get_weather", "{\"days\":2}"}}};
  check(head + "<parameter=\n" + tail, expected);
  check(head + "<parameter=ids: [1, 2]\n" + tail, expected);
  check(head + "<parameter=note=\n" + tail, expected);
  check(head + "<parameter=ids: [1, 2]\nvalue\n</parameter>\n" + tail, expected);
  check(head + "<parameter=>\nx\n</parameter>\n" + tail, expected);
  check(head + "<parameter= >\nx\n</parameter>\n" + tail, expected);
  check(head + "<parameter=" + std::string(300, 'k') + ">\nx\n</parameter>\n" + tail, expected);
  check(head + "stray text <b> </parameter>\n" + tail, expected);
  check(head +
            "<parameter=days>\n2\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        expected);
}

TEST_CASE("a call inside a value is text") {
  const std::string fake = "<tool_call><function=none></tool";
  check(xml_call("write_file", {{"content", "x " + fake + " y"}, {"path", "p"}}),
        {"", {{"write_file", "{\"content\":\"x " + fake + " y\",\"path\":\"p\"}"}}});
  // The first closing tag ends the value, whoever it was meant for: one call, and the rest of it is not
  // another one.
  const parsed_answer a = parse({xml_call(
      "write_file",
      {{"content", "<tool_call><function=none><parameter=x>1</parameter></function></tool_call>"}})});
  CHECK(a.calls.size() == 1);
  CHECK(a.calls[0].arguments == "{\"content\":\"<tool_call><function=none><parameter=x>1\"}");
}

TEST_CASE("what is no call stays text") {
  for (const std::string s :
       {"<tool_call>", "<tool_call>\n", "<tool_call>\nhello\n</tool_call> x",
        "<tool_call>\n<function=", "<tool_call>\n<function=none",
        "<tool_call>\n<function=no\nne>\n</function>\n</tool_call>", "<tool_call>\n<function=>\n</tool_call>",
        "<tool_call>\n<function=undeclared>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call> after",
        "<tool_call>\n{\"name\": \"none\"", "<tool_call>\n{\"name\": 5}\n</tool_call>",
        "<tool_call>\n{\"name\": \"undeclared\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"none\", \"arguments\": [1]}\n</tool_call>",
        "<tool_call>\n{bad json}\n</tool_call>", "<tool_call>\n{\"a\": <\n</tool_call>",
        "<tool_call>\n[]\n</tool_call>",
        "<tool_call>\n<function=undeclared>\n<parameter=x>\n<tool_call>\n<function=none>\n</function>\n"})
    check(s, {s, {}});
  // And does not stop the next one from being a call.
  check("<tool_call>\n<function=undeclared>\n</function>\n</tool_call>\n" + xml_call("none", {}),
        {"<tool_call>\n<function=undeclared>\n</function>\n</tool_call>", {{"none", "{}"}}});
  // With no tools everything is text.
  check(xml_call("none", {}), {xml_call("none", {}), {}}, json::array{});
}

TEST_CASE("JSON calls") {
  check(
      "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"K\xC3\xB6ln\", \"days\": "
      "9007199254740993000000}}\n</tool_call>",
      {"", {{"get_weather", "{\"city\": \"K\xC3\xB6ln\", \"days\": 9007199254740993000000}"}}});
  check(
      "a\n<tool_call>\n{\"arguments\": {\"x\": \"}</tool_call>{\\\"\"}, \"name\": "
      "\"none\"}\n</tool_call>\n<tool_call>\n{\"name\": \"none\"}\n</tool_call>",
      {"a", {{"none", "{\"x\": \"}</tool_call>{\\\"\"}"}, {"none", "{}"}}});
  check("<tool_call>{\"name\": \"none\", \"arguments\": null}</tool_call>", {"", {{"none", "{}"}}});
  check("<tool_call>{\"name\": \"none\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
        {"", {{"none", "{\"a\": 1}"}}});
  check(
      "<tool_call>\n{\"name\": \"none\", \"arguments\": {\"deep\": [[{\"a\": [1, {}]}]]}, \"id\": "
      "{\"arguments\": 5}}",
      {"", {{"none", "{\"deep\": [[{\"a\": [1, {}]}]]}"}}});
}

TEST_CASE("argument types follow the schema") {
  check(xml_call("typed", {{"code", "123"},
                           {"options", "{}"},
                           {"items", "[]"},
                           {"count", "7"},
                           {"active", "true"},
                           {"empty", "null"}}),
        {"", {{"typed", R"({"code":"123","options":{},"items":[],"count":7,"active":true,"empty":null})"}}});
  CHECK(typed("count", "9007199254740993") == "9007199254740993");
  CHECK(typed("count", "123456789012345678901234567890") == "123456789012345678901234567890");
  CHECK(typed("count", " -7 ") == "-7");
  CHECK(typed("count", "7.0") == "7.0");
  for (const char* raw :
       {"2026-01-15", "1e999", "00012", "TRUE", "7.5", "1e3", "", "0x10", "+1", "-", "1.", ".5", "NaN"}) {
    CAPTURE(raw);
    CHECK(typed("count", raw) == json::serialize(json::string(raw)));
  }
  CHECK(typed("ratio", "1.5e3") == "1.5e3");
  CHECK(typed("ratio", "-0.25") == "-0.25");
  CHECK(typed("ratio", "7") == "7");
  for (const char* raw : {"1e999", "00012", "Infinity", "NaN", "1,5", "abc", "-", "1e"})
    CHECK(typed("ratio", raw) == json::serialize(json::string(raw)));
  CHECK(typed("active", "false") == "false");
  for (const char* raw : {"TRUE", "True", "yes", "1"})
    CHECK(typed("active", raw) == json::serialize(json::string(raw)));
  CHECK(typed("options", "{\"a\": [1, 12345678901234567890123]}") == "{\"a\": [1, 12345678901234567890123]}");
  for (const char* raw : {"{\"a\"", "[1]", "not json", "{'a': 1}", "{} x"})
    CHECK(typed("options", raw) == json::serialize(json::string(raw)));
  CHECK(typed("items", "[1,\n 2]") == "[1,\n 2]");
  CHECK(typed("items", "{}") == "\"{}\"");
  CHECK(typed("items", std::string(1000, '[')) == '"' + std::string(1000, '[') + '"');
  CHECK(typed("maybe", "null") == "null");
  CHECK(typed("maybe", "5") == "\"5\"");
  CHECK(typed("either", "5") == "5");
  CHECK(typed("either", "five") == "\"five\"");
  CHECK(typed("untyped", "5") == "\"5\"");
  CHECK(typed("choice", "2") == "2");
  CHECK(typed("unknown", "2") == "\"2\"");
  CHECK(typed("empty", "None") == "\"None\"");
}

TEST_CASE("string arguments stream and other pieces wait") {
  tool_call_parser p{tool_set(tools())};
  CHECK(p.push("a <").size() == 1);
  CHECK(p.push("b").front().text == " <b");
  CHECK(p.push("<tool_call>\n<function=write_file").empty());
  CHECK(p.push(">\n").front() == tool_event{tool_event_kind::call_begin, 0, "write_file"});
  CHECK(p.push("<parameter=content>").front().text == "{\"content\":\"");
  CHECK(p.push("\nhello").front().text == "hello");
  CHECK(p.push(" wor\n").front().text == " wor");
  CHECK(p.push("ld").front().text == "\\nld");
  CHECK(p.push("\n</para").empty());
  CHECK(p.push("meter>").front().text == "\"");
  CHECK(p.push("\n</function>").size() == 2);
  CHECK(p.push("\n</tool_call>").empty());
  CHECK(p.finish().empty());
}

TEST_CASE("random tags in random order, at random cuts") {
  random_numbers r(21);
  const std::string parts[] = {"<tool_call>",
                               "</tool_call>",
                               "<function=none>",
                               "<function=get_weather>",
                               "<function=bad>",
                               "</function>",
                               "<parameter=city>",
                               "<parameter=days>",
                               "<parameter=x",
                               "</parameter>",
                               "\n",
                               "\r\n",
                               "\r",
                               " ",
                               "text",
                               "12",
                               "<",
                               ">",
                               "{\"name\": \"none\", \"arguments\": {\"a\": 1}}",
                               "{",
                               "}",
                               "\"",
                               "\\",
                               "\xC3\xA9",
                               "</",
                               "<p"};
  for (int i = 0; i < 4000; ++i) {
    std::string text;
    for (std::uint64_t n = r.below(16); n > 0; --n) text += parts[r.below(std::size(parts))];
    CAPTURE(text);
    const parsed_answer whole = parse({text});
    for (int k = 0; k < 4; ++k) {
      std::vector<std::string> pieces;
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t n = r.below(6);
        pieces.push_back(text.substr(at, n));
        at += n;
      }
      CHECK(parse(pieces) == whole);
    }
    CHECK(parse(cut(text, 1)) == whole);
  }
}

TEST_CASE("long arguments cost linear time") {
  for (const char* key : {"city", "days"}) {
    tool_call_parser p{tool_set(tools())};
    std::size_t bytes = 0;
    const auto take = [&](const std::vector<tool_event>& events) {
      for (const auto& e : events) bytes += e.text.size();
    };
    take(p.push(std::string("<tool_call>\n<function=get_weather>\n<parameter=") + key + ">\n"));
    for (int i = 0; i < 300'000; ++i) take(p.push("ab<\n"));
    take(p.finish());
    CHECK(bytes > 1'200'000);
  }
  tool_call_parser p{tool_set(tools())};
  p.push("<tool_call>\n{\"name\": \"none\", \"arguments\": {\"a\": \"");
  for (int i = 0; i < 300'000; ++i) p.push("x");
  CHECK(p.push("\"}}").size() == 3);
  for (int i = 0; i < 300'000; ++i) p.push("\n");
  CHECK(p.finish().empty());
}
