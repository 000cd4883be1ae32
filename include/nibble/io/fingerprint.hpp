// SPDX-License-Identifier: Apache-2.0
/// \file
/// Whether something derived from a checkpoint is still of that checkpoint: a fast checksum and a fingerprint
/// over names, sizes, times and headers. Finds accidents, not attacks.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/io/file.hpp"

namespace nibble::io {

namespace detail {
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 32;
  x *= 0x9FB2'1C65'1E98'DF25ull;
  x ^= x >> 29;
  x *= 0xD6E8'FEB8'6659'FD93ull;
  return x ^ (x >> 32);
}
}  // namespace detail

/// 64-bit checksum of bytes, order and length included. About 20 GB/s a core.
[[nodiscard]] inline std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed = 0) {
  std::uint64_t lanes[4];
  for (std::uint64_t i = 0; i < 4; ++i) lanes[i] = detail::mix(seed + 0x9E37'79B9'7F4A'7C15ull * (i + 1));
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 32; left -= 32, at += 32)
    for (int i = 0; i < 4; ++i) {
      std::uint64_t word;
      std::memcpy(&word, at + 8 * i, 8);
      lanes[i] = (lanes[i] ^ word) * 0x9FB2'1C65'1E98'DF25ull;
      lanes[i] ^= lanes[i] >> 31;
    }
  std::uint64_t tail[4] = {};
  if (left > 0) std::memcpy(tail, at, left);
  std::uint64_t sum = detail::mix(bytes.size());
  for (int i = 0; i < 4; ++i)
    sum = detail::mix(sum ^ lanes[i]) + detail::mix(tail[i] + static_cast<unsigned>(i));
  return detail::mix(sum);
}

/// 128 bits that stand for everything added, in order.
class fingerprint {
 public:
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  void add(std::span<const std::byte> bytes) {
    for (std::uint64_t i = 0; i < 2; ++i) value_[i] = checksum(bytes, value_[i] + i);
  }
  void add(std::uint64_t number) { add(std::as_bytes(std::span(&number, 1))); }

  /// Name, size, time of change and the first bytes of a file: those of a safetensors file's header.
  void add_file(const std::filesystem::path& path) {
    const file source(path);
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) throw format_error(path.string() + ": cannot be examined");
    add(path.filename().string());
    add(source.bytes());
    add(static_cast<std::uint64_t>(status.st_mtim.tv_sec));
    add(static_cast<std::uint64_t>(status.st_mtim.tv_nsec));
    std::uint64_t header = 0;
    if (source.bytes() >= 8) source.read(0, std::as_writable_bytes(std::span(&header, 1)));
    std::vector<std::byte> head(std::min(
        {source.bytes(), header + 8 < header ? source.bytes() : header + 8, std::uint64_t{64} << 20}));
    source.read(0, head);
    add(std::span<const std::byte>(head));
  }
  /// Every *.safetensors file and config.json of a folder, by name. Throws format_error.
  void add_checkpoint(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".safetensors" || entry.path().filename() == "config.json")
        files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    for (const auto& path : files) add_file(path);
    add(std::uint64_t{files.size()});
  }

  [[nodiscard]] const std::array<std::uint64_t, 2>& value() const { return value_; }
  friend bool operator==(const fingerprint&, const fingerprint&) = default;

 private:
  std::array<std::uint64_t, 2> value_{};
};

}  // namespace nibble::io
