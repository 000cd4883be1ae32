// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

struct outcome {
  std::string text;
  std::string stop;  // "" when none
  bool operator==(const outcome&) const = default;
};

outcome run(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  stop_matcher m(stops);
  outcome out;
  for (const std::string& p : pieces) out.text += m.push(p);
  out.text += m.finish();
  out.stop = m.found().value_or("");
  CHECK(m.stopped() == m.found().has_value());
  return out;
}

// The definition, without streaming: the stop string complete first, of several the longest.
outcome by_definition(const std::vector<std::string>& stops, std::string_view text) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::string best;
    for (const std::string& s : stops)
      if (!s.empty() && text.substr(0, end).ends_with(s) && s.size() > best.size()) best = s;
    if (!best.empty()) return {std::string(text.substr(0, end - best.size())), best};
  }
  return {std::string(text), ""};
}

std::vector<std::string> cut(std::string_view text, std::size_t size) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < text.size(); i += size) out.emplace_back(text.substr(i, size));
  return out;
}

}  // namespace

TEST_CASE("stop strings end the text, however it is cut") {
  const std::string fox = "The quick brown fox";
  for (std::size_t n = 1; n <= 20; ++n) {
    CHECK(run({"own fox"}, cut(fox, n)) == outcome{"The quick br", "own fox"});
    CHECK(run({"aab"}, cut("aaab", n)) == outcome{"a", "aab"});
    CHECK(run({"ab", "abc"}, cut("xabc", n)) == outcome{"x", "ab"});
    CHECK(run({"abcd", "bc"}, cut("xabcd", n)) == outcome{"xa", "bc"});
    CHECK(run({"b", "ab"}, cut("xab", n)) == outcome{"x", "ab"});
    CHECK(run({"abab"}, cut("ababab", n)) == outcome{"", "abab"});
    CHECK(run({"five"}, cut("three four fi fivesix", n)) == outcome{"three four fi ", "five"});
    CHECK(run({"x"}, cut("no match", n)) == outcome{"no match", ""});
    CHECK(run({}, cut("no stops", n)) == outcome{"no stops", ""});
    CHECK(run({""}, cut("empty", n)) == outcome{"empty", ""});
    CHECK(run({"\n\n"}, cut("a\nb\n\nc", n)) == outcome{"a\nb", "\n\n"});
    CHECK(run({"stop!"}, cut("ends in a prefix: sto", n)) == outcome{"ends in a prefix: sto", ""});
  }
}

TEST_CASE("only a true prefix is held back, and nothing comes after the stop") {
  stop_matcher m({"own fox", "<|"});
  CHECK(m.push("The br") == "The br");
  CHECK(m.push("o") == "");
  CHECK(m.held_bytes() == 1);
  CHECK(m.push("wn") == "");
  CHECK(m.push("er ") == "owner ");
  CHECK(m.push("a < b") == "a < b");
  CHECK(m.push("own ") == "");
  CHECK(m.push("<") == "own ");
  CHECK(m.push("|im|>") == "");
  CHECK(m.stopped());
  CHECK(*m.found() == "<|");
  CHECK(m.push("more") == "");
  CHECK(m.finish() == "");
}

TEST_CASE("characters stay whole") {
  const std::string text = "ab \xF0\x9F\x98\x8A\xF0\x9F\x98\x80 end";
  std::vector<std::string> characters;
  for (std::size_t at = 0; at < text.size(); at += decode_utf8(text, at).bytes)
    characters.push_back(text.substr(at, decode_utf8(text, at).bytes));
  for (const std::string& stop : {std::string("\xF0\x9F\x98\x80"), std::string("\xF0\x9F\x98\x81"),
                                  std::string("\xF0\x9F\x98\x8A\xF0\x9F\x98\x80 ")}) {
    stop_matcher m({stop});
    std::string all;
    for (const std::string& c : characters) {
      const std::string out = m.push(c);
      CHECK(is_valid_utf8(out));
      all += out;
    }
    all += m.finish();
    CHECK(outcome{all, m.found().value_or("")} == by_definition({stop}, text));
  }
}

TEST_CASE("random stops in random text obey the definition for every cut") {
  random_numbers r(11);
  const auto word = [&](std::uint64_t most) {
    std::string s;
    for (std::uint64_t n = r.below(most) + 1; n > 0; --n) s += static_cast<char>('a' + r.below(2));
    return s;
  };
  for (int i = 0; i < 3000; ++i) {
    std::vector<std::string> stops;
    for (std::uint64_t n = r.below(4) + 1; n > 0; --n) stops.push_back(word(6));
    const std::string text = word(30);
    const outcome expected = by_definition(stops, text);
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t n = r.below(5);
      pieces.push_back(text.substr(at, n));
      at += n;
    }
    CHECK(run(stops, pieces) == expected);
    CHECK(run(stops, {text}) == expected);
  }
}

TEST_CASE("a long stop and a long text cost linear time") {
  const std::string stop = std::string(100'000, 'a') + "b";
  stop_matcher m({stop});
  std::string out;
  for (int i = 0; i < 1000; ++i) out += m.push(std::string(2000, 'a'));
  out += m.finish();
  CHECK(out == std::string(2'000'000, 'a'));
}
