// SPDX-License-Identifier: Apache-2.0
// What the text tests share: files, the tokenizers under test, a reproducible source of numbers.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "support/catch.hpp"
#include "text/tokenizer.hpp"
#include "text/unicode.hpp"

namespace text_test {

namespace json = boost::json;

inline std::filesystem::path source_path(std::string_view relative) {
  return std::filesystem::path(NIBBLE_SOURCE_DIR) / relative;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

inline json::value read_json(const std::filesystem::path& path) {
  json::parse_options options;
  options.max_depth = 200;
  return json::parse(read_file(path), {}, options);
}

/// The folder with the material that is not in the repository, or nothing.
inline std::optional<std::filesystem::path> shared_folder() {
  const char* given = std::getenv("NIBBLE_SHARED");
  const std::filesystem::path path = given ? std::filesystem::path(given) : source_path("../shared");
  if (!std::filesystem::is_directory(path)) return std::nullopt;
  return path;
}

inline const qwen3_moe::tokenizer& tiny_tokenizer() {
  static const auto t =
      qwen3_moe::tokenizer::from_file(source_path("examples/qwen3_moe/models/tiny/tokenizer.json"));
  return t;
}

/// What() of the exception that `action` throws, or "" when it throws none.
template <class Exception, class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Exception& e) {
    return e.what();
  }
  return "";
}

using nibble::test::skip_case;

/// SplitMix64 (Steele, Lea and Flood 2014), as in tests/oracles.
class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  std::uint64_t below(std::uint64_t n) { return next() % n; }

 private:
  std::uint64_t state_;
};

}  // namespace text_test
