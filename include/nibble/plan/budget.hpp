// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a plan may spend, and what of that it leaves free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/plan/byte_size.hpp"
#include "nibble/plan/memory_model.hpp"

namespace nibble::detail {

class plan_budget {
 public:
  /// Throws plan_refused for readings that cannot be.
  plan_budget(const machine_memory& machine, const plan_request& request) {
    check_readings(machine);
    std::uint64_t free = machine.free_bytes;
    if (machine.os_budget_bytes) {
      const std::uint64_t left = *machine.os_budget_bytes > machine.os_used_bytes
                                     ? *machine.os_budget_bytes - machine.os_used_bytes
                                     : 0;
      if (left < free) {
        free = left;
        notes_.push_back("the operating system leaves " + bytes_text(left) + " of " +
                         bytes_text(machine.free_bytes) + " that the driver calls free");
      }
    }
    bytes_ = saturating_add(machine.context_bytes, free);
    if (machine.free_now_bytes) {
      // Memory that others gave back is not counted: they may want it again.
      const std::uint64_t now =
          saturating_add(saturating_add(machine.context_bytes, machine.held_bytes), *machine.free_now_bytes);
      if (now < bytes_) {
        if (bytes_ - now > (std::uint64_t{16} << 20))
          notes_.push_back("others took " + bytes_text(bytes_ - now) + " since the start");
        bytes_ = now;
      }
    }
    bytes_ = std::min(bytes_, machine.total_bytes);  // a context that is only supposed may be larger
    available_bytes_ = bytes_;
    if (request.vram_limit_bytes && *request.vram_limit_bytes < bytes_)
      bytes_ = *request.vram_limit_bytes;
    else if (request.vram_limit_bytes && *request.vram_limit_bytes > bytes_)
      notes_.push_back("the limit of " + bytes_text(*request.vram_limit_bytes) + " is more than the " +
                       bytes_text(bytes_) + " there are");
    reserve_bytes_ = request.reserve_bytes.value_or(reserve_of(bytes_));
  }

  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  /// The same without the user's limit.
  [[nodiscard]] std::uint64_t available_bytes() const { return available_bytes_; }
  /// Whether the user's limit is what there is least of.
  [[nodiscard]] bool limited() const { return bytes_ < available_bytes_; }
  [[nodiscard]] std::uint64_t reserve_bytes() const { return reserve_bytes_; }
  /// Where the reserve of a budget of `bytes` comes from.
  [[nodiscard]] static std::string reserve_note(std::uint64_t bytes, const plan_request& request) {
    return request.reserve_bytes ? "reserve: as asked"
                                 : "reserve: 1/64 of " + bytes_text(bytes) + ", within 64 and 512 MiB";
  }
  /// Where the figures come from, if not simply from what is free.
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }

  /// The least budget that holds `bytes` beside its reserve.
  [[nodiscard]] static std::uint64_t least_for(std::uint64_t bytes, const plan_request& request) {
    if (request.reserve_bytes) return saturating_add(bytes, *request.reserve_bytes);
    const std::uint64_t small = saturating_add(bytes, least_reserve);
    if (reserve_of(small) == least_reserve) return small;
    const std::uint64_t middle = saturating_add(bytes, divide_up(bytes, 63));
    return std::min(std::max(middle, small), saturating_add(bytes, most_reserve));
  }

 private:
  static constexpr std::uint64_t least_reserve = std::uint64_t{64} << 20,
                                 most_reserve = std::uint64_t{512} << 20;
  [[nodiscard]] static constexpr std::uint64_t reserve_of(std::uint64_t budget) {
    return std::clamp(budget / 64, least_reserve, most_reserve);
  }
  static void check_readings(const machine_memory& machine) {
    if (machine.total_bytes == 0)
      throw plan_refused("the device reports no memory at all: 0 bytes in total", {}, 0);
    const auto check = [&](std::uint64_t free) {
      if (free > machine.total_bytes)
        throw plan_refused("the device reports " + bytes_text(free) + " free of " +
                               bytes_text(machine.total_bytes) +
                               ": the reading is wrong, no plan can be made from it",
                           {}, 0);
    };
    check(machine.free_bytes);
    if (machine.free_now_bytes) check(*machine.free_now_bytes);
  }

  std::uint64_t bytes_ = 0, available_bytes_ = 0, reserve_bytes_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace nibble::detail
