// SPDX-License-Identifier: Apache-2.0
/// \file
/// Memory that a kernel keeps between calls.
#pragma once

#include <cstddef>
#include <new>

namespace nibble::host::detail {

/// Floats at a 64-byte boundary that grow and never shrink. One for each purpose and thread.
class scratch {
 public:
  scratch() = default;
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  ~scratch() { release(); }

  /// At least `count` floats with any content; what was there before is lost.
  [[nodiscard]] float* take(std::size_t count) {
    if (count > capacity_) {
      const std::size_t grown = count + count / 2;
      release();
      data_ = static_cast<float*>(::operator new (grown * sizeof(float), std::align_val_t{64}));
      capacity_ = grown;
    }
    return data_;
  }

 private:
  void release() noexcept {
    if (data_ != nullptr) ::operator delete (data_, std::align_val_t{64});
    data_ = nullptr;
    capacity_ = 0;
  }
  float* data_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace nibble::host::detail
