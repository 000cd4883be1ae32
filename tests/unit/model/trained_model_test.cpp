// SPDX-License-Identifier: Apache-2.0
// The trained checkpoint against reference outputs of an fp32 run of its dequantised weights.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "model/registry.hpp"
#include "support/catch.hpp"
#include "support/reference_answers.hpp"
#include "support/temporary_folder.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::test;

namespace {

/// Where the trained layouts and their references are: NIBBLE_SHARED, or ../shared beside the repository.
std::filesystem::path trained(const std::string& layout) {
  const char* shared = std::getenv("NIBBLE_SHARED");
  return std::filesystem::path(shared != nullptr ? shared : NIBBLE_SOURCE_DIR "/../shared") / "tiny_model" /
         layout;
}

/// Follows the reference's continuation up to its end, or to a step whose gap excuses another token.
void check_continuation(model_runner& runner, const reference_case& c, std::size_t piece) {
  sequence run(runner, 0);
  run.append(c.prompt, piece);
  for (const auto expected : c.completion) {
    if (run.best() != expected) {
      // Allowed only where the two best are closer than an independent implementation's rounding.
      REQUIRE(run.gap() < 0.05f);
      return;
    }
    run.append({&expected, 1}, 1);
  }
}

void check_layout(const std::string& layout, const std::string& compiled_name) {
  const auto folder = trained(layout);
  if (!std::filesystem::exists(folder)) {
    nibble::test::skip_case(folder.string() + " is absent: the " + layout +
                            " layout is not compared with its reference");
    return;
  }
  load_options options;
  options.max_running = 1;
  options.device = device_choice::host;
  const auto model = load_model(folder, options);
  CHECK(model->compiled_name == compiled_name);
  const auto result = verify(*model, folder / "reference.safetensors");
  CAPTURE(result.largest_difference, result.mean_kl_divergence);
  CHECK(result.prompts == 4);
  CHECK(result.positions == 285);
  CHECK(result.largest_difference < 5e-4);
  CHECK(result.mean_kl_divergence < 1e-7);
  CHECK(result.top1_agreement == 1.0);
  const auto cases = reference_cases(folder);
  CHECK(cases.size() == 48);
  for (const auto& c : cases) check_continuation(model->runner(), c, 512);
}

}  // namespace

TEST_CASE("mixed layout: logits and all greedy continuations") { check_layout("mixed", "tiny"); }
TEST_CASE("nvfp4 layout: logits and all greedy continuations") { check_layout("nvfp4", "tiny-nvfp4"); }
TEST_CASE("ct layout: logits and all greedy continuations") { check_layout("ct", "tiny-ct"); }

TEST_CASE("C092: the bundled model: prefill in pieces, token by token and at once give the same bits") {
  load_options options;
  options.max_running = 1;
  options.device = device_choice::host;
  const auto model = load_model(NIBBLE_SOURCE_DIR "/examples/qwen3_moe/models/tiny", options);
  std::vector<std::int32_t> prompt(150);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<std::int32_t>(i * i * 31 % 1900);
  sequence whole(model->runner(), 0);
  whole.append(prompt, 512);
  for (const std::size_t piece : {1u, 2u, 7u, 16u, 17u, 64u, 149u}) {
    sequence pieces(model->runner(), 0);
    pieces.append(prompt, piece);
    CHECK(pieces.logits() == whole.logits());
  }
}

TEST_CASE("verify reports files that do not fit") {
  load_options options;
  options.max_running = 1;
  options.device = device_choice::host;
  options.context_tokens = 64;
  const auto model = load_model(NIBBLE_SOURCE_DIR "/examples/qwen3_moe/models/tiny", options);
  const nibble::test::temporary_folder folder;
  const auto complaint = [&](const std::filesystem::path& file) {
    return nibble::test::message_of<nibble::format_error>([&] { (void)verify(*model, file); });
  };
  CHECK(nibble::test::has(complaint(folder.path() / "none"), "cannot be opened"));
  CHECK(nibble::test::has(complaint(folder.write("x.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10))),
                          "holds no 0.input_ids"));
}
