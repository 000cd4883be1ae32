// SPDX-License-Identifier: Apache-2.0
// Which instruction sets the kernels are compiled for. Included before any Highway header, and the same in
// every translation unit.
//
// Left out: SSSE3 and the finer AVX-512 levels, which would not change these kernels, and SVE, whose vectors
// have no size at compile time and cannot stand in register arrays (NEON serves those machines).
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | NIBBLE_HIGHWAY_NEWER)

// Levels that Highway 1.0.3 does not know yet; the bits are fixed by its ABI.
#undef NIBBLE_HIGHWAY_NEWER
#if defined(__x86_64__)
#define NIBBLE_HIGHWAY_NEWER ((1LL << 4) | (1LL << 6))  // AVX3_SPR, AVX3_ZEN4
#else
#define NIBBLE_HIGHWAY_NEWER 0LL
#endif
