// SPDX-License-Identifier: Apache-2.0
// Random checkpoints of awkward shapes: the host backend against nibble::ref, however a prompt is cut.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "model/checkpoint_names.hpp"
#include "nibble/op/load.hpp"
#include "random_runs.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "test_models.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::test;
using nibble::quantization_method;

namespace {

template <class Config>
void check_against_reference(const checkpoint_style& style, unsigned seed) {
  INFO(Config::name << ", seed " << seed);
  const nibble::test::temporary_folder folder;
  write_random_checkpoint<Config>(folder.path(), style, seed);
  load_options options;
  options.max_running = 3;
  options.step_tokens = 64;
  options.page_tokens = 8;
  options.context_tokens = 64;
  const auto model = load_model(folder.path(), options, test_models());
  CHECK(model->compiled_name == Config::name);
  CHECK(model->weight_bytes() == nibble::weight_bytes<causal_lm<Config>>());
  const auto tokens = random_tokens(41, Config::value.vocab_size, seed);
  const auto expected = reference_logits<Config>(folder.path(), tokens);
  const auto whole = run(model->runner(), tokens, 64);
  REQUIRE(whole.size() == expected.size());
  double largest = 0, scale = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    REQUIRE(std::isfinite(whole[i]));
    largest = std::max(largest, std::fabs(static_cast<double>(whole[i]) - expected[i]));
    scale = std::max(scale, std::fabs(expected[i]));
  }
  CAPTURE(largest, scale);
  CHECK(largest < 2e-4 * scale);
  for (const int piece : {1, 3, 8, 40}) CHECK(run(model->runner(), tokens, piece, 1) == whole);
}

}  // namespace

TEST_CASE("NVFP4 everywhere, value:key ratio 3, odd vocabulary, first layer attends") {
  check_against_reference<compiled::ratio3_nvfp4>({}, 1);
}
TEST_CASE("compressed-tensors, value:key ratio 4, convolution of width 3") {
  check_against_reference<compiled::ratio4_ct>(
      {quantization_method::compressed_tensors, "model.language_model.", false, true}, 2);
}
TEST_CASE("bf16, one tensor for each expert, tied embeddings, no shared expert, ratio 1") {
  check_against_reference<compiled::ratio1_bf16>({quantization_method::none, "model.", false, true}, 3);
}
TEST_CASE("bf16, fused expert tensors") {
  check_against_reference<compiled::ratio1_bf16>(
      {quantization_method::none, "language_model.model.", true, false}, 4);
}
TEST_CASE("mixed precision by list, ratio 2, convolution of width 2, top-1") {
  check_against_reference<compiled::ratio2_mixed>({}, 5);
}
TEST_CASE("Qwen3-MoE: plain attention and norms, no shared expert") {
  check_against_reference<compiled::plain_qwen3>({quantization_method::modelopt, "model.", false, false}, 6);
}

TEST_CASE("C044: the same weights under every prefix give the same bits") {
  std::vector<float> first;
  for (const char* prefix : {"model.", "model.language_model.", "language_model.model."}) {
    const nibble::test::temporary_folder folder;
    write_random_checkpoint<compiled::ratio3_nvfp4>(folder.path(),
                                                    {quantization_method::modelopt, prefix, false, false}, 9);
    if (std::string(prefix) == "language_model.model.") {
      // there the head is below language_model.
      auto tensors =
          random_tensors<compiled::ratio3_nvfp4>({quantization_method::modelopt, prefix, false, false}, 9);
      for (const char* part : {"weight", "weight_scale", "weight_scale_2"}) {
        tensors["language_model.lm_head." + std::string(part)] = tensors["lm_head." + std::string(part)];
        tensors.erase("lm_head." + std::string(part));
      }
      write_tensors(tensors, folder.path() / "model.safetensors");
    }
    const auto model = load_model(folder.path(), {}, test_models());
    const auto logits = run(model->runner(), random_tokens(9, 101, 9), 9);
    if (first.empty()) first = logits;
    CHECK(logits == first);
  }
}

TEST_CASE("zero-copy loading gives the same bits") {
  const nibble::test::temporary_folder folder;
  write_random_checkpoint<compiled::ratio2_mixed>(folder.path(), {}, 10);
  load_options options;
  const auto tokens = random_tokens(12, 500, 10);
  const auto copied = run(load_model(folder.path(), options, test_models())->runner(), tokens, 12);
  options.mode = nibble::load_mode::map;
  CHECK(run(load_model(folder.path(), options, test_models())->runner(), tokens, 12) == copied);
}

TEST_CASE("sequences of a step do not see each other, and slots start clean") {
  const nibble::test::temporary_folder folder;
  write_random_checkpoint<compiled::ratio4_ct>(
      folder.path(), {quantization_method::compressed_tensors, "model.", false, true}, 11);
  load_options options;
  options.max_running = 3;
  options.page_tokens = 4;
  options.context_tokens = 64;
  options.threads = 1;
  const auto model = load_model(folder.path(), options, test_models());
  auto& runner = model->runner();
  const auto vocab = static_cast<std::size_t>(runner.limits().vocab_size);
  std::vector<std::vector<std::int32_t>> prompts{random_tokens(17, 257, 1), random_tokens(5, 257, 2),
                                                 random_tokens(1, 257, 3)};
  std::vector<std::vector<float>> alone;
  for (const auto& prompt : prompts)
    alone.push_back(run(runner, prompt, 64, 2));  // slot 2 is dirty each time but the first
  for (int slot = 0; slot < 3; ++slot) runner.clear_slot(slot);
  const std::vector<std::vector<std::int32_t>> pages{{9, 2, 7, 4, 1}, {0, 3}, {5}};
  std::vector<step_sequence> sequences;
  std::size_t rows = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    sequences.push_back({prompts[i], 0, static_cast<int>(i), pages[i], wanted_logits::all});
    rows += prompts[i].size();
  }
  std::vector<float> together(rows * vocab, std::nanf(""));
  runner.step(sequences, together);
  std::size_t row = 0;
  for (const auto& logits : alone) {
    CHECK(std::equal(logits.begin(), logits.end(),
                     together.begin() + static_cast<std::ptrdiff_t>(row * vocab)));
    row += logits.size() / vocab;
  }
  // Prefill of one beside decode of another, and only the last row wanted.
  const std::vector<std::int32_t> next{7};
  const std::vector<std::int32_t> whole = [&] {
    auto t = prompts[0];
    t.push_back(7);
    return t;
  }();
  const auto expected = run(load_model(folder.path(), options, test_models())->runner(), whole, 64);
  runner.clear_slot(1);
  const step_sequence mixed[] = {{next, 17, 0, pages[0], wanted_logits::last},
                                 {prompts[1], 0, 1, pages[1], wanted_logits::none}};
  std::vector<float> last(vocab, std::nanf(""));
  runner.step(mixed, last);
  CHECK(std::equal(last.begin(), last.end(), expected.end() - static_cast<std::ptrdiff_t>(vocab)));
}
