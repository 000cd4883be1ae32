// SPDX-License-Identifier: Apache-2.0
/// \file
/// The bundled model's template over a tokenizer whose ids 0 … 255 are the bytes, so that a test's text is
/// cut into tokens at every byte.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "server/text_model.hpp"
#include "text/byte_level.hpp"

namespace qwen3_moe::testing {

inline std::filesystem::path tiny_folder() {
  return std::filesystem::path(NIBBLE_SOURCE_DIR) / "examples/qwen3_moe/models/tiny";
}

/// Ids of the added tokens, behind the bytes.
enum byte_token : std::int32_t {
  end_of_text = 256,
  im_start,
  im_end,
  tool_call_open,
  tool_call_close,
  tool_response_open,
  tool_response_close,
  think_open,
  think_close,
  byte_vocab_size
};

inline std::string byte_tokenizer_json() {
  std::ifstream file(tiny_folder() / "tokenizer.json", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  auto config = boost::json::parse(text).as_object();
  boost::json::object vocabulary;
  for (std::int64_t byte = 0; byte < 256; ++byte) {
    std::string name;
    append_utf8(name, byte_level_alphabet[static_cast<std::size_t>(byte)]);
    vocabulary[name] = byte;
  }
  auto& model = config["model"].as_object();
  model["vocab"] = std::move(vocabulary);
  model["merges"] = boost::json::array();
  std::int64_t id = end_of_text;
  for (auto& token : config["added_tokens"].as_array()) token.as_object()["id"] = id++;
  return boost::json::serialize(config);
}

inline text_model byte_text() {
  return {tokenizer::from_json(byte_tokenizer_json()), chat_template::from_directory(tiny_folder())};
}

/// Text with markers to ids: "<think>x</think>" becomes two added tokens and a byte.
inline std::vector<std::int32_t> byte_ids(const tokenizer& tokens, std::string_view text) {
  return tokens.encode(text, added_tokens_mode::all);
}

}  // namespace qwen3_moe::testing
