// SPDX-License-Identifier: Apache-2.0
#include "model/checkpoint_names.hpp"

#include "support/catch.hpp"
#include "support/safetensors_writer.hpp"
#include "support/temporary_folder.hpp"

using namespace qwen3_moe;
using nibble::io::checkpoint;
using nibble::io::dtype;
using namespace nibble::test;

namespace {
void write(const temporary_folder& folder, const std::vector<std::string>& names) {
  safetensors_writer writer;
  for (const auto& name : names) writer.add(name, dtype::bf16, {4, 2, 1}, std::string(16, '\0'));
  writer.write(folder.path() / "model.safetensors");
}
}  // namespace

TEST_CASE("C044: prefixes are found, or names found and expected are shown") {
  const temporary_folder folder;
  write(folder, {"model.embed_tokens.weight"});
  {
    checkpoint source(folder.path());
    const checkpoint_names names(source, false);
    CHECK(names.of("model.layers.0.mlp") == "model.layers.0.mlp");
    CHECK(names.of("lm_head.weight") == "lm_head.weight");
    CHECK(names.skipped("mtp.fc.weight"));
    CHECK(names.skipped("model.visual.x"));
    CHECK_FALSE(names.skipped("lm_head.weight"));
    CHECK_FALSE(names.skipped("model.layers.0.mlp.gate.weight"));
    const checkpoint_names tied(source, true);
    CHECK(tied.of("lm_head.weight") == "model.embed_tokens.weight");
    CHECK(tied.skipped("lm_head.weight"));
  }
  write(folder, {"transformer.wte.weight", "transformer.h.0.x", "a", "b"});
  const std::string complaint = message_of<nibble::format_error>([&] {
    checkpoint source(folder.path());
    const checkpoint_names names(source, false);
  });
  CHECK(has(complaint, "a, b, transformer.h.0.x, …"));
  CHECK(has(complaint, "expected model.language_model.embed_tokens.weight"));
}

TEST_CASE("parts of fused expert tensors") {
  const temporary_folder folder;
  write(folder, {"l.mlp.experts.gate_up_proj", "l.mlp.experts.down_proj"});
  checkpoint source(folder.path());
  const auto part = [&](const std::string& name) { return checkpoint_names::fused_expert(source, name); };
  const auto up = part("l.mlp.experts.3.up_proj.weight");
  REQUIRE(up);
  CHECK(up->shape == nibble::io::tensor_shape{1, 1});
  CHECK(up->begin == 3 * 4 + 2);
  CHECK(up->bytes == 2);
  const auto gate = part("l.mlp.experts.0.gate_proj.weight");
  REQUIRE(gate);
  CHECK(gate->begin == 0);
  const auto down = part("l.mlp.experts.2.down_proj.weight");
  REQUIRE(down);
  CHECK(down->name == "l.mlp.experts.down_proj");
  CHECK(down->begin == 8);
  for (const char* name :
       {"l.mlp.experts.4.up_proj.weight", "l.mlp.experts.x.up_proj.weight", "l.mlp.experts.-1.up_proj.weight",
        "l.mlp.experts.99999999999999999999.up_proj.weight", "l.mlp.experts.1.other.weight", "l.mlp.experts.",
        "l.mlp.gate.weight", "m.mlp.experts.0.up_proj.weight"})
    CHECK_FALSE(part(name));
}
