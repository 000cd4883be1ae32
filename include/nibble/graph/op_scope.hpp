// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which op is being launched, so that a call which is not allowed while capturing is reported with its name.
#pragma once

namespace nibble {

namespace detail {

/// Set by a graph wrapper while it captures on this thread.
struct capture_watch {
  bool (*invalidated)(void* self) = nullptr;
  void* self = nullptr;
  const char* culprit = nullptr;  ///< the first op after which the capture was no longer valid
};

struct op_context {
  const char* current = "";
  capture_watch* watch = nullptr;
};

inline op_context& this_thread_op() {
  static thread_local op_context context;
  return context;
}

}  // namespace detail

/// The op of the innermost op_scope of this thread, or "".
[[nodiscard]] inline const char* current_op() { return detail::this_thread_op().current; }

/// Names the op whose launches follow until the end of the scope. Outside a capture it costs two stores.
/// \param name lives as long as the program: a literal
class op_scope {
 public:
  explicit op_scope(const char* name) : outer_(detail::this_thread_op().current) {
    detail::this_thread_op().current = name;
  }
  op_scope(const op_scope&) = delete;
  op_scope& operator=(const op_scope&) = delete;
  ~op_scope() {
    auto& context = detail::this_thread_op();
    if (auto* watch = context.watch;
        watch != nullptr && watch->culprit == nullptr && watch->invalidated(watch->self))
      watch->culprit = context.current;
    context.current = outer_;
  }

 private:
  const char* outer_;
};

}  // namespace nibble
