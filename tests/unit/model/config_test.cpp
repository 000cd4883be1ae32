// SPDX-License-Identifier: Apache-2.0
#include <boost/json.hpp>
#include <functional>
#include <string>

#include "model/config_json.hpp"
#include "nibble/io/file.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace qwen3_moe;
using nibble::format_error;
using nibble::test::has;
using nibble::test::message_of;
namespace json = boost::json;

namespace {

const std::string source = NIBBLE_SOURCE_DIR;

std::string text_of(const std::string& path) { return nibble::io::file::read_text(source + path, 1 << 20); }
json::value tiny() { return json::parse(text_of("/examples/qwen3_moe/configs/tiny.json")); }
parsed_config parse(const json::value& config, std::string_view quantization = "") {
  return parse_config(json::serialize(config), quantization, "config.json");
}
/// The complaint after `change` to the tiny configuration.
std::string complaint(const std::function<void(json::object& top, json::object& text)>& change) {
  json::value config = tiny();
  change(config.as_object(), config.at("text_config").as_object());
  return message_of<format_error>([&] { (void)parse(config); });
}

}  // namespace

TEST_CASE("the tiny configuration") {
  const auto parsed = parse(tiny());
  const auto& c = parsed.config;
  CHECK(c.vocab_size == 2048);
  CHECK(c.hidden_size == 256);
  CHECK(c.layers == 8);
  CHECK(c.full_layers() == 2);
  CHECK((c.full_attention[3] && c.full_attention[7] && !c.full_attention[0]));
  CHECK(c.rotary_dim == 16);
  CHECK(c.rope_theta == 10000.0);
  CHECK(c.attention_gate);
  CHECK(c.zero_centred_norm);
  CHECK(c.delta_conv_channels() == 512);
  CHECK(parsed.max_positions == 4096);
  CHECK(parsed.rules.method == nibble::quantization_method::modelopt);
  CHECK(c.formats.attention_qkv == weight_format::fp8);
  CHECK(c.formats.delta_out == weight_format::fp8);
  CHECK(c.formats.expert_down == weight_format::nvfp4);
  CHECK(c.formats.shared_gate_up == weight_format::nvfp4);
  CHECK(c.formats.lm_head == weight_format::nvfp4);
}

TEST_CASE("globs and expressions of the other layouts give the stored formats") {
  const auto nvfp4 =
      parse(json::parse(text_of("/examples/qwen3_moe/configs/tiny-nvfp4.json"))).config.formats;
  CHECK(nvfp4.expert_gate_up == weight_format::nvfp4);
  CHECK(nvfp4.shared_gate_up == weight_format::bf16);
  CHECK(nvfp4.attention_qkv == weight_format::bf16);
  CHECK(nvfp4.lm_head == weight_format::bf16);
  const auto ct = parse(json::parse(text_of("/examples/qwen3_moe/configs/tiny-ct.json"))).config.formats;
  CHECK(ct.expert_gate_up == weight_format::nvfp4);
  CHECK(ct.shared_down == weight_format::nvfp4);
  CHECK(ct.attention_out == weight_format::nvfp4);
  CHECK(ct.delta_qkvz == weight_format::bf16);
  CHECK(ct.lm_head == weight_format::bf16);
}

TEST_CASE("C045: per-layer formats are found in either file and below either prefix") {
  for (const bool in_second_file : {false, true})
    for (const std::string prefix : {"model.", "model.language_model."}) {
      json::value config = tiny();
      json::object layers;
      for (int i = 0; i < 8; ++i) {
        const std::string mlp = prefix + "layers." + std::to_string(i) + ".mlp.";
        layers[mlp + "experts"] = {{"quant_algo", "W4A16_NVFP4"}, {"group_size", 16}};
        for (const char* part : {"gate_proj", "up_proj", "down_proj"})
          layers[mlp + "shared_expert." + part] = {{"quant_algo", "FP8"}};
      }
      std::string quantization;
      if (in_second_file) {
        config.as_object().erase("quantization_config");
        quantization = json::serialize(
            json::value{{"quantization", {{"quant_algo", "MIXED_PRECISION"}, {"quantized_layers", layers}}}});
      } else {
        config.at("quantization_config").at("quantized_layers") = layers;
      }
      const auto formats = parse(config, quantization).config.formats;
      CHECK(formats.expert_gate_up == weight_format::nvfp4);
      CHECK(formats.shared_gate_up == weight_format::fp8);
      CHECK(formats.attention_qkv == weight_format::bf16);
      CHECK(formats.lm_head == weight_format::bf16);
    }
}

TEST_CASE("C045: what a quantised layer cannot be is refused") {
  const auto layer = [](json::object& top) -> json::object& {
    return top["quantization_config"].at("quantized_layers").at("lm_head").as_object();
  };
  CHECK(has(complaint([&](auto& top, auto&) { layer(top)["group_size"] = 32; }),
            "group_size is 32; NVFP4 has one scale for 16 values"));
  CHECK(has(complaint([&](auto& top, auto&) { layer(top)["quant_algo"] = "INT4"; }), "is 'INT4'"));
  CHECK(has(complaint([&](auto& top, auto&) { top["quantization_config"].at("quant_method") = "gptq"; }),
            "quant_method is 'gptq'"));
  CHECK(has(complaint([&](auto& top, auto&) {
              top["quantization_config"]
                  .at("quantized_layers")
                  .as_object()
                  .erase("model.language_model.layers.2.linear_attn.in_proj_z");
            }),
            "mixed formats are not supported"));
}

TEST_CASE("the number of module patterns is bounded, that of plain names is not") {
  const auto with = [](std::size_t count, const std::string& end) {
    return complaint([&](auto& top, auto&) {
      json::array ignore;
      for (std::size_t i = 0; i < count; ++i)
        ignore.push_back(json::string("module." + std::to_string(i) + end));
      top["quantization_config"] = {
          {"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", ignore}};
    });
  };
  CHECK(with(5000, "") == "");
  CHECK(with(256, "*") == "");
  CHECK(has(with(257, "*"), "more than 256 module patterns"));
}

TEST_CASE("C053: layer kinds from the list, the interval, or both in agreement") {
  json::value config = tiny();
  auto& text = config.at("text_config").as_object();
  text["full_attention_interval"] = 4;
  CHECK(parse(config).config.full_layers() == 2);
  text["full_attention_interval"] = 2;
  CHECK(has(message_of<format_error>([&] { (void)parse(config); }), "disagree about layer 1"));
  text.erase("layer_types");
  CHECK_THROWS_AS(parse(config), format_error);  // now layer 1 attends, but the FP8 list says otherwise
  config.as_object().erase("quantization_config");
  CHECK(parse(config).config.full_layers() == 4);
  text.erase("full_attention_interval");
  CHECK(parse(config).config.full_layers() == 2);
}

TEST_CASE("C086: weights of the chosen experts are normalised unless the file says otherwise") {
  json::value config = tiny();
  auto& text = config.at("text_config").as_object();
  text.erase("norm_topk_prob");
  CHECK(parse(config).config.normalise_top_k);
  text["norm_topk_prob"] = true;
  CHECK(parse(config).config.normalise_top_k);
  text["norm_topk_prob"] = false;
  CHECK_FALSE(parse(config).config.normalise_top_k);
}

TEST_CASE("C054: unknown layer types are refused, not ignored") {
  CHECK(has(complaint([](auto&, auto& text) { text["layer_types"].as_array()[2] = "sliding_attention"; }),
            "names \"sliding_attention\" for layer 2"));
  CHECK(has(complaint([](auto&, auto& text) { text["layer_types"].as_array().pop_back(); }),
            "is not a list of num_hidden_layers = 8 entries"));
}

TEST_CASE("fields out of range name field, value and limit") {
  const std::pair<const char*, json::value> bad[] = {{"num_experts", 0},
                                                     {"num_experts", -1},
                                                     {"num_experts", 1'000'000'000},
                                                     {"num_hidden_layers", 1'000'000'000},
                                                     {"num_attention_heads", -4},
                                                     {"num_attention_heads", 3},
                                                     {"hidden_size", 0},
                                                     {"hidden_size", 256.5},
                                                     {"hidden_size", "256"},
                                                     {"vocab_size", 0},
                                                     {"vocab_size", 9223372036854775807},
                                                     {"num_experts_per_tok", 17},
                                                     {"num_experts_per_tok", 0},
                                                     {"head_dim", 1},
                                                     {"linear_num_value_heads", 3},
                                                     {"linear_conv_kernel_dim", 99},
                                                     {"rms_norm_eps", -1},
                                                     {"rms_norm_eps", "x"},
                                                     {"attention_bias", true},
                                                     {"attention_bias", 1},
                                                     {"hidden_act", "gelu"},
                                                     {"mlp_only_layers", json::array{1}},
                                                     {"decoder_sparse_step", 2},
                                                     {"max_position_embeddings", 0},
                                                     {"moe_intermediate_size", 0},
                                                     {"use_sliding_window", true}};
  for (const auto& [field, value] : bad) {
    INFO(field << " = " << value);
    const std::string text = complaint([&, f = field, v = value](auto&, auto& object) { object[f] = v; });
    CHECK(has(text, "config.json: text_config"));
    CHECK(has(text, field));
  }
  for (const char* field : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                            "num_experts", "moe_intermediate_size"})
    CHECK(has(complaint([&](auto&, auto& text) { text.erase(field); }), std::string(field) + " is missing"));
  CHECK(has(complaint([](auto& top, auto&) { top["model_type"] = "llama"; }), "model_type is 'llama'"));
  CHECK(has(complaint([](auto&, auto& text) { text["rope_parameters"].as_object()["rope_type"] = "yarn"; }),
            "rope_type is 'yarn'"));
  CHECK(has(complaint([](auto&, auto& text) { text["moe_intermediate_size"] = 40; }),
            "moe_intermediate_size is 40"));
  CHECK(has(complaint([](auto& top, auto&) { top["text_config"] = 7; }), "text_config is not an object"));
}

TEST_CASE("documents that are no configuration") {
  for (const char* text : {"", "[]", "null", "{", "{\"a\":1}}", "{\"model_type\":7}"})
    CHECK(message_of<format_error>([&] { (void)parse_config(text, "", "config.json"); }) != "");
  const std::string deep(100'000, '[');
  CHECK(
      has(message_of<format_error>([&] { (void)parse_config(deep, "", "config.json"); }), "not valid JSON"));
  const nibble::test::temporary_folder folder;
  CHECK(has(message_of<format_error>([&] { (void)read_config(folder.path()); }), "cannot be opened"));
  CHECK(has(message_of<format_error>([&] { (void)read_config(folder.path() / "none"); }), "not a folder"));
}

TEST_CASE("generation defaults") {
  const auto defaults = read_generation_defaults(source + "/examples/qwen3_moe/models/tiny", 2048);
  CHECK(defaults.eos_token_ids == std::vector<std::int32_t>{1918, 1916});
  CHECK(defaults.temperature == Approx(0.6f));
  CHECK(defaults.top_k == 20);
  CHECK(defaults.top_p == Approx(0.95f));
  const auto parse_generation = [](std::string_view text) {
    return parse_generation_defaults(text, R"({"eos_token_id":5})", 10, "generation_config.json");
  };
  CHECK(parse_generation("").eos_token_ids == std::vector<std::int32_t>{5});
  CHECK(parse_generation(R"({"eos_token_id":[1,1,2]})").eos_token_ids == std::vector<std::int32_t>{1, 2});
  CHECK_THROWS_AS(parse_generation(R"({"eos_token_id":10})"), format_error);
  CHECK_THROWS_AS(parse_generation(R"({"eos_token_id":"x"})"), format_error);
  CHECK_THROWS_AS(parse_generation(R"({"temperature":-1})"), format_error);
  CHECK_THROWS_AS(parse_generation(R"({"top_p":1.5})"), format_error);
  CHECK_THROWS_AS(parse_generation("[]"), format_error);
  // Only a file that is not listed is missing; whatever is in its place otherwise is told.
  const nibble::test::temporary_folder folder;
  folder.write("config.json", R"({"eos_token_id":5})");
  const auto read = [&] {
    return message_of<format_error>([&] { (void)read_generation_defaults(folder.path(), 10); });
  };
  CHECK(read() == "");
  folder.write("generation_config.json", "");
  CHECK(has(read(), "generation_config.json: is empty"));
  const auto path = folder.path() / "generation_config.json";
  for (const char* target : {"nowhere", "generation_config.json"}) {
    std::filesystem::remove(path);
    std::filesystem::create_symlink(target, path);
    CHECK(has(read(), "generation_config.json: cannot be opened"));
  }
}

TEST_CASE("Qwen3-MoE has plain attention and norms") {
  const auto parsed = parse_config(text_of("/tests/data/models/plain-qwen3.json"), "", "config.json");
  CHECK_FALSE(parsed.config.attention_gate);
  CHECK_FALSE(parsed.config.zero_centred_norm);
  CHECK(parsed.config.delta_layers() == 0);
  CHECK(parsed.config.shared_intermediate == 0);
  CHECK(parsed.config.rotary_dim == 32);
  CHECK(parsed.config.formats.expert_down == weight_format::nvfp4);
  CHECK(parsed.config.formats.attention_qkv == weight_format::bf16);
}
