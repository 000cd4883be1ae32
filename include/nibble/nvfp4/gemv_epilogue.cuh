// SPDX-License-Identifier: Apache-2.0
/// \file
/// What happens to finished sums: store, add a residual, SwiGLU, keep the largest logit.
///
/// An epilogue is a type with `params`, the row order of the weights it needs, block-shared state, and
/// `pair(params, shared, token, row, a, b)`: for adjacent rows a and b belong to rows `row` and `row + 1`,
/// for gate_up they are gate and up of output `row`. Scales are applied already. `ends_block`: see
/// select_gemv.
#pragma once

#include <cuda_bf16.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/status.hpp"
#include "nibble/geometry/tile.hpp"

namespace nibble {

namespace detail {
template <class T>
[[nodiscard]] inline status check_output(const T* y, int ldy, int rows, const char* where) {
  if (y == nullptr) return status::invalid(where, "the output pointer is null");
  if (ldy < rows) return status::invalid(where, "the output's row stride is smaller than a row");
  if (rows % 2 == 0 && (ldy % 2 != 0 || reinterpret_cast<std::uintptr_t>(y) % (2 * sizeof(T)) != 0))
    return status::invalid(where,
                           "an output of even width needs an even row stride and pairs that are aligned");
  return status::success();
}
}  // namespace detail

/// y[m][n] = value, rows `ldy` elements apart.
template <class Out>
struct store {
  struct params {
    Out* y = nullptr;
    int ldy = 0;
  };
  struct shared {};
  static constexpr row_order order = row_order::adjacent;
  static constexpr bool finishes = false;
  static constexpr bool ends_block = false;

  static status check(const params& p, int rows, const char* where) {
    return detail::check_output(p.y, p.ldy, rows, where);
  }
  static params advanced(params p, int tokens) {
    p.y += static_cast<std::ptrdiff_t>(tokens) * p.ldy;
    return p;
  }
  template <int Rows, bool Keep>
  static __device__ __forceinline__ void pair(const params& p, shared&, int token, int row, float a,
                                              float b) {
    Out* y = p.y + static_cast<std::size_t>(token) * p.ldy + row;
    if constexpr (Rows % 2 == 0) {
      if (Rows % tile_rows == 0 || row < Rows) device::store_pair<Keep>(y, a, b);
    } else {
      if (row < Rows) device::store_one(y, a);
      if (row + 1 < Rows) device::store_one(y + 1, b);
    }
  }
};

/// y[m][n] = residual[m][n] + value in fp32, one rounding. `residual` may be `y`.
struct add_residual {
  struct params {
    __nv_bfloat16* y = nullptr;
    int ldy = 0;
    const __nv_bfloat16* residual = nullptr;
    int ldr = 0;
  };
  struct shared {};
  static constexpr row_order order = row_order::adjacent;
  static constexpr bool finishes = false;
  static constexpr bool ends_block = true;

  static status check(const params& p, int rows, const char* where) {
    if (const status s = detail::check_output(p.y, p.ldy, rows, where); !s.ok()) return s;
    return detail::check_output(p.residual, p.ldr, rows, where);
  }
  static params advanced(params p, int tokens) {
    p.y += static_cast<std::ptrdiff_t>(tokens) * p.ldy;
    p.residual += static_cast<std::ptrdiff_t>(tokens) * p.ldr;
    return p;
  }
  template <int Rows, bool Keep>
  static __device__ __forceinline__ void pair(const params& p, shared&, int token, int row, float a,
                                              float b) {
    __nv_bfloat16* y = p.y + static_cast<std::size_t>(token) * p.ldy + row;
    const __nv_bfloat16* r = p.residual + static_cast<std::size_t>(token) * p.ldr + row;
    if constexpr (Rows % 2 == 0) {
      if (Rows % tile_rows == 0 || row < Rows) {
        const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(r));
        device::store_pair<Keep>(y, v.x + a, v.y + b);
      }
    } else {
      if (row < Rows) device::store_one(y, __bfloat162float(r[0]) + a);
      if (row + 1 < Rows) device::store_one(y + 1, __bfloat162float(r[1]) + b);
    }
  }
};

/// y[m][n] = residual[m][n] + weight[m] · value in fp32, one rounding. `residual` may be `y`. For an expert
/// that every token passes through.
struct add_scaled_residual {
  struct params {
    __nv_bfloat16* y = nullptr;
    int ldy = 0;
    const __nv_bfloat16* residual = nullptr;
    int ldr = 0;
    const float* weight = nullptr;  ///< [m], null: 1
  };
  struct shared {};
  static constexpr row_order order = row_order::adjacent;
  static constexpr bool finishes = false;
  static constexpr bool ends_block = true;

  static status check(const params& p, int rows, const char* where) {
    return add_residual::check({p.y, p.ldy, p.residual, p.ldr}, rows, where);
  }
  static params advanced(params p, int tokens) {
    p.y += static_cast<std::ptrdiff_t>(tokens) * p.ldy;
    p.residual += static_cast<std::ptrdiff_t>(tokens) * p.ldr;
    if (p.weight != nullptr) p.weight += tokens;
    return p;
  }
  template <int Rows, bool Keep>
  static __device__ __forceinline__ void pair(const params& p, shared&, int token, int row, float a,
                                              float b) {
    const float w = p.weight != nullptr ? p.weight[token] : 1.0f;
    add_residual::shared none;
    add_residual::pair<Rows, Keep>({p.y, p.ldy, p.residual, p.ldr}, none, token, row, w * a, w * b);
  }
};

/// silu(gate) · up = gate / (1 + e^-gate) · up.
__device__ __forceinline__ float swiglu_value(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

/// h[m][n/2] = silu(gate) · up over two equal row segments, bf16.
struct swiglu {
  struct params {
    __nv_bfloat16* y = nullptr;
    int ldy = 0;
  };
  struct shared {};
  static constexpr row_order order = row_order::gate_up;
  static constexpr bool finishes = false;
  static constexpr bool ends_block = false;

  static status check(const params& p, int rows, const char* where) {
    if (p.y == nullptr) return status::invalid(where, "the output pointer is null");
    if (p.ldy < rows) return status::invalid(where, "the output's row stride is smaller than a row");
    return status::success();
  }
  static params advanced(params p, int tokens) {
    p.y += static_cast<std::ptrdiff_t>(tokens) * p.ldy;
    return p;
  }
  template <int Rows, bool Keep>
  static __device__ __forceinline__ void pair(const params& p, shared&, int token, int row, float a,
                                              float b) {
    if (Rows % (tile_rows / 2) == 0 || row < Rows)
      p.y[static_cast<std::size_t>(token) * p.ldy + row] = __float2bfloat16_rn(swiglu_value(a, b));
  }
};

/// Tokens whose logits one launch makes.
inline constexpr int max_logit_tokens = 16;

/// A logit and its row as a key: keys order first by value, then by lower row. A NaN is above every number, 0
/// below every key. -0 counts as 0.
__host__ __device__ inline unsigned long long logit_key(float value, int row) {
  value += 0.0f;
#ifdef __CUDA_ARCH__
  const std::uint32_t bits = __float_as_uint(value);
#else
  const auto bits = std::bit_cast<std::uint32_t>(value);
#endif
  const std::uint32_t ordered = (bits & 0x7FFF'FFFFu) > 0x7F80'0000u ? 0xFFFF'FFFFu
                                : (bits & 0x8000'0000u) != 0         ? ~bits
                                                                     : bits | 0x8000'0000u;
  return static_cast<unsigned long long>(ordered) << 32 | (0xFFFF'FFFFu - static_cast<std::uint32_t>(row));
}
/// The row of a key that is not 0.
__host__ __device__ inline int key_row(unsigned long long key) {
  return static_cast<int>(0xFFFF'FFFFu - static_cast<std::uint32_t>(key));
}
__host__ __device__ inline bool key_is_nan(unsigned long long key) { return key >> 32 == 0xFFFF'FFFFull; }
/// The row of a token's largest key, -1 when the largest logit is NaN.
__host__ __device__ inline int largest_key_row(unsigned long long key) {
  return key_is_nan(key) ? -1 : key_row(key);
}
/// The logit of a key that is not 0.
__host__ __device__ inline float key_value(unsigned long long key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  const std::uint32_t bits = (ordered & 0x8000'0000u) != 0 && !key_is_nan(key) ? ordered ^ 0x8000'0000u
                             : key_is_nan(key)                                 ? 0x7FC0'0000u
                                                                               : ~ordered;
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

/// Logits in fp32 and, per token and block, the largest one and its row. Ties go to the lower row; a NaN
/// beats every number, so it is seen. The largest key over blocks does not depend on the order they end in.
struct store_and_argmax {
  struct params {
    float* y = nullptr;
    int ldy = 0;
    unsigned long long* keys = nullptr;  ///< [m][blocks], see largest_key_row
    int blocks = 0;                      ///< policy.grid or more; what is more gets zeros
  };
  struct shared {
    unsigned long long best[max_logit_tokens];
  };
  static constexpr row_order order = row_order::adjacent;
  static constexpr bool finishes = true;
  static constexpr bool ends_block = false;
  static constexpr int keys = 1;  ///< of a token and block

  static status check(const params& p, int rows, const char* where) {
    if (p.keys == nullptr || p.blocks < 1) return status::invalid(where, "the key buffer is missing");
    return detail::check_output(p.y, p.ldy, rows, where);
  }
  static params advanced(params p, int tokens) {
    p.y += static_cast<std::ptrdiff_t>(tokens) * p.ldy;
    p.keys += static_cast<std::ptrdiff_t>(tokens) * p.blocks;
    return p;
  }
  static __device__ __forceinline__ void start(shared& s) {
    if (threadIdx.x < max_logit_tokens) s.best[threadIdx.x] = 0;
  }
  template <int Rows, bool Keep>
  static __device__ __forceinline__ void pair(const params& p, shared& s, int token, int row, float a,
                                              float b) {
    store<float>::shared none;
    store<float>::template pair<Rows, Keep>({p.y, p.ldy}, none, token, row, a, b);
    unsigned long long key = row < Rows ? logit_key(a, row) : 0;
    if (row + 1 < Rows) {
      const unsigned long long other = logit_key(b, row + 1);
      key = other > key ? other : key;
    }
    // The value read may be stale, never too large: a better key is not lost.
    if (key > *static_cast<volatile unsigned long long*>(&s.best[token])) atomicMax(&s.best[token], key);
  }
  static __device__ __forceinline__ void finish(const params& p, shared& s, int m) {
    if (static_cast<int>(threadIdx.x) >= m) return;
    unsigned long long* const to = p.keys + static_cast<std::size_t>(threadIdx.x) * p.blocks;
    for (int block = static_cast<int>(blockIdx.x); block < p.blocks; block += static_cast<int>(gridDim.x))
      to[block] = block == static_cast<int>(blockIdx.x) ? s.best[threadIdx.x] : 0;
  }
};

}  // namespace nibble
