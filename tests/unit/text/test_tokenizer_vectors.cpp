// SPDX-License-Identifier: Apache-2.0
// Ids and texts against the tokenizers package: vectors of tests/oracles/text_tokenizer.py, which also has
// generate().
#include <cstdio>

#include "text/detokenizer.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

const json::value& parts() {
  static const json::value v = read_json(source_path("tests/data/text/tokenizer_strings.json"));
  return v;
}

std::string generate(std::uint64_t index) {
  random_numbers r(index);
  std::string out;
  const json::value& p = parts();
  const auto pick = [&](const char* list) -> const json::value& {
    const json::array& a = p.at(list).as_array();
    return a[r.below(a.size())];
  };
  const auto pick_text = [&](const char* list) { return std::string(pick(list).as_string()); };
  const auto add_from = [&](const json::value& range) {
    const auto first = range.at(0).to_number<std::uint64_t>(), last = range.at(1).to_number<std::uint64_t>();
    append_utf8(out, static_cast<char32_t>(first + r.below(last - first + 1)));
  };
  for (std::uint64_t pieces = 1 + r.below(8); pieces > 0; --pieces) {
    switch (r.below(12)) {
      case 0:
        out += pick_text("words");
        break;
      case 1:
        for (std::uint64_t n = 1 + r.below(4); n > 0; --n) out += pick_text("space");
        break;
      case 2:
        for (std::uint64_t n = 1 + r.below(6); n > 0; --n) out += static_cast<char>('0' + r.below(10));
        break;
      case 3:
        out += pick_text("contractions");
        break;
      case 4: {
        const std::string_view marks = p.at("punctuation").as_string();
        for (std::uint64_t n = 1 + r.below(5); n > 0; --n) out += marks[r.below(marks.size())];
        break;
      }
      case 5: {
        const json::value& block = pick("blocks");
        for (std::uint64_t n = 1 + r.below(8); n > 0; --n) add_from(block);
        break;
      }
      case 6:
        out += pick_text("bases");
        for (std::uint64_t n = 1 + r.below(6); n > 0; --n) add_from(pick("marks"));
        break;
      case 7:
        out += pick_text("emoji");
        break;
      case 8: {
        const std::string token = pick_text("markers");
        out += token.substr(0, token.size() - r.below(3) % token.size());
        break;
      }
      case 9: {
        const std::uint64_t c = r.below(0x110000);
        append_utf8(out, static_cast<char32_t>(c >= 0xD800 && c < 0xE000 ? c - 0xD800 : c));
        break;
      }
      case 10:
        out += pick_text("code");
        break;
      default:
        for (std::uint64_t n = 1 + r.below(4); n > 0; --n)
          out += static_cast<char>(static_cast<unsigned char>(r.below(256)));
    }
  }
  return out;
}

void check_vectors(const tokenizer& t, const char* name) {
  const json::value vectors = read_json(source_path("tests/data/text/tokenizer_vectors.json"));
  const json::array& strings = parts().at("explicit").as_array();
  const json::array& explicit_ids = vectors.at(name).at("explicit").as_array();
  REQUIRE(strings.size() == explicit_ids.size());
  for (std::size_t i = 0; i < strings.size(); ++i) {
    const std::string s(strings[i].as_string());
    CAPTURE(s);
    CHECK(t.encode(s) == json::value_to<std::vector<std::int32_t>>(explicit_ids[i]));
  }
  const json::array& hashes = vectors.at(name).at("hashes").as_array();
  const auto block = vectors.at("block").to_number<std::uint64_t>();
  CHECK(hashes.size() * block >= 100'000);
  std::size_t wrong = 0;
  for (std::uint64_t b = 0; b < hashes.size(); ++b) {
    std::uint64_t h = 0xCBF29CE484222325u;
    const auto add = [&](std::uint64_t byte) { h = (h ^ byte) * 0x100000001B3u; };
    for (std::uint64_t i = b * block; i < (b + 1) * block; ++i) {
      const auto ids = t.encode(generate(i));
      for (const std::int32_t id : ids)
        for (int k = 0; k < 4; ++k) add(static_cast<std::uint32_t>(id) >> (8 * k) & 0xFF);
      add(0xFF);
      for (const char c : t.decode(ids)) add(static_cast<unsigned char>(c));
      add(0xFF);
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(h));
    if (text == std::string(hashes[b].as_string())) continue;
    if (++wrong <= 5) UNSCOPED_INFO("strings from " << b * block << " on differ");
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("the bundled tokenizer agrees with the reference on 100,000 strings") {
  check_vectors(tiny_tokenizer(), "tiny");
}

TEST_CASE("Qwen3's tokenizer agrees with the reference on 100,000 strings") {
  const auto shared = shared_folder();
  if (!shared) {
    skip_case("../shared (or NIBBLE_SHARED) is absent, so there is no Qwen3 tokenizer");
    return;
  }
  const std::string path = (*shared / "data/qwen3_tokenizer/tokenizer.json.gz").string();
  REQUIRE(path.find('\'') == path.npos);
  std::FILE* pipe = popen(("gzip -dc '" + path + "'").c_str(), "r");
  REQUIRE(pipe);
  std::string text;
  char buffer[1 << 16];
  for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
  REQUIRE(pclose(pipe) == 0);
  const tokenizer t = tokenizer::from_json(text, "Qwen3");
  CHECK(t.vocab_size() == 151'669);
  check_vectors(t, "qwen3");
  // Merges spelled "a b" mean the same.
  json::value v = json::parse(text);
  for (json::value& m : v.at("model").at("merges").as_array())
    m = std::string(m.at(0).as_string()) + " " + std::string(m.at(1).as_string());
  const tokenizer old_style = tokenizer::from_json(json::serialize(v));
  for (std::uint64_t i = 0; i < 2000; ++i) CHECK(old_style.encode(generate(i)) == t.encode(generate(i)));
}

TEST_CASE("tokens one by one give the text of all tokens") {
  const tokenizer& t = tiny_tokenizer();
  random_numbers r(9);
  for (std::uint64_t i = 0; i < 3000; ++i) {
    std::vector<std::int32_t> ids = t.encode(generate(i));
    // Shuffled and cut ids make ill-formed text too.
    if (i % 2)
      for (std::size_t k = ids.size(); k > 1; --k) std::swap(ids[k - 1], ids[r.below(k)]);
    for (const bool skip : {false, true}) {
      detokenizer d(t, skip);
      std::string all;
      for (const std::int32_t id : ids) {
        const std::string piece = d.push(id);
        CHECK(is_valid_utf8(piece));
        all += piece;
      }
      all += d.finish();
      CHECK(all == t.decode(ids, skip));
    }
  }
}
