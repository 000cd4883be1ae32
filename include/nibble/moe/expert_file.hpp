// SPDX-License-Identifier: Apache-2.0
/// \file
/// Experts in slot form in a file, so that a start need not repack the checkpoint.
///
///     header        4096 bytes: magic, version, fingerprint, counts, checksum of the tables, of the header
///     scales        [count][3] fp32
///     checksums     [count] 64 bits, one for each expert's bytes
///     experts       from a multiple of 4096: [count][slot_bytes]
#pragma once

#include <sys/statvfs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/io/file.hpp"
#include "nibble/io/fingerprint.hpp"
#include "nibble/io/replace_file.hpp"
#include "nibble/moe/expert_store.hpp"

namespace nibble::moe {

class expert_file {
 public:
  static constexpr std::uint32_t version = 2;
  static constexpr std::uint64_t alignment_bytes = 4096;

  /// A file that fits, or nothing with `why` telling why not: absent, stale, cut short, damaged. Never throws
  /// for what is in the file. Experts' own checksums are looked at when they are read.
  [[nodiscard]] static std::optional<expert_file> open(const std::filesystem::path& path,
                                                       const io::fingerprint& of, int count,
                                                       std::size_t slot_bytes, std::string& why) {
    if (!io::file::listed(path)) {
      why = "there is none";
      return std::nullopt;
    }
    try {
      expert_file opened(path, of, count, slot_bytes);
      why.clear();
      return opened;
    } catch (const format_error& failure) {
      why = failure.what();
      return std::nullopt;
    }
  }

  [[nodiscard]] int count() const { return static_cast<int>(sums_.size()); }
  [[nodiscard]] std::span<const expert_scales> scales() const { return scales_; }
  /// One expert's bytes. Throws format_error when the file has changed or is damaged. Thread-safe.
  void read(int number, std::span<std::byte> out) const {
    const auto n = static_cast<std::size_t>(number);
    if (number < 0 || n >= sums_.size() || out.size() != slot_bytes_)
      throw format_error(source_->path().string() + ": there is no expert " + std::to_string(number));
    source_->read(data_offset_ + n * slot_bytes_, out);
    if (io::checksum(out) != sums_[n])
      throw format_error(source_->path().string() + ": expert " + std::to_string(number) +
                         " is damaged: its checksum differs. Delete the file; it is made again");
  }
  /// All experts without a copy, unchecked. A file that is cut short meanwhile raises SIGBUS: see io::file.
  [[nodiscard]] std::span<const std::byte> map() {
    return source_->map().subspan(data_offset_, sums_.size() * slot_bytes_);
  }

  /// Writes a store's experts. Throws format_error (a full disk too); what was there before stays then.
  static void write(const std::filesystem::path& path, const io::fingerprint& of, const expert_store& store) {
    // First: it gives back the room that a .partial of a crash takes, and whoever may not write learns it
    // now.
    io::replacement_file out(path);
    const auto count = static_cast<std::size_t>(store.count());
    std::vector<std::byte> head(data_offset_of(count));
    std::vector<std::uint64_t> sums(count);
    parallel_ranges(static_cast<int>(count), 0, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) sums[static_cast<std::size_t>(i)] = io::checksum(store.expert(i));
    });
    const std::size_t scale_bytes = count * sizeof(expert_scales);
    std::memcpy(head.data() + alignment_bytes, store.scales().data(), scale_bytes);
    std::memcpy(head.data() + alignment_bytes + scale_bytes, sums.data(), 8 * count);
    header h = header_of(of, count, store.slot_bytes());
    h.tables_sum = io::checksum(std::span(head).subspan(alignment_bytes));
    h.header_sum = sum_of(h);
    std::memcpy(head.data(), &h, sizeof h);

    const auto parent = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
    struct statvfs disk {};
    if (::statvfs(parent.c_str(), &disk) == 0 &&
        static_cast<std::uint64_t>(disk.f_bavail) * disk.f_frsize < h.file_bytes)
      throw format_error(path.string() + ": needs " + std::to_string(h.file_bytes >> 20) +
                         " MiB, the disk has " +
                         std::to_string(static_cast<std::uint64_t>(disk.f_bavail) * disk.f_frsize >> 20));
    out.write(0, head);
    constexpr std::size_t piece = std::size_t{64} << 20;
    const std::size_t bytes = count * store.slot_bytes();
    for (std::size_t done = 0; done < bytes; done += piece)
      out.write(head.size() + done, {store.data() + done, std::min(piece, bytes - done)});
    out.commit();
  }

 private:
  struct header {
    char magic[8];
    std::uint32_t version, header_bytes;
    std::uint64_t fingerprint[2];
    std::uint64_t slot_bytes, count, data_offset, file_bytes;
    std::uint64_t tables_sum, header_sum;
  };
  static_assert(sizeof(header) == 80);

  [[nodiscard]] static std::uint64_t data_offset_of(std::uint64_t count) {
    return alignment_bytes + align_up(count * (sizeof(expert_scales) + 8), alignment_bytes);
  }
  [[nodiscard]] static header header_of(const io::fingerprint& of, std::uint64_t count,
                                        std::uint64_t slot_bytes) {
    header h{};
    std::memcpy(h.magic, "nibbleXF", 8);
    h.version = version, h.header_bytes = sizeof h;
    h.fingerprint[0] = of.value()[0], h.fingerprint[1] = of.value()[1];
    h.slot_bytes = slot_bytes, h.count = count;
    h.data_offset = data_offset_of(count);
    h.file_bytes = h.data_offset + count * slot_bytes;
    return h;
  }
  [[nodiscard]] static std::uint64_t sum_of(header h) {
    h.header_sum = 0;
    return io::checksum(std::as_bytes(std::span(&h, 1)));
  }

  expert_file(const std::filesystem::path& path, const io::fingerprint& of, int count, std::size_t slot_bytes)
      : source_(std::make_unique<io::file>(path)), slot_bytes_(slot_bytes) {
    const auto refuse = [&](const char* text) { throw format_error(path.string() + ": " + text); };
    header h{};
    if (source_->bytes() < alignment_bytes) refuse("is cut short");
    source_->read(0, std::as_writable_bytes(std::span(&h, 1)));
    const header want = header_of(of, static_cast<std::uint64_t>(count), slot_bytes);
    if (std::memcmp(h.magic, want.magic, 8) != 0) refuse("is not a file of experts");
    if (h.version != want.version || h.header_bytes != want.header_bytes) refuse("is of another version");
    if (h.header_sum != sum_of(h)) refuse("has a damaged header");
    if (h.fingerprint[0] != want.fingerprint[0] || h.fingerprint[1] != want.fingerprint[1] ||
        h.slot_bytes != want.slot_bytes || h.count != want.count)
      refuse("is of another checkpoint or layout");
    if (h.data_offset != want.data_offset || h.file_bytes != want.file_bytes ||
        source_->bytes() != want.file_bytes)
      refuse("is cut short");
    std::vector<std::byte> tables(h.data_offset - alignment_bytes);
    source_->read(alignment_bytes, tables);
    if (io::checksum(tables) != h.tables_sum) refuse("has damaged tables");
    data_offset_ = h.data_offset;
    scales_.resize(static_cast<std::size_t>(count));
    sums_.resize(static_cast<std::size_t>(count));
    std::memcpy(scales_.data(), tables.data(), scales_.size() * sizeof(expert_scales));
    std::memcpy(sums_.data(), tables.data() + scales_.size() * sizeof(expert_scales), 8 * sums_.size());
  }

  std::unique_ptr<io::file> source_;
  std::size_t slot_bytes_ = 0;
  std::uint64_t data_offset_ = 0;
  std::vector<expert_scales> scales_;
  std::vector<std::uint64_t> sums_;
};

}  // namespace nibble::moe
