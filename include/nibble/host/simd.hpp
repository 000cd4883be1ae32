// SPDX-License-Identifier: Apache-2.0
/// \file
/// Which SIMD instruction set the CPU kernels run on. The best one the processor has is chosen by itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace nibble::host {

/// Names of the instruction sets that are both compiled in and supported here, best first: "AVX3" (AVX-512),
/// "AVX2", "SSE4", "NEON", "SCALAR" or "SSE2" or "EMU128" (portable).
[[nodiscard]] std::vector<std::string> simd_targets();

/// The name of the instruction set that kernels run on now.
[[nodiscard]] std::string simd_target();

/// Makes every kernel of the process use `name`, one of simd_targets(); an empty name restores the best.
/// For tests and measurements: call it while no kernel is running.
/// \throws nibble::error for a name that is not supported here.
void use_simd_target(std::string_view name);

}  // namespace nibble::host
