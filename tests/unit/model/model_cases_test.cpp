// SPDX-License-Identifier: Apache-2.0
// Field cases of whole models: conventions of norms, tensors that nobody reads, states that outlive their
// request, prompts cut anywhere.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "nibble/core/bf16.hpp"
#include "nibble/op/walk.hpp"
#include "random_runs.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "test_models.hpp"

using namespace qwen3_moe;
using namespace qwen3_moe::test;
using nibble::quantization_method;

namespace {

using config = compiled::ratio3_nvfp4;  // both kinds of layers, a shared expert, norms stored around zero
const checkpoint_style style{quantization_method::modelopt, "model.language_model.", false, true};

load_options small_options() {
  load_options options;
  options.max_running = 2;
  options.step_tokens = 128;
  options.page_tokens = 8;
  options.context_tokens = 128;
  options.threads = 1;
  return options;
}
std::unique_ptr<loaded_model> load(const std::filesystem::path& folder) {
  return load_model(folder, small_options(), test_models());
}
std::unique_ptr<loaded_model> load_tensors(const std::filesystem::path& folder,
                                           const stored_tensors& tensors) {
  copy_config(config::name, folder);
  write_tensors(tensors, folder / "model.safetensors");
  return load(folder);
}

/// Every number of a tensor a little larger, or another code.
void perturb(stored_tensor& t) {
  const auto each = [&t]<class T>(T, auto&& change) {
    for (std::size_t at = 0; at + sizeof(T) <= t.bytes.size(); at += sizeof(T)) {
      T v;
      std::memcpy(&v, t.bytes.data() + at, sizeof(T));
      v = change(v);
      std::memcpy(t.bytes.data() + at, &v, sizeof(T));
    }
  };
  if (t.type == dtype::f32) each(float{}, [](float v) { return v == 0 ? 0.1f : v * 1.1f; });
  if (t.type == dtype::bf16)
    each(std::uint16_t{}, [](std::uint16_t v) {
      const float old = nibble::bf16::decode(v);
      return nibble::bf16::encode(old == 0 ? 0.1f : old * 1.1f);
    });
  if (t.type == dtype::f8_e4m3)
    each(std::uint8_t{},
         [](std::uint8_t v) { return static_cast<std::uint8_t>((v & 0x7F) < 0x7E ? v + 1 : v - 1); });
  if (t.type == dtype::u8)
    each(std::uint8_t{}, [](std::uint8_t v) { return static_cast<std::uint8_t>(v ^ 0x11); });
}

}  // namespace

TEST_CASE("C087: every norm multiplies by one more than is stored, but that inside the delta rule") {
  const nibble::test::temporary_folder folder;
  auto tensors = random_tensors<config>(style, 21);
  int zeroed = 0, ones = 0;
  for (auto& [name, t] : tensors) {
    if (!name.ends_with("norm.weight")) continue;
    const bool gated = name.ends_with("linear_attn.norm.weight");
    const std::size_t count = t.bytes.size() / (t.type == dtype::f32 ? 4 : 2);
    const std::vector<float> values(count, gated ? 1.0f : 0.0f);
    t.type = dtype::f32;
    t.bytes.assign(reinterpret_cast<const char*>(values.data()), 4 * count);
    ++(gated ? ones : zeroed);
  }
  CHECK(zeroed == 2 * 4 + 2 * 2 + 1);
  CHECK(ones == 2);
  const auto model = load_tensors(folder.path(), tensors);
  const auto tokens = random_tokens(23, config::value.vocab_size, 21);
  const auto got = run(model->runner(), tokens, 128);

  // The same by norms without any convention: weights of one, multiplied as they are.
  nibble::io::checkpoint source(folder.path());
  const auto parsed = read_config(folder.path());
  const checkpoint_names names(source, false);
  causal_lm<config> lm;
  const auto weights = nibble::load_weights(lm, source, names.bind_options(parsed.rules));
  const std::vector<float> one(4096, 1.0f);
  nibble::for_each_leaf(lm, [&]<class Leaf>(const nibble::op_path& path, Leaf& leaf) {
    if constexpr (Leaf::kind == nibble::leaf_kind::parameter)
      if (path.joined(Leaf::part_name).ends_with("norm.weight")) leaf.data = one.data();
  });
  model_config plain = config::value;
  plain.zero_centred_norm = false;
  reference_backend backend(plain, tokens);
  forward(backend, lm);
  double largest = 0, scale = 0;
  REQUIRE(backend.logits.size() == got.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(got[i]) - backend.logits[i]));
    scale = std::max(scale, std::fabs(backend.logits[i]));
  }
  CHECK(largest < 2e-4 * scale);
}

TEST_CASE("C088: every tensor that is read changes the logits") {
  const nibble::test::temporary_folder folder;
  const auto tensors = random_tensors<config>(style, 22);
  const auto tokens = random_tokens(40, config::value.vocab_size, 22);
  const auto before = run(load_tensors(folder.path(), tensors)->runner(), tokens, 128);
  int changed = 0;
  for (const auto& [name, t] : tensors) {
    // What nothing reads: scales of quantised activations, vision, multi-token prediction.
    const bool unread = name.ends_with("input_scale") || name.find("visual.") != std::string::npos ||
                        name.starts_with("mtp.");
    auto other = tensors;
    perturb(other.at(name));
    CAPTURE(name);
    CHECK((run(load_tensors(folder.path(), other)->runner(), tokens, 128) != before) == !unread);
    changed += !unread;
  }
  CHECK(changed > 200);
}

TEST_CASE("C089, C090: whatever a slot ran before, and however it ended, the next request finds it empty") {
  const nibble::test::temporary_folder folder;
  write_random_checkpoint<config>(folder.path(), style, 23);
  const auto model = load(folder.path());
  auto& runner = model->runner();
  const auto vocab = static_cast<std::size_t>(config::value.vocab_size);
  const auto b = random_tokens(60, config::value.vocab_size, 24);
  const auto expected = run(load(folder.path())->runner(), b, 128);
  static_cast<void>(run(runner, random_tokens(100, config::value.vocab_size, 25), 128));
  CHECK(run(runner, b, 128) == expected);
  std::mt19937 random(26);
  for (int round = 0; round < 30; ++round) {
    // A is given up in the middle of its prompt, or while it decodes.
    const auto a = random_tokens(100, config::value.vocab_size, 100 + static_cast<unsigned>(round));
    const auto pages = scattered_pages(runner.limits());
    const std::size_t prompt = 1 + random() % 90, decodes = round % 2 == 0 ? 0 : 1 + random() % 9;
    std::vector<float> logits(vocab);
    runner.clear_slot(round % 2);
    for (std::size_t done = 0; done < prompt + decodes;) {
      const std::size_t count = done < prompt ? prompt : 1;
      const step_sequence s{std::span(a).subspan(done, count), static_cast<int>(done), round % 2, pages,
                            done < prompt ? wanted_logits::none : wanted_logits::last};
      runner.step({&s, 1}, std::span(logits).first(done < prompt ? 0 : vocab));
      done += count;
    }
    CHECK(run(runner, b, 1 + static_cast<int>(random() % 60), round % 2) == expected);
  }
}

TEST_CASE("C092: a prompt in windows of any size") {
  const nibble::test::temporary_folder folder;
  write_random_checkpoint<config>(folder.path(), style, 27);
  const auto model = load(folder.path());
  const auto tokens = random_tokens(100, config::value.vocab_size, 27);
  const auto whole = run(model->runner(), tokens, 100);
  for (const int window : {1, 7, 32, 64}) CHECK(run(model->runner(), tokens, window) == whole);
}

TEST_CASE("C095: prompts shorter than the convolution's window, and last pieces of one token") {
  const nibble::test::temporary_folder folder;
  write_random_checkpoint<config>(folder.path(), style, 28);
  const auto model = load(folder.path());
  auto& runner = model->runner();
  const auto vocab = static_cast<std::size_t>(config::value.vocab_size);
  for (int prompt = 1; prompt <= 4; ++prompt) {
    const auto tokens = random_tokens(prompt + 5, config::value.vocab_size, 28);
    const auto expected = reference_logits<config>(folder.path(), tokens);
    std::vector<float> got(tokens.size() * vocab);
    const auto pages = scattered_pages(runner.limits());
    runner.clear_slot(0);
    for (int done = 0; done < prompt + 5;) {
      const int count = done == 0 ? prompt : 1;
      const step_sequence s{
          std::span(tokens).subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)), done, 0,
          pages, wanted_logits::all};
      runner.step({&s, 1}, std::span(got).subspan(static_cast<std::size_t>(done) * vocab,
                                                  static_cast<std::size_t>(count) * vocab));
      done += count;
    }
    double largest = 0, scale = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(got[i]) - expected[i]));
      scale = std::max(scale, std::fabs(expected[i]));
    }
    CAPTURE(prompt);
    CHECK(largest < 2e-4 * scale);
    for (const int piece : {2, 4, 8}) CHECK(run(runner, tokens, piece) == got);
  }
}
