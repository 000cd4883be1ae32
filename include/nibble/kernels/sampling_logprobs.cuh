// SPDX-License-Identifier: Apache-2.0
/// \file
/// The last of the sampling kernels: log softmax at the chosen token and at the likeliest.
#pragma once

#include "nibble/kernels/sampling_kernel.cuh"

namespace nibble {

/// Log-probabilities of the raw logits, for the rows that ask.
template <int Vocab>
__global__ __launch_bounds__(device::sampling_threads) void sampling_logprobs_kernel(
    const __grid_constant__ sampling_launch_params p) {
  using namespace device;
  __shared__ std::uint64_t room[8];
  __shared__ double sums[sampling_threads];
  __shared__ std::uint32_t flag;
  wait_for_previous_grid();
  let_next_grid_start();
  const sampling_view<Vocab> view(p, static_cast<int>(blockIdx.y));
  const int wanted = min(p.row[view.row].logprobs, max_top_logprobs), chunk = static_cast<int>(blockIdx.x);
  if (wanted < 0) return;
  const auto sum_in_order = [&](double v) {  // a tree over threads
    sums[threadIdx.x] = v;
#pragma unroll
    for (int half = sampling_threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    const double sum = sums[0];
    __syncthreads();
    return sum;
  };
  logit_group<Vocab> x(chunk);
  x.load(view.raw());
  std::uint64_t key[8], best = 0;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bad = bad || (x.exists(i) && !(x.v[i] < INFINITY));
    key[i] = x.exists(i) ? token_key(x.v[i], x.id(i)) : 0;
    best = key[i] > best ? key[i] : best;
  }
  best = block_max(best, room);
  bad = __syncthreads_or(bad);
  const float largest = key_logit(best);
  double own = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (x.exists(i) && largest > -INFINITY) own += static_cast<double>(expf(__fsub_rn(x.v[i], largest)));
  own = sum_in_order(own);
  for (int n = 0; n < wanted; ++n) {
    if (threadIdx.x == 0) view.chunk_top()[chunk * max_top_logprobs + n] = best;
    if (n + 1 == wanted) break;
    std::uint64_t next = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) next = key[i] < best && key[i] > next ? key[i] : next;
    best = block_max(next, room);
  }
  if (threadIdx.x == 0) {
    sampling_chunk_record& record = view.records()[chunk];
    record.sum = own, record.raw_largest = largest, record.raw_bad = bad;
  }
  if (!view.last(5, flag)) return;
  const bool mine = static_cast<int>(threadIdx.x) < view.chunks;
  const sampling_chunk_record* record = view.records() + (mine ? threadIdx.x : 0);
  bad = __syncthreads_or(mine && record->raw_bad != 0);
  const std::uint64_t row_best = block_max(mine ? token_key(record->raw_largest, 0) : 0, room);
  const float row_largest = key_logit(row_best);
  sampled_row& out = p.out[view.row];
  if (bad || row_largest == -INFINITY) return;  // the row keeps NaN and no alternatives
  const double total = sum_in_order(
      mine ? record->sum * exp(static_cast<double>(record->raw_largest) - static_cast<double>(row_largest))
           : 0.0);
  const double shift = static_cast<double>(row_largest) + log(total);
  if (threadIdx.x == 0) {
    if (out.token >= 0) out.logprob = static_cast<float>(static_cast<double>(view.raw()[out.token]) - shift);
    out.top_count = min(wanted, Vocab);
  }
  std::uint64_t candidate[max_top_logprobs];
#pragma unroll
  for (int n = 0; n < max_top_logprobs; ++n)
    candidate[n] = mine && n < wanted ? __ldcg(reinterpret_cast<const unsigned long long*>(view.chunk_top()) +
                                               threadIdx.x * max_top_logprobs + n)
                                      : 0;
  best = no_mass_limit;
  for (int n = 0; n < wanted && n < Vocab; ++n) {
    std::uint64_t next = 0;
#pragma unroll
    for (int i = 0; i < max_top_logprobs; ++i)
      next = candidate[i] < best && candidate[i] > next ? candidate[i] : next;
    best = block_max(next, room);
    if (threadIdx.x == 0) {
      out.top_token[n] = key_token(best);
      out.top_logprob[n] = static_cast<float>(static_cast<double>(key_logit(best)) - shift);
    }
  }
}

}  // namespace nibble
