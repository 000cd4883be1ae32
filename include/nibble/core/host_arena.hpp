// SPDX-License-Identifier: Apache-2.0
/// \file
/// One block of host memory from which weights are carved.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "nibble/core/checked.hpp"
#include "nibble/core/error.hpp"

namespace nibble {

/// Address space of a fixed size, handed out front to back and freed as a whole. Pages cost memory only once
/// they are written. Every piece starts at a multiple of `alignment_bytes`.
class host_arena {
 public:
  static constexpr std::uint64_t alignment_bytes = 64;

  host_arena() = default;
  explicit host_arena(std::uint64_t capacity_bytes) : capacity_(capacity_bytes) {
    if (capacity_ == 0) return;
    void* address = ::mmap(nullptr, capacity_, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
      throw out_of_memory("host arena: " + std::to_string(capacity_) +
                          " bytes refused: " + std::strerror(errno));
    base_ = static_cast<std::byte*>(address);
    ::madvise(base_, capacity_, MADV_HUGEPAGE);  // fewer TLB misses where the kernel allows it
  }
  host_arena(host_arena&& other) noexcept { swap(other); }
  host_arena& operator=(host_arena&& other) noexcept {
    host_arena(std::move(other)).swap(*this);
    return *this;
  }
  ~host_arena() {
    if (base_ != nullptr) ::munmap(base_, capacity_);
  }

  /// The next `bytes` bytes; throws out_of_memory when the arena is too small.
  [[nodiscard]] std::span<std::byte> allocate(std::uint64_t bytes) {
    const std::uint64_t begin = align_up(used_, alignment_bytes);
    if (begin > capacity_ || bytes > capacity_ - begin)
      throw out_of_memory("host arena: " + std::to_string(bytes) + " bytes asked for, " +
                          std::to_string(capacity_ - used_) + " of " + std::to_string(capacity_) +
                          " are left");
    used_ = begin + bytes;
    return {base_ + begin, bytes};
  }

  [[nodiscard]] std::uint64_t used_bytes() const { return used_; }
  [[nodiscard]] std::uint64_t capacity_bytes() const { return capacity_; }

 private:
  void swap(host_arena& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(capacity_, other.capacity_);
    std::swap(used_, other.used_);
  }

  std::byte* base_ = nullptr;
  std::uint64_t capacity_ = 0;
  std::uint64_t used_ = 0;
};

}  // namespace nibble
