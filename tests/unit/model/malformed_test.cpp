// SPDX-License-Identifier: Apache-2.0
// Checkpoints that must be refused: one sentence, nothing loaded.
#include <fstream>
#include <functional>
#include <string>

#include "nibble/op/load.hpp"
#include "nibble/op/type_visitors.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "test_models.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::test;
using nibble::format_error;
using nibble::quantization_method;
using nibble::test::has;
using nibble::test::message_of;
using nibble::test::temporary_folder;

namespace {

using config = compiled::ratio3_nvfp4;

const stored_tensors& good_tensors() {
  static const stored_tensors tensors = random_tensors<config>({}, 21);
  return tensors;
}
/// The complaint about a checkpoint with changed tensors; "" when it loads.
std::string complaint(const std::function<void(stored_tensors&)>& change) {
  const temporary_folder folder;
  copy_config(config::name, folder.path());
  auto tensors = good_tensors();
  change(tensors);
  write_tensors(tensors, folder.path() / "model.safetensors");
  const std::string text =
      message_of<format_error>([&] { (void)load_model(folder.path(), {}, test_models()); });
  CHECK(text.find('\n') == std::string::npos);
  return text;
}
const std::string layer = "model.language_model.layers.1.";

}  // namespace

TEST_CASE("the checkpoint that the cases below damage is good") {
  CHECK(complaint([](auto&) {}) == "");
}

TEST_CASE("C051: a missing part of one expert is named") {
  CHECK(has(complaint([](auto& t) { t.erase(layer + "mlp.experts.4.down_proj.weight_scale_2"); }),
            "1 missing: " + layer + "mlp.experts.4.down_proj.weight_scale_2"));
  CHECK(has(complaint([](auto& t) { t.erase(layer + "mlp.experts.2.up_proj.weight_scale"); }),
            "mlp.experts.2.up_proj.weight_scale"));
  CHECK(has(complaint([](auto& t) {
              for (const char* part : {"gate_proj", "up_proj", "down_proj"})
                t.erase(layer + "mlp.experts.0." + part + ".weight");
            }),
            "3 missing"));
  CHECK(has(complaint([](auto& t) { t.erase("model.language_model.norm.weight"); }),
            "model.language_model.norm.weight"));
}

TEST_CASE("C048: fused projections of another architecture are not ours") {
  const std::string text = complaint([](auto& t) {
    t[layer + "linear_attn.in_proj_qkvz.weight"] = t[layer + "linear_attn.in_proj_qkv.weight"];
    for (const char* part : {"weight", "weight_scale", "weight_scale_2"})
      t.erase(layer + "linear_attn.in_proj_qkv." + part);
  });
  CHECK(has(text, "3 missing"));
  CHECK(has(text, "1 unexpected: " + layer + "linear_attn.in_proj_qkvz.weight"));
}

TEST_CASE("tensors nobody asked for are reported") {
  CHECK(has(complaint([](auto& t) {
              t[layer + "self_attn.q_proj.bias"] = {dtype::bf16, {1}, "xx"};
            }),
            "unexpected: " + layer + "self_attn.q_proj.bias"));
  CHECK(has(complaint([](auto& t) {
              for (int i = 0; i < 9; ++i) t["odd." + std::to_string(i)] = {dtype::u8, {1}, "x"};
            }),
            "9 unexpected: odd.0, odd.1, odd.2, …"));
}

TEST_CASE("C047: the stored form of lm_head decides which model fits") {
  const std::string text = complaint([](auto& t) {
    t["lm_head.weight"] = {dtype::bf16, {101, 48}, std::string(101 * 48 * 2, '\0')};
    t.erase("lm_head.weight_scale");
    t.erase("lm_head.weight_scale_2");
  });
  CHECK(has(text, "no compiled model fits"));
  CHECK(has(text, "lm_head bf16"));
  CHECK(has(text, "The model ratio3-nvfp4 has these shapes, but stores"));
}

TEST_CASE("a NaN block scale deep inside is found") {
  const std::string name = layer + "mlp.experts.3.gate_proj.weight_scale";
  CHECK(
      has(complaint([&](auto& t) { t[name].bytes[17] = '\x7f'; }), name + " has NaN (byte 127) at index 17"));
}

TEST_CASE("C002: a gate scale and an up scale of their own are kept apart") {
  const temporary_folder folder;
  copy_config(config::name, folder.path());
  auto tensors = good_tensors();
  const float gate = 0.25f, up = 0.125f;
  const std::string expert = layer + "mlp.experts.0.";
  tensors[expert + "gate_proj.weight_scale_2"].bytes.assign(reinterpret_cast<const char*>(&gate), 4);
  tensors[expert + "up_proj.weight_scale_2"].bytes.assign(reinterpret_cast<const char*>(&up), 4);
  write_tensors(tensors, folder.path() / "model.safetensors");
  nibble::io::checkpoint source(folder.path());
  causal_lm<config> lm;
  nibble::bind_options options;
  options.method = quantization_method::modelopt;
  options.checkpoint_name = [](std::string_view name) {
    return name.starts_with("model.") ? "model.language_model." + std::string(name.substr(6))
                                      : std::string(name);
  };
  options.skip = [](std::string_view name) {
    return name.starts_with("mtp.") || name.starts_with("model.visual.");
  };
  const auto weights = nibble::load_weights(lm, source, options);
  lm.model.layers.visit(1, [&](auto& l) {
    CHECK(l.mlp.experts[0].gate_up.segments[0].global_scale == gate);
    CHECK(l.mlp.experts[0].gate_up.segments[1].global_scale == up);
  });
}

TEST_CASE("a checkpoint without a compiled model says which exist and the line to add") {
  const temporary_folder folder;
  std::filesystem::copy_file(std::string(NIBBLE_SOURCE_DIR) + "/examples/qwen3_moe/configs/tiny.json",
                             folder.path() / "config.json");
  write_tensors({{"model.embed_tokens.weight", {dtype::bf16, {1, 1}, "xx"}}},
                folder.path() / "model.safetensors");
  const std::string text =
      message_of<format_error>([&] { (void)load_model(folder.path(), {}, test_models()); });
  CHECK(has(text, "no compiled model fits"));
  CHECK(has(text, "Compiled: ratio1-bf16, ratio2-mixed, ratio3-nvfp4, ratio4-ct, plain-qwen3, qwen3.6-35b-a3b, qwen3-30b-a3b"));
  CHECK(has(text, "-DNIBBLE_MODELS=\"" + (folder.path() / "config.json").string() + "\""));
}

TEST_CASE("files cut short, folders, and nothing at all") {
  const temporary_folder folder;
  const auto load = [&] {
    return message_of<format_error>([&] { (void)load_model(folder.path(), {}, test_models()); });
  };
  CHECK(has(load(), "config.json: cannot be opened"));
  copy_config(config::name, folder.path());
  CHECK(has(load(), "holds neither"));
  write_tensors(good_tensors(), folder.path() / "model.safetensors");
  const auto size = std::filesystem::file_size(folder.path() / "model.safetensors");
  for (const auto bytes : {size - 1, size / 2, std::uintmax_t{4096}, std::uintmax_t{9}, std::uintmax_t{0}}) {
    std::filesystem::resize_file(folder.path() / "model.safetensors", bytes);
    CHECK(has(load(), "model.safetensors"));
  }
  std::filesystem::remove(folder.path() / "model.safetensors");
  std::filesystem::create_directory(folder.path() / "model.safetensors");
  CHECK(has(load(), "not a regular file"));
}

TEST_CASE("limits that make no sense are refused with the range") {
  const temporary_folder folder;
  copy_config(config::name, folder.path());
  write_tensors(good_tensors(), folder.path() / "model.safetensors");
  const auto load = [&](load_options options) {
    return message_of<format_error>([&] { (void)load_model(folder.path(), options, test_models()); });
  };
  load_options options;
  options.context_tokens = 513;
  CHECK(has(load(options), "context is 513, expected 2 to 512"));
  options = {};
  options.max_running = 0;
  CHECK(has(load(options), "max-running is 0"));
  options = {};
  options.kv_tokens = 3;
  CHECK(has(load(options), "kv tokens is 3, expected 512"));
}

TEST_CASE("summaries need no weights") {
  const temporary_folder folder;
  copy_config(config::name, folder.path());
  write_tensors(good_tensors(), folder.path() / "model.safetensors");
  const auto summary = summarize(folder.path(), test_models());
  REQUIRE(summary.model != nullptr);
  CHECK(summary.model->name == "ratio3-nvfp4");
  CHECK(summary.tensors == good_tensors().size());
  CHECK(summary.model->geometries.size() == nibble::distinct_geometries<causal_lm<config>>().size());
  CHECK(summarize(folder.path(), {}).model == nullptr);
}
