// SPDX-License-Identifier: Apache-2.0
/// \file
/// Writes safetensors files, well-formed by tensor or raw by header text.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/io/safetensors.hpp"

namespace nibble::test {

/// 8 bytes of little-endian header length, the header, the data: valid or not.
inline std::string raw_safetensors(std::string_view header, std::string_view data, std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(length >> (8 * i) & 0xFF));
  return bytes + std::string(header) + std::string(data);
}
inline std::string raw_safetensors(std::string_view header, std::string_view data) {
  return raw_safetensors(header, data, header.size());
}

/// Collects tensors and writes them back to back in the order added.
class safetensors_writer {
 public:
  void add(const std::string& name, io::dtype type, const io::tensor_shape& shape, std::string_view bytes) {
    header_ += (header_.empty() ? "{" : ",") + ("\"" + name + "\":{\"dtype\":\"") +
               std::string(io::name_of(type)) + "\",\"shape\":[";
    for (std::size_t i = 0; i < shape.size(); ++i) header_ += (i == 0 ? "" : ",") + std::to_string(shape[i]);
    header_ += "],\"data_offsets\":[" + std::to_string(data_.size()) + "," +
               std::to_string(data_.size() + bytes.size()) + "]}";
    data_ += bytes;
  }
  template <class T>
  void add(const std::string& name, io::dtype type, const io::tensor_shape& shape,
           const std::vector<T>& values) {
    add(name, type, shape,
        std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)));
  }
  [[nodiscard]] std::string bytes() const {
    return raw_safetensors(header_.empty() ? "{}" : header_ + "}", data_);
  }
  [[nodiscard]] std::size_t data_bytes() const { return data_.size(); }
  void write(const std::filesystem::path& path) const { std::ofstream(path, std::ios::binary) << bytes(); }

 private:
  std::string header_, data_;
};

}  // namespace nibble::test
