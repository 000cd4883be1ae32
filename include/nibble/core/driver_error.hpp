// SPDX-License-Identifier: Apache-2.0
/// \file
/// From the status of a device call to an exception, at the edge where exceptions begin.
#pragma once

#include <string>

#include "nibble/core/error.hpp"
#include "nibble/core/status.hpp"

namespace nibble {

/// A device call that failed. The context is still usable unless the error is a context_lost_error.
class device_error : public error {
 public:
  device_error(const std::string& text, status what) : error(text), status_(what) {}
  [[nodiscard]] const status& what_happened() const { return status_; }

 private:
  status status_;
};

/// An error that stays: every later call of this process on this device returns it again. The only way out is
/// a new process; answers in flight are to be failed, not retried.
class context_lost_error : public device_error {
 public:
  using device_error::device_error;
};

/// Device memory that could not be had. Nothing is lost: free something and try again.
class device_out_of_memory : public out_of_memory {
 public:
  device_out_of_memory(const std::string& text, status what) : out_of_memory(text), status_(what) {}
  [[nodiscard]] const status& what_happened() const { return status_; }

 private:
  status status_;
};

/// cudaErrorMemoryAllocation, which is also the driver's CUDA_ERROR_OUT_OF_MEMORY.
inline constexpr int cuda_error_memory_allocation = 2;

[[nodiscard]] constexpr bool is_out_of_memory(const status& s) {
  return s.code == status_code::cuda_error && s.cuda_error == cuda_error_memory_allocation;
}

/// Errors after which the context answers nothing else: faults of running kernels, of memory, of the device.
[[nodiscard]] constexpr bool is_sticky(const status& s) {
  if (s.code != status_code::cuda_error) return false;
  switch (s.cuda_error) {
    case 4:    // the driver is shutting down
    case 46:   // the device is unavailable
    case 214:  // uncorrectable memory error
    case 220:  // NVLink error
    case 709:  // the context is destroyed
      return true;
    default:  // 700 illegal address, 702 time-out, 710 assert, 714-719 faults of a kernel, 721 contained, 999
      return s.cuda_error == 700 || s.cuda_error == 702 || s.cuda_error == 710 ||
             (s.cuda_error >= 714 && s.cuda_error <= 719) || s.cuda_error == 721 || s.cuda_error == 999;
  }
}

/// Errors of a stream capture that has to be given up: 900 … 908.
[[nodiscard]] constexpr bool is_capture_error(const status& s) {
  return s.code == status_code::cuda_error && s.cuda_error >= 900 && s.cuda_error <= 908;
}

/// "nibble::gemv: the CUDA runtime refused the launch (CUDA error 700)".
[[nodiscard]] inline std::string describe(const status& s) {
  std::string text = std::string(s.where) + ": " + s.text;
  if (s.code == status_code::cuda_error) text += " (CUDA error " + std::to_string(s.cuda_error) + ")";
  return text;
}

/// Nothing when `s` is good, otherwise throws the exception of its kind.
inline void require(const status& s) {
  if (s.ok()) return;
  if (is_out_of_memory(s)) throw device_out_of_memory(describe(s), s);
  if (is_sticky(s)) throw context_lost_error(describe(s) + "; the device context is lost", s);
  throw device_error(describe(s), s);
}

}  // namespace nibble
