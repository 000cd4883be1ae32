// SPDX-License-Identifier: Apache-2.0
#define ODD_PART 0
#include "gemv_odd.inl"
