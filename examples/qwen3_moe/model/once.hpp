// SPDX-License-Identifier: Apache-2.0
/// \file
/// Work that many threads need done and one does.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace qwen3_moe {

/// Runs its body once, whichever thread comes first; the others wait. What the body throws is thrown by every
/// call, without another try: a check of many gigabytes is not repeated by each thread that waited for it.
class once {
 public:
  /// \param body may be empty
  explicit once(std::function<void()> body) : body_(std::move(body)) {}
  void operator()() {
    if (!body_) return;
    std::call_once(flag_, [this] {
      try {
        body_();
      } catch (...) {
        failure_ = std::current_exception();
      }
    });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::once_flag flag_;
  std::function<void()> body_;
  std::exception_ptr failure_;
};

}  // namespace qwen3_moe
