// SPDX-License-Identifier: Apache-2.0
#include "nibble/io/checkpoint.hpp"

#include <algorithm>
#include <string>

#include "support/catch.hpp"
#include "support/safetensors_writer.hpp"
#include "support/temporary_folder.hpp"

using nibble::format_error;
using nibble::io::checkpoint;
using nibble::io::dtype;
using namespace nibble::test;

namespace {

void write_shard(const temporary_folder& folder, const std::string& file, const std::string& tensor,
                 float value) {
  safetensors_writer writer;
  writer.add(tensor, dtype::f32, {1}, std::vector<float>{value});
  writer.write(folder.path() / file);
}
void write_index(const temporary_folder& folder, const std::string& map, const std::string& metadata = "{}") {
  folder.write("model.safetensors.index.json",
               R"({"metadata":)" + metadata + R"(,"weight_map":)" + map + "}");
}
std::string complaint_of(const temporary_folder& folder) {
  return message_of<format_error>([&] { checkpoint opened(folder.path()); });
}
float value_of(checkpoint& source, const std::string& name) {
  const auto slice = source.find(name);
  REQUIRE(slice);
  float value = 0;
  slice->read(0, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}
bool warned(const checkpoint& source, std::string_view part) {
  return std::any_of(source.warnings().begin(), source.warnings().end(),
                     [&](const auto& w) { return has(w, part); });
}

}  // namespace

TEST_CASE("a folder without a checkpoint says what it looked for") {
  const temporary_folder folder;
  CHECK(has(complaint_of(folder), "holds neither model.safetensors nor model.safetensors.index.json"));
  CHECK(has(message_of<format_error>([&] { checkpoint opened(folder.path() / "none"); }), "not a folder"));
  folder.write("model.safetensors", raw_safetensors("{}", ""));
  CHECK(has(complaint_of(folder), "holds no tensors"));
}

TEST_CASE("C039: every shard of the index must be there") {
  const temporary_folder folder;
  write_shard(folder, "a-1.safetensors", "a", 1);
  write_shard(folder, "a-3.safetensors", "c", 3);
  write_index(folder, R"({"a":"a-1.safetensors","b":"a-2.safetensors","c":"a-3.safetensors"})");
  CHECK(has(complaint_of(folder), "not in the folder: a-2.safetensors"));
  std::filesystem::create_symlink("nowhere", folder.path() / "a-2.safetensors");
  CHECK(has(complaint_of(folder), "not in the folder: a-2.safetensors"));
  std::filesystem::remove(folder.path() / "a-2.safetensors");
  folder.write("a-2.safetensors", "");
  CHECK(has(complaint_of(folder), "has 0 bytes"));
}

TEST_CASE("links that lead nowhere are told as such") {
  const temporary_folder folder;
  const auto link = [&](const char* name, const char* target) {
    std::filesystem::remove(folder.path() / name);
    std::filesystem::create_symlink(target, folder.path() / name);
  };
  write_shard(folder, "model.safetensors", "a", 1);
  for (const char* target : {"nowhere", "model.safetensors.index.json"}) {
    link("model.safetensors.index.json", target);
    CHECK(has(complaint_of(folder), "model.safetensors.index.json: cannot be opened"));
  }
  std::filesystem::remove(folder.path() / "model.safetensors.index.json");
  CHECK(complaint_of(folder) == "");
  for (const char* target : {"nowhere", "model.safetensors"}) {
    link("model.safetensors", target);
    CHECK(has(complaint_of(folder), "model.safetensors: cannot be opened"));
  }
  write_index(folder, R"({"a":"s.safetensors"})");
  link("s.safetensors", "s.safetensors");
  CHECK(has(complaint_of(folder), "s.safetensors: cannot be opened"));
  link("s.safetensors", "nowhere");
  CHECK(has(complaint_of(folder), "not in the folder: s.safetensors"));
  link("self", "self");
  CHECK(has(message_of<format_error>([&] { checkpoint opened(folder.path() / "self"); }), "not a folder"));
}

TEST_CASE("C040: a tensor the index promises and the shard lacks is known as such") {
  const temporary_folder folder;
  write_shard(folder, "m.safetensors", "a", 1);
  write_index(folder, R"({"a":"m.safetensors","mtp.fc.weight":"m.safetensors"})");
  checkpoint source(folder.path());
  CHECK_FALSE(source.find("mtp.fc.weight"));
  REQUIRE(source.promised_shard("mtp.fc.weight") != nullptr);
  CHECK(*source.promised_shard("mtp.fc.weight") == "m.safetensors");
  CHECK(warned(source, "mtp.fc.weight into m.safetensors, which does not hold it"));
}

TEST_CASE("C041: where two shards hold a name, the index decides") {
  const temporary_folder folder;
  write_shard(folder, "base.safetensors", "t", 1);
  write_shard(folder, "overlay.safetensors", "t", 2);
  write_shard(folder, "other.safetensors", "u", 3);
  write_index(folder, R"({"t":"overlay.safetensors","u":"other.safetensors"})");
  {
    checkpoint source(folder.path());
    CHECK(value_of(source, "t") == 2);
    CHECK(warned(source, "base.safetensors is in the folder"));
  }
  write_index(folder, R"({"t":"base.safetensors","u":"other.safetensors"})");
  {
    checkpoint source(folder.path());
    CHECK(value_of(source, "t") == 1);
  }
  write_index(folder, R"({"t":"other.safetensors"})");
  CHECK(has(complaint_of(folder), "none of its 1 tensors"));
  std::filesystem::remove(folder.path() / "model.safetensors.index.json");
  CHECK(has(complaint_of(folder), "holds neither"));
}

TEST_CASE("C043: tensors in a shard the index does not list are reported") {
  const temporary_folder folder;
  write_shard(folder, "model-1.safetensors", "a", 1);
  write_shard(folder, "model-mtp-of-00002.safetensors", "mtp.fc.weight", 2);
  write_index(folder, R"({"a":"model-1.safetensors"})");
  checkpoint source(folder.path());
  CHECK(value_of(source, "a") == 1);
  CHECK(warned(source, "model-mtp-of-00002.safetensors is in the folder, but the index does not list it"));
}

TEST_CASE("an index cannot reach outside its folder") {
  for (const char* shard : {"../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "..", "",
                            ".safetensors", "a\\b.safetensors", "x.bin"}) {
    const temporary_folder folder;
    write_shard(folder, "x.safetensors", "a", 1);
    std::string escaped;
    for (const char* c = shard; *c != 0; ++c) escaped += *c == '\\' ? "\\\\" : std::string(1, *c);
    write_index(folder, R"({"a":")" + escaped + R"("})");
    CHECK(has(complaint_of(folder), "a shard must be a file name"));
  }
  const temporary_folder outside, folder;
  write_shard(outside, "x.safetensors", "a", 1);
  std::filesystem::create_symlink(outside.path() / "x.safetensors", folder.path() / "x.safetensors");
  write_index(folder, R"({"a":"x.safetensors"})");
  CHECK(has(complaint_of(folder), "outside the checkpoint"));
}

TEST_CASE("a hub cache, where files are links to blobs, is read") {
  const temporary_folder root;
  std::filesystem::create_directories(root.path() / "blobs");
  std::filesystem::create_directories(root.path() / "snapshots" / "rev");
  safetensors_writer writer;
  writer.add("a", dtype::f32, {1}, std::vector<float>{5});
  writer.write(root.path() / "blobs" / "abcdef");
  const auto folder = root.path() / "snapshots" / "rev";
  std::filesystem::create_symlink("../../blobs/abcdef", folder / "x.safetensors");
  std::ofstream(folder / "model.safetensors.index.json") << R"({"weight_map":{"a":"x.safetensors"}})";
  checkpoint source(folder);
  CHECK(value_of(source, "a") == 5);
}

TEST_CASE("index documents are checked") {
  const auto complaint = [](std::string_view text) {
    return message_of<format_error>([&] { (void)nibble::io::parse_shard_index(text, "index"); });
  };
  CHECK(complaint(R"({"weight_map":{}})") == "");
  CHECK(has(complaint("{}"), "has no weight_map"));
  CHECK(has(complaint(R"({"weight_map":{},"weight_map":{}})"), "weight_map twice"));
  CHECK(has(complaint(R"({"weight_map":{"a":"x.safetensors","a":"x.safetensors"}})"),
            "duplicate tensor name a"));
  CHECK(complaint(R"({"weight_map":{"a":1}})") != "");
  CHECK(complaint(R"({"weight_map":[]})") != "");
  CHECK(complaint(R"([])") != "");
  CHECK(complaint("") != "");
  CHECK(nibble::io::parse_shard_index(R"({"metadata":{"total_size":12,"x":[{}]},"weight_map":{}})", "index")
            .total_bytes == 12u);
}

TEST_CASE("the index's total must agree with the tensors") {
  const temporary_folder folder;
  write_shard(folder, "m.safetensors", "a", 1);
  write_index(folder, R"({"a":"m.safetensors"})", R"({"total_size":4})");
  CHECK(complaint_of(folder) == "");
  write_index(folder, R"({"a":"m.safetensors"})", R"({"total_size":8})");
  CHECK(has(complaint_of(folder), "total_size is 8, the tensors listed add up to 4"));
}

TEST_CASE("items and rows of a tensor are slices of its bytes") {
  const temporary_folder folder;
  safetensors_writer writer;
  std::vector<float> values(2 * 4 * 3);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  writer.add("stack", dtype::f32, {2, 4, 3}, values);
  writer.write(folder.path() / "model.safetensors");
  checkpoint source(folder.path());
  const auto whole = source.find("stack");
  REQUIRE(whole);
  const auto item = checkpoint::item(*whole, 1);
  REQUIRE(item);
  CHECK(item->shape == nibble::io::tensor_shape{4, 3});
  const auto rows = checkpoint::rows(*item, 2, 2);
  REQUIRE(rows);
  CHECK(rows->shape == nibble::io::tensor_shape{2, 3});
  std::vector<float> got(6);
  rows->read(0, std::as_writable_bytes(std::span(got)));
  CHECK(got == std::vector<float>{18, 19, 20, 21, 22, 23});
  CHECK_FALSE(checkpoint::item(*whole, 2));
  CHECK_FALSE(checkpoint::rows(*item, 3, 2));
  CHECK_FALSE(checkpoint::rows(*item, UINT64_MAX, 2));
}
