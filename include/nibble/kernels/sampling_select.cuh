// SPDX-License-Identifier: Apache-2.0
/// \file
/// Order and mass of tokens: keys, integer masses, buckets, and the search for the token at which a count or
/// a mass is reached.
///
/// A token's key orders by falling logit, equals by rising id. Its mass is its weight e^((l - max) / T) in
/// units of 2^-44, a whole number: sums are the same in any order.
#pragma once

#include <cstdint>

#include "nibble/kernels/router_choice.cuh"
#include "nibble/kernels/sampling_types.hpp"

namespace nibble::device {

inline constexpr int sampling_threads = 256;
inline constexpr std::uint64_t no_mass_limit = ~std::uint64_t{0};

__device__ __forceinline__ std::uint64_t token_key(float logit, int id) {
  return static_cast<std::uint64_t>(ordered_bits(logit)) << 32 | static_cast<std::uint32_t>(~id);
}
__device__ __forceinline__ int key_token(std::uint64_t key) {
  return static_cast<int>(~static_cast<std::uint32_t>(key));
}
__device__ __forceinline__ float key_logit(std::uint64_t key) {
  return from_ordered_bits(static_cast<std::uint32_t>(key >> 32));
}

/// What turns a logit into a weight.
struct tempering {
  float largest, temperature;

  __device__ __forceinline__ float weight(float logit) const {
    return expf(__fdiv_rn(__fsub_rn(logit, largest), temperature));
  }
  __device__ __forceinline__ std::uint64_t mass(float logit) const {
    return static_cast<std::uint64_t>(__float2ull_rn(weight(logit) * 0x1p44f));
  }
  /// Rises as the logit falls.
  __device__ __forceinline__ int bucket(float logit) const {
    const float nats = __fdiv_rn(__fsub_rn(largest, logit), temperature);
    return static_cast<int>(fminf(nats * 64.0f, static_cast<float>(sampling_buckets - 1)));
  }
};

// Reductions over the block of sampling_threads; every thread gets the result. `room` has one element per
// warp and may be used again after the next block barrier.
__device__ __forceinline__ std::uint64_t block_max(std::uint64_t v, std::uint64_t (&room)[8]) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    const std::uint64_t other = __shfl_xor_sync(whole_warp, v, bit);
    v = other > v ? other : v;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  v = room[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) v = room[i] > v ? room[i] : v;
  return v;
}
__device__ __forceinline__ std::uint64_t block_sum(std::uint64_t v, std::uint64_t (&room)[8]) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) v += __shfl_xor_sync(whole_warp, v, bit);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = v;
  __syncthreads();
  v = room[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) v += room[i];
  return v;
}
/// The sum over threads below this one.
__device__ __forceinline__ std::uint64_t block_sum_below(std::uint64_t v, std::uint64_t (&room)[8]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::uint64_t upto = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const std::uint64_t below = __shfl_up_sync(whole_warp, upto, d);
    if (lane >= d) upto += below;
  }
  __syncthreads();
  if (lane == 31) room[warp] = upto;
  __syncthreads();
  std::uint64_t before = upto - v;
#pragma unroll
  for (int i = 0; i < 8; ++i) before += i < warp ? room[i] : 0;
  return before;
}

/// A place in the falling order of tokens, bucket-wise.
struct bucket_place {
  int bucket;           ///< sampling_buckets: the limits were not reached
  std::uint32_t count;  ///< tokens of the buckets before
  std::uint64_t mass;   ///< and their mass
};
__device__ __forceinline__ bucket_place no_place() { return {sampling_buckets, 0, 0}; }
struct histogram {
  std::uint64_t* mass;   ///< [sampling_buckets]
  std::uint32_t* count;  ///< [sampling_buckets]
};
struct select_room {
  std::uint64_t reduce[8], reduce_2[8];
  bucket_place place;
  std::uint64_t mass[256], key;
  std::uint32_t count[256];
  std::uint32_t digit;
};

/// The first bucket up to which `count` tokens or a mass of `mass` have come; count is at least 1.
__device__ __forceinline__ bucket_place find_bucket(const histogram& h, std::uint32_t count,
                                                    std::uint64_t mass, select_room& room) {
  constexpr int each = sampling_buckets / sampling_threads;
  const int first = each * static_cast<int>(threadIdx.x);
  std::uint32_t counts[each], own_count = 0;
  std::uint64_t masses[each], own_mass = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    counts[i] = __ldcg(h.count + first + i),
    masses[i] = __ldcg(reinterpret_cast<const unsigned long long*>(h.mass) + first + i);
    own_count += counts[i], own_mass += masses[i];
  }
  bucket_place at = no_place();
  at.count = static_cast<std::uint32_t>(block_sum_below(own_count, room.reduce));
  at.mass = block_sum_below(own_mass, room.reduce_2);
  if (threadIdx.x == 0) room.place = no_place();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const bool before = at.count < count && at.mass < mass;
    const std::uint32_t upto = at.count + counts[i];
    const std::uint64_t mass_upto = at.mass + masses[i];
    if (before && (upto >= count || mass_upto >= mass) && counts[i] > 0) {
      at.bucket = first + i;
      room.place = at;
    }
    at.count = upto, at.mass = mass_upto;
  }
  __syncthreads();
  const bucket_place found = room.place;
  __syncthreads();
  return found;
}

/// Where a search ended: the token's key, and count and mass up to and with it.
struct token_place {
  std::uint64_t key = 0;
  std::uint32_t count = 0;
  std::uint64_t mass = 0;
};

/// The first key, in falling order, up to which `count` keys or a mass of `mass` have come; the last one
/// where neither is reached. A radix search over the bits in which keys differ. \param for_each calls its
/// argument with every key of this thread; keys are distinct
template <class ForEach>
__device__ __forceinline__ token_place find_key(const ForEach& for_each, const tempering& t,
                                                std::uint32_t count, std::uint64_t mass, select_room& room) {
  std::uint64_t most = 0, least = 0;  // of ~key
  for_each([&](std::uint64_t key) {
    most = key > most ? key : most;
    least = ~key > least ? ~key : least;
  });
  most = block_max(most, room.reduce);
  least = ~block_max(least, room.reduce_2);
  int shift = most == least ? 0 : 64 - __clzll(static_cast<long long>(most ^ least));
  const auto above = [](int bits) { return bits >= 64 ? std::uint64_t{0} : ~std::uint64_t{0} << bits; };
  token_place at;
  std::uint64_t prefix = most & above(shift);
  bool single = most == least;
  while (!single) {
    const int width = shift < 8 ? shift : 8;
    const std::uint64_t fixed = above(shift);
    shift -= width;
    room.count[threadIdx.x] = 0, room.mass[threadIdx.x] = 0;
    __syncthreads();
    const std::uint32_t digits = (1u << width) - 1;
    for_each([&](std::uint64_t key) {
      if ((key & fixed) != prefix) return;
      const std::uint32_t d = static_cast<std::uint32_t>(key >> shift) & digits;
      atomicAdd(&room.count[d], 1u);
      atomicAdd(reinterpret_cast<unsigned long long*>(&room.mass[d]),
                static_cast<unsigned long long>(t.mass(key_logit(key))));
    });
    __syncthreads();
    // Thread i has the i-th largest digit.
    const std::uint32_t digit = 255 - threadIdx.x, own = room.count[digit];
    const std::uint64_t own_mass = room.mass[digit];
    const auto before = at.count + static_cast<std::uint32_t>(block_sum_below(own, room.reduce));
    const std::uint64_t mass_before = at.mass + block_sum_below(own_mass, room.reduce_2);
    const bool here = own > 0 && before < count && mass_before < mass;  // not reached before it
    // Of those, the last: either it reaches a limit, or nothing does and it is the end. Both hold for one.
    const std::uint64_t last = block_max(here ? threadIdx.x + 1u : 0u, room.reduce);
    if (last == threadIdx.x + 1u) {
      room.digit = digit;
      room.place.count = before, room.place.mass = mass_before;
    }
    __syncthreads();
    at.count = room.place.count, at.mass = room.place.mass;
    prefix |= static_cast<std::uint64_t>(room.digit) << shift;
    single = room.count[room.digit] == 1 || shift == 0;
    const std::uint64_t now_fixed = above(shift);
    if (single) {
      for_each([&](std::uint64_t key) {
        if ((key & now_fixed) == prefix) room.key = key;
      });
    }
    __syncthreads();
    if (single) most = room.key;
  }
  at.key = most;
  at.count += 1;
  at.mass += t.mass(key_logit(most));
  return at;
}

}  // namespace nibble::device
