// SPDX-License-Identifier: Apache-2.0
/// \file
/// Sizes and counts as people write them.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace nibble {

/// "2.0 MiB", "11.20 GiB", "512 B".
[[nodiscard]] inline std::string bytes_text(std::uint64_t bytes) {
  char text[40];
  const auto value = static_cast<double>(bytes);
  if (bytes < 1024)
    std::snprintf(text, sizeof text, "%llu B", static_cast<unsigned long long>(bytes));
  else if (bytes < (std::uint64_t{1} << 20))
    std::snprintf(text, sizeof text, "%.1f KiB", value / 1024);
  else if (bytes < (std::uint64_t{1} << 30))
    std::snprintf(text, sizeof text, "%.1f MiB", value / (1 << 20));
  else
    std::snprintf(text, sizeof text, "%.2f GiB", value / (1 << 30));
  return text;
}

/// "1 page", "2 pages", "0 pages": `what` takes an s.
[[nodiscard]] inline std::string counted(std::uint64_t count, std::string_view what) {
  return std::to_string(count) + " " + std::string(what) + (count == 1 ? "" : "s");
}

/// Whole MiB for an option, no less than `bytes`: "1234MiB".
[[nodiscard]] inline std::string mebibytes_at_least(std::uint64_t bytes) {
  constexpr std::uint64_t mebibyte = std::uint64_t{1} << 20;
  return std::to_string(bytes / mebibyte + (bytes % mebibyte != 0)) + "MiB";
}

/// Reads "12GiB", "12 GB", "900MiB", "1.5g", "1073741824": K, M, G, T with iB are powers of 1024, with B
/// powers of 1000; the bare letter means the power of 1024. Case does not matter. Nothing when the text is no
/// size or does not fit 64 bits.
[[nodiscard]] inline std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  std::size_t digits = 0, dots = 0;
  while (digits < text.size() && ((text[digits] >= '0' && text[digits] <= '9') || text[digits] == '.'))
    dots += text[digits++] == '.';
  if (digits == dots || dots > 1 || digits > 24) return std::nullopt;
  const std::string number(text.substr(0, digits));
  std::string_view unit = text.substr(digits);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  std::string suffix;
  for (const char c : unit) suffix += lower(c);
  double factor = 1;
  if (!suffix.empty() && suffix != "b") {
    static constexpr std::string_view letters = "kmgt";
    const auto power = letters.find(suffix[0]);
    if (power == std::string_view::npos) return std::nullopt;
    const std::string rest = suffix.substr(1);
    if (rest != "" && rest != "ib" && rest != "b") return std::nullopt;
    for (std::size_t i = 0; i <= power; ++i) factor *= rest == "b" ? 1000.0 : 1024.0;
  }
  if (factor == 1 && dots == 0) {  // exact: a double holds 53 bits only
    std::uint64_t value = 0;
    for (const char c : number) {
      const auto digit = static_cast<std::uint64_t>(c - '0');
      if (value > (UINT64_MAX - digit) / 10) return std::nullopt;
      value = value * 10 + digit;
    }
    return value;
  }
  const double value = std::strtod(number.c_str(), nullptr) * factor;
  if (!(value < 18446744073709551616.0)) return std::nullopt;
  return static_cast<std::uint64_t>(std::floor(value));
}

}  // namespace nibble
