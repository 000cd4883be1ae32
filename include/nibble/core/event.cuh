// SPDX-License-Identifier: Apache-2.0
/// \file
/// An event that orders and does not time.
#pragma once

#include <cuda_runtime.h>

#include "nibble/core/device_memory.cuh"
#include "nibble/core/driver.cuh"

namespace nibble {

class event {
 public:
  /// Throws device_error.
  event() {
    require(runtime_status(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "nibble::event",
                           "no event"));
  }
  event(const event&) = delete;
  event& operator=(const event&) = delete;
  ~event() { static_cast<void>(cudaEventDestroy(event_)); }
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace nibble
