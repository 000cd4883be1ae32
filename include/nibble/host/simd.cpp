// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <nibble/core/error.hpp>
#include <nibble/host/simd.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/simd.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {
std::int64_t this_target() { return HWY_TARGET; }
}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(this_target);

namespace {
std::int64_t usable_targets() { return (hwy::SupportedTargets() | HWY_STATIC_TARGET) & HWY_TARGETS; }
}  // namespace

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (std::int64_t rest = usable_targets(); rest != 0; rest &= rest - 1)
    names.emplace_back(hwy::TargetName(rest & -rest));
  return names;
}

std::string simd_target() { return hwy::TargetName(HWY_DYNAMIC_DISPATCH(this_target)()); }

void use_simd_target(std::string_view name) {
  if (name.empty()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return;
  }
  std::string known;
  for (std::int64_t rest = usable_targets(); rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    if (name == hwy::TargetName(target)) {
      hwy::GetChosenTarget().Update(target);
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + hwy::TargetName(target);
  }
  throw error("instruction set \"" + std::string(name) + "\" is not available here; choose one of: " + known);
}

}  // namespace nibble::host
#endif
