// SPDX-License-Identifier: Apache-2.0
/// \file
/// The safetensors reader: 8-byte little-endian header length, JSON header, tensor data.
///
/// Every rule is enforced before a tensor can be read: header length ≤ 100,000,000 and inside the file; a
/// UTF-8 JSON object; no name twice; `__metadata__` maps strings to strings; each entry has exactly dtype,
/// shape and data_offsets; the byte ranges, sorted, are contiguous from 0 to the end of the file; elements ×
/// bits per element is a whole number of bytes equal to the range. Zero-sized dimensions and rank 0 are
/// legal.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/core/error.hpp"
#include "nibble/io/file.hpp"
#include "nibble/io/json_scan.hpp"

namespace nibble::io {

/// Element types of the format, as published by its reference implementation.
enum class dtype : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f4,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  i64,
  u64,
  f64,
  c64
};

struct dtype_info {
  std::string_view name;
  dtype type;
  unsigned bits;
};

inline constexpr std::array<dtype_info, 18> dtype_table{{
    {"BOOL", dtype::boolean, 8},
    {"U8", dtype::u8, 8},
    {"I8", dtype::i8, 8},
    {"F8_E4M3", dtype::f8_e4m3, 8},
    {"F8_E5M2", dtype::f8_e5m2, 8},
    {"F8_E8M0", dtype::f8_e8m0, 8},
    {"F4", dtype::f4, 4},
    {"I16", dtype::i16, 16},
    {"U16", dtype::u16, 16},
    {"F16", dtype::f16, 16},
    {"BF16", dtype::bf16, 16},
    {"I32", dtype::i32, 32},
    {"U32", dtype::u32, 32},
    {"F32", dtype::f32, 32},
    {"I64", dtype::i64, 64},
    {"U64", dtype::u64, 64},
    {"F64", dtype::f64, 64},
    {"C64", dtype::c64, 64},
}};

[[nodiscard]] constexpr std::string_view name_of(dtype type) {
  for (const auto& row : dtype_table)
    if (row.type == type) return row.name;
  return "?";
}

[[nodiscard]] constexpr unsigned bits_of(dtype type) {
  for (const auto& row : dtype_table)
    if (row.type == type) return row.bits;
  return 0;
}

using tensor_shape = std::vector<std::uint64_t>;

/// "[2, 3]", "[]" for a scalar.
[[nodiscard]] inline std::string to_string(const tensor_shape& shape) {
  std::string text = "[";
  for (const auto size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

/// One tensor of a file: where its bytes are, checked against the file's size.
struct tensor_entry {
  dtype type{};
  tensor_shape shape;
  std::uint64_t offset = 0;  ///< from the start of the file
  std::uint64_t bytes = 0;
};

/// A file whose header has been read and checked; tensor data is read on demand.
class safetensors_file {
 public:
  static constexpr std::uint64_t header_limit_bytes = 100'000'000;
  static constexpr std::size_t rank_limit = 64;

  explicit safetensors_file(const std::filesystem::path& path) : source_(path) {
    parse_header(read_header());
  }

  [[nodiscard]] const std::filesystem::path& path() const { return source_.path(); }
  [[nodiscard]] const std::map<std::string, tensor_entry, std::less<>>& tensors() const { return tensors_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }

  [[nodiscard]] const tensor_entry* find(std::string_view name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : &it->second;
  }

  /// Copies bytes [begin, begin + out.size()) of the tensor; the range must lie inside it.
  void read(const tensor_entry& tensor, std::uint64_t begin, std::span<std::byte> out) const {
    if (begin > tensor.bytes || out.size() > tensor.bytes - begin)
      throw error(path().string() + ": read of " + std::to_string(out.size()) + " bytes at " +
                  std::to_string(begin) + " from a tensor of " + std::to_string(tensor.bytes) + " bytes");
    source_.read(tensor.offset + begin, out);
  }

  /// The tensor's bytes without a copy; aligned to nothing. See file::map about files that change.
  [[nodiscard]] std::span<const std::byte> map(const tensor_entry& tensor) {
    return source_.map().subspan(tensor.offset, tensor.bytes);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw format_error(path().string() + ": " + why); }

  [[nodiscard]] std::string read_header() {
    if (source_.bytes() < 8)
      fail("has " + std::to_string(source_.bytes()) + " bytes, a safetensors file has at least 8");
    std::array<std::byte, 8> raw{};
    source_.read(0, raw);
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i)
      length = length << 8 | static_cast<std::uint64_t>(raw[static_cast<std::size_t>(i)]);
    if (length > header_limit_bytes)
      fail("header of " + std::to_string(length) + " bytes, the limit is " +
           std::to_string(header_limit_bytes) + "; is this a safetensors file?");
    if (length > source_.bytes() - 8)
      fail("header of " + std::to_string(length) + " bytes, but the file has only " +
           std::to_string(source_.bytes()) + "; is the download complete?");
    std::string header(length, '\0');
    source_.read(8, std::as_writable_bytes(std::span(header)));
    if (header.empty() || header.front() != '{') fail("header does not start with '{'");
    data_begin_ = 8 + length;
    return header;
  }

  void parse_header(const std::string& header) {
    const std::string what = path().string() + ": header";
    json_reader json(header, what);
    std::string name;
    json.enter_object();
    bool metadata_seen = false;
    while (json.next_key(name)) {
      if (name == "__metadata__") {
        if (metadata_seen) fail("__metadata__ twice");
        metadata_seen = true;
        read_metadata(json);
      } else {
        const auto [it, fresh] = tensors_.try_emplace(name);
        if (!fresh) fail("duplicate tensor name " + name);
        it->second = read_entry(json, name);
      }
    }
    json.finish();
    check_coverage();
  }

  void read_metadata(json_reader& json) {
    std::string key, value;
    json.enter_object();
    while (json.next_key(key)) {
      json.read_string(value);
      if (!metadata_.emplace(key, value).second) fail("__metadata__ has the key " + key + " twice");
    }
  }

  [[nodiscard]] tensor_entry read_entry(json_reader& json, const std::string& name) {
    std::optional<dtype> type;
    std::optional<tensor_shape> shape;
    std::optional<std::array<std::uint64_t, 2>> range;
    std::string key, text;
    json.enter_object();
    while (json.next_key(key)) {
      if (key == "dtype" && !type) {
        json.read_string(text);
        for (const auto& row : dtype_table)
          if (row.name == text) type = row.type;
        if (!type) fail("tensor " + name + " has the unknown dtype " + text);
      } else if (key == "shape" && !shape) {
        shape.emplace();
        json.enter_array();
        while (json.next_element()) {
          if (shape->size() == rank_limit) fail("tensor " + name + " has more than 64 dimensions");
          shape->push_back(json.read_uint());
        }
      } else if (key == "data_offsets" && !range) {
        range.emplace();
        std::size_t count = 0;
        json.enter_array();
        while (json.next_element()) {
          if (count == 2) fail("tensor " + name + " has more than two data_offsets");
          (*range)[count++] = json.read_uint();
        }
        if (count != 2)
          fail("tensor " + name + " has " + std::to_string(count) + " data_offsets, expected 2");
      } else {
        fail("tensor " + name + " has the unexpected or repeated key " + key);
      }
    }
    if (!type || !shape || !range) fail("tensor " + name + " lacks dtype, shape or data_offsets");
    return check_entry(name, *type, std::move(*shape), (*range)[0], (*range)[1]);
  }

  [[nodiscard]] tensor_entry check_entry(const std::string& name, dtype type, tensor_shape shape,
                                         std::uint64_t begin, std::uint64_t end) const {
    const std::uint64_t data_bytes = source_.bytes() - data_begin_;
    if (begin > end)
      fail("tensor " + name + " has data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
           "]");
    if (end > data_bytes)
      fail("tensor " + name + " ends at data byte " + std::to_string(end) + ", but the file holds " +
           std::to_string(data_bytes) + " data bytes; is the download complete?");
    std::optional<std::uint64_t> bits = bits_of(type);
    for (const auto size : shape)
      if (bits) bits = checked_multiply(*bits, size);
    if (!bits) fail("tensor " + name + " of shape " + to_string(shape) + " is over 2^64 bits");
    if (*bits % 8 != 0)
      fail("tensor " + name + " of shape " + to_string(shape) + " is not a whole number of bytes");
    if (*bits / 8 != end - begin)
      fail("tensor " + name + ", " + std::string(name_of(type)) + " " + to_string(shape) + ", needs " +
           std::to_string(*bits / 8) + " bytes, its data_offsets span " + std::to_string(end - begin));
    return {type, std::move(shape), data_begin_ + begin, end - begin};
  }

  void check_coverage() const {
    std::vector<const std::pair<const std::string, tensor_entry>*> order;
    order.reserve(tensors_.size());
    for (const auto& item : tensors_) order.push_back(&item);
    std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
      return a->second.offset != b->second.offset ? a->second.offset < b->second.offset
                                                  : a->second.bytes < b->second.bytes;
    });
    std::uint64_t covered = data_begin_;
    for (const auto* item : order) {
      const auto& [name, tensor] = *item;
      if (tensor.offset < covered) fail("tensor " + name + " overlaps the one before it");
      if (tensor.offset > covered)
        fail("hole of " + std::to_string(tensor.offset - covered) + " bytes before tensor " + name);
      covered += tensor.bytes;
    }
    if (covered != source_.bytes())
      fail(std::to_string(source_.bytes() - covered) + " bytes after the last tensor");
  }

  file source_;
  std::uint64_t data_begin_ = 8;
  std::map<std::string, tensor_entry, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace nibble::io
