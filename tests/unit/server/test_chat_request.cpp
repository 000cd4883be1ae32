// SPDX-License-Identifier: Apache-2.0
// Every field with good and bad values; `param` must name the field.
#include <boost/json/serialize.hpp>
#include <string>
#include <vector>

#include "server/api_error.hpp"
#include "server/chat_request.hpp"
#include "server/json.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;

namespace {

constexpr std::int32_t vocab = 300;

chat_request chat(const std::string& more) {
  return parse_chat_request(
      parse_json(R"({"messages":[{"role":"user","content":"hi"}])" + (more.empty() ? "" : "," + more) + "}",
                 "x"),
      vocab);
}

chat_request conversation(const std::string& messages, const std::string& more = {}) {
  return parse_chat_request(
      parse_json("{\"messages\":" + messages + (more.empty() ? "" : "," + more) + "}", "x"), vocab);
}

completion_request completion(const std::string& fields) {
  return parse_completion_request(parse_json("{" + fields + "}", "x"), vocab);
}

// The param of the error, "-" when there was none, "?" for an error without param.
template <class Parse>
std::string param_of(const Parse& parse) {
  try {
    parse();
  } catch (const api_error& error) {
    CHECK(error.status == 400);
    CHECK(error.type == "invalid_request_error");
    if (error.param) CHECK(error.message.find(*error.param) == 0);
    return error.param.value_or("?");
  }
  return "-";
}
std::string chat_param(const std::string& more) {
  return param_of([&] { chat(more); });
}
std::string messages_param(const std::string& messages) {
  return param_of([&] { conversation(messages); });
}
std::string completion_param(const std::string& fields) {
  return param_of([&] { completion(fields); });
}

std::string repeat(const std::string& item, std::size_t count) {
  std::string out;
  for (std::size_t i = 0; i < count; ++i) out += (i ? "," : "") + item;
  return out;
}

}  // namespace

TEST_CASE("chat: values at and past each limit") {
  struct row {
    const char* field;
    std::vector<std::string> good, bad;
  };
  const std::vector<row> table{
      {"max_tokens",
       {"1", "5", "2147483647", "3.0", "1e2", "null"},
       {"0", "-1", "1.5", "\"5\"", "2147483648", "9223372036854775808", "true", "[]", "{}"}},
      {"max_completion_tokens", {"1", "null"}, {"0", "-1", "1.5", "\"5\"", "2147483648"}},
      {"n", {"1", "8", "null"}, {"0", "-1", "9", "129", "1000000000", "\"1\""}},
      {"temperature",
       {"0", "2", "0.7", "-0", "1e-38", "null"},
       {"-0.1", "2.1", "1e30", "\"NaN\"", "\"0.7\"", "true", "[]"}},
      {"top_p", {"0", "1", "1e-10", "null"}, {"-0.1", "1.1", "\"1\"", "{}"}},
      {"min_p", {"0", "1", "null"}, {"-0.1", "1.1", "\"1\""}},
      {"top_k", {"0", "-1", "1", "1000000000", "null"}, {"-2", "1.5", "\"5\"", "2147483648"}},
      {"presence_penalty", {"-2", "2", "0", "null"}, {"3", "-2.1", "\"0\""}},
      {"frequency_penalty", {"-2", "2", "null"}, {"3", "-2.1", "\"0\""}},
      {"repetition_penalty", {"1", "0.1", "10", "null"}, {"0", "-1", "11", "\"1\""}},
      {"seed",
       {"-1", "0", "9223372036854775807", "18446744073709551615", "-9223372036854775808", "null"},
       {"18446744073709551616", "1.5", "\"a\"", "true"}},
      {"stream", {"true", "false", "null"}, {"1", "\"true\"", "[]"}},
      {"logprobs", {"true", "false", "null"}, {"1", "\"true\""}},
      {"enable_thinking", {"true", "false", "null"}, {"1", "\"false\""}},
      {"model", {"\"any\"", "null"}, {"1", "[]", "{}"}},
      {"stop", {"\"a\"", "[]", "[\"a\",\"b\"]", "null"}, {"1", "{}", "\"\"", "true"}},
      {"logit_bias",
       {"{}", "null", "{\"5\":-100}", "{\"299\":100}"},
       {"[]", "{\"191222999\":-100}", "{\"AI\":-100}", "{\"-1\":1}", "{\"300\":1}", "{\"99999999999999\":1}",
        "{\"5 \":1}", "{\"\":1}"}},
      {"tools", {"[]", "null"}, {"{}", "1", "\"x\""}},
      {"tool_choice",
       {"\"auto\"", "\"none\"", "null"},
       {"\"required\"", "\"x\"", "{\"type\":\"function\",\"function\":{\"name\":\"f\"}}", "1"}},
      {"response_format", {"{\"type\":\"text\"}", "null"}, {"1", "[]"}},
      {"chat_template_kwargs",
       {"{}", "null", "{\"a\":1,\"b\":\"x\",\"c\":null,\"enable_thinking\":false}"},
       {"1", "[]", "\"x\"", "{\"a-b\":1}", "{\"\":1}"}},
      {"functions", {"null"}, {"[]"}},
  };
  for (const auto& [field, good, bad] : table) {
    for (const auto& value : good) {
      INFO(field << " = " << value);
      CHECK(chat_param("\"" + std::string(field) + "\":" + value) == "-");
    }
    for (const auto& value : bad) {
      INFO(field << " = " << value);
      CHECK(chat_param("\"" + std::string(field) + "\":" + value) == field);
    }
  }
}

TEST_CASE("chat: errors inside fields name the place") {
  CHECK(chat_param(R"("stop":["a",5])") == "stop[1]");
  CHECK(chat_param(R"("stop":["a",""])") == "stop[1]");
  CHECK(chat_param("\"stop\":[" + repeat("\"a\"", 16) + "]") == "-");
  CHECK(chat_param("\"stop\":[" + repeat("\"a\"", 17) + "]") == "stop");
  CHECK(chat_param("\"stop\":\"" + std::string(256, 'a') + "\"") == "-");
  CHECK(chat_param("\"stop\":\"" + std::string(257, 'a') + "\"") == "stop");
  CHECK(chat_param(R"("logit_bias":{"5":null})") == "logit_bias.5");
  CHECK(chat_param(R"("logit_bias":{"5":1e9})") == "logit_bias.5");
  CHECK(chat_param(R"("logit_bias":{"5":"x"})") == "logit_bias.5");
  std::string biases;
  for (int i = 0; i < 1025; ++i) biases += (i ? "," : "") + ("\"" + std::to_string(i) + "\":1");
  CHECK(chat_param("\"logit_bias\":{" + biases + "}") == "logit_bias");
  CHECK(chat_param(R"("stream":true,"stream_options":{"include_usage":1})") ==
        "stream_options.include_usage");
  CHECK(chat_param(R"("stream":true,"stream_options":{"include_usage":true,"other":1})") == "-");
  CHECK(chat_param(R"("stream":true,"stream_options":null)") == "-");
  CHECK(chat_param(R"("stream_options":{"include_usage":true})") == "stream_options");
  CHECK(chat_param(R"("stream":false,"stream_options":{})") == "stream_options");
  CHECK(chat_param(R"("top_logprobs":5)") == "top_logprobs");
  CHECK(chat_param(R"("logprobs":true,"top_logprobs":20)") == "-");
  CHECK(chat_param(R"("logprobs":true,"top_logprobs":21)") == "top_logprobs");
  CHECK(chat_param(R"("logprobs":true,"top_logprobs":1000000)") == "top_logprobs");
  CHECK(chat_param(R"("response_format":{"type":"json_object"})") == "response_format.type");
  CHECK(chat_param(R"("response_format":{})") == "response_format.type");
  CHECK(chat_param(R"("chat_template_kwargs":{"messages":1})") == "chat_template_kwargs.messages");
  CHECK(chat_param(R"("chat_template_kwargs":{"add_generation_prompt":false})") ==
        "chat_template_kwargs.add_generation_prompt");
  CHECK(chat_param(R"("chat_template_kwargs":{"a":[1]})") == "chat_template_kwargs.a");
  CHECK(chat_param(R"("chat_template_kwargs":{"enable_thinking":"no"})") ==
        "chat_template_kwargs.enable_thinking");
}

TEST_CASE("chat: tools") {
  const auto tool = [](const std::string& function) {
    return "\"tools\":[{\"type\":\"function\",\"function\":" + function + "}]";
  };
  CHECK(chat_param(tool(R"({"name":"f"})")) == "-");
  CHECK(chat_param(tool(R"({"name":"f","description":"d","parameters":{"$ref":"#"}})")) == "-");
  CHECK(chat_param(tool(R"({"name":"a\"b"})")) == "tools[0].function.name");
  CHECK(chat_param(tool(R"({"name":"a\nb"})")) == "tools[0].function.name");
  CHECK(chat_param(tool(R"({"name":""})")) == "tools[0].function.name");
  CHECK(chat_param(tool(R"({"name":5})")) == "tools[0].function.name");
  CHECK(chat_param(tool(R"({})")) == "tools[0].function.name");
  CHECK(chat_param(tool(R"({"name":"f","parameters":[]})")) == "tools[0].function.parameters");
  CHECK(chat_param(tool(R"({"name":"f","description":1})")) == "tools[0].function.description");
  CHECK(chat_param(R"("tools":[{"type":"function"}])") == "tools[0].function");
  CHECK(chat_param(R"("tools":[{"function":{"name":"f"}}])") == "tools[0].type");
  CHECK(chat_param(R"("tools":[{"type":"web","function":{"name":"f"}}])") == "tools[0].type");
  CHECK(chat_param(R"("tools":["f"])") == "tools[0]");
  const std::string one = R"({"type":"function","function":{"name":"f"}})";
  CHECK(chat_param("\"tools\":[" + repeat(one, 128) + "]") == "-");
  CHECK(chat_param("\"tools\":[" + repeat(one, 129) + "]") == "tools");
  CHECK(chat("\"tools\":[" + one + "],\"tool_choice\":\"none\"").tools.empty());
  CHECK(chat("\"tools\":[" + one + "],\"tool_choice\":\"auto\"").tools.size() == 1);
}

TEST_CASE("chat: messages") {
  CHECK(param_of([] { parse_chat_request(parse_json("{}", "x"), vocab); }) == "messages");
  for (const auto* body : {"null", "[]", "5", "\"x\"", "true"})
    CHECK(param_of([&] { parse_chat_request(parse_json(body, "x"), vocab); }) == "?");
  CHECK(messages_param("[]") == "messages");
  CHECK(messages_param("{}") == "messages");
  CHECK(messages_param("\"hi\"") == "messages");
  CHECK(messages_param("[5]") == "messages[0]");
  CHECK(messages_param(R"([{"content":"x"}])") == "messages[0].role");
  CHECK(messages_param(R"([{"role":"robot","content":"x"}])") == "messages[0].role");
  CHECK(messages_param(R"([{"role":5,"content":"x"}])") == "messages[0].role");
  CHECK(messages_param(R"([{"role":"user"}])") == "messages[0].content");
  CHECK(messages_param(R"([{"role":"user","content":"a"},{"role":"user","content":null}])") ==
        "messages[1].content");
  CHECK(messages_param(R"([{"role":"user","content":5}])") == "messages[0].content");
  CHECK(messages_param(R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}])") ==
        "messages[0].content[0].type");
  CHECK(
      messages_param(R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"input_audio"}]}])") ==
      "messages[0].content[1].type");
  CHECK(messages_param(R"([{"role":"user","content":[{"type":"text"}]}])") == "messages[0].content[0].text");
  CHECK(messages_param(R"([{"role":"user","content":["a"]}])") == "messages[0].content[0]");
  CHECK(messages_param(R"([{"role":"assistant","content":"a","tool_calls":{}}])") ==
        "messages[0].tool_calls");
  CHECK(messages_param(R"([{"role":"assistant","tool_calls":[{"id":"1","type":"function"}]}])") ==
        "messages[0].tool_calls[0].function");
  CHECK(messages_param("[" + repeat(R"({"role":"user","content":"x"})", 4096) + "]") == "-");
  CHECK(messages_param("[" + repeat(R"({"role":"user","content":"x"})", 4097) + "]") == "messages");
  const auto parts =
      conversation(R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])");
  CHECK(parts.messages[0].at("content") == "ab");
  CHECK(conversation(R"([{"role":"developer","content":"x"}])").messages[0].at("role") == "system");
}

TEST_CASE("chat: tool calls with content of any absence are one and the same") {
  const std::string calls =
      R"("tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}])";
  const auto plain = [&](const std::string& content) {
    return boost::json::serialize(
        conversation("[{\"role\":\"assistant\"," + content + calls + "}]").messages);
  };
  const auto expected = plain("");
  CHECK(plain("\"content\":null,").find("\"content\":\"\"") != std::string::npos);
  for (const auto* content : {"\"content\":null,", "\"content\":\"\",", "\"content\":[],"}) {
    const auto request = conversation("[{\"role\":\"assistant\"," + std::string(content) + calls + "}]");
    CHECK(boost::json::serialize(request.messages) == expected);
  }
  CHECK(conversation(R"([{"role":"assistant","content":null}])").messages[0].at("content") == "");
  CHECK(conversation(R"([{"role":"tool","tool_call_id":"c1","content":[{"type":"text","text":"r"}]}])")
            .messages[0]
            .at("content") == "r");
  CHECK(conversation(R"([{"role":"tool","content":"r"}])").messages[0].at("content") == "r");
}

TEST_CASE("chat: arguments of tool calls become objects") {
  const auto call = [](const std::string& arguments) {
    return R"([{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"g","arguments":{}}},)"
           R"({"id":"2","type":"function","function":{"name":"f")" +
           (arguments.empty() ? "" : ",\"arguments\":" + arguments) + "}}]}]";
  };
  const auto parsed = [&](const std::string& arguments) {
    return boost::json::serialize(
        conversation(call(arguments)).messages[0].at("tool_calls").at(1).at("function").at("arguments"));
  };
  CHECK(parsed(R"("{\"a\":1,\"b\":[2]}")") == R"({"a":1,"b":[2]})");
  CHECK(parsed(R"("{}")") == "{}");
  CHECK(parsed(R"("")") == "{}");
  CHECK(parsed("null") == "{}");
  CHECK(parsed("") == "{}");
  CHECK(parsed(R"({"x":9007199254740993})") == R"({"x":9007199254740993})");
  const std::string place = "messages[0].tool_calls[1].function.arguments";
  CHECK(messages_param(call(R"("not json")")) == place);
  CHECK(messages_param(call(R"("[1]")")) == place);
  CHECK(messages_param(call(R"("{\"a\":1,\"a\":2}")")) == place);
  CHECK(messages_param(call("5")) == place);
  CHECK(messages_param(call("\"" + std::string(3000, '[') + "\"")) == place);
}

TEST_CASE("chat: reasoning of earlier turns comes in under either name") {
  CHECK(conversation(R"([{"role":"assistant","content":"a","reasoning_content":"r"}])")
            .messages[0]
            .at("reasoning_content") == "r");
  CHECK(conversation(R"([{"role":"assistant","content":"a","reasoning":"r"}])")
            .messages[0]
            .at("reasoning_content") == "r");
  CHECK(messages_param(R"([{"role":"assistant","content":"a","reasoning_content":5}])") ==
        "messages[0].reasoning_content");
}

TEST_CASE("chat: what is read is what was sent, and unknown fields are ignored") {
  const auto request = chat(
      R"("max_tokens":100,"max_completion_tokens":3,"temperature":0.5,"top_k":7,"seed":-1,"stop":["x","y"],"logit_bias":{"5":-100},)"
      R"("user":"u","metadata":{"a":1},"store":true,"parallel_tool_calls":true,"service_tier":"auto","brand_new":[1,{}],"enable_thinking":false)");
  CHECK(request.max_tokens == 3);
  CHECK(request.temperature == 0.5f);
  CHECK(request.top_k == 7);
  CHECK(request.seed == 18446744073709551615u);
  CHECK(request.stop == std::vector<std::string>{"x", "y"});
  REQUIRE(request.logit_bias.size() == 1);
  CHECK(request.logit_bias[0].token == 5);
  CHECK(request.logit_bias[0].bias == -100.0f);
  CHECK(request.template_arguments.at("enable_thinking") == false);
  CHECK(chat(R"("enable_thinking":true,"chat_template_kwargs":{"enable_thinking":false})")
            .template_arguments.at("enable_thinking") == false);
  CHECK(chat("").template_arguments.empty());
}

TEST_CASE("sampling: the checkpoint's defaults, the request's values, a seed for each choice") {
  const sampling_defaults defaults{.temperature = 0.6f, .top_k = 20, .top_p = 0.95f};
  auto options = sampling_of(chat(""), defaults, 77, 0);
  CHECK(options.temperature == 0.6f);
  CHECK(options.top_k == 20);
  CHECK(options.top_p == 0.95f);
  CHECK(options.seed == 77);
  options = sampling_of(chat(R"("temperature":0,"top_p":1,"top_k":-1,"seed":5)"), defaults, 77, 0);
  CHECK(options.temperature == 0);
  CHECK(options.top_k == -1);
  CHECK(options.seed == 5);
  CHECK(sampling_of(chat(R"("seed":5)"), defaults, 77, 1).seed != 5);
  CHECK(sampling_of(chat(R"("seed":5)"), defaults, 77, 1).seed ==
        sampling_of(chat(R"("seed":5)"), defaults, 78, 1).seed);
}

TEST_CASE("completions: prompt and refusals") {
  CHECK(std::get<std::string>(completion(R"("prompt":"a")").prompt) == "a");
  CHECK(std::get<std::string>(completion(R"("prompt":["a"])").prompt) == "a");
  CHECK(std::get<std::vector<std::int32_t>>(completion(R"("prompt":[1,2,299])").prompt) ==
        std::vector<std::int32_t>{1, 2, 299});
  CHECK(completion_param("") == "prompt");
  CHECK(completion_param(R"("prompt":null)") == "prompt");
  CHECK(completion_param(R"("prompt":"")") == "prompt");
  CHECK(completion_param(R"("prompt":[])") == "prompt");
  CHECK(completion_param(R"("prompt":5)") == "prompt");
  CHECK(completion_param(R"("prompt":{})") == "prompt");
  CHECK(completion_param(R"("prompt":["a","b"])") == "prompt");
  CHECK(completion_param(R"("prompt":[[1,2]])") == "prompt");
  CHECK(completion_param(R"("prompt":[1,"a"])") == "prompt[1]");
  CHECK(completion_param(R"("prompt":[1,-1])") == "prompt[1]");
  CHECK(completion_param(R"("prompt":[1,2,300])") == "prompt[2]");
  CHECK(completion_param(R"("prompt":[1.5])") == "prompt[0]");
  CHECK(completion_param(R"("prompt":"a","echo":false)") == "-");
  CHECK(completion_param(R"("prompt":"a","echo":true)") == "echo");
  CHECK(completion_param(R"("prompt":"a","echo":1)") == "echo");
  CHECK(completion_param(R"("prompt":"a","best_of":1)") == "-");
  CHECK(completion_param(R"("prompt":"a","best_of":2)") == "best_of");
  CHECK(completion_param(R"("prompt":"a","suffix":"b")") == "suffix");
  CHECK(completion_param(R"("prompt":"a","logprobs":5)") == "-");
  CHECK(completion_param(R"("prompt":"a","logprobs":6)") == "logprobs");
  CHECK(completion_param(R"("prompt":"a","max_tokens":0)") == "max_tokens");
}
