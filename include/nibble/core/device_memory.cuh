// SPDX-License-Identifier: Apache-2.0
/// \file
/// Plain allocations that belong to somebody, on the device and pinned on the host.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "nibble/core/checked.hpp"
#include "nibble/core/driver.cuh"
#include "nibble/core/driver_error.hpp"

namespace nibble {

namespace detail {

struct device_allocator {
  static constexpr const char* name = "device memory";
  static cudaError_t take(void** address, std::size_t bytes) { return cudaMalloc(address, bytes); }
  static cudaError_t give_back(void* address) { return cudaFree(address); }
};
struct pinned_allocator {
  static constexpr const char* name = "pinned host memory";
  static cudaError_t take(void** address, std::size_t bytes) {
    return cudaHostAlloc(address, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  }
  static cudaError_t give_back(void* address) { return cudaFreeHost(address); }
};

}  // namespace detail

/// One allocation, freed with its owner. Moves, never copies. A cudaMalloc address is a multiple of 256.
template <class Allocator>
class basic_device_memory {
 public:
  basic_device_memory() = default;
  /// Throws device_out_of_memory, context_lost_error or device_error; 0 bytes take nothing.
  explicit basic_device_memory(std::uint64_t bytes) {
    if (bytes == 0) return;
    void* address = nullptr;
    const status s = runtime_status(Allocator::take(&address, bytes), Allocator::name, "was refused");
    if (is_out_of_memory(s))
      throw device_out_of_memory(
          std::string(Allocator::name) + ": " + std::to_string(bytes) + " bytes refused", s);
    require(s);
    data_ = static_cast<std::byte*>(address);
    bytes_ = bytes;
  }
  basic_device_memory(basic_device_memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  basic_device_memory& operator=(basic_device_memory&& other) noexcept {
    basic_device_memory moved(std::move(other));
    std::swap(data_, moved.data_);
    std::swap(bytes_, moved.bytes_);
    return *this;
  }
  ~basic_device_memory() {
    if (data_ != nullptr) static_cast<void>(Allocator::give_back(data_));
  }

  /// The same without exceptions.
  [[nodiscard]] static status try_allocate(std::uint64_t bytes, basic_device_memory& out) {
    basic_device_memory made;
    if (bytes > 0) {
      void* address = nullptr;
      if (const status s = runtime_status(Allocator::take(&address, bytes), Allocator::name, "was refused");
          !s.ok())
        return s;
      made.data_ = static_cast<std::byte*>(address);
      made.bytes_ = bytes;
    }
    out = std::move(made);
    return status::success();
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

using device_memory = basic_device_memory<detail::device_allocator>;
using pinned_memory = basic_device_memory<detail::pinned_allocator>;

/// Copies that are over when they return; they throw. For set-up, not for steps.
inline void copy_to_device(void* to, const void* from, std::uint64_t bytes) {
  require(runtime_status(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "nibble::copy_to_device",
                         "the copy failed"));
  // From pageable memory the runtime may return while its own staging copy is under way.
  require(
      runtime_status(cudaStreamSynchronize(cudaStreamLegacy), "nibble::copy_to_device", "the copy failed"));
}
inline void copy_to_host(void* to, const void* from, std::uint64_t bytes) {
  require(runtime_status(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "nibble::copy_to_host",
                         "the copy failed"));
}

/// Hands out pieces of one block, front to back, each at a multiple of 256 bytes. With a null base it only
/// counts, so one function both sizes and places a workspace.
class device_carver {
 public:
  static constexpr std::uint64_t alignment_bytes = 256;

  explicit device_carver(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  [[nodiscard]] T* take(std::uint64_t count) {
    const std::uint64_t begin = align_up(used_, alignment_bytes);
    used_ = begin + count * sizeof(T);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  [[nodiscard]] std::uint64_t used_bytes() const { return used_; }

 private:
  std::byte* base_;
  std::uint64_t used_ = 0;
};

}  // namespace nibble
