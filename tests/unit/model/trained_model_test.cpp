// SPDX-License-Identifier: Apache-2.0
// The trained checkpoint against reference outputs of an fp32 run of its dequantised weights.
#include <algorithm>
#include <boost/json.hpp>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "model/registry.hpp"
#include "nibble/io/file.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace qwen3_moe;

namespace {

/// Where the trained layouts and their references are: NIBBLE_SHARED, or ../shared beside the repository.
std::filesystem::path trained(const std::string& layout) {
  const char* shared = std::getenv("NIBBLE_SHARED");
  return std::filesystem::path(shared != nullptr ? shared : NIBBLE_SOURCE_DIR "/../shared") / "tiny_model" /
         layout;
}

struct reference_case {
  std::vector<std::int32_t> prompt, completion;
};

std::vector<reference_case> reference_cases(const std::filesystem::path& folder) {
  const auto text = nibble::io::file::read_text(folder / "reference.json", 64 << 20);
  std::vector<reference_case> cases;
  const auto ids = [](const boost::json::value& list) {
    return boost::json::value_to<std::vector<std::int32_t>>(list);
  };
  const auto document = boost::json::parse(text);
  for (const auto& item : document.as_array())
    cases.push_back({ids(item.at("prompt_ids")), ids(item.at("completion_ids"))});
  return cases;
}

/// A sequence of one slot, stepped greedily.
class greedy_run {
 public:
  explicit greedy_run(model_runner& runner, int slot = 0)
      : runner_(runner), slot_(slot), pages_(static_cast<std::size_t>(runner.limits().pages)) {
    std::iota(pages_.begin(), pages_.end(), 0);
    runner_.clear_slot(slot_);
  }
  /// Appends tokens in pieces; afterwards logits() are those of the last one.
  void append(std::span<const std::int32_t> tokens, std::size_t piece) {
    logits_.assign(static_cast<std::size_t>(runner_.limits().vocab_size), std::nanf(""));
    for (std::size_t done = 0; done < tokens.size();) {
      const std::size_t count = std::min(piece, tokens.size() - done);
      const bool last = done + count == tokens.size();
      const step_sequence sequence{tokens.subspan(done, count), position_, slot_, pages_,
                                   last ? wanted_logits::last : wanted_logits::none};
      runner_.step({&sequence, 1}, logits_);
      position_ += static_cast<int>(count);
      done += count;
    }
  }
  [[nodiscard]] std::int32_t best() const {
    return static_cast<std::int32_t>(std::max_element(logits_.begin(), logits_.end()) - logits_.begin());
  }
  /// Distance from the best logit to the second.
  [[nodiscard]] float gap() const {
    std::vector<float> sorted = logits_;
    std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
    return *std::max_element(sorted.begin(), sorted.end()) - sorted[1];
  }
  [[nodiscard]] const std::vector<float>& logits() const { return logits_; }

 private:
  model_runner& runner_;
  int slot_;
  std::vector<std::int32_t> pages_;
  std::vector<float> logits_;
  int position_ = 0;
};

/// Follows the reference's continuation up to its end, or to a step whose gap excuses another token.
void check_continuation(model_runner& runner, const reference_case& c, std::size_t piece) {
  greedy_run run(runner);
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

TEST_CASE("the bundled model: prefill in pieces, token by token and at once give the same bits") {
  load_options options;
  options.max_running = 1;
  options.device = device_choice::host;
  const auto model = load_model(NIBBLE_SOURCE_DIR "/examples/qwen3_moe/models/tiny", options);
  std::vector<std::int32_t> prompt(150);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<std::int32_t>(i * i * 31 % 1900);
  greedy_run whole(model->runner());
  whole.append(prompt, 512);
  for (const std::size_t piece : {1u, 2u, 7u, 16u, 17u, 64u, 149u}) {
    greedy_run pieces(model->runner());
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
