// SPDX-License-Identifier: Apache-2.0
/// \file
/// What the race checker does not follow, and what a program that it is to see clean does instead.
#pragma once

namespace nibble::device {

#ifdef NIBBLE_FOR_RACE_CHECKER
inline constexpr bool for_race_checker = true;
#else
inline constexpr bool for_race_checker = false;
#endif

/// How many lanes of a warp say that it has read a slot of a ring in shared memory. One is enough where
/// something brings the warp's lanes together before: a __syncwarp, or a matrix instruction of the warpgroup
/// that takes what they read.
inline constexpr int ring_arrivals = for_race_checker ? 32 : 1;

/// Whether warps that arrive at a named barrier wait there, too, though they need not. Where they do not, the
/// checker now and then reports what the block's next barrier orders.
inline constexpr bool arriving_warps_wait = for_race_checker;

}  // namespace nibble::device
