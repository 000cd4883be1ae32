// SPDX-License-Identifier: Apache-2.0
/// \file
/// How many lanes of a warp say that it has read a slot of a ring in shared memory.
#pragma once

namespace nibble::device {

/// One is enough where something brings the warp's lanes together before: a __syncwarp, or a matrix instruction
/// of the warpgroup that takes what they read. The race checker does not follow that, so a program it is to see
/// clean lets every lane arrive.
#ifdef NIBBLE_RING_EVERY_LANE
inline constexpr int ring_arrivals = 32;
#else
inline constexpr int ring_arrivals = 1;
#endif

}  // namespace nibble::device
