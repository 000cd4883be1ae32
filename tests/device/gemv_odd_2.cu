// SPDX-License-Identifier: Apache-2.0
#define ODD_PART 2
#include "gemv_odd.inl"
