// SPDX-License-Identifier: Apache-2.0
// Malformed and unsupported tokenizer.json files: each has its sentence.
#include <sys/stat.h>

#include <filesystem>
#include <functional>

#include "nibble/core/error.hpp"
#include "support/temporary_folder.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

const json::value& good() {
  static const json::value v = read_json(source_path("examples/qwen3_moe/models/tiny/tokenizer.json"));
  return v;
}

json::object& at(json::value& v, std::initializer_list<const char*> path) {
  json::value* p = &v;
  for (const char* key : path) p = &p->as_object()[key];
  return p->as_object();
}

std::string refusal(const std::function<void(json::value&)>& change, const tokenizer_limits& limits = {}) {
  json::value v = good();
  change(v);
  return message_of<nibble::format_error>([&] { tokenizer::from_json(json::serialize(v), "f", limits); });
}

bool contains(const std::string& message, std::string_view what) {
  INFO(message);
  CHECK(message.find(what) != message.npos);
  return message.find(what) != message.npos;
}

}  // namespace

TEST_CASE("text that is no tokenizer") {
  const auto error = [](std::string_view s) {
    return message_of<nibble::format_error>([&] { tokenizer::from_json(s, "f"); });
  };
  contains(error(""), "f: is not valid JSON");
  contains(error("{"), "not valid JSON");
  contains(error("[]"), "is not a JSON object");
  contains(error("{}"), "pre_tokenizer is missing");
  contains(error("{\"a\":\"\xFF\"}"), "not valid JSON");
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += '[';
  contains(error(deep), "not valid JSON");
  contains(message_of<nibble::format_error>([] { tokenizer::from_file("/nonexistent/tokenizer.json"); }),
           "/nonexistent/tokenizer.json: cannot be opened");
  const nibble::test::temporary_folder folder;
  const auto path = folder.path() / "tokenizer.json";
  const auto refused = [&] {
    return message_of<nibble::format_error>([&] { (void)tokenizer::from_file(path); });
  };
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);  // opening it must not wait for a writer
  contains(refused(), "not a regular file");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  contains(refused(), "not a regular file");
  contains(message_of<nibble::format_error>([] { tokenizer::from_json("{}", "f", {.file_bytes = 1}); }),
           "more than the limit of 1");
}

TEST_CASE("parts that are not supported are named") {
  contains(refusal([](json::value& v) { at(v, {"normalizer"})["type"] = "NFKC"; }),
           "normalizer \"NFKC\" is not supported");
  contains(refusal([](json::value& v) { at(v, {"pre_tokenizer"})["type"] = "Whitespace"; }),
           "pre_tokenizer \"Whitespace\" is not supported");
  contains(refusal([](json::value& v) {
             v.at("pre_tokenizer").at("pretokenizers").at(0).at("pattern").as_object()["Regex"] = "\\w+";
           }),
           "pre_tokenizer.pretokenizers[0].pattern.Regex is none of the Qwen patterns: \"\\\\w+\"");
  contains(refusal([](json::value& v) {
             v.at("pre_tokenizer").at("pretokenizers").at(0).as_object()["behavior"] = "Removed";
           }),
           "\"Removed\"");
  contains(refusal([](json::value& v) {
             v.at("pre_tokenizer").at("pretokenizers").at(0).as_object()["invert"] = true;
           }),
           "invert is true");
  contains(refusal([](json::value& v) {
             v.at("pre_tokenizer").at("pretokenizers").at(0).as_object()["type"] = "Digits";
           }),
           "\"Digits\"");
  contains(refusal([](json::value& v) {
             v.at("pre_tokenizer").at("pretokenizers").at(1).as_object()["use_regex"] = true;
           }),
           "use_regex is true");
  contains(refusal([](json::value& v) {
             v.at("pre_tokenizer").at("pretokenizers").at(1).as_object()["add_prefix_space"] = true;
           }),
           "add_prefix_space is true");
  contains(refusal([](json::value& v) { v.at("pre_tokenizer").at("pretokenizers").as_array().pop_back(); }),
           "has 1 parts");
  contains(refusal([](json::value& v) { at(v, {"decoder"})["type"] = "Metaspace"; }),
           "decoder \"Metaspace\" is not supported");
  contains(refusal([](json::value& v) { v.as_object()["decoder"] = nullptr; }), "decoder is missing");
  contains(refusal([](json::value& v) {
             v.as_object()["post_processor"] = {{"type", "TemplateProcessing"}};
           }),
           "post_processor \"TemplateProcessing\"");
  contains(refusal([](json::value& v) { v.as_object()["truncation"] = json::object{}; }),
           "truncation is set");
  contains(refusal([](json::value& v) { v.as_object()["padding"] = json::object{}; }), "padding is set");
  contains(refusal([](json::value& v) { at(v, {"model"})["type"] = "Unigram"; }),
           "model.type \"Unigram\" is not supported");
  contains(refusal([](json::value& v) { at(v, {"model"})["dropout"] = 0.1; }), "model.dropout");
  contains(refusal([](json::value& v) { at(v, {"model"})["unk_token"] = "<unk>"; }), "model.unk_token");
  contains(refusal([](json::value& v) { at(v, {"model"})["byte_fallback"] = true; }),
           "model.byte_fallback is true");
  contains(refusal([](json::value& v) { at(v, {"model"})["end_of_word_suffix"] = "</w>"; }),
           "model.end_of_word_suffix");
  contains(refusal([](json::value& v) { at(v, {"model"})["ignore_merges"] = 1; }),
           "model.ignore_merges must be true or false");
}

TEST_CASE("a vocabulary with mistakes") {
  contains(refusal([](json::value& v) { at(v, {"model"})["vocab"] = json::object{}; }),
           "model.vocab is empty");
  contains(refusal([](json::value& v) { at(v, {"model"})["vocab"] = json::array{}; }),
           "model.vocab must be an object");
  contains(refusal([](json::value& v) { at(v, {"model"}).erase("vocab"); }), "model.vocab is missing");
  contains(refusal([](json::value& v) {
             at(v, {"model", "vocab"})["zzzz"] = 5;
           }),
           "gives the id 5 to two tokens");
  contains(refusal([](json::value& v) {
             at(v, {"model", "vocab"})["zzzz"] = 1917;
           }),
           "gives \"zzzz\" the id 1917; ids here are whole numbers from 0 to 1916");
  contains(refusal([](json::value& v) { at(v, {"model", "vocab"})["zzzz"] = -1; }), "the id -1");
  contains(refusal([](json::value& v) { at(v, {"model", "vocab"})["zzzz"] = 1.5; }), "\"zzzz\"");
  contains(refusal([](json::value& v) { at(v, {"model", "vocab"})["zzzz"] = "7"; }), "\"zzzz\"");
  contains(refusal([](json::value& v) { at(v, {"model", "vocab"})[""] = 1916; }), "holds an empty token");
  contains(refusal([](json::value& v) {
             at(v, {"model", "vocab"})[std::string(5000, 'x')] = 1916;
           }),
           "holds a token of 5000 bytes, more than the limit of 4096");
  contains(refusal([](json::value& v) {
             const auto id = at(v, {"model", "vocab"})["q"];
             at(v, {"model", "vocab"}).erase("q");
             at(v, {"model", "vocab"})["qqq"] = id;
           }),
           "lacks the token \"q\" of byte 113");
  contains(refusal([](json::value&) {}, {.tokens = 100}), "has 1916 tokens, more than the limit of 100");
  CHECK(refusal([](json::value&) {}) == "");
}

TEST_CASE("merges with mistakes") {
  const auto first = [](json::value x) {
    return [x](json::value& v) { v.at("model").at("merges").as_array()[0] = x; };
  };
  contains(refusal(first("a")), "model.merges[0] \"a\" is not two tokens with one space between them");
  contains(refusal(first("a b c")), "is not two tokens");
  contains(refusal(first(json::array{"a"})), "must be a string \"a b\" or a pair of strings");
  contains(refusal(first(json::array{"a", 1})), "must be a string \"a b\" or a pair of strings");
  contains(refusal(first(7)), "must be a string");
  contains(refusal(first(json::array{"nosuchtoken", "a"})),
           "names \"nosuchtoken\", which is not in model.vocab");
  contains(refusal(first(json::array{"q", "q"})), "names \"qq\", which is not in model.vocab");
  contains(refusal([](json::value& v) { at(v, {"model"}).erase("merges"); }), "model.merges is missing");
}

TEST_CASE("added tokens with mistakes") {
  const auto set = [](const char* key, json::value x) {
    return [=](json::value& v) { v.at("added_tokens").at(2).as_object()[key] = x; };
  };
  contains(refusal(set("lstrip", true)), "added_tokens[2] (\"<|im_end|>\") sets lstrip");
  contains(refusal(set("rstrip", true)), "sets rstrip");
  contains(refusal(set("single_word", true)), "sets single_word");
  contains(refusal(set("normalized", true)), "both special and normalized");
  contains(refusal(set("content", "")), "added_tokens[2] holds an empty token");
  contains(refusal(set("content", 5)), "added_tokens[2].content must be a string");
  contains(refusal(set("id", -3)), "the id -3");
  contains(refusal(set("id", 1u << 31)), "the id 2147483648");
  contains(refusal(set("id", 1917)), "gives \"<|im_end|>\" the id 1917, which another token has");
  contains(refusal(set("content", "<|im_start|>")), "but it has the id 1917 already");
  contains(refusal(set("content", "a")), "gives \"a\" the id 1918, but it has the id");
  contains(refusal([](json::value& v) { v.as_object()["added_tokens"] = 1; }),
           "added_tokens must be an array");
  contains(refusal([](json::value& v) { v.at("added_tokens").as_array()[0] = 1; }),
           "added_tokens[0] must be an object");
}

TEST_CASE("what may vary") {
  const auto load = [](const std::function<void(json::value&)>& change) {
    json::value v = good();
    change(v);
    return tokenizer::from_json(json::serialize(v));
  };
  const std::string text = "Hello the world e\xCC\x81 <|im_end|>x";
  const auto ids = tiny_tokenizer().encode(text);
  CHECK(load([](json::value& v) {
          v.as_object()["post_processor"] = {{"type", "ByteLevel"}};
        }).encode(text) == ids);
  CHECK(load([](json::value& v) {
          for (json::value& m : v.at("model").at("merges").as_array())
            m = std::string(m.at(0).as_string()) + " " + std::string(m.at(1).as_string());
        }).encode(text) == ids);
  // Without a normaliser the decomposed letter stays two characters.
  CHECK(load([](json::value& v) { v.as_object()["normalizer"] = nullptr; }).decode(ids) ==
        normalize_nfc(text));
  const tokenizer raw = load([](json::value& v) { v.as_object()["normalizer"] = nullptr; });
  CHECK(raw.decode(raw.encode("e\xCC\x81")) == "e\xCC\x81");
  // Gaps between added tokens are padding.
  const tokenizer gap = load([](json::value& v) { v.at("added_tokens").at(8).as_object()["id"] = 2000; });
  CHECK(gap.vocab_size() == 2001);
  CHECK_FALSE(gap.contains(1950));
  CHECK(gap.decode(std::vector<std::int32_t>{1950, 2000}) == "</think>");
  // The longest added token wins.
  const tokenizer longer = load([](json::value& v) {
    v.at("added_tokens")
        .as_array()
        .push_back({{"id", 1925}, {"content", "<think>!"}, {"normalized", false}, {"special", false}});
  });
  CHECK(longer.encode("<think>!")[0] == 1925);
  CHECK(longer.encode("<think>?")[0] == 1923);
  // A normalized added token is looked for in normalised text.
  const tokenizer normalized = load([](json::value& v) {
    v.at("added_tokens")
        .as_array()
        .push_back({{"id", 1925}, {"content", "e\xCC\x81!"}, {"normalized", true}, {"special", false}});
  });
  CHECK(normalized.encode("\xC3\xA9!") == std::vector<std::int32_t>{1925});
  CHECK(normalized.encode("e\xCC\x81!") == std::vector<std::int32_t>{1925});
}

TEST_CASE("ignore_merges takes a whole piece that is a token") {
  json::value v = good();
  json::object& model = v.at("model").as_object();
  const std::string word = "zqzqzq";
  // A word that no merge makes.
  model["vocab"].as_object()[word] = 1916;
  for (json::value& a : v.at("added_tokens").as_array())
    a.as_object()["id"] = a.at("id").to_number<int>() + 1;
  model["ignore_merges"] = false;
  CHECK(tokenizer::from_json(json::serialize(v)).encode(word).size() > 1);
  model["ignore_merges"] = true;
  CHECK(tokenizer::from_json(json::serialize(v)).encode(word) == std::vector<std::int32_t>{1916});
}
