// SPDX-License-Identifier: Apache-2.0
// What is kept of experts between starts: the packed form and which were in use. Nothing that is wrong with a
// file may keep a start from succeeding, and no expert may ever have other bytes than its packer gives it.
#include "model/expert_files.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "model/once.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace qwen3_moe;
using nibble::moe::expert_store;

namespace {

constexpr int count = 37;
constexpr std::size_t slot_bytes = 128 * 5;

/// One start: a store filled through files over a checkpoint's folder.
struct start {
  explicit start(expert_keeping keeping)
      : files(std::move(keeping), count, slot_bytes,
              [this](std::string_view line) { notes += std::string(line) + "\n"; }),
        store({.count = count, .slot_bytes = slot_bytes, .piece_bytes = 1, .note = {}, .progress = {}}) {
    scales.resize(count);
    for (int n = 0; n < count; ++n) scales[static_cast<std::size_t>(n)] = {static_cast<float>(n), 2, 3};
  }
  start& fill() {
    files.fill(
        store,
        [this](int number, std::span<std::uint8_t> slot) {
          ++packed;
          for (std::size_t i = 0; i < slot.size(); ++i) slot[i] = byte_of(number, i);
        },
        scales);
    return *this;
  }
  static std::uint8_t byte_of(int number, std::size_t i) {
    return static_cast<std::uint8_t>(i * 11 + static_cast<std::size_t>(number) * 3);
  }
  [[nodiscard]] bool right() const {
    for (int n = 0; n < count; ++n) {
      const auto bytes = store.expert(n);
      for (std::size_t i = 0; i < bytes.size(); ++i)
        if (bytes[i] != static_cast<std::byte>(byte_of(n, i))) return false;
      if (store.scales()[static_cast<std::size_t>(n)][0] != static_cast<float>(n)) return false;
    }
    return true;
  }
  [[nodiscard]] bool noted(const std::string& part) const { return notes.find(part) != std::string::npos; }

  std::string notes;
  expert_files files;
  expert_store store;
  std::vector<nibble::moe::expert_scales> scales;
  std::atomic<int> packed = 0;
};

struct checkpoint {
  checkpoint() {
    folder.write("config.json", "{}");
    folder.write("model.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10) + "weights");
    keeping.checkpoint = folder.path();
  }
  nibble::test::temporary_folder folder;
  expert_keeping keeping;
};

void change_byte(const std::filesystem::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char was = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(was ^ 1));
}

std::vector<std::uint32_t> some_worth() {
  std::vector<std::uint32_t> worth(count);
  std::iota(worth.begin(), worth.end(), 1000u);
  return worth;
}

}  // namespace

TEST_CASE("experts are packed once: the next start takes them from the file", "[expert_files]") {
  checkpoint c;
  c.keeping.cache_file = "";
  start first(c.keeping);
  CHECK(first.fill().right());
  CHECK(first.packed == count);
  CHECK(std::filesystem::exists(c.folder.path() / "nibble-experts.bin"));
  CHECK(!std::filesystem::exists(c.folder.path() / "nibble-experts.bin.partial"));
  CHECK(!first.noted("not used"));
  start second(c.keeping);
  CHECK(second.fill().right());
  CHECK(second.packed == 0);
  CHECK(second.noted("from " + (c.folder.path() / "nibble-experts.bin").string()));
}

TEST_CASE("without the option there is no file", "[expert_files]") {
  checkpoint c;
  start only(c.keeping);
  CHECK(only.fill().right());
  CHECK(only.packed == count);
  CHECK(only.noted("packed from the checkpoint"));
  CHECK(std::distance(std::filesystem::directory_iterator(c.folder.path()), {}) == 2);
}

TEST_CASE("a file of another checkpoint, cut short or damaged is made again", "[expert_files]") {
  checkpoint c;
  const auto file = c.folder.path() / "elsewhere.bin";
  c.keeping.cache_file = file;
  CHECK(start(c.keeping).fill().right());
  SECTION("the checkpoint changed") {
    c.folder.write("config.json", "{ }");
    start next(c.keeping);
    CHECK(next.fill().right());
    CHECK(next.packed == count);
    CHECK(next.noted("is of another checkpoint or layout"));
  }
  SECTION("cut short, as a copy that was broken off leaves it") {
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
    start next(c.keeping);
    CHECK(next.fill().right());
    CHECK(next.packed == count);
    CHECK(next.noted("is cut short"));
  }
  SECTION("one expert is damaged: it alone is packed, and the file is mended") {
    change_byte(file, static_cast<std::streamoff>(std::filesystem::file_size(file) - slot_bytes * 3 - 7));
    start next(c.keeping);
    CHECK(next.fill().right());
    CHECK(next.packed == 1);
    CHECK(next.noted("36 from"));
    CHECK(next.noted("is damaged"));
  }
  SECTION("a crash while it was written left a .partial") {
    std::filesystem::rename(file, file.string() + ".partial");
    start next(c.keeping);
    CHECK(next.fill().right());
    CHECK(next.packed == count);
  }
  start last(c.keeping);
  CHECK(last.fill().right());
  CHECK(last.packed == 0);
}

TEST_CASE("a file that cannot be written is a note", "[expert_files]") {
  checkpoint c;
  c.keeping.cache_file = c.folder.path() / "no such folder" / "experts.bin";
  c.keeping.remember = true;
  start only(c.keeping);
  CHECK(only.fill().right());
  CHECK(only.noted("expert cache not written: "));
  c.keeping.cache_file = c.folder.path();  // a folder where a file should be
  start onto(c.keeping);
  CHECK(onto.fill().right());
  CHECK(onto.noted("not a file"));
  c.keeping.cache_file = c.folder.path() / "config.json" / "experts.bin";  // a file where a folder should be
  start other(c.keeping);
  CHECK(other.fill().right());
  CHECK(other.files.remembers());
  other.files.save_worth(some_worth());
  CHECK(other.noted("was not saved: "));
}

TEST_CASE("a checkpoint that cannot be read for its fingerprint costs nothing but the files",
          "[expert_files]") {
  checkpoint c;
  c.keeping.cache_file = "";
  c.keeping.remember = true;
  c.keeping.checkpoint = c.folder.path() / "absent";
  start only(c.keeping);
  CHECK(only.fill().right());
  CHECK(only.noted("nothing is kept of the experts: "));
  CHECK(!only.files.remembers());
}

TEST_CASE("what was in use is saved beside the cache file, or where programs keep such things",
          "[expert_files]") {
  checkpoint c;
  c.keeping.remember = true;
  const auto state = c.folder.path() / "state";
  REQUIRE(::setenv("XDG_STATE_HOME", state.c_str(), 1) == 0);
  SECTION("beside the cache file") { c.keeping.cache_file = c.folder.path() / "experts.bin"; }
  SECTION("in the state folder, which need not exist") {}
  CHECK(start(c.keeping).files.load_worth().empty());
  start first(c.keeping);
  first.files.save_worth(some_worth());
  CHECK(first.notes.empty());
  CHECK(std::filesystem::exists(c.keeping.cache_file ? c.folder.path() / "experts.bin.worth" : state));
  start second(c.keeping);
  CHECK(second.files.load_worth() == some_worth());
  CHECK(second.noted("are loaded first"));
  c.keeping.remember = false;
  CHECK(start(c.keeping).files.load_worth().empty());
  c.keeping.remember = true;
  if (c.keeping.cache_file) {  // in the state folder another checkpoint has another name
    c.folder.write("config.json", "{ }");
    start third(c.keeping);
    CHECK(third.files.load_worth().empty());
    CHECK(third.noted("is of another checkpoint"));
  }
  REQUIRE(::unsetenv("XDG_STATE_HOME") == 0);
}

TEST_CASE("without a home nothing is remembered, and that is said", "[expert_files]") {
  checkpoint c;
  c.keeping.remember = true;
  const char* home = std::getenv("HOME");
  const std::string before = home != nullptr ? home : "";
  REQUIRE(::unsetenv("XDG_STATE_HOME") == 0);
  REQUIRE(::setenv("HOME", "relative", 1) == 0);
  start only(c.keeping);
  CHECK(!only.files.remembers());
  CHECK(only.noted("neither XDG_STATE_HOME nor HOME"));
  only.files.save_worth(some_worth());
  if (!before.empty()) REQUIRE(::setenv("HOME", before.c_str(), 1) == 0);
}

TEST_CASE("what several threads need done once is tried once, and they all learn that it failed",
          "[expert_files]") {
  std::atomic<int> tried = 0, failed = 0, passed = 0;
  const auto by_all = [&](once& check) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&] {
        try {
          check();
          ++passed;
        } catch (const nibble::format_error&) {
          ++failed;
        }
      });
    for (auto& thread : threads) thread.join();
  };
  once bad([&] {
    ++tried;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    throw nibble::format_error("not a number");
  });
  by_all(bad);
  CHECK(tried == 1);
  CHECK(failed == 8);
  once good([&] { ++tried; });
  by_all(good);
  CHECK(tried == 2);
  CHECK(passed == 8);
  once empty({});
  CHECK_NOTHROW(empty());
}
