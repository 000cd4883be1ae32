// SPDX-License-Identifier: Apache-2.0
/// \file
/// The few macros of the library.
#pragma once

/// Marks a function that host and device code may call: nothing without nvcc.
#if defined(__CUDACC__)
#define NIBBLE_HOST_DEVICE __host__ __device__
#else
#define NIBBLE_HOST_DEVICE
#endif
