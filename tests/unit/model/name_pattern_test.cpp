// SPDX-License-Identifier: Apache-2.0
#include "model/name_pattern.hpp"

#include <string>

#include "nibble/core/error.hpp"
#include "support/catch.hpp"

using qwen3_moe::name_pattern;

namespace {
bool matches(const char* pattern, const char* name) { return name_pattern(pattern).matches(name); }
}  // namespace

TEST_CASE("C049: globs match whole names, dots included") {
  CHECK(matches("lm_head", "lm_head"));
  CHECK_FALSE(matches("lm_head", "lm_head2"));
  CHECK_FALSE(matches("lm_head", "model.lm_head"));
  CHECK(matches("lm_head*", "lm_head.x"));
  CHECK(matches("*visual*", "model.visual.blocks.0"));
  CHECK(matches("model.layers.*.mlp.gate", "model.layers.11.mlp.gate"));
  CHECK_FALSE(matches("model.layers.*.mlp.gate", "model.layers.11.mlp.gate_proj"));
  CHECK(matches("model.layers.1.*", "model.layers.1.mlp"));
  CHECK_FALSE(matches("model.layers.1.*", "model.layers.10.mlp"));
  CHECK(matches("model.layers.1*", "model.layers.10.mlp"));
  CHECK(matches("layer?", "layer1"));
  CHECK_FALSE(matches("layer?", "layer"));
  CHECK_FALSE(matches("layer?", "layer12"));
  CHECK(matches("a*b*c", "a1b2b3c"));
  CHECK_FALSE(matches("a*b*c", "a1b2b3"));
  CHECK(matches("lm_head.weight", "lm_head"));
  CHECK(matches("*", ""));
  CHECK_FALSE(matches("", "x"));
}

TEST_CASE("C049: expressions match from the start of the name") {
  CHECK(matches("re:.*linear_attn.*", "model.layers.0.linear_attn.in_proj_a"));
  CHECK_FALSE(matches("re:linear_attn", "model.layers.0.linear_attn"));
  CHECK(matches("re:.*mlp.gate$", "model.layers.0.mlp.gate"));
  CHECK_FALSE(matches("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj"));
  CHECK(matches("re:.*mlp.gate", "model.layers.0.mlp.gate_proj"));
  CHECK(matches("re:^mtp.*", "mtp.fc"));
  CHECK_FALSE(matches("re:^mtp.*", "model.mtp.fc"));
  CHECK(matches("re:.*layers\\.\\d+\\.mlp$", "model.layers.12.mlp"));
  CHECK_FALSE(matches("re:.*layers\\.\\d+\\.mlp$", "model.layers.x.mlp"));
  CHECK_FALSE(matches("re:.*layers\\.\\d+\\.mlp$", "model.layers..mlp"));
  CHECK(matches("re:ab?c$", "ac"));
  CHECK(matches("re:ab?c$", "abc"));
  CHECK_FALSE(matches("re:ab?c$", "abbc"));
  CHECK(matches("re:a+$", "aaa"));
  CHECK_FALSE(matches("re:a+$", ""));
  CHECK_FALSE(matches("re:a+b$", "aac"));
}

TEST_CASE("C049: syntax that is not supported is an error, not a pattern that never matches") {
  for (const char* pattern : {"re:(a|b)", "re:[ab]", "re:a{2}", "re:a|b", "re:*a", "re:a**", "re:a\\w",
                              "re:a$b", "re:a\\", "[ab]*", "a{b}"})
    CHECK_THROWS_AS(name_pattern(pattern), nibble::format_error);
}

TEST_CASE("matching does not blow up") {
  const std::string stars(200, '*');
  const std::string name(5000, 'a');
  CHECK(name_pattern(stars).matches(name));
  std::string hard = "re:";
  for (int i = 0; i < 100; ++i) hard += ".*a";
  CHECK_FALSE(name_pattern(hard + "b$").matches(name));
  CHECK_THROWS_AS(name_pattern(std::string(name_pattern::length_limit + 1, 'a')), nibble::format_error);
}
