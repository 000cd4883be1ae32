// SPDX-License-Identifier: Apache-2.0
#include "nibble/moe/expert_store.hpp"

#include <sys/file.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "nibble/io/fingerprint.hpp"
#include "nibble/moe/expert_file.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace nibble::moe;
using nibble::test::has;
using nibble::test::message_of;

namespace {

/// Locks in name only, and refuses from the `most`-th range on.
class counting_locker final : public page_locker {
 public:
  explicit counting_locker(int most) : most_(most) {}
  std::string lock(std::byte* at, std::uint64_t bytes) override {
    if (static_cast<int>(ranges.size()) >= most_) return "out of lockable memory";
    ranges[at] = bytes;
    return {};
  }
  void unlock(std::byte* at) override { ranges.erase(at); }
  std::map<std::byte*, std::uint64_t> ranges;

 private:
  int most_;
};

std::byte byte_of(int number, std::size_t i) {
  return static_cast<std::byte>((i * 7 + static_cast<std::size_t>(number)) & 255);
}

void produce(int number, std::span<std::byte> slot, expert_scales& scales) {
  for (std::size_t i = 0; i < slot.size(); ++i) slot[i] = byte_of(number, i);
  scales = {static_cast<float>(number), 1, 2};
}

expert_store_options options_for(int count, std::size_t slot_bytes) {
  expert_store_options o;
  o.count = count, o.slot_bytes = slot_bytes, o.piece_bytes = 1;
  return o;
}

bool right(const expert_store& store) {
  for (int n = 0; n < store.count(); ++n) {
    const auto bytes = store.expert(n);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      if (bytes[i] != byte_of(n, i)) return false;
    if (store.scales()[static_cast<std::size_t>(n)][0] != static_cast<float>(n)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("a store is filled, locked in whole pages, and unlocked", "[store]") {
  counting_locker locker(1000);
  {
    auto o = options_for(100, 128 * 9);
    o.locker = &locker;
    std::uint64_t last = 0;
    o.progress = [&](std::uint64_t done, std::uint64_t total) {
      REQUIRE(done > last);
      REQUIRE(total == 100 * 128 * 9);
      last = done;
    };
    o.note = [](std::string_view) { FAIL("nothing to note"); };
    expert_store store(o);
    store.fill(produce);
    REQUIRE(right(store));
    REQUIRE(store.locked() == 100);
    REQUIRE(last == 100 * 128 * 9);
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::byte* at = store.data();
    for (const auto& [begin, bytes] : locker.ranges) {
      REQUIRE(begin == at);  // they follow each other, and no expert lies across two
      REQUIRE(bytes % page == 0);
      REQUIRE(static_cast<std::uint64_t>(begin - store.data()) % (128 * 9) == 0);
      at += bytes;
    }
    REQUIRE(locker.ranges.size() > 1);
    REQUIRE_THROWS_AS(store.expert(100), nibble::error);
    REQUIRE_THROWS_AS(store.expert(-1), nibble::error);
  }
  REQUIRE(locker.ranges.empty());
}

TEST_CASE("C103: memory that cannot be locked is used unlocked, with one note", "[store]") {
  for (const int most : {0, 1, 3}) {
    counting_locker locker(most);
    auto o = options_for(200, 128 * 3);
    o.locker = &locker;
    int notes = 0;
    o.note = [&](std::string_view text) {
      ++notes;
      REQUIRE(has(text, "out of lockable memory"));
      REQUIRE(has(text, "ulimit -l"));
    };
    expert_store store(o);
    store.fill(produce);
    REQUIRE(right(store));
    REQUIRE(notes == 1);
    REQUIRE(store.locked() < 200);
    REQUIRE((store.locked() > 0) == (most > 0));
  }
  counting_locker locker(1000);
  auto o = options_for(200, 128 * 3);
  o.locker = &locker, o.most_locked_bytes = 32 * 128 * 3;
  expert_store store(o);
  store.fill(produce);
  REQUIRE(store.locked() == 32);
}

TEST_CASE("an exception of whoever fills comes through", "[store]") {
  counting_locker locker(1000);
  auto o = options_for(100, 128);
  o.locker = &locker, o.threads = 3;
  {
    expert_store store(o);
    REQUIRE(message_of<nibble::format_error>([&] {
              store.fill([](int number, std::span<std::byte> slot, expert_scales& scales) {
                if (number == 57) throw nibble::format_error("shard 2 has vanished");
                produce(number, slot, scales);
              });
            }) == "shard 2 has vanished");
  }
  REQUIRE(locker.ranges.empty());
  REQUIRE_THROWS_AS(expert_store(options_for(0, 128)), nibble::error);
  REQUIRE_THROWS_AS(expert_store(options_for(1, 100)), nibble::error);
}

TEST_CASE("a file of experts is read back, and only for its checkpoint", "[file]") {
  const nibble::test::temporary_folder folder;
  const auto path = folder.path() / "experts.bin";
  nibble::io::fingerprint of, other;
  of.add("this");
  other.add("that");
  expert_store store(options_for(37, 128 * 5));
  store.fill(produce);
  std::string why;
  REQUIRE_FALSE(expert_file::open(path, of, 37, 640, why));
  REQUIRE(why == "there is none");
  expert_file::write(path, of, store);
  REQUIRE_FALSE(std::filesystem::exists(path.string() + ".partial"));
  {
    auto file = expert_file::open(path, of, 37, 640, why);
    REQUIRE(file);
    expert_store again(options_for(37, 640));
    again.fill([&](int number, std::span<std::byte> slot, expert_scales& scales) {
      file->read(number, slot);
      scales = file->scales()[static_cast<std::size_t>(number)];
    });
    REQUIRE(right(again));
    REQUIRE(std::memcmp(file->map().data(), store.data(), 37 * 640) == 0);
  }
  REQUIRE_FALSE(expert_file::open(path, other, 37, 640, why));
  REQUIRE(has(why, "another checkpoint"));
  REQUIRE_FALSE(expert_file::open(path, of, 36, 640, why));
  REQUIRE_FALSE(expert_file::open(path, of, 37, 768, why));

  // Cut short anywhere, or a bit turned anywhere: refused when opened, or when the expert is read.
  const std::string bytes = nibble::io::file::read_text(path, 1 << 22);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{79}, std::size_t{4096}, std::size_t{5000}, bytes.size() - 1})
    REQUIRE_FALSE(expert_file::open(folder.write("short", bytes.substr(0, size)), of, 37, 640, why));
  REQUIRE_FALSE(expert_file::open(folder.write("long", bytes + "x"), of, 37, 640, why));
  REQUIRE_FALSE(expert_file::open(folder.path(), of, 37, 640, why));  // a folder
  std::mt19937 random(4);
  int refused = 0, found = 0;
  for (int i = 0; i < 300; ++i) {
    std::string damaged = bytes;
    const std::size_t at = i < 80 ? static_cast<std::size_t>(i) : 4096 + random() % (damaged.size() - 4096);
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8));
    auto file = expert_file::open(folder.write("damaged", damaged), of, 37, 640, why);
    if (!file) {
      ++refused;
      continue;
    }
    std::vector<std::byte> slot(640);
    for (int n = 0; n < 37; ++n)
      if (has(message_of<nibble::format_error>([&] { file->read(n, slot); }), "damaged")) ++found;
  }
  REQUIRE(refused + found == 300);
  REQUIRE(refused >= 80);
  REQUIRE(found > 0);
}

TEST_CASE("a crash half-way leaves the old file and nothing else to trust", "[file]") {
  const nibble::test::temporary_folder folder;
  const auto path = folder.path() / "experts.bin";
  nibble::io::fingerprint of;
  expert_store store(options_for(8, 256));
  store.fill(produce);
  folder.write("experts.bin.partial", "half of something");
  expert_file::write(path, of, store);  // what a crash left is overwritten
  std::string why;
  REQUIRE(expert_file::open(path, of, 8, 256, why));
  const std::string good = nibble::io::file::read_text(path, 1 << 22);
  {
    nibble::io::replacement_file abandoned(path);
    abandoned.write(0, std::as_bytes(std::span("xxxx")));
    // A second writer is refused while the first is at work.
    REQUIRE(has(message_of<nibble::format_error>([&] { nibble::io::replacement_file second(path); }),
                "somebody else"));
  }
  REQUIRE(nibble::io::file::read_text(path, 1 << 22) == good);
  REQUIRE_FALSE(std::filesystem::exists(path.string() + ".partial"));
  REQUIRE_THROWS_AS(expert_file::write(folder.path() / "no" / "folder", of, store), nibble::format_error);
  // Where a folder is, nothing is written first and given up at the end.
  std::filesystem::create_directory(folder.path() / "taken");
  REQUIRE(has(message_of<nibble::format_error>(
                  [&] { nibble::io::replacement_file on_folder(folder.path() / "taken"); }),
              "not a file"));
  REQUIRE_FALSE(std::filesystem::exists(folder.path() / "taken.partial"));
  // The file shrinks after it was opened: an error, not a signal.
  auto file = expert_file::open(path, of, 8, 256, why);
  REQUIRE(file);
  std::filesystem::resize_file(path, 4096);
  std::vector<std::byte> slot(256);
  REQUIRE(has(message_of<nibble::format_error>([&] { file->read(7, slot); }), "ended at byte"));
}

TEST_CASE("fingerprints tell checkpoints apart", "[file]") {
  const nibble::test::temporary_folder folder;
  std::string header(8, '\0');
  header[0] = 16;
  folder.write("model.safetensors", header + "{\"a\":1}         data");
  folder.write("config.json", "{}");
  const auto now = [&] {
    nibble::io::fingerprint f;
    f.add_checkpoint(folder.path());
    return f;
  };
  const auto first = now();
  REQUIRE(first == now());
  folder.write("config.json", "{ }");
  const auto second = now();
  REQUIRE(second != first);
  folder.write("other.safetensors", header + "{\"a\":1}         data");
  REQUIRE(now() != second);
  folder.write("short.safetensors", "abc");
  REQUIRE_NOTHROW(now());
  // Sums see order, length and every bit.
  std::vector<std::byte> bytes(1000);
  std::mt19937 random(1);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  const auto sum = nibble::io::checksum(bytes);
  for (int i = 0; i < 2000; ++i) {
    auto changed = bytes;
    changed[random() % 1000] ^= static_cast<std::byte>(1 << random() % 8);
    REQUIRE(nibble::io::checksum(changed) != sum);
  }
  std::vector<std::byte> zeros(64);
  REQUIRE(nibble::io::checksum(std::span(zeros).first(40)) !=
          nibble::io::checksum(std::span(zeros).first(41)));
}
