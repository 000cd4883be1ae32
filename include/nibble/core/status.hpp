// SPDX-License-Identifier: Apache-2.0
/// \file
/// What kernel launchers return: no exception, no message allocated.
#pragma once

#include <cstdint>

namespace nibble {

enum class status_code : std::uint8_t {
  ok,
  invalid_argument,  ///< a pointer, stride or count breaks the launcher's contract; nothing was launched
  unsupported,       ///< this build or this device has no such kernel; nothing was launched
  cuda_error,        ///< the CUDA runtime refused; `cuda_error` has its number
};

/// The result of a launch. `where` and `text` are string literals and never null.
struct [[nodiscard]] status {
  status_code code = status_code::ok;
  int cuda_error = 0;       ///< a cudaError_t, 0 unless the code is cuda_error
  const char* where = "";   ///< the function that refused
  const char* text = "ok";  ///< one sentence: what is wrong and what is right

  [[nodiscard]] constexpr bool ok() const { return code == status_code::ok; }
  [[nodiscard]] static constexpr status success() { return {}; }
  [[nodiscard]] static constexpr status invalid(const char* where, const char* text) {
    return {status_code::invalid_argument, 0, where, text};
  }
  [[nodiscard]] static constexpr status not_supported(const char* where, const char* text) {
    return {status_code::unsupported, 0, where, text};
  }
  [[nodiscard]] static constexpr status cuda(int error, const char* where, const char* text) {
    return error == 0 ? status{} : status{status_code::cuda_error, error, where, text};
  }
};

}  // namespace nibble
