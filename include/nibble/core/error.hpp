// SPDX-License-Identifier: Apache-2.0
/// \file
/// The exceptions of loader, planner and server. Kernels never throw: they return a status.
#pragma once

#include <stdexcept>
#include <string>

namespace nibble {

/// The base of everything nibble throws. The text says what, the value, the limit and the next step.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A file, checkpoint or configuration that breaks a rule. Nothing was changed when it is thrown.
class format_error : public error {
 public:
  using error::error;
};

/// Memory that could not be had, on the host or on a device.
class out_of_memory : public error {
 public:
  using error::error;
};

}  // namespace nibble
