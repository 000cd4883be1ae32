// SPDX-License-Identifier: Apache-2.0
#include "nibble/io/safetensors.hpp"

#include <sys/stat.h>

#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/safetensors_writer.hpp"
#include "support/temporary_folder.hpp"

using nibble::format_error;
using nibble::io::dtype;
using nibble::io::safetensors_file;
using namespace nibble::test;

namespace {

/// The complaint about a file of these bytes; "" when it is accepted.
std::string check(const std::string& bytes) {
  const temporary_folder folder;
  const auto path = folder.write("t.safetensors", bytes);
  return message_of<format_error>([&] { const safetensors_file file(path); });
}
std::string check(std::string_view header, std::string_view data) {
  return check(raw_safetensors(header, data));
}

const std::string two_tensors = raw_safetensors(
    R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
    std::string("\x01\x02\x00\x00\x80\x3f", 6));

}  // namespace

TEST_CASE("a valid file is read") {
  const temporary_folder folder;
  safetensors_file file(folder.write("t.safetensors", two_tensors));
  REQUIRE(file.tensors().size() == 2);
  const auto* b = file.find("b");
  REQUIRE(b != nullptr);
  CHECK(b->type == dtype::f32);
  CHECK(b->shape == nibble::io::tensor_shape{1});
  float value = 0;
  file.read(*b, 0, std::as_writable_bytes(std::span(&value, 1)));
  CHECK(value == 1.0f);
  const auto mapped = file.map(*file.find("a"));
  REQUIRE(mapped.size() == 2);
  CHECK(mapped[1] == std::byte{2});
  CHECK(file.find("c") == nullptr);
  std::vector<std::byte> more(5);
  CHECK_THROWS_AS(file.read(*b, 0, more), nibble::error);
  CHECK_THROWS_AS(file.read(*b, UINT64_MAX, std::span(more).first(1)), nibble::error);
}

TEST_CASE("C025: a file cut short is refused with both sizes") {
  const std::size_t header = two_tensors.size() - 8 - 6;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{7}, std::size_t{8}, 8 + header - 1, 8 + header, two_tensors.size() - 1}) {
    const std::string complaint = check(two_tensors.substr(0, bytes));
    CHECK(complaint != "");
    CHECK(has(complaint, "t.safetensors"));
  }
  CHECK(
      has(check(two_tensors.substr(0, two_tensors.size() - 1)), "ends at data byte 6, but the file holds 5"));
}

TEST_CASE("C026: the header length is bounded by the cap and by the file") {
  CHECK(check(raw_safetensors("{}", "")) == "");
  CHECK(has(check(raw_safetensors("{}", "", 0x07DF9D40)), "the limit is 100000000"));
  CHECK(has(check(raw_safetensors("{}", "", 0xFFFFFFFFFFFFFFFF)), "the limit is"));
  CHECK(has(check(raw_safetensors("{}", "", 0x7FFFFFFFFFFFFFF8)), "the limit is"));
  CHECK(has(check(raw_safetensors("{}", "", 1000)), "the file has only 10"));
  CHECK(check(raw_safetensors("{}", "", 1)) != "");
  CHECK(has(check(raw_safetensors("", "")), "does not start with '{'"));
  CHECK(has(check(raw_safetensors(" {}", "")), "does not start with '{'"));
}

TEST_CASE("C028: a file of metadata only has no tensors") {
  const temporary_folder folder;
  const safetensors_file file(
      folder.write("t.safetensors", raw_safetensors(R"({"__metadata__":{"crc":"12"}})", "")));
  CHECK(file.tensors().empty());
  CHECK(file.metadata().at("crc") == "12");
}

TEST_CASE("metadata maps strings to strings") {
  CHECK(check(R"({"__metadata__":{"a":1}})", "") != "");
  CHECK(check(R"({"__metadata__":[]})", "") != "");
  CHECK(has(check(R"({"__metadata__":{"a":"1","a":"2"}})", ""), "the key a twice"));
  CHECK(has(check(R"({"__metadata__":{},"__metadata__":{}})", ""), "__metadata__ twice"));
}

TEST_CASE("C029: a name twice is refused, also after unescaping") {
  CHECK(has(
      check(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          "xy"),
      "duplicate tensor name a"));
  CHECK(has(
      check(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          "xy"),
      "duplicate tensor name a"));
}

TEST_CASE("C030: empty tensors and scalars are legal where the sizes agree") {
  CHECK(
      check(
          R"({"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
          "abcd") == "");
  CHECK(
      check(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"z":{"dtype":"BF16","shape":[0,16],"data_offsets":[2,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
          "abc") == "");
  CHECK(check(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", "abcd") == "");
  CHECK(has(check(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,0]}})", ""), "needs 4 bytes"));
}

TEST_CASE("C031: holes and trailing bytes are refused") {
  CHECK(has(check(two_tensors + "x"), "1 bytes after the last tensor"));
  CHECK(has(
      check(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
          "abc"),
      "hole of 1 bytes before tensor b"));
  CHECK(has(check(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})", "abcde"), "hole of 4 bytes"));
}

TEST_CASE("C032: overlaps are refused, order in the header is free") {
  CHECK(has(
      check(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
          "abcd"),
      "overlaps"));
  CHECK(has(
      check(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
          "abcdef"),
      "overlaps"));
  CHECK(
      check(
          R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
          "abcdefgh") == "");
}

TEST_CASE("C033: offsets are exact integers, in order, inside the file, two of them") {
  for (const char* offsets : {"[0,4]", "[4,0]", "[-1,4]", "[0.5,4]", "[\"0\",\"4\"]", "[0,4,8]", "[0]", "[]",
                              "[0,1e300]", "null", "{}"}) {
    const std::string header =
        R"({"a":{"dtype":"F32","shape":[1000,1000],"data_offsets":)" + std::string(offsets) + "}}";
    CHECK(check(header, "abcd") != "");
  }
}

TEST_CASE("C034: shapes cannot wrap") {
  for (const char* shape : {"[4294967296,4294967296]", "[4611686018427387904,4]", "[-1]", "[1.5]",
                            "[9007199254740993]", "[\"1\"]"}) {
    const std::string header =
        R"({"a":{"dtype":"F32","shape":)" + std::string(shape) + R"(,"data_offsets":[0,0]}})";
    CHECK(check(header, "") != "");
  }
  std::string many = "[1";
  for (int i = 1; i < 65; ++i) many += ",1";
  CHECK(has(check(R"({"a":{"dtype":"U8","shape":)" + many + R"(],"data_offsets":[0,1]}})", "x"),
            "more than 64 dimensions"));
  CHECK(check(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", "") != "");
}

TEST_CASE("C036: every dtype has its own width") {
  const std::vector<std::pair<const char*, int>> bytes_of_eight{
      {"BOOL", 8}, {"U8", 8},   {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8},
      {"F4", 4},   {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},
      {"U32", 32}, {"F32", 32}, {"I64", 64}, {"U64", 64},    {"F64", 64},    {"C64", 64}};
  for (const auto& [name, bytes] : bytes_of_eight) {
    const auto header = [&, type = name](int end) {
      return R"({"a":{"dtype":")" + std::string(type) + R"(","shape":[8],"data_offsets":[0,)" +
             std::to_string(end) + "]}}";
    };
    CHECK(check(header(bytes), std::string(static_cast<std::size_t>(bytes), 'x')) == "");
    CHECK(check(header(bytes * 2), std::string(static_cast<std::size_t>(bytes) * 2, 'x')) != "");
  }
  CHECK(has(check(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", "x"),
            "not a whole number of bytes"));
  CHECK(has(check(R"({"a":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}})", "x"), "unknown dtype F7"));
}

TEST_CASE("an entry has exactly dtype, shape and data_offsets") {
  CHECK(has(check(R"({"a":{"dtype":"U8","shape":[1]}})", ""), "lacks"));
  CHECK(has(check(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", "x"),
            "unexpected or repeated key x"));
  CHECK(has(check(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"),
            "repeated key dtype"));
  CHECK(check(R"({"a":1})", "") != "");
  CHECK(check(R"(["a"])", "") != "");
  CHECK(check("{\"a\xff\":{}}", "") != "");
  CHECK(check(std::string(R"({"a":)") + std::string(100'000, '['), "") != "");
  CHECK(check("{}   ", "") == "");  // padding after the header is usual
  CHECK(check("{}  x", "") != "");
}

TEST_CASE("only regular files are opened") {
  const temporary_folder folder;
  CHECK(has(message_of<format_error>([&] { const safetensors_file file(folder.path()); }),
            "not a regular file"));
  CHECK(has(message_of<format_error>([&] { const safetensors_file file(folder.path() / "none"); }),
            "cannot be opened"));
  const auto pipe = folder.path() / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(has(message_of<format_error>([&] { const safetensors_file file(pipe); }), "not a regular file"));
  CHECK(message_of<format_error>([&] { const safetensors_file file("/dev/zero"); }) != "");
}

TEST_CASE("a file that shrinks while open gives an error, not a signal") {
  const temporary_folder folder;
  const auto path = folder.write("t.safetensors", two_tensors);
  const safetensors_file file(path);
  std::filesystem::resize_file(path, 20);
  float value = 0;
  CHECK(has(message_of<format_error>(
                [&] { file.read(*file.find("b"), 0, std::as_writable_bytes(std::span(&value, 1))); }),
            "was it changed while being read?"));
}
