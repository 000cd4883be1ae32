// SPDX-License-Identifier: Apache-2.0
/// \file
/// The kernels that hand missing experts to the CPU and take its rows back.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"
#include "nibble/moe/fetch_staged.cuh"
#include "nibble/moe/placement_host_types.hpp"

namespace nibble::moe {

template <int Threads>
__global__ __launch_bounds__(Threads) void ask_host(const __grid_constant__ host_experts_params p) {
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  const int count = p.host_list[0], thread = static_cast<int>(threadIdx.x);
  if (count <= 0) return;
  const int row_vectors = p.hidden / 8;
  auto* const x = reinterpret_cast<uint4*>(p.rows_out);
  for (int i = thread; i < p.rows * row_vectors; i += Threads)
    x[i] = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.x) +
                                           static_cast<std::size_t>(i / row_vectors) * p.ldx +
                                           8 * (i % row_vectors));
  auto* const ids = reinterpret_cast<std::int32_t*>(x + most_host_rows * row_vectors);
  auto* const weights = reinterpret_cast<float*>(ids + most_host_rows * p.top_k);
  for (int i = thread; i < p.rows * p.top_k; i += Threads) ids[i] = p.ids[i], weights[i] = p.weights[i];
  for (int i = thread; i < count && i < most_split_misses; i += Threads)
    p.mail->experts[i] = p.host_list[4 + i];
  if (thread == 0) p.mail->layer = p.layer, p.mail->rows = p.rows, p.mail->count = count;
  __threadfence_system();
  __syncthreads();
  if (thread == 0) {
    const std::uint32_t number = *p.asked + 1;
    *p.asked = number;
    detail::write_mail(&p.mail->asked, number);
  }
}

/// A block takes a row.
template <int Threads>
__global__ __launch_bounds__(Threads) void add_from_host(const __grid_constant__ host_experts_params p) {
  __shared__ bool good;
  device::wait_for_previous_grid();
  device::let_next_grid_start();
  if (p.host_list[0] <= 0) return;
  if (threadIdx.x == 0) {
    const std::uint32_t number = *p.asked;
    const std::uint64_t begin = detail::nanoseconds();
    std::uint64_t said = 0;
    const bool lost = *static_cast<volatile std::uint64_t*>(p.failures) != 0;  // the step: no waiting
    bool late = false;
    while (!lost && !late && (said = detail::read_answer(&p.mail->answered)) >> 32 != number)
      late = detail::nanoseconds() - begin > fetch_patience_ns;
    good = !lost && !late && (said & 3) == 1;
    // Being late is each block's own: another one may have seen the answer in the last moment.
    if (late || (!good && blockIdx.x == 0))
      atomicAdd(reinterpret_cast<unsigned long long*>(p.failures), 1ull);
  }
  __syncthreads();
  if (!good) return;
  const float* const from = p.rows_in + static_cast<std::size_t>(blockIdx.x) * p.hidden;
  auto* const y = static_cast<__nv_bfloat16*>(p.y) + static_cast<std::size_t>(blockIdx.x) * p.ldy;
  for (int i = 4 * static_cast<int>(threadIdx.x); i < p.hidden; i += 4 * Threads) {
    const uint4 raw = detail::load_ring(from + i);
    auto* const out = reinterpret_cast<__nv_bfloat162*>(y + i);
    const float2 a = __bfloat1622float2(out[0]), b = __bfloat1622float2(out[1]);
    out[0] = __floats2bfloat162_rn(a.x + __uint_as_float(raw.x), a.y + __uint_as_float(raw.y));
    out[1] = __floats2bfloat162_rn(b.x + __uint_as_float(raw.z), b.y + __uint_as_float(raw.w));
  }
}

/// Handing over as kernel families: host_question_family after the placement, host_experts_family after down,
/// which has ask() for the former too.
struct host_experts_family {
  using params = host_experts_params;
  static constexpr const char* name = "experts on the CPU";
  static constexpr int threads = 256;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    const auto none = std::size_t{0};
    const status s = visit(ask_host<threads>, threads, none, "ask_host");
    return s.ok() ? visit(add_from_host<threads>, threads, none, "add_from_host") : s;
  }
  static status ask(const params& p, const launch_options& options) {
    if (const status s = check(p); !s.ok()) return s;
    return nibble::launch(&ask_host<threads>, dim3(1), threads, 0, options, where, p);
  }
  static status launch(const params& p, const launch_options& options) {
    if (const status s = check(p); !s.ok()) return s;
    return nibble::launch(&add_from_host<threads>, dim3(static_cast<unsigned>(p.rows)), threads, 0, options,
                          where, p);
  }

 private:
  static constexpr const char* where = "nibble::moe::host_experts";
  static status check(const params& p) {
    const auto aligned = [](const void* a) {
      return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % 16 == 0;
    };
    if (p.rows < 1 || p.rows > most_host_rows || p.top_k < 1)
      return status::invalid(where, "the CPU takes steps of 1 to 16 tokens");
    if (p.hidden < 8 || p.hidden % 8 != 0 || p.ldx % 8 != 0 || p.ldy % 8 != 0 || p.ldx < p.hidden ||
        p.ldy < p.hidden || !aligned(p.x) || !aligned(p.y))
      return status::invalid(where,
                             "rows need a 16-byte address, a width and strides that are multiples of 8");
    if (p.host_list == nullptr || p.ids == nullptr || p.weights == nullptr || p.mail == nullptr ||
        !aligned(p.rows_out) || !aligned(p.rows_in) || p.asked == nullptr || p.failures == nullptr)
      return status::invalid(where, "a list or the mail is missing");
    return status::success();
  }
};

/// The question alone.
struct host_question_family {
  using params = host_experts_params;
  static constexpr const char* name = "question to the CPU";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(ask_host<host_experts_family::threads>, host_experts_family::threads, std::size_t{0},
                 "ask_host");
  }
  static status launch(const params& p, const launch_options& options) {
    return host_experts_family::ask(p, options);
  }
};

}  // namespace nibble::moe
