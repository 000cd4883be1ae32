// SPDX-License-Identifier: Apache-2.0
/// \file
/// The sampling kernels. A row of logits is cut into chunks of 2048, a block each; the block of a row that
/// arrives last draws the row's conclusion from what all have left.
///
///     prepare    mask, penalties, bias; the largest; a greedy row is done
///     histogram  counts and masses over buckets of the weight; a row without filters is drawn
///     select     three times, each on one bucket: top_k's cut; the last of all cuts; the draw
///     logprobs   log softmax of the raw row at the token and at the likeliest
#pragma once

#include <cmath>
#include <cstdint>

#include "nibble/kernels/sampling_params.cuh"
#include "nibble/kernels/sampling_select.cuh"

namespace nibble {
namespace device {

struct sampling_chunk_record {
  std::uint64_t best, mass;  ///< key of the largest; mass without filters
  double sum;                ///< Σ e^(raw - raw_largest)
  float raw_largest;
  std::uint32_t bad, raw_bad;
};
static_assert(sizeof(sampling_chunk_record) <= 64);

enum class sampling_stage : int { top_k, last_cut, draw };

struct sampling_control {
  unsigned arrived[8];  ///< one per kernel; back at zero after each
  float largest;
  int done;
  std::uint32_t min_p_bucket;
  int needs[3];               ///< stages that have work
  std::uint32_t listed[3];    ///< tokens found of each stage's bucket
  bucket_place place[3];      ///< each stage's bucket
  std::uint32_t count_limit;  ///< of the last cut, within its bucket
  std::uint64_t mass_limit;
  int min_p_cuts;        ///< min_p's boundary lies in the last cut's bucket
  std::uint64_t target;  ///< of the draw: the first token whose mass up to and with it is above
};
static_assert(sizeof(sampling_control) <= 512);

/// One row's view of the launch.
template <int Vocab>
struct sampling_view {
  static constexpr sampling_layout layout = sampling_layout_of(Vocab);
  static constexpr int chunks = sampling_chunks(Vocab);
  static_assert(chunks <= sampling_threads);
  const sampling_launch_params& p;
  int row;
  std::byte* base;

  __device__ __forceinline__ sampling_view(const sampling_launch_params& params, int of)
      : p(params), row(of), base(params.workspace + static_cast<std::size_t>(of) * layout.bytes) {}
  __device__ __forceinline__ sampling_control& control() const {
    return *reinterpret_cast<sampling_control*>(base + layout.control);
  }
  __device__ __forceinline__ sampling_chunk_record* records() const {
    return reinterpret_cast<sampling_chunk_record*>(base + layout.chunks);
  }
  __device__ __forceinline__ histogram buckets() const {
    auto* const masses = reinterpret_cast<std::uint64_t*>(base + layout.histogram);
    return {masses, reinterpret_cast<std::uint32_t*>(masses + sampling_buckets)};
  }
  __device__ __forceinline__ std::uint64_t* list() const {
    return reinterpret_cast<std::uint64_t*>(base + layout.candidates);
  }
  __device__ __forceinline__ std::uint64_t* chunk_top() const {
    return reinterpret_cast<std::uint64_t*>(base + layout.chunk_top);
  }
  __device__ __forceinline__ float* adjusted() const {
    return reinterpret_cast<float*>(base + layout.adjusted);
  }
  __device__ __forceinline__ const float* raw() const {
    return p.logits + static_cast<std::ptrdiff_t>(row) * p.ldl;
  }

  /// Whether this block is the row's last to arrive at `counter`. What the others wrote before is visible.
  __device__ __forceinline__ bool last(int counter, std::uint32_t& flag) const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) flag = atomicInc(&control().arrived[counter], chunks - 1) == chunks - 1;
    __syncthreads();
    if (flag != 0) __threadfence();
    return flag != 0;
  }
  /// Ends a row: the token goes where it is wanted. By one thread.
  __device__ __forceinline__ void finish(const sampling_row& r, int token, int status) const {
    sampled_row& out = p.out[row];
    out.token = token, out.status = status, out.logprob = __uint_as_float(0x7FC0'0000u), out.top_count = 0;
    control().done = 1;
    const int to = p.token_index != nullptr ? p.token_index[row] : row;
    if (p.tokens != nullptr && to >= 0) p.tokens[to] = token;
    if (status == 0) {
      if (r.seen != nullptr) r.seen[token] += 1;
      if (r.step_at != nullptr) *r.step_at += 1;
    }
  }
};

/// Eight logits of a thread: 4 t … 4 t + 3 of the chunk's first and second thousand.
template <int Vocab>
struct logit_group {
  float v[8];
  int first[2];

  __device__ __forceinline__ explicit logit_group(int chunk) {
    first[0] = chunk * sampling_chunk + 4 * static_cast<int>(threadIdx.x),
    first[1] = first[0] + 4 * sampling_threads;
  }
  __device__ __forceinline__ int id(int i) const { return first[i / 4] + i % 4; }
  __device__ __forceinline__ bool exists(int i) const { return id(i) < Vocab; }
  __device__ __forceinline__ void load(const float* row) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first[h] + 3 < Vocab) {
        const float4 x = load_float4(row + first[h]);
        v[4 * h] = x.x, v[4 * h + 1] = x.y, v[4 * h + 2] = x.z, v[4 * h + 3] = x.w;
      } else {
#pragma unroll
        for (int i = 4 * h; i < 4 * h + 4; ++i) v[i] = exists(i) ? row[id(i)] : -INFINITY;
      }
  }
  __device__ __forceinline__ void store(float* row) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first[h] + 3 < Vocab) {
        *reinterpret_cast<float4*>(row + first[h]) =
            make_float4(v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3]);
      } else {
#pragma unroll
        for (int i = 4 * h; i < 4 * h + 4; ++i)
          if (exists(i)) row[id(i)] = v[i];
      }
  }
};

__device__ __forceinline__ std::uint64_t mix_bits(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9u;
  z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBu;
  return z ^ (z >> 31);
}
/// ⌊u · mass⌋ with the host's uniform number u for (seed, step): 53 bits.
__device__ __forceinline__ std::uint64_t drawn_mass(const sampling_row& r, std::uint64_t mass) {
  const std::uint64_t step = r.step_at != nullptr ? *r.step_at : r.step;
  const std::uint64_t key = mix_bits(r.seed + 0x9E37'79B9'7F4A'7C15u);
  const std::uint64_t bits = mix_bits(key + mix_bits(step * 0x9E37'79B9'7F4A'7C15u + 0xD1B5'4A32'D192'ED03u));
  return __umul64hi(bits >> 11 << 11, mass);
}
template <int Vocab>
__device__ __forceinline__ bool cuts_top_k(const sampling_row& r) {
  return r.top_k > 0 && r.top_k < Vocab;
}
__device__ __forceinline__ bool greedy(const sampling_row& r) { return !(r.temperature > 1e-5f); }

/// Mask, penalties and bias on a chunk, in this order. `tile` is a chunk in shared memory.
template <int Vocab>
__device__ __forceinline__ void adjust(logit_group<Vocab>& x, const sampling_row& r, int chunk, float* tile) {
  if (r.allowed != nullptr)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (x.exists(i) && (r.allowed[x.id(i) / 32] >> (x.id(i) % 32) & 1) == 0) x.v[i] = -INFINITY;
  if (r.seen != nullptr && (r.repetition != 1.0f || r.presence != 0.0f || r.frequency != 0.0f))
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t seen = x.exists(i) ? r.seen[x.id(i)] : 0;
      if (seen == 0) continue;
      const std::uint32_t generated = seen & 0x7FFF'FFFFu;
      x.v[i] = x.v[i] > 0 ? __fdiv_rn(x.v[i], r.repetition) : __fmul_rn(x.v[i], r.repetition);
      if (generated > 0)
        x.v[i] =
            __fsub_rn(x.v[i], __fadd_rn(r.presence, __fmul_rn(r.frequency, static_cast<float>(generated))));
    }
  if (r.bias_count <= 0) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) tile[x.id(i) - chunk * sampling_chunk] = x.v[i];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < r.bias_count; i += sampling_threads) {
    const device_token_bias b = r.bias[i];
    const int at = b.token - chunk * sampling_chunk;
    if (b.token >= 0 && b.token < Vocab && at >= 0 && at < sampling_chunk)
      tile[at] = __fadd_rn(tile[at], b.bias);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) x.v[i] = tile[x.id(i) - chunk * sampling_chunk];
}

}  // namespace device

/// \tparam Adjust false: every row is greedy on its raw logits
template <int Vocab, bool Adjust>
__global__ __launch_bounds__(device::sampling_threads) void sampling_prepare_kernel(
    const __grid_constant__ sampling_launch_params p) {
  using namespace device;
  __shared__ float tile[Adjust ? sampling_chunk : 1];
  __shared__ std::uint64_t room[8];
  __shared__ std::uint32_t flag;
  wait_for_previous_grid();
  let_next_grid_start();
  const sampling_view<Vocab> view(p, static_cast<int>(blockIdx.y));
  const int chunk = static_cast<int>(blockIdx.x);
  logit_group<Vocab> x(chunk);
  x.load(view.raw());
  const sampling_row r = p.row[view.row];
  if constexpr (Adjust) {
    adjust(x, r, chunk, tile);
    if (!greedy(r)) x.store(view.adjusted());
  }
  std::uint64_t best = 0;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (x.exists(i)) {
      bad = bad || !(x.v[i] < INFINITY);
      const std::uint64_t key = token_key(x.v[i], x.id(i));
      best = key > best ? key : best;
    }
  best = block_max(best, room);
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) view.records()[chunk].best = best, view.records()[chunk].bad = bad;
  if (!view.last(0, flag)) return;
  const bool mine = static_cast<int>(threadIdx.x) < view.chunks;
  best = block_max(mine ? view.records()[threadIdx.x].best : 0, room);
  bad = __syncthreads_or(mine && view.records()[threadIdx.x].bad != 0);
  if (threadIdx.x != 0) return;
  const float largest = key_logit(best);
  sampling_control& c = view.control();
  if (bad || largest == -INFINITY) {
    view.finish(r, -1, 1);
  } else if (!Adjust || greedy(r)) {
    view.finish(r, key_token(best), 0);
  } else {
    c.done = 0, c.largest = largest, c.min_p_bucket = sampling_buckets;
#pragma unroll
    for (int i = 0; i < 3; ++i) c.needs[i] = 0, c.listed[i] = 0;
  }
}

namespace device {

/// Prepares the draw of a row whose survivors weigh `left` and of which nothing more is to be cut.
template <int Vocab>
__device__ __forceinline__ void aim(const sampling_view<Vocab>& view, const sampling_row& r,
                                    std::uint64_t left, select_room& room) {
  const std::uint64_t target = drawn_mass(r, left);
  const bucket_place at = find_bucket(view.buckets(), ~0u, target + 1, room);
  if (threadIdx.x == 0) {
    sampling_control& c = view.control();
    c.target = target, c.place[2] = at, c.needs[2] = 1;
  }
}

/// All cuts, the mass of what top_k leaves being known: finds the bucket of the first one.
/// \param k where top_k cuts
template <int Vocab>
__device__ __forceinline__ void find_last_cut(const sampling_view<Vocab>& view, const sampling_row& r,
                                              const bucket_place& k, std::uint64_t mass, std::uint64_t total,
                                              select_room& room) {
  sampling_control& c = view.control();
  const histogram h = view.buckets();
  std::uint64_t wanted = no_mass_limit;
  bucket_place top_p = no_place();
  if (r.top_p < 1.0f) {
    const double share = ceil(static_cast<double>(fmaxf(r.top_p, 0.0f)) * static_cast<double>(mass));
    wanted = static_cast<std::uint64_t>(share);
    wanted = wanted < 1 ? 1 : wanted > mass ? mass : wanted;
    top_p = find_bucket(h, ~0u, wanted, room);
  }
  const int min_p = static_cast<int>(c.min_p_bucket);
  bucket_place cut = k.bucket <= top_p.bucket ? k : top_p;
  if (min_p < cut.bucket) {
    // Count and mass before min_p's bucket.
    std::uint64_t count = 0, before = 0;
    for (int b = static_cast<int>(threadIdx.x); b < min_p; b += sampling_threads)
      count += h.count[b], before += h.mass[b];
    cut.bucket = min_p;
    cut.count = static_cast<std::uint32_t>(block_sum(count, room.reduce));
    cut.mass = block_sum(before, room.reduce_2);
  }
  if (cut.bucket == sampling_buckets) {
    aim(view, r, total, room);
    return;
  }
  if (threadIdx.x == 0) {
    c.place[1] = cut, c.needs[1] = 1;
    c.count_limit = cut.bucket == k.bucket ? static_cast<std::uint32_t>(r.top_k) - cut.count : ~0u;
    c.mass_limit = cut.bucket == top_p.bucket ? wanted - cut.mass : no_mass_limit;
    c.min_p_cuts = cut.bucket == min_p;
  }
}

}  // namespace device

template <int Vocab>
__global__ __launch_bounds__(device::sampling_threads) void sampling_histogram_kernel(
    const __grid_constant__ sampling_launch_params p) {
  using namespace device;
  __shared__ std::uint64_t masses[sampling_buckets];
  __shared__ std::uint32_t counts[sampling_buckets];
  __shared__ select_room room;
  __shared__ std::uint32_t flag, lowest;
  __shared__ int token;
  wait_for_previous_grid();
  let_next_grid_start();
  const sampling_view<Vocab> view(p, static_cast<int>(blockIdx.y));
  sampling_control& c = view.control();
  if (c.done != 0) return;
  const int chunk = static_cast<int>(blockIdx.x);
  const sampling_row r = p.row[view.row];
  const tempering t{c.largest, r.temperature};
  logit_group<Vocab> x(chunk);
  x.load(view.adjusted());
  const histogram h = view.buckets();
  if (!cuts_top_k<Vocab>(r) && !(r.top_p < 1.0f) && !(r.min_p > 0.0f)) {
    // The whole distribution: tokens in the order of their ids.
    std::uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) own += x.exists(i) ? t.mass(x.v[i]) : 0;
    own = block_sum(own, room.reduce);
    if (threadIdx.x == 0) view.records()[chunk].mass = own;
    if (!view.last(1, flag)) return;
    own = static_cast<int>(threadIdx.x) < view.chunks ? view.records()[threadIdx.x].mass : 0;
    const std::uint64_t total = block_sum(own, room.reduce), target = drawn_mass(r, total);
    std::uint64_t before = block_sum_below(own, room.reduce_2);
    if (before <= target && target < before + own) room.digit = threadIdx.x, room.key = before;
    __syncthreads();
    const int first = static_cast<int>(room.digit) * sampling_chunk + 8 * static_cast<int>(threadIdx.x);
    std::uint64_t mass[8];
    own = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) own += mass[i] = first + i < Vocab ? t.mass(view.adjusted()[first + i]) : 0;
    before = room.key + block_sum_below(own, room.reduce);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (before <= target && target < before + mass[i]) token = first + i;
      before += mass[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) view.finish(r, token, 0);
    return;
  }
  for (int b = static_cast<int>(threadIdx.x); b < sampling_buckets; b += sampling_threads)
    masses[b] = 0, counts[b] = 0;
  if (threadIdx.x == 0) lowest = sampling_buckets;
  __syncthreads();
  const float least = fminf(r.min_p, 1.0f);
  std::uint32_t cut = sampling_buckets;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (x.exists(i)) {
      const int b = t.bucket(x.v[i]);
      atomicAdd(&counts[b], 1u);
      const std::uint64_t mass = t.mass(x.v[i]);
      if (mass != 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(&masses[b]), static_cast<unsigned long long>(mass));
      if (r.min_p > 0.0f && t.weight(x.v[i]) < least && static_cast<std::uint32_t>(b) < cut)
        cut = static_cast<std::uint32_t>(b);
    }
  if (cut < sampling_buckets) atomicMin(&lowest, cut);
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < sampling_buckets; b += sampling_threads)
    if (counts[b] != 0) {
      atomicAdd(h.count + b, counts[b]);
      if (masses[b] != 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(h.mass) + b,
                  static_cast<unsigned long long>(masses[b]));
    }
  if (threadIdx.x == 0 && lowest < sampling_buckets) atomicMin(&c.min_p_bucket, lowest);
  if (!view.last(1, flag)) return;
  if (cuts_top_k<Vocab>(r)) {
    const bucket_place k = find_bucket(h, static_cast<std::uint32_t>(r.top_k), no_mass_limit, room);
    if (threadIdx.x == 0) c.place[0] = k, c.needs[0] = 1;
  } else {
    std::uint64_t total = 0;
    for (int b = static_cast<int>(threadIdx.x); b < sampling_buckets; b += sampling_threads)
      total += __ldcg(reinterpret_cast<const unsigned long long*>(h.mass) + b);
    total = block_sum(total, room.reduce);
    find_last_cut(view, r, no_place(), total, total, room);
  }
}

/// One bucket looked at token by token. The draw's kernel leaves the histogram at zero for the next launch.
template <int Vocab, int Stage>
__global__ __launch_bounds__(device::sampling_threads, 1) void sampling_select_kernel(
    const __grid_constant__ sampling_launch_params p) {
  using namespace device;
  constexpr auto stage = static_cast<sampling_stage>(Stage);
  __shared__ select_room room;
  __shared__ std::uint32_t flag;
  wait_for_previous_grid();
  let_next_grid_start();
  const sampling_view<Vocab> view(p, static_cast<int>(blockIdx.y));
  sampling_control& c = view.control();
  const int chunk = static_cast<int>(blockIdx.x);
  if constexpr (stage == sampling_stage::draw) {
    const histogram h = view.buckets();
    for (int b = chunk * sampling_threads + static_cast<int>(threadIdx.x); b < sampling_buckets;
         b += view.chunks * sampling_threads)
      h.count[b] = 0, h.mass[b] = 0;
  }
  if (c.done != 0 || c.needs[Stage] == 0) return;
  const sampling_row r = p.row[view.row];
  const tempering t{c.largest, r.temperature};
  const bucket_place place = c.place[Stage];
  logit_group<Vocab> x(chunk);
  x.load(view.adjusted());
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (x.exists(i) && t.bucket(x.v[i]) == place.bucket) {
      const std::uint32_t at = atomicAdd(&c.listed[Stage], 1u);
      if (at < sampling_candidates) view.list()[at] = token_key(x.v[i], x.id(i));
    }
  if (!view.last(2 + Stage, flag)) return;
  const auto listed = static_cast<int>(__ldcg(&c.listed[Stage]));
  constexpr int each = sampling_candidates / sampling_threads;
  std::uint64_t key[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int at = static_cast<int>(threadIdx.x) + sampling_threads * i;
    key[i] = at < listed && at < sampling_candidates
                 ? __ldcg(reinterpret_cast<const unsigned long long*>(view.list()) + at)
                 : 0;
  }
  const auto for_each = [&](auto&& visit) {
    if (listed <= sampling_candidates) {
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (key[i] != 0) visit(key[i]);
    } else {
      for (int id = static_cast<int>(threadIdx.x); id < Vocab; id += sampling_threads) {
        const float v = view.adjusted()[id];
        if (t.bucket(v) == place.bucket) visit(token_key(v, id));
      }
    }
  };
  if constexpr (stage == sampling_stage::top_k) {
    const token_place cut =
        find_key(for_each, t, static_cast<std::uint32_t>(r.top_k) - place.count, no_mass_limit, room);
    find_last_cut(view, r, place, place.mass + cut.mass, place.mass + cut.mass, room);
  } else if constexpr (stage == sampling_stage::last_cut) {
    std::uint32_t limit = c.count_limit;
    if (c.min_p_cuts != 0) {
      std::uint64_t heavy = 0;
      const float least = fminf(r.min_p, 1.0f);
      for_each([&](std::uint64_t k) { heavy += t.weight(key_logit(k)) >= least; });
      heavy = block_sum(heavy, room.reduce);
      limit = heavy < limit ? static_cast<std::uint32_t>(heavy) : limit;
    }
    std::uint64_t left = place.mass;
    if (limit > 0) left += find_key(for_each, t, limit, c.mass_limit, room).mass;
    const std::uint64_t target = drawn_mass(r, left);
    if (target >= place.mass) {
      const token_place drawn = find_key(for_each, t, ~0u, target - place.mass + 1, room);
      if (threadIdx.x == 0) view.finish(r, key_token(drawn.key), 0);
    } else {
      aim(view, r, left, room);
    }
  } else {
    const token_place drawn = find_key(for_each, t, ~0u, c.target - place.mass + 1, room);
    if (threadIdx.x == 0) view.finish(r, key_token(drawn.key), 0);
  }
}

}  // namespace nibble
