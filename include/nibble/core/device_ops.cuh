// SPDX-License-Identifier: Apache-2.0
/// \file
/// The instructions kernels use by name: streaming loads, programmatic dependent launch, barriers, bulk
/// copies, the matrix instruction.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace nibble::device {

// Weights are read once and stay out of L1. They must be plain ld.global: ptxas moves ld.global.nc below
// griddepcontrol.wait without a word, and what asking early gains is lost.
__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 v{};
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
#endif
  return v;
}
__device__ __forceinline__ std::uint32_t load_weights_4(const void* p) {
  std::uint32_t v = 0;
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#endif
  return v;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared_8(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ const void* load_shared_pointer(std::uint32_t address) {
  const void* p;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(p) : "r"(address));
  return p;
}
__device__ __forceinline__ void store_shared_pointer(std::uint32_t address, const void* p) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(p) : "memory");
}
__device__ __forceinline__ void store_shared_4(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Programmatic dependent launch. Without the launch attribute both do nothing; before sm_90 they do not
// exist.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Whether launches can be chained on the architecture being compiled.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool chains = false;
#else
inline constexpr bool chains = true;
#endif

// Transaction barriers and the bulk copy engine, sm_90 and later. Policies never choose a variant that needs
// them on older devices; the bodies are empty there only so that the same source compiles.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900 && \
    (!defined(NIBBLE_ARCHITECTURE) || NIBBLE_ARCHITECTURE >= 90)
#error \
    "nibble: code for a device before sm_90 with the policies of sm_90: define NIBBLE_ARCHITECTURE, 89 for sm_89"
#endif
__device__ __forceinline__ void barrier_init(std::uint32_t barrier, std::uint32_t count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      " @p bra done;\n bra again;\n done:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
/// Whether the phase of `parity` has completed, without waiting.
__device__ __forceinline__ bool barrier_ready(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t ready = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(ready)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return ready != 0;
}
/// An L2 policy for data that is read once.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ __forceinline__ void bulk_copy(std::uint32_t to_shared, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(to_shared),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}
/// The way back: `bytes`, a multiple of 16, from shared memory. The thread waits for its own by groups.
__device__ __forceinline__ void bulk_store(void* to, std::uint32_t from_shared, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from_shared),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
/// Until all but the last `Left` groups have read their shared memory.
template <int Left>
__device__ __forceinline__ void wait_for_bulk_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
#endif
}
/// Until all groups are written.
__device__ __forceinline__ void wait_for_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// Copies of 16 bytes to shared memory that a thread waits for by itself; not live: zeros are written.
__device__ __forceinline__ void copy_async(std::uint32_t to_shared, const void* from, bool live) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(live ? 16 : 0)
               : "memory");
#endif
}
/// The thread's arrival at a barrier follows once all its copies so far are there.
__device__ __forceinline__ void barrier_arrive_after_copies(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

/// A barrier over the first `Threads` threads of the block.
template <int Threads>
__device__ __forceinline__ void partial_block_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}
/// The same barrier for those of its threads that need not wait.
template <int Threads>
__device__ __forceinline__ void partial_block_arrive() {
  asm volatile("bar.arrive 1, %0;" ::"n"(Threads) : "memory");
}

/// c[16 rows][8 columns] += a[16 rows][16 k] · b[16 k][8 columns], bf16 in, fp32 out.
__device__ __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// Two bf16 products. mul.bf16x2 exists since sm_90; before, it is a fused multiply-add onto -0, which gives
/// the same number. Both keep subnormal operands.
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#elif __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x8000'8000u));
#else
  d = a * b;
#endif
  return d;
}

// Stores of two neighbours. Keep: the line is the last to leave L2. Where megabytes are written while weights
// stream, lines that leave one by one cost ten times their bytes.
template <bool Keep>
__device__ __forceinline__ void store_pair(__nv_bfloat16* p, float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  if constexpr (Keep) {
    std::uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(p),
                 "r"(*reinterpret_cast<const std::uint32_t*>(&v)), "l"(policy)
                 : "memory");
  } else {
    *reinterpret_cast<__nv_bfloat162*>(p) = v;
  }
}
template <bool Keep>
__device__ __forceinline__ void store_pair(float* p, float a, float b) {
  if constexpr (Keep) {
    std::uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(p), "f"(a), "f"(b), "l"(policy)
                 : "memory");
  } else {
    *reinterpret_cast<float2*>(p) = make_float2(a, b);
  }
}
__device__ __forceinline__ void store_one(__nv_bfloat16* p, float a) { *p = __float2bfloat16_rn(a); }
__device__ __forceinline__ void store_one(float* p, float a) { *p = a; }

}  // namespace nibble::device
