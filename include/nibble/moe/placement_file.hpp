// SPDX-License-Identifier: Apache-2.0
/// \file
/// What experts were worth when the server stopped, for the next start: a small file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "nibble/io/file.hpp"
#include "nibble/io/fingerprint.hpp"
#include "nibble/io/replace_file.hpp"
#include "nibble/moe/residency_types.hpp"

namespace nibble::moe {

/// Worth of every expert, moved so that the clock reads clock_start.
[[nodiscard]] inline std::vector<std::uint32_t> worth_at_start(std::span<const std::uint32_t> worth,
                                                               std::uint32_t clock) {
  std::vector<std::uint32_t> out(worth.begin(), worth.end());
  for (std::uint32_t& w : out) {
    if (w == worth_protected)
      w = clock_start;
    else if (clock >= clock_start)
      w = worth_rebased(w, clock - clock_start);
    if (w > clock_start + 64u * worth_octave) w = worth_least;  // no history gives that
  }
  return out;
}

/// Writes worth_at_start values. Throws format_error.
inline void save_worth(const std::filesystem::path& path, const io::fingerprint& of,
                       std::span<const std::uint32_t> worth) {
  std::vector<std::byte> bytes(48 + 4 * worth.size());
  const std::uint64_t head[5] = {0x3153'5457'656C'6269ull /* "ible" "WTS1" */, of.value()[0], of.value()[1],
                                 worth.size(), io::checksum(std::as_bytes(worth))};
  std::memcpy(bytes.data(), head, sizeof head);
  const std::uint64_t sum = io::checksum(std::span<const std::byte>(bytes).first(sizeof head));
  std::memcpy(bytes.data() + 40, &sum, 8);
  std::memcpy(bytes.data() + 48, worth.data(), 4 * worth.size());
  io::replacement_file out(path);
  out.write(0, bytes);
  out.commit();
}

/// Saved worth, or nothing with `why`: absent, of another checkpoint, damaged. Never throws for the contents.
[[nodiscard]] inline std::vector<std::uint32_t> load_worth(const std::filesystem::path& path,
                                                           const io::fingerprint& of, std::size_t count,
                                                           std::string& why) {
  why.clear();
  std::vector<std::uint32_t> worth;
  if (!io::file::listed(path)) {
    why = "there is none";
    return worth;
  }
  try {
    const io::file source(path);
    std::uint64_t head[6] = {};
    if (source.bytes() != 48 + 4 * std::uint64_t{count})
      throw format_error(path.string() + ": has another size");
    source.read(0, std::as_writable_bytes(std::span(head)));
    if (head[0] != 0x3153'5457'656C'6269ull ||
        head[5] != io::checksum(std::as_bytes(std::span(head).first(5))))
      throw format_error(path.string() + ": is damaged or of another version");
    if (head[1] != of.value()[0] || head[2] != of.value()[1] || head[3] != count)
      throw format_error(path.string() + ": is of another checkpoint");
    worth.resize(count);
    source.read(48, std::as_writable_bytes(std::span(worth)));
    if (head[4] != io::checksum(std::as_bytes(std::span<const std::uint32_t>(worth))))
      throw format_error(path.string() + ": is damaged");
  } catch (const format_error& failure) {
    why = failure.what();
    worth.clear();
  }
  return worth;
}

}  // namespace nibble::moe
