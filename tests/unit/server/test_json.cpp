// SPDX-License-Identifier: Apache-2.0
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <string>
#include <thread>

#include "server/api_error.hpp"
#include "server/json.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;

namespace {

std::string problem_of(std::string_view text) {
  try {
    parse_json(text, "the body");
  } catch (const api_error& error) {
    CHECK(error.status == 400);
    return error.message;
  }
  return {};
}

std::string nested(std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

}  // namespace

TEST_CASE("JSON: good texts keep their order, digits and NULs") {
  const auto value = parse_json(
      R"({"b":1,"a":[18446744073709551615,-9223372036854775808,1.5,true,null,"\u0000x\ud83d\ude0a"]})", "x");
  CHECK(boost::json::serialize(value) ==
        std::string("{\"b\":1,\"a\":[18446744073709551615,-9223372036854775808,1.5E0,true,null,"
                    "\"\\u0000x\xF0\x9F\x98\x8A\"]}"));
  CHECK(parse_json("  7 \n", "x").get_int64() == 7);
}

TEST_CASE("JSON: bad texts are refused in one sentence") {
  for (const std::string text :
       {"", "   ", "{", "[1,]", "{\"a\":1,}", "nul", "{'a':1}", "[1] x", "{} {}", "\xEF\xBB\xBF{}", "NaN",
        "-Infinity", "01", "+1", "1.", "\"\\x\"", "// c\n1", "\"a\nb\""}) {
    INFO(text);
    CHECK(problem_of(text).find("the body") == 0);
  }
  CHECK(problem_of("1e400").find("too large") != std::string::npos);
  CHECK(problem_of(std::string("{}\0", 3)).find("not valid") != std::string::npos);
}

TEST_CASE("JSON: ill-formed UTF-8 and lone surrogates are refused") {
  for (const std::string text :
       {"\"\xFF\xFE\"", "\"\xC0\xAF\"", "\"\xED\xA0\x80\"", "\"\xF4\x90\x80\x80\"", "\"\xF0\x9F\"",
        "{\"\xFF\":1}", "\"\\ud83d\"", "\"\\ude00\"", "\"\\ud83d\\u0041\""}) {
    INFO(text);
    CHECK_FALSE(problem_of(text).empty());
  }
}

TEST_CASE("JSON: a key twice in one object is refused, in two objects it is not") {
  CHECK(problem_of(R"({"a":1,"b":2,"a":3})").find("\"a\" twice") != std::string::npos);
  CHECK(problem_of(R"({"a":1,"\u0061":3})").find("\"a\" twice") != std::string::npos);
  CHECK(problem_of(R"({"x":[{"k":1},{"k":2,"k":3}]})").find("\"k\" twice") != std::string::npos);
  CHECK(problem_of(R"({"a":{"a":{"a":1}},"b":{"a":2}})").empty());
  const std::string long_key(5000, 'k');
  CHECK(problem_of("{\"" + long_key + "\":1,\"" + long_key + "\":2}").size() < 200);
}

TEST_CASE("JSON: nesting ends at the limit, on a small stack too") {
  CHECK(problem_of(nested(64)).empty());
  for (const std::size_t depth : {65, 3000, 10000, 100000}) {
    CHECK(problem_of(nested(depth)).find("nesting") != std::string::npos);
    std::string objects;
    for (std::size_t i = 0; i < depth; ++i) objects += "{\"a\":";
    CHECK(problem_of(objects).find("nesting") != std::string::npos);
  }
  std::string message;
  std::thread([&] { message = problem_of(nested(100000)); }).join();
  CHECK(message.find("nesting") != std::string::npos);
}

TEST_CASE("error bodies are valid JSON whatever they are told") {
  const api_error error(400, "bad \xFF\xFE \"quoted\"\n", "invalid_request_error", "a\xC3", "c");
  const auto body = boost::json::parse(error.body()).at("error");
  CHECK(body.at("message").as_string().find("\"quoted\"") != boost::json::string::npos);
  CHECK(body.at("code") == "c");
  CHECK(boost::json::parse(error_of_status(500, "x").body()).at("error").at("param").is_null());
}
