// SPDX-License-Identifier: Apache-2.0
/// \file
/// Every byte of device memory on one of nine lines, as planned and as measured.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "nibble/core/checked.hpp"
#include "nibble/plan/byte_size.hpp"

namespace nibble {

enum class ledger_line : std::uint8_t {
  context,       ///< what the driver keeps for the process
  kernels,       ///< machine code of every kernel
  weights,       ///< everything of the model that is always resident
  workspace,     ///< activations of the largest step, page tables, logits
  graphs,        ///< captured steps
  states,        ///< recurrent states: one for each running sequence, snapshots, a dummy if need be
  kv_pages,      ///< keys and values, a dummy page included if need be
  expert_slots,  ///< routed experts that are resident
  reserve,       ///< left free: other programs, fragmentation
};

inline constexpr std::size_t ledger_lines = 9;

/// What people read.
[[nodiscard]] constexpr std::string_view name_of(ledger_line line) {
  constexpr std::string_view names[] = {"context",          "kernels",  "weights",      "workspace", "graphs",
                                        "recurrent states", "KV pages", "expert slots", "reserve"};
  return names[static_cast<std::size_t>(line)];
}
/// What programs read.
[[nodiscard]] constexpr std::string_view key_of(ledger_line line) {
  constexpr std::string_view keys[] = {"context", "kernels",  "weights",      "workspace", "graphs",
                                       "states",  "kv_pages", "expert_slots", "reserve"};
  return keys[static_cast<std::size_t>(line)];
}

/// a + b, UINT64_MAX where it does not fit: a sum that no budget holds.
[[nodiscard]] constexpr std::uint64_t saturating_add(std::uint64_t a, std::uint64_t b) {
  return checked_add(a, b).value_or(UINT64_MAX);
}
[[nodiscard]] constexpr std::uint64_t saturating_multiply(std::uint64_t a, std::uint64_t b) {
  return checked_multiply(a, b).value_or(UINT64_MAX);
}

class ledger {
 public:
  struct entry {
    std::uint64_t planned_bytes = 0;
    std::optional<std::uint64_t> measured_bytes;
    std::string note;  ///< "3580 of 10240 slots of 1.7 MiB"
  };

  std::uint64_t budget_bytes = 0;  ///< what all lines together may take; 0: not set

  void plan(ledger_line line, std::uint64_t bytes, std::string note = {}) {
    at(line).planned_bytes = bytes;
    at(line).note = std::move(note);
  }
  void measure(ledger_line line, std::uint64_t bytes) { at(line).measured_bytes = bytes; }
  /// Adds to what was measured of a line.
  void add_measured(ledger_line line, std::uint64_t bytes) {
    at(line).measured_bytes = saturating_add(at(line).measured_bytes.value_or(0), bytes);
  }

  [[nodiscard]] const entry& operator[](ledger_line line) const {
    return entries_[static_cast<std::size_t>(line)];
  }
  [[nodiscard]] std::uint64_t planned_total() const {
    std::uint64_t sum = 0;
    for (const auto& e : entries_) sum = saturating_add(sum, e.planned_bytes);
    return sum;
  }
  /// Sum of the lines that were measured.
  [[nodiscard]] std::uint64_t measured_total() const {
    std::uint64_t sum = 0;
    for (const auto& e : entries_) sum = saturating_add(sum, e.measured_bytes.value_or(0));
    return sum;
  }

  /// Lines and totals as a table of fixed width.
  [[nodiscard]] std::string text() const {
    bool measured = false;
    for (const auto& e : entries_) measured |= e.measured_bytes.has_value();
    std::string out;
    char row[96];
    std::snprintf(row, sizeof row, "%-18s%12s", "", "planned");
    out += row;
    if (measured) out += "    measured";
    out += '\n';
    for (std::size_t i = 0; i < ledger_lines; ++i) {
      const auto& e = entries_[i];
      std::snprintf(row, sizeof row, "%-18s%12s", std::string(name_of(static_cast<ledger_line>(i))).c_str(),
                    bytes_text(e.planned_bytes).c_str());
      out += row;
      if (measured) {
        std::snprintf(row, sizeof row, "%12s",
                      e.measured_bytes ? bytes_text(*e.measured_bytes).c_str() : "-");
        out += row;
      }
      if (!e.note.empty()) out += "  " + e.note;
      out += '\n';
    }
    std::snprintf(row, sizeof row, "%-18s%12s", "total", bytes_text(planned_total()).c_str());
    out += row;
    if (measured) {
      std::snprintf(row, sizeof row, "%12s", bytes_text(measured_total()).c_str());
      out += row;
    }
    if (budget_bytes != 0) out += "  of " + bytes_text(budget_bytes);
    return out + '\n';
  }

  /// `[{"line":"context","planned_bytes":…,"measured_bytes":…|null}, …]`.
  [[nodiscard]] std::string json_rows() const {
    std::string out = "[";
    for (std::size_t i = 0; i < ledger_lines; ++i) {
      const auto& e = entries_[i];
      out += (i == 0 ? "{\"line\":\"" : ",{\"line\":\"");
      out += key_of(static_cast<ledger_line>(i));
      out += "\",\"planned_bytes\":" + std::to_string(e.planned_bytes) + ",\"measured_bytes\":" +
             (e.measured_bytes ? std::to_string(*e.measured_bytes) : std::string("null")) + "}";
    }
    return out + "]";
  }

 private:
  entry& at(ledger_line line) { return entries_[static_cast<std::size_t>(line)]; }
  std::array<entry, ledger_lines> entries_{};
};

}  // namespace nibble
