// SPDX-License-Identifier: Apache-2.0
/// \file
/// Device memory that grows and shrinks at a constant address, so that captured graphs stay valid.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "nibble/core/checked.hpp"
#include "nibble/core/driver_error.hpp"
#include "nibble/core/status.hpp"

namespace nibble {

/// Reserved address space of which the front is backed by memory.
///
/// Memory comes and goes in blocks at the end; what lies before keeps its contents and its address. A block
/// is `block_bytes`, the last one of a growth whatever granules remain, so growth is exact up to a granule
/// and shrinking keeps up to one block more than was asked for.
///
/// `Driver` is movable and has
///
///     std::uint64_t granule_bytes() const;                       smallest unit of mapping, a power of two
///     status reserve(std::uint64_t bytes, std::byte*& base);     address space, no memory
///     void release(std::byte* base, std::uint64_t bytes);
///     status map(std::byte* at, std::uint64_t bytes);            all or nothing; readable and writable after
///     status unmap(std::byte* at, std::uint64_t bytes);          one mapped block
///     status synchronize();                                      no work uses the memory afterwards
template <class Driver>
class elastic_arena {
 public:
  static constexpr std::uint64_t default_block_bytes = std::uint64_t{16} << 20;

  elastic_arena() = default;
  elastic_arena(elastic_arena&& other) noexcept { swap(other); }
  elastic_arena& operator=(elastic_arena&& other) noexcept {
    elastic_arena(std::move(other)).swap(*this);
    return *this;
  }
  ~elastic_arena() { close(); }

  /// Reserves address space for at most `reserved_bytes`; no memory is taken yet.
  [[nodiscard]] static status open(Driver driver, std::uint64_t reserved_bytes, elastic_arena& arena,
                                   std::uint64_t block_bytes = default_block_bytes) {
    static constexpr const char* where = "nibble::elastic_arena::open";
    elastic_arena made;
    made.driver_ = std::move(driver);
    const std::uint64_t granule = made.driver_.granule_bytes();
    if (granule == 0) return status::not_supported(where, "the device cannot map memory");
    if (reserved_bytes == 0 || reserved_bytes > (std::uint64_t{1} << 46))
      return status::invalid(where, "an arena reserves between one byte and 64 TiB");
    made.block_ = align_up(std::max(block_bytes, granule), granule);
    made.reserved_ = align_up(reserved_bytes, granule);
    if (const status s = made.driver_.reserve(made.reserved_, made.base_); !s.ok()) {
      made.base_ = nullptr;
      return s;
    }
    arena = std::move(made);
    return status::success();
  }

  /// Makes at least `bytes` usable, or fewer than before. Growth that fails leaves the size as it was and
  /// returns the reason (is_out_of_memory: somebody else has the memory). Shrinking waits for the device.
  /// What is cut off must not be used by any later launch.
  [[nodiscard]] status resize(std::uint64_t bytes) {
    static constexpr const char* where = "nibble::elastic_arena::resize";
    if (base_ == nullptr) return status::invalid(where, "the arena is not open");
    if (bytes > reserved_)
      return status::invalid(where, "the arena cannot grow past the address space it reserved");
    const std::uint64_t target = align_up(bytes, driver_.granule_bytes());
    return target > mapped_ ? grow(target) : shrink(target);
  }

  [[nodiscard]] std::byte* base() const { return base_; }
  /// Bytes that are backed by memory now: multiples of the granule.
  [[nodiscard]] std::uint64_t mapped_bytes() const { return mapped_; }
  [[nodiscard]] std::uint64_t reserved_bytes() const { return reserved_; }
  [[nodiscard]] std::uint64_t granule_bytes() const { return base_ == nullptr ? 0 : driver_.granule_bytes(); }

 private:
  status grow(std::uint64_t target) {
    const std::size_t blocks_before = blocks_.size();
    const std::uint64_t before = mapped_;
    blocks_.reserve(blocks_.size() + static_cast<std::size_t>((target - mapped_) / block_ + 1));
    while (mapped_ < target) {
      const std::uint64_t bytes = std::min(block_, target - mapped_);
      if (const status s = driver_.map(base_ + mapped_, bytes); !s.ok()) {
        // Nothing of the new part was handed out, so it goes back without waiting.
        while (blocks_.size() > blocks_before) {
          const status back = pop();
          if (!back.ok()) return back;
        }
        mapped_ = before;
        return s;
      }
      blocks_.push_back(bytes);
      mapped_ += bytes;
    }
    return status::success();
  }
  status shrink(std::uint64_t target) {
    if (blocks_.empty() || mapped_ - blocks_.back() < target) return status::success();
    if (const status s = driver_.synchronize(); !s.ok()) return s;
    while (!blocks_.empty() && mapped_ - blocks_.back() >= target)
      if (const status s = pop(); !s.ok()) return s;
    return status::success();
  }
  status pop() {
    const std::uint64_t bytes = blocks_.back();
    if (const status s = driver_.unmap(base_ + (mapped_ - bytes), bytes); !s.ok()) return s;
    blocks_.pop_back();
    mapped_ -= bytes;
    return status::success();
  }
  void close() {
    if (base_ == nullptr) return;
    static_cast<void>(driver_.synchronize().ok());
    while (!blocks_.empty() && pop().ok()) {
    }
    driver_.release(base_, reserved_);
    base_ = nullptr;
  }
  void swap(elastic_arena& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(base_, other.base_);
    std::swap(reserved_, other.reserved_);
    std::swap(mapped_, other.mapped_);
    std::swap(block_, other.block_);
    std::swap(blocks_, other.blocks_);
  }

  Driver driver_{};
  std::byte* base_ = nullptr;
  std::uint64_t reserved_ = 0;
  std::uint64_t mapped_ = 0;
  std::uint64_t block_ = 0;
  std::vector<std::uint64_t> blocks_;  ///< sizes, front to back
};

}  // namespace nibble
