// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json from anywhere: it loads or is refused; what loads encodes, and decodes what it encoded.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "nibble/core/error.hpp"
#include "text/detokenizer.hpp"
#include "text/tokenizer.hpp"

using namespace qwen3_moe;

namespace {

void check(const tokenizer& t, std::string_view text) {
  for (const auto mode : {added_tokens_mode::all, added_tokens_mode::not_special, added_tokens_mode::none}) {
    const auto ids = t.encode(text, mode);
    detokenizer d(t, false);
    std::string all;
    for (const std::int32_t id : ids) {
      if (!t.contains(id)) std::abort();
      const std::string piece = d.push(id);
      if (!is_valid_utf8(piece)) std::abort();
      all += piece;
    }
    all += d.finish();
    if (all != t.decode(ids)) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  try {
    const tokenizer t = tokenizer::from_json(
        input, "fuzz", {.file_bytes = std::size_t{1} << 20, .tokens = 4096, .token_bytes = 256});
    check(t, input.substr(0, 2000));
    check(t,
          "Hello  world's\r\n\n 123 e\xCC\x81 \xE1\x84\x80\xE1\x85\xA1 "
          "<|im_end|><think>aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\xFF");
  } catch (const nibble::format_error&) {
  }
  return 0;
}
