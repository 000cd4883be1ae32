// SPDX-License-Identifier: Apache-2.0
#include "text/pre_tokenizer.hpp"
#include "text/unicode.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

const std::string fffd = "\xEF\xBF\xBD";

std::string utf8(std::initializer_list<char32_t> characters) {
  std::string out;
  for (const char32_t c : characters) append_utf8(out, c);
  return out;
}

std::vector<std::string> pieces(std::string_view text, split_pattern pattern) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = piece_end(text, at, pattern);
    REQUIRE(end > at);
    out.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return out;
}

using list = std::vector<std::string>;

}  // namespace

TEST_CASE("ill-formed UTF-8 becomes one U+FFFD for each maximal subpart") {
  // The examples of tables 3-8 to 3-11 of the Unicode standard.
  CHECK(to_valid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") ==
        fffd + fffd + fffd + fffd + fffd + fffd + fffd + fffd + "A");
  CHECK(to_valid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") ==
        fffd + fffd + fffd + fffd + fffd + fffd + fffd + fffd + "A");
  CHECK(to_valid_utf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42") ==
        fffd + fffd + fffd + fffd + fffd + "A" + fffd + fffd + "B");
  CHECK(to_valid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41") == fffd + fffd + fffd + fffd + "A");
  CHECK(to_valid_utf8("a\xE4\xB8\xAD\xF0\x9F\x98\x8A") == "a\xE4\xB8\xAD\xF0\x9F\x98\x8A");
  CHECK(is_valid_utf8("\xF4\x8F\xBF\xBF"));
  CHECK_FALSE(is_valid_utf8("\xF4\x90\x80\x80"));
  CHECK_FALSE(is_valid_utf8("\xED\xA0\x80"));
  for (char32_t c = 0; c < 0x110000; c = c == 0xD7FF ? 0xE000 : c + 1) {
    const std::string s = utf8({c});
    const decoded_character d = decode_utf8(s, 0);
    if (!d.valid || d.value != c || d.bytes != s.size()) FAIL("code point " << static_cast<std::uint32_t>(c));
  }
}

TEST_CASE("a stream of bytes gives whole characters and the same text") {
  random_numbers r(3);
  const unsigned char bytes[] = {'a',  0x80, 0xBF, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F,
                                 0x98, 0x8A, 0xED, 0xA0, 0xF4, 0xFF, 0xC0, 0xE0, 0x90};
  for (int i = 0; i < 20'000; ++i) {
    std::string all, got;
    utf8_stream s;
    for (std::uint64_t n = r.below(12); n > 0; --n) {
      std::string piece;
      for (std::uint64_t k = r.below(4); k > 0; --k) piece += static_cast<char>(bytes[r.below(sizeof bytes)]);
      all += piece;
      const std::string out = s.push(piece);
      CHECK(is_valid_utf8(out));
      got += out;
    }
    got += s.finish();
    CHECK(got == to_valid_utf8(all));
  }
  utf8_stream s;
  CHECK(s.push("\xF0\x9F\x98") == "");
  CHECK(s.pending());
  CHECK(s.push("\x8A") == "\xF0\x9F\x98\x8A");
  CHECK_FALSE(s.pending());
  CHECK(s.push("\xF0\x9F\x98") == "");
  CHECK(s.finish() == fffd);
  CHECK(s.finish() == "");
}

TEST_CASE("canonical composition") {
  CHECK(normalize_nfc(utf8({'e', 0x301})) == utf8({0xE9}));
  CHECK(normalize_nfc(utf8({0x212B})) == utf8({0xC5}));
  CHECK(normalize_nfc(utf8({0x958})) == utf8({0x915, 0x93C}));  // excluded from composition
  CHECK(normalize_nfc(utf8({0x344})) == utf8({0x308, 0x301}));
  CHECK(normalize_nfc(utf8({'q', 0x307, 0x323})) == utf8({'q', 0x323, 0x307}));
  CHECK(normalize_nfc(utf8({'a', 0x334, 0x301})) == utf8({0xE1, 0x334}));
  CHECK(normalize_nfc(utf8({'a', 0x301, 0x301})) == utf8({0xE1, 0x301}));
  CHECK(normalize_nfc(utf8({0x301, 'a'})) == utf8({0x301, 'a'}));
  CHECK(normalize_nfc(utf8({0x1100, 0x1161, 0x11A8})) == utf8({0xAC01}));
  CHECK(normalize_nfc(utf8({0xAC00, 0x11A8})) == utf8({0xAC01}));
  CHECK(normalize_nfc(utf8({0xAC00, 0x11A7})) == utf8({0xAC00, 0x11A7}));
  CHECK(normalize_nfc(utf8({0xAC01, 0x11A8})) == utf8({0xAC01, 0x11A8}));
  CHECK(normalize_nfc(utf8({0x1100, 0x301, 0x1161})) == utf8({0x1100, 0x301, 0x1161}));
  CHECK(normalize_nfc(utf8({0xCC6, 0xCC2, 0xCD5})) == utf8({0xCCB}));
  CHECK(normalize_nfc(utf8({0x1E0B, 0x323})) == utf8({0x1E0D, 0x307}));
  // Characters younger than Unicode 9 are left alone, as the reference leaves them.
  CHECK(normalize_nfc(utf8({0x11935, 0x11930})) == utf8({0x11935, 0x11930}));
  CHECK(normalize_nfc(utf8({'a', 0x1ACE, 0x323})) == utf8({'a', 0x1ACE, 0x323}));
  CHECK(normalize_nfc("plain ASCII\n") == "plain ASCII\n");
  CHECK(normalize_nfc("") == "");
}

TEST_CASE("composing what is composed changes nothing") {
  random_numbers r(4);
  const char32_t some[] = {'a',    'e',    0x301, 0x308, 0x323, 0x327,  0x334, 0x345, 0x1100, 0x1161,
                           0x11A8, 0xAC00, 0x9C7, 0x9BE, 0xE9,  0x1E69, 0x3B1, 0x93C, 0x915,  0x4E00};
  for (int i = 0; i < 5000; ++i) {
    std::string s;
    for (std::uint64_t n = r.below(12); n > 0; --n) append_utf8(s, some[r.below(std::size(some))]);
    const std::string once = normalize_nfc(s);
    CHECK(normalize_nfc(once) == once);
  }
}

TEST_CASE("pieces of text, by hand from the patterns") {
  for (const split_pattern p : {split_pattern::qwen2, split_pattern::qwen3_5}) {
    CHECK(pieces("Hello, world!", p) == list{"Hello", ",", " world", "!"});
    CHECK(pieces("it's I'Ve we'LL", p) == list{"it", "'s", " I", "'Ve", " we", "'LL"});
    CHECK(pieces("'sing 'x '", p) == list{"'s", "ing", " '", "x", " '"});
    CHECK(pieces("12345", p) == list{"1", "2", "3", "4", "5"});
    CHECK(pieces("a1b", p) == list{"a", "1", "b"});
    CHECK(pieces("-> (x):\n\n y", p) == list{"->", " (", "x", "):\n\n", " y"});
    CHECK(pieces("  x", p) == list{" ", " x"});
    CHECK(pieces("x  \n\n  y", p) == list{"x", "  \n\n", " ", " y"});
    CHECK(pieces("\t\tx\t1", p) == list{"\t", "\tx", "\t", "1"});
    CHECK(pieces("a\r\nb", p) == list{"a", "\r\n", "b"});
    CHECK(pieces("end   ", p) == list{"end", "   "});
    CHECK(pieces(" \n", p) == list{" \n"});
    CHECK(pieces("   1", p) == list{"  ", " ", "1"});
    CHECK(pieces("\xC2\xA0x\xC2\xA0\xC2\xA0", p) == list{"\xC2\xA0x", "\xC2\xA0\xC2\xA0"});
    CHECK(pieces("'\xC5\xBFo", p) == list{"'\xC5\xBF", "o"});
  }
  const std::string namaste = "\u0928\u092E\u0938\u094D\u0924\u0947";
  CHECK(pieces(namaste, split_pattern::qwen3_5) == list{namaste});
  CHECK(pieces(namaste, split_pattern::qwen2) == list{"\u0928\u092E\u0938", "\u094D\u0924", "\u0947"});
  CHECK(pieces("!\u0301", split_pattern::qwen3_5) == list{"!\u0301"});
  CHECK(pieces("!\u0301", split_pattern::qwen2) == list{"!\u0301"});
  CHECK(pieces("1\u0301a", split_pattern::qwen3_5) == list{"1", "\u0301a"});
}
