// SPDX-License-Identifier: Apache-2.0
// What a step looks like to the device, and what of the page tables is sent: host logic of the CUDA runner.
#include "model/device_step.hpp"

#include <numeric>
#include <random>
#include <vector>

#include "compiled/qwen3_30b_a3b.hpp"
#include "compiled/qwen3_6_35b_a3b.hpp"
#include "model/device_memory_model.hpp"
#include "support/catch.hpp"
#include "test_models.hpp"

using namespace qwen3_moe;

namespace {

struct composed {
  explicit composed(int rows = 64, int sequences = 8)
      : layout{rows, sequences},
        words(static_cast<std::size_t>(layout.words()), -77),
        step(layout, words.data()) {}
  [[nodiscard]] std::int32_t at(int offset, int i) const {
    return words[static_cast<std::size_t>(offset + i)];
  }

  device_step_layout layout;
  std::vector<std::int32_t> words;
  device_step step;
};

std::vector<std::int32_t> tokens_from(int first, int count) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

}  // namespace

TEST_CASE("single tokens come first, prompts after them, each in the caller's order") {
  composed c;
  const auto prompt = tokens_from(100, 5), other = tokens_from(200, 3);
  const std::int32_t one = 11, two = 22;
  const std::vector<std::int32_t> pages(4, 0);
  const step_sequence sequences[] = {{prompt, 0, 3, pages, wanted_logits::last},
                                     {{&one, 1}, 40, 5, pages, wanted_logits::last},
                                     {other, 8, 0, pages, wanted_logits::none},
                                     {{&two, 1}, 7, 1, pages, wanted_logits::last}};
  c.step.compose(sequences);
  CHECK(c.step.rows() == 10);
  CHECK(c.step.sequences() == 4);
  CHECK(c.step.decodes() == 2);
  CHECK(std::vector<int>(c.step.order().begin(), c.step.order().end()) == std::vector<int>{1, 3, 0, 2});
  const std::int32_t first_rows[] = {0, 1, 2, 7, 10}, positions[] = {40, 7, 0, 8}, slots[] = {5, 1, 3, 0};
  for (int i = 0; i < 5; ++i) CHECK(c.at(c.layout.first_row_at(), i) == first_rows[i]);
  for (int i = 0; i < 4; ++i) {
    CHECK(c.at(c.layout.position_at(), i) == positions[i]);
    CHECK(c.at(c.layout.slot_at(), i) == slots[i]);
  }
  const std::int32_t tokens[] = {11, 22, 100, 101, 102, 103, 104, 200, 201, 202};
  for (int i = 0; i < 10; ++i) CHECK(c.at(c.layout.tokens_at(), i) == tokens[i]);
  // Wanted rows in the order of the caller: the prompt's last one, then the two single tokens.
  REQUIRE(c.step.wanted() == 3);
  CHECK(std::vector<std::int32_t>(c.step.wanted_rows().begin(), c.step.wanted_rows().end()) ==
        std::vector<std::int32_t>{6, 0, 1});
  const std::int32_t drawing[] = {3, 5, 1};
  for (int i = 0; i < 3; ++i) CHECK(c.at(c.layout.drawing_slot_at(), i) == drawing[i]);
}

TEST_CASE("every row of a sequence can be wanted") {
  composed c(64, 2);
  const auto prompt = tokens_from(0, 6);
  const std::int32_t one = 9;
  const std::vector<std::int32_t> pages(1, 0);
  const step_sequence sequences[] = {{prompt, 0, 0, pages, wanted_logits::all},
                                     {{&one, 1}, 3, 1, pages, wanted_logits::all}};
  c.step.compose(sequences);
  CHECK(std::vector<std::int32_t>(c.step.wanted_rows().begin(), c.step.wanted_rows().end()) ==
        std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 0});
}

TEST_CASE("padding rows have position -1 and want nothing") {
  composed c;
  const std::int32_t token = 5;
  const std::vector<std::int32_t> pages(1, 0);
  const step_sequence sequence{{&token, 1}, 2, 6, pages, wanted_logits::last};
  c.step.compose({&sequence, 1}, 4);
  CHECK(c.step.rows() == 4);
  CHECK(c.step.sequences() == 4);
  CHECK(c.step.decodes() == 4);
  CHECK(c.step.wanted() == 1);
  CHECK(c.at(c.layout.position_at(), 0) == 2);
  for (int i = 1; i < 4; ++i) {
    CHECK(c.at(c.layout.position_at(), i) == -1);
    CHECK(c.at(c.layout.first_row_at(), i) == i);
    CHECK(c.at(c.layout.tokens_at(), i) == 0);
  }
  CHECK(c.at(c.layout.first_row_at(), 4) == 4);
  c.step.compose({}, 3);
  CHECK(c.step.rows() == 3);
  CHECK(c.step.wanted() == 0);
  c.step.compose({&sequence, 1});
  CHECK(c.step.rows() == 1);
  CHECK(c.step.decodes() == 1);
}

TEST_CASE("the arrays of a step do not overlap") {
  for (const int rows : {1, 16, 513})
    for (const int sequences : {1, 8, 64}) {
      const device_step_layout l{rows, sequences};
      CHECK(l.first_row_at() >= l.tokens_at() + rows);
      CHECK(l.position_at() >= l.first_row_at() + sequences + 1);
      CHECK(l.slot_at() >= l.position_at() + sequences);
      CHECK(l.wanted_at() >= l.slot_at() + sequences);
      CHECK(l.drawing_slot_at() >= l.wanted_at() + rows);
      CHECK(l.words() >= l.drawing_slot_at() + sequences);
    }
}

TEST_CASE("the device's page table is what the sequences say, and only changes are sent") {
  std::mt19937 random(3);
  constexpr int sequences = 4, stride = 20;
  page_table_shadow shadow(sequences, stride);
  std::vector<std::int32_t> device(sequences * stride, -5);
  std::vector<std::vector<std::int32_t>> tables(sequences);
  std::size_t sent = 0, updates = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto s = random() % sequences;
    auto& table = tables[s];
    if (table.size() == stride || random() % 50 == 0) table.clear();  // another sequence takes the row
    if (table.empty() || random() % 4 == 0) table.push_back(static_cast<std::int32_t>(random() % 1000));
    shadow.update(static_cast<int>(s), table, [&](std::size_t at, std::span<const std::int32_t> changed) {
      REQUIRE(at + changed.size() <= device.size());
      std::copy(changed.begin(), changed.end(), device.begin() + static_cast<std::ptrdiff_t>(at));
      sent += changed.size(), ++updates;
    });
    REQUIRE(std::equal(table.begin(), table.end(), device.begin() + static_cast<std::ptrdiff_t>(s * stride)));
  }
  CHECK(updates > 500);
  CHECK(sent < 2 * updates);  // nearly always one new page
}

TEST_CASE("a model's bytes from its configuration are those of its type") {
  const auto check = []<class Config>(std::type_identity<Config>) {
    CAPTURE(std::string(Config::name));
    CHECK(dense_device_bytes_of(Config::value) == dense_device_bytes<Config>());
    // Tiles pad rows and columns to whole tiles, so they are no less than the checkpoint's bytes; the fp32
    // scales of experts are in tables, a few others go with the launches.
    const auto slots =
        static_cast<std::uint64_t>(expert_count(Config::value)) * expert_slot_bytes_of(Config::value);
    CHECK(dense_device_bytes<Config>() + slots + expert_table_bytes_of(Config::value) + 4096 >=
          nibble::weight_bytes<causal_lm<Config>>());
  };
  check(std::type_identity<compiled::qwen3_6_35b_a3b>{});
  check(std::type_identity<compiled::qwen3_30b_a3b>{});
  check(std::type_identity<compiled::ratio2_mixed>{});
  check(std::type_identity<compiled::ratio3_nvfp4>{});
  check(std::type_identity<compiled::ratio4_ct>{});
}

TEST_CASE("the parts of the workspace follow each other without overlap, and grow with every limit") {
  const model_config& c = compiled::qwen3_6_35b_a3b::value;
  const auto bytes = [&](int step, int running, int context) {
    return device_workspace_of(c, nibble::kv_format::bf16, device_sizes_of(step, running, context),
                               nibble::h200)
        .bytes;
  };
  const auto w = device_workspace_of(c, nibble::kv_format::bf16, device_sizes_of(512, 4, 4096), nibble::h200);
  const std::uint64_t starts[] = {
      w.step_words, w.page_table, w.hidden,         w.normed,         w.projected,
      w.mixed,      w.expert_ids, w.expert_weights, w.shared_weights, w.expert_h,
      w.experts,    w.router,     w.attention,      w.delta,          w.inverse_frequencies,
      w.logits,     w.sampling,   w.sampling_rows,  w.sampled,        w.seen,
      w.allowed,    w.bias,       w.drawn,          w.previous,       w.forbidden};
  std::uint64_t before = 0;
  for (const auto start : starts) {
    CHECK(start % 256 == 0);
    CHECK(start >= before);
    before = start;
  }
  CHECK(w.bytes > before);
  CHECK(w.hidden - w.page_table >= 4u * 4 * 256);
  CHECK(w.normed - w.hidden >= 2u * 512 * 2048);
  CHECK(w.sampling - w.logits >= 4u * 8 * 248320);
  CHECK(bytes(1024, 4, 4096) > bytes(512, 4, 4096));
  CHECK(bytes(512, 16, 4096) > bytes(512, 4, 4096));
  CHECK(bytes(512, 4, 131072) > bytes(512, 4, 4096));
}
