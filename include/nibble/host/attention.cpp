// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <nibble/core/bf16.hpp>
#include <nibble/host/attention.hpp>
#include <nibble/host/detail/scratch.hpp>
#include <vector>

namespace nibble::host {
namespace {
#ifndef NIBBLE_HOST_ATTENTION_TILE
#define NIBBLE_HOST_ATTENTION_TILE
constexpr int block_tokens = 16;  // tokens between two updates of the running maximum
constexpr int max_queries = 4;    // queries that share the loads of a key or value

/// Up to max_queries queries of one sequence and one KV head. Query i sees the tokens before last[i] + 1.
struct attention_tile {
  int count;
  const float* q[max_queries];
  const float* gate[max_queries];  // null: no gate
  float* out[max_queries];
  int last[max_queries];
  int kv_head;
  float scale;
};
#endif
}  // namespace
}  // namespace nibble::host

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/attention.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include <nibble/host/detail/simd_math.inl>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {

template <class D>
HWY_INLINE hn::Vec<D> load_element(D d, const float* from) {
  return hn::LoadU(d, from);
}
template <class D>
HWY_INLINE hn::Vec<D> load_element(D d, const std::uint16_t* from) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint16_t, D> dh;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, from))));
}

/// scores[i] = q_i · key for Q queries.
template <int Q, class Element>
HWY_INLINE void scores_of(const attention_tile& tile, const Element* key, int dim, float* scores) {
  const f32_tag d;
  const one_tag one;
  vec sum[Q];
  for (int i = 0; i < Q; ++i) sum[i] = hn::Zero(d);
  int at = 0;
  for (; at + lanes <= dim; at += lanes) {
    const vec k = load_element(d, key + at);
    for (int i = 0; i < Q; ++i) sum[i] = hn::MulAdd(hn::LoadU(d, tile.q[i] + at), k, sum[i]);
  }
  for (int i = 0; i < Q; ++i) scores[i * block_tokens] = sum_of(d, sum[i]);
  for (; at < dim; ++at) {
    const auto k = load_element(one, key + at);
    for (int i = 0; i < Q; ++i)
      scores[i * block_tokens] =
          hn::GetLane(hn::MulAdd(hn::LoadU(one, tile.q[i] + at), k, hn::Set(one, scores[i * block_tokens])));
  }
}

/// accumulator_i = accumulator_i · rescale_i + Σ_t weight_i[t] value_t over the tokens that query i sees, t
/// ascending. All queries see the first `common` tokens; the loads of those are shared.
template <int Q, class D, class Element>
HWY_INLINE void values_of(D d, const Element* const* values, const int* visible, int common,
                          const float* weights, const float* rescale, int at, float* const* accumulators) {
  hn::Vec<D> sum[Q];
  for (int i = 0; i < Q; ++i) sum[i] = hn::Mul(hn::LoadU(d, accumulators[i] + at), hn::Set(d, rescale[i]));
  for (int t = 0; t < common; ++t) {
    const auto v = load_element(d, values[t] + at);
    for (int i = 0; i < Q; ++i) sum[i] = hn::MulAdd(hn::Set(d, weights[i * block_tokens + t]), v, sum[i]);
  }
  for (int i = 0; i < Q; ++i) {
    for (int t = common; t < visible[i]; ++t)
      sum[i] = hn::MulAdd(hn::Set(d, weights[i * block_tokens + t]), load_element(d, values[t] + at), sum[i]);
    hn::StoreU(sum[i], d, accumulators[i] + at);
  }
}

template <int Q, class Element>
void attend(const kv_cache_view& cache, const std::int32_t* pages, const attention_tile& tile,
            float* memory) {
  const f32_tag d;
  const one_tag one;
  const int dim = cache.head_dim;
  const auto* keys = static_cast<const Element*>(cache.keys);
  const auto* values = static_cast<const Element*>(cache.values);
  float* accumulators[Q];
  float largest[Q], total[Q];
  int end = 0;
  for (int i = 0; i < Q; ++i) {
    accumulators[i] = memory + i * dim;
    for (int at = 0; at < dim; ++at) accumulators[i][at] = 0.0f;
    largest[i] = -HUGE_VALF;
    total[i] = 0.0f;
    end = HWY_MAX(end, tile.last[i] + 1);
  }
  int page = 0, slot = 0;  // of the block's next token
  for (int begin = 0; begin < end; begin += block_tokens) {
    const int count = HWY_MIN(block_tokens, end - begin);
    const Element* value_at[block_tokens];
    float scores[Q * block_tokens];
    for (int t = 0; t < count; ++t) {
      const std::size_t row =
          (static_cast<std::size_t>(pages[page]) * static_cast<std::size_t>(cache.kv_heads) +
           static_cast<std::size_t>(tile.kv_head)) *
              static_cast<std::size_t>(cache.page_tokens) +
          static_cast<std::size_t>(slot);
      value_at[t] = values + row * static_cast<std::size_t>(dim);
      scores_of<Q>(tile, keys + row * static_cast<std::size_t>(dim), dim, scores + t);
      if (++slot == cache.page_tokens) {
        slot = 0;
        ++page;
      }
    }
    int visible[Q];
    float rescale[Q];
    for (int i = 0; i < Q; ++i) {
      float* row = scores + i * block_tokens;
      visible[i] = HWY_MAX(0, HWY_MIN(count, tile.last[i] + 1 - begin));
      rescale[i] = 1.0f;
      if (visible[i] == 0) continue;
      float now = largest[i];
      for (int t = 0; t < block_tokens; ++t) {
        row[t] = t < visible[i] ? row[t] * tile.scale : -HUGE_VALF;
        now = row[t] > now ? row[t] : now;
      }
      rescale[i] = hn::GetLane(exp_of(one, hn::Set(one, largest[i] - now)));
      largest[i] = now;
      vec sum = hn::Zero(d);
      for (int t = 0; t < block_tokens; t += lanes) {
        const vec weight = exp_of(d, hn::Sub(hn::LoadU(d, row + t), hn::Set(d, now)));
        hn::StoreU(weight, d, row + t);
        sum = hn::Add(sum, weight);
      }
      total[i] = total[i] * rescale[i] + sum_of(d, sum);
    }
    int common = count, at = 0;
    for (int i = 0; i < Q; ++i) common = HWY_MIN(common, visible[i]);
    for (; at + lanes <= dim; at += lanes)
      values_of<Q>(d, value_at, visible, common, scores, rescale, at, accumulators);
    for (; at < dim; ++at) values_of<Q>(one, value_at, visible, common, scores, rescale, at, accumulators);
  }
  for (int i = 0; i < Q; ++i) {
    const float inverse = 1.0f / total[i];
    for_each_vector(static_cast<std::size_t>(dim), [&](auto tag, std::size_t at) HWY_ATTR {
      auto result = hn::Mul(hn::LoadU(tag, accumulators[i] + at), hn::Set(tag, inverse));
      if (tile.gate[i] != nullptr)
        result = hn::Mul(result, sigmoid_of(tag, hn::LoadU(tag, tile.gate[i] + at)));
      hn::StoreU(result, tag, tile.out[i] + at);
    });
  }
}

template <class Element>
void attend_count(const kv_cache_view& cache, const std::int32_t* pages, const attention_tile& tile,
                  float* memory) {
  switch (tile.count) {
    case 1:
      return attend<1, Element>(cache, pages, tile, memory);
    case 2:
      return attend<2, Element>(cache, pages, tile, memory);
    case 3:
      return attend<3, Element>(cache, pages, tile, memory);
    default:
      return attend<4, Element>(cache, pages, tile, memory);
  }
}

/// `memory` takes tile.count · head_dim floats.
void attend_impl(const kv_cache_view& cache, const std::int32_t* pages, const attention_tile& tile,
                 float* memory) {
  if (cache.format == kv_format::f32)
    attend_count<float>(cache, pages, tile, memory);
  else
    attend_count<std::uint16_t>(cache, pages, tile, memory);
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
HWY_EXPORT(attend_impl);

namespace {

void store_row(const kv_cache_view& cache, void* array, std::size_t element, const float* from) {
  const auto dim = static_cast<std::size_t>(cache.head_dim);
  if (cache.format == kv_format::f32) {
    std::memcpy(static_cast<float*>(array) + element, from, dim * sizeof(float));
  } else {
    std::uint16_t* to = static_cast<std::uint16_t*>(array) + element;
    for (std::size_t i = 0; i < dim; ++i) to[i] = bf16::encode(from[i]);
  }
}

}  // namespace

void append_kv(thread_pool& pool, const kv_cache_view& cache, std::span<const sequence_span> spans,
               const float* k, std::ptrdiff_t ldk, const float* v, std::ptrdiff_t ldv) {
  for (const sequence_span& span : spans) {
    const std::int64_t grain =
        std::max<std::int64_t>(16384 / std::max(cache.kv_heads * cache.head_dim, 1), 1);
    pool.parallel_for(span.rows, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const int token = span.position + static_cast<int>(r);
        const int page = span.pages[token / cache.page_tokens];
        assert(page >= 0 && page < cache.pages);
        for (int h = 0; h < cache.kv_heads; ++h) {
          const std::size_t element =
              ((static_cast<std::size_t>(page) * static_cast<std::size_t>(cache.kv_heads) +
                static_cast<std::size_t>(h)) *
                   static_cast<std::size_t>(cache.page_tokens) +
               static_cast<std::size_t>(token % cache.page_tokens)) *
              static_cast<std::size_t>(cache.head_dim);
          const std::ptrdiff_t head = static_cast<std::ptrdiff_t>(h) * cache.head_dim;
          store_row(cache, cache.keys, element, k + (span.first_row + r) * ldk + head);
          store_row(cache, cache.values, element, v + (span.first_row + r) * ldv + head);
        }
      }
    });
  }
}

void attention(thread_pool& pool, const kv_cache_view& cache, std::span<const sequence_span> spans,
               const attention_input& input, float* out, std::ptrdiff_t ldo) {
  assert(cache.kv_heads > 0 && input.heads % cache.kv_heads == 0);
  const int group = input.heads / cache.kv_heads;
  // A tile takes queries of one KV head in the order row, then head of the group. Its make-up does not enter
  // any result.
  thread_local std::vector<std::int64_t> first_tile;
  first_tile.clear();
  std::int64_t tiles = 0, work = 0;
  for (const sequence_span& span : spans) {
    first_tile.push_back(tiles);
    const std::int64_t queries = static_cast<std::int64_t>(span.rows) * group;
    tiles += (queries + max_queries - 1) / max_queries * cache.kv_heads;
    work += queries * cache.kv_heads * (span.position + span.rows) * cache.head_dim;
  }
  // Products per task: less is not worth waking a thread.
  const std::int64_t grain = std::max<std::int64_t>(tiles * 16384 / std::max<std::int64_t>(work, 1), 1);
  pool.parallel_for(
      tiles, grain,
      [&, firsts = std::span<const std::int64_t>(first_tile)](std::int64_t begin, std::int64_t end) {
        thread_local detail::scratch memory;
        float* accumulators =
            memory.take(static_cast<std::size_t>(max_queries) * static_cast<std::size_t>(cache.head_dim));
        for (std::int64_t index = begin; index < end; ++index) {
          const auto which = static_cast<std::size_t>(std::upper_bound(firsts.begin(), firsts.end(), index) -
                                                      firsts.begin() - 1);
          const sequence_span& span = spans[which];
          const std::int64_t queries = static_cast<std::int64_t>(span.rows) * group;
          const std::int64_t per_head = (queries + max_queries - 1) / max_queries;
          const std::int64_t local = index - firsts[which];
          const std::int64_t first = local % per_head * max_queries;
          attention_tile tile{};
          tile.kv_head = static_cast<int>(local / per_head);
          tile.count = static_cast<int>(std::min<std::int64_t>(max_queries, queries - first));
          tile.scale = input.scale;
          for (int i = 0; i < tile.count; ++i) {
            const std::int64_t row = (first + i) / group;
            const std::int64_t head = static_cast<std::int64_t>(tile.kv_head) * group + (first + i) % group;
            tile.q[i] = input.q + (span.first_row + row) * input.q_row_stride + head * input.q_head_stride;
            tile.gate[i] = input.gate == nullptr
                               ? nullptr
                               : input.gate + (span.first_row + row) * input.gate_row_stride +
                                     head * input.gate_head_stride;
            tile.out[i] = out + (span.first_row + row) * ldo + head * cache.head_dim;
            tile.last[i] = span.position + static_cast<int>(row);
          }
          HWY_DYNAMIC_DISPATCH(attend_impl)(cache, span.pages, tile, accumulators);
        }
      });
}

}  // namespace nibble::host
#endif
