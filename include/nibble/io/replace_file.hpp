// SPDX-License-Identifier: Apache-2.0
/// \file
/// Writing a file so that a reader never sees half of it.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

#include "nibble/core/error.hpp"

namespace nibble::io {

/// Written as NAME.partial, which commit() puts in NAME's place once it is on the disk. A crash before leaves
/// NAME as it was, and a .partial that the next writer overwrites. Two writers at once: the second is
/// refused.
class replacement_file {
 public:
  /// Throws format_error.
  explicit replacement_file(std::filesystem::path path)
      : path_(std::move(path)), partial_(path_.string() + ".partial") {
    // Before anything is written, not when all of it is to be renamed.
    struct stat present {};
    if (::stat(path_.c_str(), &present) == 0 && !S_ISREG(present.st_mode))
      throw format_error(path_.string() + ": is there and not a file, so it is not replaced");
    descriptor_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (descriptor_ < 0) fail("cannot be created");
    struct stat opened {
    }, named{};
    const bool ours = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 && ::fstat(descriptor_, &opened) == 0 &&
                      ::stat(partial_.c_str(), &named) == 0 && opened.st_ino == named.st_ino;
    if (!ours || ::ftruncate(descriptor_, 0) != 0) {
      ::close(descriptor_);
      descriptor_ = -1;
      throw format_error(partial_.string() + ": is being written by somebody else");
    }
  }
  replacement_file(const replacement_file&) = delete;
  replacement_file& operator=(const replacement_file&) = delete;
  ~replacement_file() {
    if (descriptor_ < 0) return;
    ::unlink(partial_.c_str());
    ::close(descriptor_);
  }

  /// Throws format_error, for a full disk too.
  void write(std::uint64_t offset, std::span<const std::byte> bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t put =
          ::pwrite(descriptor_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) fail("cannot be written");
      done += static_cast<std::size_t>(put);
    }
  }
  /// The file is complete. Throws format_error; nothing has changed then.
  void commit() {
    if (::fsync(descriptor_) != 0) fail("cannot be written");
    if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("cannot be renamed");
    ::close(descriptor_);
    descriptor_ = -1;
    // The name is to survive a power failure too; where a folder cannot be synced, nothing is lost but that.
    const auto parent = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
    if (const int folder = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); folder >= 0) {
      static_cast<void>(::fsync(folder));
      ::close(folder);
    }
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw format_error(partial_.string() + ": " + what + ": " + std::strerror(errno));
  }

  std::filesystem::path path_, partial_;
  int descriptor_ = -1;
};

}  // namespace nibble::io
