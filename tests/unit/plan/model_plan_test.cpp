// SPDX-License-Identifier: Apache-2.0
// What the planner counts of a model, from its configuration alone; field cases by their number.
#include <filesystem>
#include <fstream>

#include "model/device_memory_model.hpp"
#include "model/memory_plan.hpp"
#include "support/catch.hpp"

using namespace qwen3_moe;
using nibble::kv_format;

namespace {

constexpr std::uint64_t mib = 1 << 20, gib = 1024 * mib;
const std::filesystem::path configs = std::filesystem::path(NIBBLE_SOURCE_DIR) / "examples/qwen3_moe/configs";
const std::string large = (configs / "qwen3.6-35b-a3b.json").string();

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}
nibble::memory_model bytes_of(const std::string& config_text) {
  const auto parsed = parse_config(config_text, "", "config.json");
  return device_memory_model(parsed.config, parsed.max_positions, kv_format::bf16);
}
std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const nibble::error& problem) {
    return problem.what();
  }
  return "";
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("C053: keys and values are those of the attention layers, however the layers are told") {
  const std::string text = text_of(large);
  const auto listed = bytes_of(text);
  CHECK(listed.kv_page_bytes == 16 * 20480);  // 20,480 bytes a token
  const auto begin = text.find("\"layer_types\""), end = text.find("],", begin);
  REQUIRE(begin != std::string::npos);
  std::string by_interval = text;
  by_interval.erase(begin, end + 2 - begin);
  CHECK(bytes_of(by_interval).kv_page_bytes == 16 * 20480);
  const auto by_default = replaced(by_interval, "\"full_attention_interval\": 4,", "");
  CHECK(bytes_of(by_default).kv_page_bytes == 16 * 20480);
  CHECK(contains(refusal([&] {
                   bytes_of(
                       replaced(text, "\"full_attention_interval\": 4", "\"full_attention_interval\": 5"));
                 }),
                 "disagree about layer"));
  const auto fp8 = parse_config(text, "", "config.json");
  CHECK(device_memory_model(fp8.config, fp8.max_positions, kv_format::fp8).kv_page_bytes == 16 * 10240);
}

TEST_CASE("C054: states grow with sequences, are a line of their own, and unknown layers are refused") {
  const auto found = find_paper_model(large, kv_format::bf16);
  // 30 layers of 32 heads of 128 × 128 fp32, and three rows of 8192 channels.
  const std::uint64_t recurrent = 30ull * 32 * 128 * 128 * 4, convolution = 30ull * 8192 * 3 * 2;
  CHECK(found.bytes.state_slot_bytes >= recurrent + convolution);
  CHECK(found.bytes.state_slot_bytes <= recurrent + 2 * convolution + mib);
  load_options options;
  options.fewer_may_run = false;
  std::uint64_t line_of_one = 0;
  for (const int running : {1, 4, 16}) {
    options.max_running = running;
    const auto paper = plan_on_paper(large, 48 * gib, options);
    const auto line = paper.plan.lines[nibble::ledger_line::states].planned_bytes;
    CHECK(line >= static_cast<std::uint64_t>(running) * found.bytes.state_slot_bytes);
    if (running == 1) line_of_one = line;
    CHECK(line <= static_cast<std::uint64_t>(running) * line_of_one);
    CHECK(paper.plan.state_slots == static_cast<std::uint64_t>(running));  // padding rows need none
    CHECK(contains(paper.text(), "recurrent states"));
  }
  CHECK(contains(
      refusal([] { bytes_of(replaced(text_of(large), "\"linear_attention\"", "\"sliding_attention\"")); }),
      "sliding_attention"));
}

TEST_CASE("C055: packed weights count in full: never below what is stored, within one per cent of it") {
  constexpr auto stored = nibble::matrix(2048, 4096, weight_format::nvfp4).bytes();
  CHECK(stored == 4'194'304 + 524'288 + 4);
  constexpr auto resident = nibble::resident_layout{nibble::matrix(2048, 4096, weight_format::nvfp4)}.bytes();
  CHECK(resident + 4 >= stored);
  CHECK(static_cast<double>(resident) <= 1.01 * static_cast<double>(stored));
  const auto found = find_paper_model(large, kv_format::bf16);
  CHECK(found.bytes.expert_slot_bytes == 1'769'472);
  CHECK(found.bytes.experts == 10240);
  // All weights of the type, from the full-size test: experts, delta, attention, routers, norms, head, table.
  const std::uint64_t delta =
      30u * (std::uint64_t{33'554'432} + 2u * 64u * 2048u + 4u * (8192u * 4u + 32u + 32u + 128u));
  const std::uint64_t dense = 40u * std::uint64_t{1'769'472} + delta +
                              10u * (std::uint64_t{27'262'976} + 4u * 512u) + 40u * 2u * 257u * 2048u +
                              4u * 81u * 2048u + 286'064'640u + 2u * std::uint64_t{248'320} * 2048u;
  CHECK(found.bytes.weight_bytes >= dense);
  CHECK(static_cast<double>(found.bytes.weight_bytes) <= 1.01 * static_cast<double>(dense));
}

TEST_CASE("plan: what experts in host memory take beside their slots is counted from sizes") {
  const auto config = parse_config(text_of(large), "", "config.json").config;
  const auto model = [&](const expert_keeping& keeping) {
    return find_paper_model(large, kv_format::bf16, keeping).bytes;
  };
  expert_keeping keeping;
  keeping.ahead = 0;
  const auto none = model(keeping);
  // Where every expert is and what it is worth, what every slot holds, scales of both, lists to fetch.
  const std::uint64_t tables = 10240 * (4 + 4 + 12), lists = 4 * 2 * 40 * 576;
  for (const std::uint64_t slots : {40u, 5000u, 10239u}) {
    const std::uint64_t bytes = none.expert_table_bytes(slots), least = tables + lists + slots * (4 + 4 + 12);
    CHECK(bytes >= least);
    CHECK(bytes < least + 9 * 256 + sizeof(nibble::moe::residency_counts));
  }
  keeping.ahead = 4;
  CHECK(model(keeping).expert_table_bytes(40) - none.expert_table_bytes(40) ==
        router_ahead_workspace_of(config).bytes);
  CHECK(router_ahead_workspace_of(config).bytes >=
        16 * (2 * 2048 + 8 * 8 + 4) + nibble::router_workspace_bytes(router_shape_of(config)));
  keeping.ahead = 0, keeping.cpu = cpu_share::measured;
  CHECK(model(keeping).expert_table_bytes(40) ==
        none.expert_table_bytes(40) + 4 * nibble::moe::host_split_words);
  // Page tables are those of what may be locked.
  keeping.lock_limit_bytes = gib;
  CHECK(model(keeping).expert_map_bytes == 2 * mib);
  keeping.lock_limit_bytes = 0;
  CHECK(model(keeping).expert_map_bytes == 0);
  // An H200 took 106 MiB for the whole line with 40 slots, 2 MiB more.
  load_options options;
  options.cuda.expert_slots = 40;
  const auto paper = plan_on_paper(large, 8 * gib, options);
  CHECK(paper.plan.lines[nibble::ledger_line::expert_slots].planned_bytes == 104 * mib);
  CHECK(contains(paper.json(),
                 "\"expert_table_bytes\":" + std::to_string(paper.bytes.expert_table_bytes(40)) + ","));
  CHECK(contains(plan_on_paper(large, 32 * gib, {}).json(), "\"expert_table_bytes\":0,"));
}

TEST_CASE("C056: every stored format has its bytes, block scales included") {
  CHECK(nibble::matrix(1, 16, weight_format::nvfp4).code_bytes() == 8);
  CHECK(nibble::matrix(1, 16, weight_format::nvfp4).block_scale_bytes() == 1);
  CHECK(nibble::matrix(1, 16, weight_format::nvfp4).bytes() == 8 + 1 + 4);
  CHECK(nibble::matrix(1, 16, weight_format::fp8).bytes() == 16 + 4);
  CHECK(nibble::matrix(1, 16, weight_format::bf16).bytes() == 32);
  for (const auto format : {weight_format::bf16, weight_format::fp8, weight_format::nvfp4}) {
    CHECK(nibble::matrix(64, 128, format).bytes() > 0);
    CHECK(nibble::resident_layout{nibble::matrix(64, 128, format)}.bytes() >=
          nibble::matrix(64, 128, format).code_bytes());
  }
  CHECK(nibble::bytes_of(kv_format::bf16) == 2);
  CHECK(nibble::bytes_of(kv_format::fp8) == 1);
  CHECK(!refusal([] {
           static_cast<void>(
               parse_config(replaced(text_of(large), "W4A16_NVFP4", "INT4_AWQ"), "", "config.json"));
         }).empty());
}

TEST_CASE("plan on paper: a 12 GiB card, from config.json, with neither GPU nor weights") {
  const auto paper = plan_on_paper(large, 12 * gib, {});
  CHECK(paper.plan.lines.planned_total() <= 12 * gib);
  CHECK(paper.plan.expert_slots > 3000);
  CHECK(paper.plan.expert_slots < 5000);
  CHECK(paper.plan.limits.context_tokens == 32768);
  CHECK(paper.plan.limits.step_tokens == 8192);                               // experts are fetched
  CHECK(plan_on_paper(large, 10 * gib, {}).plan.limits.step_tokens == 4096);  // and slots are few
  CHECK(plan_on_paper(large, 32 * gib, {}).plan.limits.step_tokens == 512);
  const std::string text = paper.text();
  for (const char* part : {"context", "kernels", "weights", "workspace", "graphs", "recurrent states",
                           "KV pages", "expert slots", "reserve", "of 12.00 GiB", "are resident at a time"})
    CHECK(contains(text, part));
  const std::string json = paper.json();
  for (const char* part : {"\"context_tokens\":32768", "\"line\":\"expert_slots\"",
                           "\"planned_bytes\":", "\"experts\":10240", "\"captured_sizes\":[1,2,4,8]"})
    CHECK(contains(json, part));
  CHECK(json.find('\n') == std::string::npos);
  CHECK(plan_on_paper(large, 32 * gib, {}).plan.residency == nibble::expert_residency::all);
}

TEST_CASE("plan on paper: folders, compiled names, and what is neither") {
  const auto folder = (std::filesystem::path(NIBBLE_SOURCE_DIR) / "examples/qwen3_moe/models/tiny").string();
  const auto by_folder = plan_on_paper(folder, 8 * gib, {});
  CHECK(by_folder.plan.residency == nibble::expert_residency::all);
  CHECK(by_folder.warnings.empty());
  const auto by_name = plan_on_paper("tiny", 8 * gib, {});
  CHECK(by_name.bytes.weight_bytes == by_folder.bytes.weight_bytes);
  CHECK(contains(by_name.text(), "a context of 4096 tokens is assumed"));
  // What a server of that checkpoint would do by default.
  CHECK(by_name.plan.limits.context_tokens == by_folder.plan.limits.context_tokens);
  CHECK(by_name.plan.kv_pages == by_folder.plan.kv_pages);
  CHECK(contains(refusal([] { static_cast<void>(plan_on_paper("nothing", 8 * gib, {})); }),
                 "neither a checkpoint's folder, nor a config.json, nor a compiled model; those are tiny"));
}

TEST_CASE("plan on paper: wishes are kept, contradictory ones refused with the arithmetic") {
  load_options options;
  options.context_tokens = 8192;
  options.max_running = 2;
  options.fewer_may_run = false;
  options.cuda.expert_slots = 1000;
  auto paper = plan_on_paper(large, 12 * gib, options);
  CHECK(paper.plan.limits.context_tokens == 8192);
  CHECK(paper.plan.limits.running == 2);
  CHECK(paper.plan.expert_slots == 1000);
  options.cuda.expert_slots = 6000;
  options.cuda.kv_bytes = 4 * gib;
  try {
    static_cast<void>(plan_on_paper(large, 12 * gib, options));
    FAIL("not refused");
  } catch (const nibble::plan_refused& refused) {
    CHECK(contains(refused.what(), "6000 of 10240 experts"));
    CHECK(contains(refused.what(), "\n  --expert-slots "));
    CHECK(contains(refusal_json(large, 12 * gib, refused), "\"missing_bytes\":"));
  }
  CHECK_THROWS_AS(plan_on_paper(large, 2 * gib, {}), nibble::plan_refused);
  CHECK_THROWS_AS(plan_on_paper(large, 1, {}), nibble::plan_refused);
  // Less than the context alone takes: what is missing is still all that is missing.
  for (const std::uint64_t bytes : {1 * mib, 100 * mib, 523 * mib, 2 * gib}) {
    try {
      static_cast<void>(plan_on_paper(large, bytes, {}));
      FAIL("not refused");
    } catch (const nibble::plan_refused& refused) {
      CHECK(contains(refused.what(), "the driver's context alone takes 524.0 MiB") == (bytes < 524 * mib));
      CHECK(refused.lines().planned_total() == bytes + refused.missing_bytes());
      CHECK_NOTHROW(plan_on_paper(large, bytes + refused.missing_bytes(), {}));
      CHECK_THROWS_AS(plan_on_paper(large, bytes + refused.missing_bytes() - 1, {}), nibble::plan_refused);
    }
  }
}
