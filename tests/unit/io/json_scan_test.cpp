// SPDX-License-Identifier: Apache-2.0
#include "nibble/io/json_scan.hpp"

#include <string>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using nibble::format_error;
using nibble::io::json_reader;
using nibble::test::has;
using nibble::test::message_of;

namespace {

/// The whole document skipped: "" when it is valid JSON, the complaint otherwise.
std::string check(std::string_view text, int depth = 64) {
  return message_of<format_error>([&] {
    json_reader json(text, "document");
    json.skip_value(depth);
    json.finish();
  });
}

std::string read_one(std::string_view text) {
  std::string out;
  json_reader json(text, "document");
  json.read_string(out);
  json.finish();
  return out;
}

}  // namespace

TEST_CASE("documents that RFC 8259 allows are stepped over") {
  for (const char* text : {"{}", "[]", " [ ] ", "0", "-0", "12.5e-3", "1E+9", "true", "false", "null", "\"\"",
                           "{\"a\":[1,{\"b\":null},[]],\"c\":\"\\u00e9\\n\"}", "[[[]]]", "[{},{\"x\":{}}]"})
    CHECK(check(text) == "");
}

TEST_CASE("documents that RFC 8259 forbids are refused") {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "}",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "[1,]",
                           "[,1]",
                           "[1 2]",
                           "{a:1}",
                           "{'a':1}",
                           "01",
                           "-",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "nul",
                           "NaN",
                           "Infinity",
                           "\"a",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\t\"",
                           "[1]]",
                           "{} {}",
                           "\"\xff\"",
                           "\"\xc0\xaf\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xf5\x80\x80\x80\"",
                           "\"\xe2\x82\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "{\"a\":1 \"b\":2}",
                           "\xef\xbb\xbf{}"})
    CHECK(has(check(text), "not valid JSON at byte"));
}

TEST_CASE("nesting is bounded, not recursed into") {
  const std::string deep(100'000, '[');
  CHECK(has(check(deep), "nesting over the limit"));
  CHECK(check(std::string(64, '[') + std::string(64, ']')) == "");
  CHECK(has(check(std::string(65, '[') + std::string(65, ']')), "nesting over the limit"));
}

TEST_CASE("strings are decoded to UTF-8") {
  CHECK(read_one(R"("a\"\\\/\b\f\n\r\t")") == "a\"\\/\b\f\n\r\t");
  CHECK(read_one(R"("\u0041\u00e9\u20ac\ud83d\ude00")") == "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  CHECK(read_one("\"\xf0\x9f\x98\x80\"") == "\xf0\x9f\x98\x80");
}

TEST_CASE("integers are exact") {
  const auto read = [](std::string_view text) {
    json_reader json(text, "document");
    return json.read_uint();
  };
  CHECK(read("0") == 0);
  CHECK(read("9007199254740993") == 9007199254740993ull);
  CHECK(read("18446744073709551615") == UINT64_MAX);
  for (const char* text : {"18446744073709551616", "-1", "1.0", "1e3", "\"1\"", "00", "x", ""})
    CHECK(message_of<format_error>([&] { (void)read(text); }) != "");
}

TEST_CASE("members and elements are visited in order") {
  json_reader json(R"({"a":[1,2],"b":{},"c":7})", "document");
  std::string key;
  json.enter_object();
  REQUIRE(json.next_key(key));
  CHECK(key == "a");
  json.enter_array();
  REQUIRE(json.next_element());
  CHECK(json.read_uint() == 1);
  REQUIRE(json.next_element());
  CHECK(json.read_uint() == 2);
  CHECK_FALSE(json.next_element());
  REQUIRE(json.next_key(key));
  CHECK(key == "b");
  json.enter_object();
  CHECK_FALSE(json.next_key(key));
  REQUIRE(json.next_key(key));
  CHECK(key == "c");
  CHECK(json.read_uint() == 7);
  CHECK_FALSE(json.next_key(key));
  json.finish();
}
