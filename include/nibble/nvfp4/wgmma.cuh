// SPDX-License-Identifier: Apache-2.0
/// \file
/// The warpgroup matrix instruction of sm_90a: weights from registers, activations from shared memory.
///
/// Four warps multiply 64 rows × 16 columns by 16 columns × N tokens. A warp's 16 rows are held as those of
/// the warp-wide instruction are, so a decoded row tile is an operand as it is, and any four row tiles make
/// up the 64 rows. Activations lie in rows of 128 bytes, 64 columns, swizzled in groups of eight rows.
#pragma once

#include <cstdint>

#include "nibble/core/device_ops.cuh"

/// Whether the build has code for sm_90a (CMAKE_CUDA_ARCHITECTURES 90a): only there the instruction exists.
/// Host code cannot tell, so the build says it.
#ifndef NIBBLE_WGMMA
#define NIBBLE_WGMMA 0
#endif
#if NIBBLE_WGMMA && defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "nibble: NIBBLE_WGMMA is set, but this is not sm_90a: build for 90a, or leave NIBBLE_WGMMA unset"
#endif

namespace nibble {
inline constexpr bool has_wgmma = NIBBLE_WGMMA != 0;
}

namespace nibble::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NIBBLE_WGMMA_CODE 1
#else
#define NIBBLE_WGMMA_CODE 0
#endif

/// Orders registers written before and the instruction's reads of them.
__device__ __forceinline__ void wgmma_fence() {
#if NIBBLE_WGMMA_CODE
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if NIBBLE_WGMMA_CODE
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
#if NIBBLE_WGMMA_CODE
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}
/// What threads wrote to shared memory becomes visible to the matrix unit.
__device__ __forceinline__ void fence_matrix_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/// More registers for the caller's warpgroup, or fewer.
template <int Registers>
__device__ __forceinline__ void more_registers() {
#if NIBBLE_WGMMA_CODE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}
template <int Registers>
__device__ __forceinline__ void fewer_registers() {
#if NIBBLE_WGMMA_CODE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

/// Descriptor of activations at a shared address: rows of 128 bytes, swizzled, 1024 bytes from one group of
/// eight rows to the next. 16 columns further on it is 2 more.
__device__ __forceinline__ std::uint64_t swizzled_rows(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3FFFFu) >> 4) | std::uint64_t{1} << 16 |
         std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}

/// d[64 rows][N tokens] (+)= a · b; `add` 0: what d held is forgotten. d[4 j + 2 h + i] is row g + 8 h, token
/// 8 j + 2 t + i of the warp's sixteen rows.
template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                                      int add);

template <>
__device__ __forceinline__ void wgmma<32>(float (&d)[16], const std::uint32_t (&a)[4], std::uint64_t b,
                                          int add) {
#if NIBBLE_WGMMA_CODE
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
template <>
__device__ __forceinline__ void wgmma<64>(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b,
                                          int add) {
#if NIBBLE_WGMMA_CODE
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
template <>
__device__ __forceinline__ void wgmma<96>(float (&d)[48], const std::uint32_t (&a)[4], std::uint64_t b,
                                          int add) {
#if NIBBLE_WGMMA_CODE
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, "
      "%51}, %52, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
template <>
__device__ __forceinline__ void wgmma<128>(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b,
                                           int add) {
#if NIBBLE_WGMMA_CODE
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, "
      "0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
        "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]),
        "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}

}  // namespace nibble::device
