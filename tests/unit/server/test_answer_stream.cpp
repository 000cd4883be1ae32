// SPDX-License-Identifier: Apache-2.0
// Tokens to content, reasoning and calls: the whole pipeline, at every cut.
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <set>
#include <string>
#include <vector>

#include "byte_text.hpp"
#include "server/answer_stream.hpp"
#include "server/answer_writer.hpp"
#include "support/catch.hpp"
#include "text/unicode.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::testing;

namespace {

const tokenizer& bytes() {
  static const tokenizer tokens = tokenizer::from_json(byte_tokenizer_json());
  return tokens;
}

struct outcome {
  choice_text whole;
  std::size_t settled = 0, pushed = 0;
  bool stopped = false;
  int reasoning_tokens = 0;
};

json::array tools(const std::string& text) { return boost::json::parse(text).as_array(); }

// Every prefix of what is streamed must be a prefix of the end result, and valid UTF-8.
outcome run(const std::vector<std::int32_t>& ids, answer_options options) {
  answer_stream stream(bytes(), std::move(options));
  outcome result;
  std::set<std::string> ids_seen;
  const auto take = [&](const answer_delta& delta) {
    CHECK(is_valid_utf8(delta.content));
    CHECK(is_valid_utf8(delta.reasoning));
    for (const auto& piece : delta.calls) {
      const bool first = piece.index >= result.whole.calls.size();
      CHECK(piece.id.has_value() == first);
      CHECK(piece.name.has_value() == first);
      if (piece.id) CHECK(ids_seen.insert(*piece.id).second);
    }
    result.whole.add(delta);
    result.settled += delta.settled_tokens;
  };
  for (const auto id : ids) {
    take(stream.push(id));
    ++result.pushed;
    if (stream.stopped()) break;
  }
  take(stream.finish());
  result.stopped = stream.stopped();
  result.reasoning_tokens = stream.reasoning_tokens();
  for (const auto& call : result.whole.calls) CHECK(boost::json::parse(call.arguments).is_object());
  return result;
}

outcome run(std::string_view text, answer_options options) {
  return run(byte_ids(bytes(), text), std::move(options));
}

const std::string weather =
    R"([{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{)"
    R"("code":{"type":"string"},"count":{"type":"integer"},"options":{"type":"object"}}}}}])";

}  // namespace

TEST_CASE("stop strings are cut before they show, at every byte") {
  const auto content = [](std::string_view text, std::vector<std::string> stop) {
    return run(text, {.split = true, .in_reasoning = false, .tools = {}, .stop = std::move(stop)})
        .whole.content;
  };
  CHECK(content("The quick brown fox", {"own fox"}) == "The quick br");
  CHECK(content("aaab", {"aab"}) == "a");
  CHECK(content("xxabc", {"ab", "abc"}) == "xx");
  CHECK(content("one two three four five six", {"five"}) == "one two three four ");
  CHECK(content("go \xF0\x9F\x98\x8A now", {"\xF0\x9F\x98\x8A n"}) == "go ");
  CHECK(content("go \xF0\x9F\x98\x8A now", {"\xF0\x9F\x98\x8B"}) == "go \xF0\x9F\x98\x8A now");
  CHECK(content("nearly own fo", {"own fox"}) == "nearly own fo");
  CHECK(run("abcdef", {.split = true, .in_reasoning = false, .tools = {}, .stop = {"c"}}).stopped);
}

TEST_CASE("reasoning and content part at the tag, wherever it is cut") {
  const auto thinking =
      run("weighing it</think>Answer.", {.split = true, .in_reasoning = true, .tools = {}, .stop = {}});
  CHECK(thinking.whole.reasoning == "weighing it");
  CHECK(thinking.whole.content == "Answer.");
  CHECK(thinking.reasoning_tokens == 12);
  const auto off = run("All content.", {});
  CHECK(off.whole.content == "All content.");
  CHECK(off.whole.reasoning.empty());
  CHECK(off.reasoning_tokens == 0);
  const auto cut = run("never ends", {.split = true, .in_reasoning = true, .tools = {}, .stop = {}});
  CHECK(cut.whole.reasoning == "never ends");
  CHECK(cut.whole.content.empty());
  CHECK(run("<think>\nopened by itself\n</think>\n\nyes", {}).whole.reasoning == "opened by itself");
}

TEST_CASE("a tag spelled with ordinary tokens inside reasoning is text") {
  std::vector<std::int32_t> ids;
  for (const char c : std::string("quoting `</think>` here")) ids.push_back(static_cast<unsigned char>(c));
  ids.push_back(think_close);
  for (const char c : std::string("done")) ids.push_back(c);
  const auto result = run(ids, {.split = true, .in_reasoning = true, .tools = {}, .stop = {}});
  CHECK(result.whole.reasoning == "quoting `</think>` here");
  CHECK(result.whole.content == "done");
}

TEST_CASE("a call right behind the reasoning is a call") {
  const auto result = run(
      "x</think><tool_call>\n<function=f>\n<parameter=code>\n123\n</parameter>\n</function>\n</tool_call>",
      {.split = true, .in_reasoning = true, .tools = tools(weather), .stop = {}});
  CHECK(result.whole.reasoning == "x");
  CHECK(result.whole.content.empty());
  REQUIRE(result.whole.calls.size() == 1);
  CHECK(result.whole.calls[0].name == "f");
  CHECK(result.whole.calls[0].arguments == R"({"code":"123"})");
  CHECK(result.whole.calls[0].id.substr(0, 5) == "call_");
}

TEST_CASE("calls: none without parameters lost, two stay two, text around them stays") {
  const auto with = [](std::string_view text) {
    return run(text, {.split = true, .in_reasoning = false, .tools = tools(weather), .stop = {}}).whole;
  };
  const auto empty = with("<tool_call>\n<function=f>\n</function>\n</tool_call>");
  REQUIRE(empty.calls.size() == 1);
  CHECK(empty.calls[0].arguments == "{}");
  const auto two = with(
      "<tool_call>\n<function=f>\n<parameter=count>\n7\n</parameter>\n</function>\n</"
      "tool_call><tool_call>\n<function=f>\n"
      "<parameter=options>\n{\"a\": {\"b\": 1}}\n</parameter>\n</function>\n</tool_call>");
  REQUIRE(two.calls.size() == 2);
  CHECK(two.calls[0].arguments == R"({"count":7})");
  CHECK(boost::json::parse(two.calls[1].arguments) == boost::json::parse(R"({"options":{"a":{"b":1}}})"));
  CHECK(two.calls[0].id != two.calls[1].id);
  const auto mixed = with("before<tool_call>\n<function=f>\n</function>\n</tool_call>after");
  CHECK(mixed.content.find("before") == 0);
  CHECK(mixed.content.find("after") != std::string::npos);
  CHECK(mixed.calls.size() == 1);
  CHECK(with("if a < b then").content == "if a < b then");
  const auto undeclared = with("<tool_call>\n<function=rm>\n</function>\n</tool_call>");
  CHECK(undeclared.calls.empty());
  CHECK(undeclared.content.find("<function=rm>") != std::string::npos);
}

TEST_CASE("without tools, and with split off, markup stays text") {
  const std::string call = "<tool_call>\n<function=f>\n</function>\n</tool_call>";
  CHECK(run(call, {}).whole.content == call);
  const auto raw = run("a</think>b", {.split = false, .in_reasoning = true, .tools = {}, .stop = {}});
  CHECK(raw.whole.content == "a</think>b");
  CHECK(raw.whole.reasoning.empty());
}

TEST_CASE("an answer cut inside a call or a character is still valid") {
  const auto call = run("<tool_call>\n<function=f>\n<parameter=code>\nhal",
                        {.split = true, .in_reasoning = false, .tools = tools(weather), .stop = {}});
  REQUIRE(call.whole.calls.size() == 1);
  CHECK(call.whole.calls[0].arguments == R"({"code":"hal"})");
  CHECK(run(std::vector<std::int32_t>{'a', 0xF0, 0x9F, 0x98}, {}).whole.content == "a\xEF\xBF\xBD");
  CHECK(run(std::vector<std::int32_t>{0xF0, 0x9F, 0x98, 0x8A, im_end}, {}).whole.content ==
        "\xF0\x9F\x98\x8A");
  CHECK(run(std::vector<std::int32_t>{}, {}).whole.content.empty());
}

TEST_CASE("tokens are settled when their text is, and those a stop string cuts never are") {
  const auto natural = run("abc", {});
  CHECK(natural.settled == 3);
  const auto held =
      run("say own fo", {.split = true, .in_reasoning = false, .tools = {}, .stop = {"own fox"}});
  CHECK(held.settled == 10);
  const auto cut = run("The quick brown fox jumps",
                       {.split = true, .in_reasoning = false, .tools = {}, .stop = {"own fox"}});
  CHECK(cut.settled == std::string("The quick br").size());
  const auto emoji = run("go \xF0\x9F\x98\x8A",
                         {.split = true, .in_reasoning = false, .tools = {}, .stop = {"\xF0\x9F\x98\x8A"}});
  CHECK(emoji.settled == 3);
  CHECK(emoji.whole.content == "go ");
}

TEST_CASE("a stop string inside held reasoning or a call goes through the same parsers") {
  const auto result = run("think</think><tool_call>\n<function=f>\n<parameter=code>\nabc STOP def",
                          {.split = true, .in_reasoning = true, .tools = tools(weather), .stop = {"STOP"}});
  CHECK(result.stopped);
  CHECK(result.whole.reasoning == "think");
  CHECK(result.whole.content.empty());
  REQUIRE(result.whole.calls.size() == 1);
  CHECK(boost::json::parse(result.whole.calls[0].arguments).at("code").as_string().find("abc") == 0);
  CHECK(result.whole.calls[0].arguments.find("STOP") == std::string::npos);
}

TEST_CASE("twenty thousand tokens of reasoning take linear work") {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "<t";
  const auto result =
      run(text + "</think>end",
          {.split = true, .in_reasoning = true, .tools = {}, .stop = {"never", "<to", "tttt"}});
  CHECK(result.whole.reasoning == text);
  CHECK(result.whole.content == "end");
}
