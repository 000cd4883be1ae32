// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "server/one_line.hpp"
#include "support/catch.hpp"

using qwen3_moe::one_line;

TEST_CASE("one line: what could forge a line or drive a terminal goes") {
  CHECK(one_line("plain \xC3\xA9 \xF0\x9F\x90\x9F") == "plain \xC3\xA9 \xF0\x9F\x90\x9F");
  CHECK(one_line("a\nb\r\tc\n") == "a b  c");
  CHECK(one_line(std::string("\x1b[2J\x7f\0z", 7)) == "?[2J??z");
  CHECK(one_line("\xC2\x9B\xC2\xA9") == "?\xC2\xA9");  // CSI of Latin-1; the copyright sign stays
  CHECK(one_line("\xC2") == "\xC2");
  CHECK(one_line("") == "");
  CHECK(one_line("\n\n") == "");
}

TEST_CASE("one line: long text is cut between characters") {
  CHECK(one_line("abcdef", 6) == "abcdef");
  CHECK(one_line("abcdef", 4) == "abcd\xE2\x80\xA6");
  CHECK(one_line("ab\xC3\xA9"
                 "cd",
                 3) == "ab\xE2\x80\xA6");
  CHECK(one_line(std::string(5000, 'x')).size() == 2003);
}
