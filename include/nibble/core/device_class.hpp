// SPDX-License-Identifier: Apache-2.0
/// \file
/// Classes of devices that kernels are tuned for, and which of them a device belongs to.
#pragma once

#include <span>

namespace nibble {

/// A class of devices a build is tuned for. Results are right on every device of the architecture, whatever
/// its number of multiprocessors: no kernel waits for blocks that may not have begun.
struct device_class {
  int architecture = 90;      ///< 80, 86, 89, 90, 100, 120
  int multiprocessors = 132;  ///< of a typical device; only speed depends on it
  bool measured = false;      ///< whether its policies were tuned on such a device

  friend constexpr bool operator==(const device_class&, const device_class&) = default;

  /// Shared memory a block may have, static and dynamic together, with opt-in; what the driver takes for
  /// itself (1 KiB a block) is not in it.
  [[nodiscard]] constexpr int shared_bytes() const {
    switch (architecture) {
      case 86:
      case 89:
      case 120:
        return 99 * 1024;
      case 80:
        return 163 * 1024;
      default:
        return 227 * 1024;
    }
  }
  /// Of these, what a kernel may ask for at launch: the rest is for its static shared memory.
  [[nodiscard]] constexpr int dynamic_shared_bytes() const { return shared_bytes() - 1024; }
  /// Whether there are bulk copies, transaction barriers and clusters.
  [[nodiscard]] constexpr bool has_bulk_copies() const { return architecture >= 90; }
};

inline constexpr device_class h200{90, 132, true};
/// GeForce RTX 40. 128 blocks are one wave of a 4090, and nearly whole waves of a 4070 (46 multiprocessors,
/// three) and of a 4070 Ti Super (66, two).
inline constexpr device_class ada{89, 128, false};
inline constexpr device_class ampere{80, 108, false};
inline constexpr device_class ampere_consumer{86, 82, false};
inline constexpr device_class blackwell{100, 148, false};
inline constexpr device_class blackwell_consumer{120, 170, false};

/// Every class there are policies for.
inline constexpr device_class device_classes[] = {ampere, ampere_consumer, ada,
                                                  h200,   blackwell,       blackwell_consumer};

/// The class of an architecture, 89 or 120; architecture 0 where there is none.
[[nodiscard]] constexpr device_class device_class_of(int architecture) {
  for (const device_class& one : device_classes)
    if (one.architecture == architecture) return one;
  return {0, 0, false};
}

/// Whether code of a class runs on a device of a compute capability (10 × major + minor). Before 9.0, code
/// runs on later devices of the same major version. From 9.0 on the code is specific to one capability. PTX
/// does not count: compiled for an older architecture it lacks the waits that chained launches rely on.
[[nodiscard]] constexpr bool runs_on(const device_class& one, int compute_capability) {
  if (one.architecture >= 90) return one.architecture == compute_capability;
  return one.architecture / 10 == compute_capability / 10 && one.architecture <= compute_capability;
}

/// Of some builds, each with a `device` of type device_class, the one for a device: the latest architecture
/// that runs on it. Null: none does.
template <class Build>
[[nodiscard]] constexpr const Build* best_build(std::span<const Build> builds, int compute_capability) {
  const Build* best = nullptr;
  for (const Build& one : builds)
    if (runs_on(one.device, compute_capability) &&
        (best == nullptr || one.device.architecture > best->device.architecture))
      best = &one;
  return best;
}

#ifndef NIBBLE_ARCHITECTURE
#define NIBBLE_ARCHITECTURE 90
#endif
/// What kernel families are specialised on where nothing else is said: the build's architecture, or of
/// several one whose kernels run on all of them.
inline constexpr device_class default_device = device_class_of(NIBBLE_ARCHITECTURE);
static_assert(default_device.architecture != 0,
              "nibble has kernels for the architectures 80, 86, 89, 90, 100 and 120");

}  // namespace nibble
