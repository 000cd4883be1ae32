// SPDX-License-Identifier: Apache-2.0
/// \file
/// A read-only regular file: positioned reads, and a mapping for who wants no copy.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "nibble/core/error.hpp"

namespace nibble::io {

/// An open file. Reads never touch memory beyond `out`, and a file that shrinks under a read is an error,
/// not a signal. Thread-safe for concurrent reads.
class file {
 public:
  /// Opens `path`, which must be a regular file (no folder, pipe or device); throws format_error.
  explicit file(std::filesystem::path path) : path_(std::move(path)) {
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) throw format_error(path_.string() + ": cannot be opened: " + std::strerror(errno));
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(descriptor_);
      throw format_error(path_.string() + ": not a regular file");
    }
    bytes_ = static_cast<std::uint64_t>(status.st_size);
  }
  file(file&& other) noexcept
      : path_(std::move(other.path_)),
        descriptor_(std::exchange(other.descriptor_, -1)),
        bytes_(std::exchange(other.bytes_, 0)),
        mapping_(std::exchange(other.mapping_, nullptr)) {}
  file& operator=(file&&) = delete;
  ~file() {
    if (mapping_ != nullptr) ::munmap(mapping_, bytes_);
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

  /// Fills `out` from `offset`; throws format_error when the file ends before, or on a read error.
  void read(std::uint64_t offset, std::span<std::byte> out) const {
    std::size_t done = 0;
    while (done < out.size()) {
      const ssize_t got =
          ::pread(descriptor_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw format_error(path_.string() + ": read failed: " + std::strerror(errno));
      if (got == 0)
        throw format_error(path_.string() + ": ended at byte " + std::to_string(offset + done) +
                           ", expected " + std::to_string(offset + out.size()) +
                           "; was it changed while being read?");
      done += static_cast<std::size_t>(got);
    }
  }

  /// The whole file in memory without a copy. The mapping lives as long as the file object. Whoever shortens
  /// the file under a mapping raises SIGBUS here, so servers should prefer read(). Not thread-safe.
  [[nodiscard]] std::span<const std::byte> map() {
    if (bytes_ == 0) return {};
    if (mapping_ == nullptr) {
      void* address = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, descriptor_, 0);
      if (address == MAP_FAILED)
        throw out_of_memory(path_.string() + ": cannot be mapped: " + std::strerror(errno));
      mapping_ = address;
    }
    return {static_cast<const std::byte*>(mapping_), bytes_};
  }

  /// Whether the folder lists `path`, be it a file, a folder or a link to nothing: whatever is listed should
  /// be opened, so that its own error tells what is wrong, and never be taken for missing. Where even that
  /// cannot be told the answer is true, for the same reason. Never throws.
  [[nodiscard]] static bool listed(const std::filesystem::path& path) noexcept {
    struct stat status {};
    return ::lstat(path.c_str(), &status) == 0 || (errno != ENOENT && errno != ENOTDIR);
  }

  /// Text of a small file, or nothing where the folder lists no such file. Throws as read_text() does.
  [[nodiscard]] static std::optional<std::string> read_optional_text(const std::filesystem::path& path,
                                                                     std::uint64_t limit_bytes) {
    if (!listed(path)) return std::nullopt;
    return read_text(path, limit_bytes);
  }

  /// Text of a small file; refuses one of more than `limit_bytes`.
  [[nodiscard]] static std::string read_text(const std::filesystem::path& path, std::uint64_t limit_bytes) {
    const file source(path);
    if (source.bytes() > limit_bytes)
      throw format_error(path.string() + ": " + std::to_string(source.bytes()) + " bytes, the limit is " +
                         std::to_string(limit_bytes));
    std::string text(source.bytes(), '\0');
    source.read(0, std::as_writable_bytes(std::span(text)));
    return text;
  }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t bytes_ = 0;
  void* mapping_ = nullptr;
};

}  // namespace nibble::io
