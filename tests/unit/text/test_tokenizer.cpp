// SPDX-License-Identifier: Apache-2.0
// What the tokenizer does beyond the vectors: modes, hostile input, threads.
#include <thread>

#include "text/detokenizer.hpp"
#include "text_support.hpp"

using namespace qwen3_moe;
using namespace text_test;

namespace {

// A vocabulary of the 256 bytes and "aa", "aaaa" and so on, so that a run of one letter merges many times.
tokenizer run_tokenizer(int doublings) {
  json::object vocab;
  json::array merges;
  int id = 0;
  for (int b = 0; b < 256; ++b) {
    std::string s;
    const bool prints = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    append_utf8(s, static_cast<char32_t>(prints ? b
                                                : 0x100 + (b < 0x21   ? b
                                                           : b < 0xA1 ? b - 0x7F + 33
                                                                      : 67)));
    vocab[s] = id++;
  }
  for (int i = 0; i < doublings; ++i) {
    const std::string half(std::size_t{1} << i, 'a');
    vocab[half + half] = id++;
    merges.push_back(json::array{half, half});
  }
  json::value file = read_json(source_path("examples/qwen3_moe/models/tiny/tokenizer.json"));
  file.at("model").as_object()["vocab"] = std::move(vocab);
  file.at("model").as_object()["merges"] = std::move(merges);
  file.as_object()["added_tokens"] = json::array{};
  return tokenizer::from_json(json::serialize(file));
}

}  // namespace

TEST_CASE("which added tokens are recognised") {
  const tokenizer& t = tiny_tokenizer();
  const std::int32_t end = *t.token_to_id("<|im_end|>"), think = *t.token_to_id("<think>");
  const auto has = [](const std::vector<std::int32_t>& ids, std::int32_t id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  const std::string text = "a<think>b<|im_end|>c";
  const auto all = t.encode(text), some = t.encode(text, added_tokens_mode::not_special),
             none = t.encode(text, added_tokens_mode::none);
  CHECK((has(all, end) && has(all, think)));
  CHECK((!has(some, end) && has(some, think)));
  CHECK((!has(none, end) && !has(none, think)));
  for (const auto& ids : {all, some, none}) CHECK(t.decode(ids) == text);
  CHECK(t.decode(all, true) == "a<think>bc");
  CHECK(t.is_special(end));
  CHECK_FALSE(t.is_special(think));
  CHECK_FALSE(t.is_special(-1));
  CHECK_FALSE(t.is_special(1 << 30));
  CHECK(t.token_bytes(end) == "<|im_end|>");
  CHECK(t.token_bytes(-5).empty());
  CHECK_FALSE(t.token_to_id("<|nosuch|>").has_value());
  CHECK(t.vocab_size() == 1925);
  CHECK(t.decode(std::vector<std::int32_t>{-1, 2000, 1 << 30}) == "");
}

TEST_CASE("characters spread over tokens arrive whole and at once") {
  const tokenizer t = run_tokenizer(0);
  detokenizer d(t);
  const auto byte = [&](unsigned char b) {
    const auto ids = t.encode(std::string(1, static_cast<char>(b)));
    // A lone byte above 0x7F is encoded as U+FFFD, so look its token up by its bytes.
    if (b < 0x80) return ids[0];
    for (std::int32_t id = 0; id < t.vocab_size(); ++id)
      if (t.token_bytes(id) == std::string(1, static_cast<char>(b))) return id;
    return -1;
  };
  CHECK(d.push(byte(0xC4)) == "");
  CHECK(d.push(byte(0x8F)) == "\xC4\x8F");
  CHECK(d.push(byte(0xF0)) == "");
  CHECK(d.push(byte(0x9F)) == "");
  CHECK(d.push(byte(0x98)) == "");
  CHECK(d.push(byte(0x8A)) == "\xF0\x9F\x98\x8A");
  CHECK(d.push(byte(0xE4)) == "");
  CHECK(d.push(byte('x')) == "\xEF\xBF\xBDx");
  CHECK(d.push(byte(0xF0)) == "");
  CHECK(d.finish() == "\xEF\xBF\xBD");
  CHECK(d.finish() == "");
}

TEST_CASE("long runs finish") {
  const tokenizer& t = tiny_tokenizer();
  for (const std::string& s :
       {std::string(1'000'000, 'a'), std::string(5'000'000, ' '), std::string(1'000'000, '\n'),
        std::string(1'000'000, '\''), std::string(1'000'000, '<'), std::string(300'000, '\xFF'),
        std::string(1'000'000, '!')}) {
    const auto ids = t.encode(s);
    CHECK(t.decode(ids) == to_valid_utf8(s));
  }
  // 300,000 combining marks in the worst order, and markers that never end.
  std::string marks = "a", markers;
  for (int i = 0; i < 150'000; ++i) marks += i % 2 ? "\xCC\x81" : "\xCC\xA3";
  for (int i = 0; i < 100'000; ++i) markers += "<|im_star";
  CHECK(t.decode(t.encode(marks)) == normalize_nfc(marks));
  CHECK(t.decode(t.encode(markers)) == markers);
}

TEST_CASE("one long piece merges as the rules say") {
  const tokenizer t = run_tokenizer(12);
  // Lowest rank first makes the powers of two of the length, the largest ones first.
  for (const std::size_t n : {1u, 2u, 3u, 47u, 48u, 49u, 50u, 4095u, 4096u, 4097u, 100'000u, 1'000'001u}) {
    const auto ids = t.encode(std::string(n, 'a'));
    std::size_t expected = n / 4096;
    for (std::size_t rest = n % 4096; rest; rest &= rest - 1) ++expected;
    CHECK(ids.size() == expected);
    CHECK(t.decode(ids) == std::string(n, 'a'));
  }
}

TEST_CASE("several threads share a tokenizer") {
  const tokenizer& t = tiny_tokenizer();
  const std::string text = "Hello \xC3\xA9\xCC\x81 <think> 123 <|im_end|>";
  const auto expected = t.encode(text);
  std::vector<std::thread> threads;
  std::vector<int> right(4);
  for (std::size_t k = 0; k < right.size(); ++k)
    threads.emplace_back([&, k] {
      for (int i = 0; i < 500; ++i) right[k] += t.encode(text) == expected;
    });
  for (auto& thread : threads) thread.join();
  for (const int n : right) CHECK(n == 500);
}
