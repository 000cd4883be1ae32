// SPDX-License-Identifier: Apache-2.0
// Products with resident NVFP4 tiles. 64 bytes of a tile are 16 words of four columns of two rows: word w of
// plane p holds the columns 64 p + 4 w … + 3. So x is laid out once as [tile][plane][column of four][word],
// and no lane is ever moved for a product. A word decodes as on the
// device into four pairs (nvfp4/decode.hpp), of which the magnitude looks up the value; a block's scale comes
// in with one FMA after its products.
#include <nibble/host/detail/simd_targets.inl>
//
#include <algorithm>
#include <cmath>
#include <cstring>
#include <nibble/geometry/geometry.hpp>
#include <nibble/geometry/tile.hpp>
#include <nibble/host/resident_experts.hpp>
#include <nibble/nvfp4/decode.hpp>
#include <nibble/nvfp4/e2m1.hpp>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/resident_experts.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Rows of x that share a decoded weight.
constexpr int group_rows = 4;
constexpr std::size_t nvfp4_tile_bytes = 1152;
/// A stored scale s is the fp32 number of the bits (s << 20) + this.
constexpr std::uint32_t scale_base = 0x3480'0000u;
static_assert((0x7000u << 16) - (119u << 23) == scale_base, "see nvfp4::stored_scale");

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

using f32_tag = hn::ScalableTag<float>;
using vec = hn::Vec<f32_tag>;
constexpr int lanes = static_cast<int>(hn::MaxLanes(f32_tag()));
constexpr int parts = 16 / lanes;
static_assert(lanes == 8 || lanes == 16, "eight magnitudes are looked up in one register");

using words = hn::Vec<hn::ScalableTag<std::uint32_t>>;

#undef NIBBLE_WIDE_LOOKUP
#define NIBBLE_WIDE_LOOKUP (HWY_TARGET <= HWY_AVX3)

/// Values of the lower and upper halves of masked pairs: magnitude in bits 6 … 8, sign in bit 15.
HWY_INLINE void values_of(words pair, vec& lower, vec& upper) {
#if NIBBLE_WIDE_LOOKUP
  // Sixteen values in one register; the lookup ignores all but four bits.
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  lower = vec{_mm512_permutexvar_ps(hn::Or(hn::ShiftRight<6>(pair), hn::ShiftRight<12>(pair)).raw, table)};
  upper = vec{_mm512_permutexvar_ps(hn::Or(hn::ShiftRight<22>(pair), hn::ShiftRight<28>(pair)).raw, table)};
#else
  const f32_tag d;
  const hn::ScalableTag<std::uint32_t> du;
  HWY_ALIGN static constexpr float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const auto seven = hn::Set(du, 7u), sign = hn::Set(du, 0x8000'0000u);
  const vec table = hn::Load(d, magnitudes);
  const auto value = [&](words index, words signs) {
    const vec found = hn::TableLookupLanes(table, hn::IndicesFromVec(d, hn::And(index, seven)));
    return hn::Or(found, hn::BitCast(d, hn::And(signs, sign)));
  };
  lower = value(hn::ShiftRight<6>(pair), hn::ShiftLeft<16>(pair));
  upper = value(hn::ShiftRight<22>(pair), pair);
#endif
}

/// Lanes of a 16-byte group of scales: for row g (0) or g + 8 (1), plane and part.
struct scale_lanes {
  std::uint8_t at[2][2][16];
  constexpr scale_lanes() : at() {
    for (int h = 0; h < 2; ++h)
      for (int plane = 0; plane < 2; ++plane)
        for (int word = 0; word < 16; ++word)
          at[h][plane][word] = static_cast<std::uint8_t>(4 * (word / 4) + 2 * h + plane);
  }
};

template <int M>
HWY_NOINLINE void row_tile(const std::uint8_t* tile, int k_tiles, const float* const* x, float* out) {
  const f32_tag d;
  const hn::ScalableTag<std::uint32_t> du;
  const hn::ScalableTag<std::uint8_t> db;
  const hn::Rebind<std::uint8_t, f32_tag> d_few;
  const hn::FixedTag<std::uint8_t, 16> d16;
  HWY_ALIGN static constexpr scale_lanes from{};
  const auto mask = hn::Set(du, nvfp4::code_mask);
  HWY_ALIGN float sums[8][2][M][lanes] = {};
  for (int kt = 0; kt < k_tiles; ++kt, tile += nvfp4_tile_bytes) {
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(kt) * tile_columns;
    for (int g = 0; g < 8; ++g) {
      // Tiles follow each other without a gap; an address past the end is only a lost hint.
      for (const int line : {64 * g, 512 + 64 * g, 1024 + 16 * g})
        hwy::Prefetch(reinterpret_cast<const std::uint8_t*>(reinterpret_cast<std::uintptr_t>(tile) + 4608 +
                                                            static_cast<unsigned>(line)));
      const auto scale_bytes = hn::LoadU(d16, tile + 1024 + 16 * g);
      vec sum[2][M];
      for (int h = 0; h < 2; ++h)
        for (int r = 0; r < M; ++r) sum[h][r] = hn::Load(d, sums[g][h][r]);
      for (int plane = 0; plane < 2; ++plane)
        for (int part = 0; part < parts; ++part) {
          const auto word = hn::BitCast(du, hn::LoadU(db, tile + 512 * plane + 64 * g + 4 * lanes * part));
          const auto pair0 = hn::And(word, mask), pair1 = hn::And(hn::ShiftLeft<6>(word), mask),
                     pair2 = hn::And(hn::Or(hn::ShiftLeft<12>(word), hn::ShiftRight<20>(word)), mask),
                     pair3 = hn::And(hn::Xor(hn::ShiftLeft<2>(word), hn::ShiftRight<6>(word)), mask);
          vec w[2][4];
          values_of(pair0, w[0][0], w[0][1]), values_of(pair2, w[0][2], w[0][3]);
          values_of(pair1, w[1][0], w[1][1]), values_of(pair3, w[1][2], w[1][3]);
          vec scale[2];
          for (int h = 0; h < 2; ++h) {
            const auto bytes =
                hn::TableLookupBytes(scale_bytes, hn::LoadU(d_few, from.at[h][plane] + lanes * part));
            const auto bits = hn::PromoteTo(du, bytes);
            scale[h] = hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(bits), hn::Set(du, scale_base)));
          }
          for (int r = 0; r < M; ++r) {
            const float* const values = x[r] + at + 64 * plane + lanes * part;
            const vec x0 = hn::LoadU(d, values), x1 = hn::LoadU(d, values + 16),
                      x2 = hn::LoadU(d, values + 32), x3 = hn::LoadU(d, values + 48);
            for (int h = 0; h < 2; ++h) {
              vec product = hn::Mul(w[h][0], x0);
              product = hn::MulAdd(w[h][1], x1, product);
              product = hn::MulAdd(w[h][2], x2, product);
              product = hn::MulAdd(w[h][3], x3, product);
              sum[h][r] = hn::MulAdd(product, scale[h], sum[h][r]);
            }
          }
        }
      for (int h = 0; h < 2; ++h)
        for (int r = 0; r < M; ++r) hn::Store(sum[h][r], d, sums[g][h][r]);
    }
  }
  for (int g = 0; g < 8; ++g)
    for (int h = 0; h < 2; ++h)
      for (int r = 0; r < M; ++r)
        out[16 * r + g + 8 * h] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, sums[g][h][r])));
}

#else  // plain loops: correct everywhere, and too slow to be chosen over fetching

template <int M>
HWY_NOINLINE void row_tile(const std::uint8_t* tile, int k_tiles, const float* const* x, float* out) {
  std::fill(out, out + 16 * M, 0.0f);
  for (int kt = 0; kt < k_tiles; ++kt, tile += nvfp4_tile_bytes)
    for (int g = 0; g < 8; ++g)
      for (int plane = 0; plane < 2; ++plane)
        for (int word = 0; word < 16; ++word) {
          std::uint32_t stored = 0;
          std::memcpy(&stored, tile + 512 * plane + 64 * g + 4 * word, 4);
          const std::uint32_t codes = nvfp4::codes_of_word(stored);
          for (int h = 0; h < 2; ++h) {
            const std::uint32_t byte = tile[1024 + 16 * g + 4 * (word / 4) + 2 * h + plane];
            const std::uint32_t bits = (byte << 20) + scale_base;
            float scale = 0;
            std::memcpy(&scale, &bits, 4);
            for (int r = 0; r < M; ++r) {
              float product = 0;
              for (int c = 0; c < 4; ++c)  // pair 2 (c / 2) + h, half c % 2
                product += e2m1::decode(codes >> (4 * (2 * (2 * (c / 2) + h) + c % 2)) & 15u) *
                           x[r][tile_columns * kt + 64 * plane + 16 * c + word];
              out[16 * r + g + 8 * h] += product * scale;
            }
          }
        }
}

#endif

/// out[r][fragment row] = row tile · x[r], for m rows.
void row_tile_impl(const std::uint8_t* tile, int k_tiles, const float* const* x, int m, float* out) {
  for (int done = 0; done < m; done += group_rows) {
    const float* const* from = x + done;
    float* const to = out + 16 * done;
    switch (m - done) {
      case 1:
        row_tile<1>(tile, k_tiles, from, to);
        break;
      case 2:
        row_tile<2>(tile, k_tiles, from, to);
        break;
      case 3:
        row_tile<3>(tile, k_tiles, from, to);
        break;
      default:
        row_tile<4>(tile, k_tiles, from, to);
    }
  }
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host {
namespace {
HWY_EXPORT(row_tile_impl);

/// Rows that one pass takes.
constexpr int pass_rows = 16;

/// Where a column's value lies in a laid out row.
constexpr std::size_t place_of(int column) {
  const int within = column % tile_columns;
  return static_cast<std::size_t>(column / tile_columns * tile_columns + 64 * (within / 64) +
                                  16 * (within % 4) + within % 64 / 4);
}

/// An expert and the rows of the pass that chose it, with their weights.
struct chosen_expert {
  std::int32_t id = 0;
  int rows = 0;
  std::array<int, pass_rows> row{};
  std::array<float, pass_rows> weight{};
};

struct pass_memory {
  std::vector<chosen_expert> experts;
  std::vector<float> x, h;  ///< laid out: [rows][hidden], [experts · rows][inner], padded to whole tiles
};

void find_experts(const std::int32_t* ids, const float* weights, int top_k, int rows,
                  std::vector<chosen_expert>& out) {
  out.clear();
  for (int r = 0; r < rows; ++r)
    for (int s = 0; s < top_k; ++s) {
      const std::int32_t id = ids[r * top_k + s];
      if (id < 0) continue;
      const auto at =
          std::lower_bound(out.begin(), out.end(), id,
                           [](const chosen_expert& e, std::int32_t wanted) { return e.id < wanted; });
      chosen_expert& e =
          at != out.end() && at->id == id ? *at : *out.insert(at, chosen_expert{id, 0, {}, {}});
      // One that a row names twice would not find room.
      if (e.rows > 0 && e.row[static_cast<std::size_t>(e.rows - 1)] == r) {
        e.weight[static_cast<std::size_t>(e.rows - 1)] += weights[r * top_k + s];
        continue;
      }
      e.row[static_cast<std::size_t>(e.rows)] = r;
      e.weight[static_cast<std::size_t>(e.rows++)] = weights[r * top_k + s];
    }
}

void one_pass(thread_pool& pool, const resident_experts& experts, const std::int32_t* ids,
              const float* weights, const float* x, int rows, float* y, pass_memory& m) {
  const resident_layout up{fused(experts.hidden, weight_format::nvfp4, experts.inner, experts.inner),
                           row_order::gate_up};
  const resident_layout down{matrix(experts.hidden, experts.inner, weight_format::nvfp4),
                             row_order::adjacent};
  const auto x_length = static_cast<std::size_t>(up.k_tiles() * tile_columns),
             h_length = static_cast<std::size_t>(down.k_tiles() * tile_columns);
  find_experts(ids, weights, experts.top_k, rows, m.experts);
  m.x.assign(static_cast<std::size_t>(rows) * x_length, 0.0f);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < experts.hidden; ++i)
      m.x[static_cast<std::size_t>(r) * x_length + place_of(i)] = x[r * experts.hidden + i];
  const auto most = static_cast<std::size_t>(rows);  // of an expert
  m.h.assign(m.experts.size() * most * h_length, 0.0f);
  const auto slot = [&](const chosen_expert& e) {
    return reinterpret_cast<const std::uint8_t*>(experts.first) +
           static_cast<std::size_t>(e.id) * experts.slot_bytes;
  };
  const auto multiply = HWY_DYNAMIC_DISPATCH(row_tile_impl);
  const std::int64_t up_tiles = up.row_tiles();
  pool.parallel_for(
      static_cast<std::int64_t>(m.experts.size()) * up_tiles, 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t task = begin; task < end; ++task) {
          const auto number = static_cast<std::size_t>(task / up_tiles);
          const chosen_expert& e = m.experts[number];
          const int tile = static_cast<int>(task % up_tiles);
          const float* from[pass_rows];
          for (int i = 0; i < e.rows; ++i)
            from[i] = m.x.data() + static_cast<std::size_t>(e.row[static_cast<std::size_t>(i)]) * x_length;
          float sums[16 * pass_rows];
          multiply(slot(e) + static_cast<std::size_t>(tile) * static_cast<std::size_t>(up.k_tiles()) *
                                 tile_bytes(weight_format::nvfp4),
                   up.k_tiles(), from, e.rows, sums);
          const auto& scale = experts.scales[e.id];
          for (int i = 0; i < e.rows; ++i) {
            float* const to = m.h.data() + (number * most + static_cast<std::size_t>(i)) * h_length;
            for (int g = 0; g < 8 && 8 * tile + g < experts.inner; ++g) {
              const float gate = sums[16 * i + g] * scale[0], value = sums[16 * i + g + 8] * scale[1];
              to[place_of(8 * tile + g)] = gate / (1.0f + std::exp(-gate)) * value;
            }
          }
        }
      });
  pool.parallel_for(down.row_tiles(), 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t tile = begin; tile < end; ++tile) {
      float total[pass_rows][16] = {};
      for (std::size_t number = 0; number < m.experts.size(); ++number) {
        const chosen_expert& e = m.experts[number];
        const float* from[pass_rows];
        for (int i = 0; i < e.rows; ++i)
          from[i] = m.h.data() + (number * most + static_cast<std::size_t>(i)) * h_length;
        float sums[16 * pass_rows];
        multiply(slot(e) + up.bytes() +
                     static_cast<std::size_t>(tile) * static_cast<std::size_t>(down.k_tiles()) *
                         tile_bytes(weight_format::nvfp4),
                 down.k_tiles(), from, e.rows, sums);
        for (int i = 0; i < e.rows; ++i)
          for (int r = 0; r < 16; ++r)
            total[e.row[static_cast<std::size_t>(i)]][r] +=
                e.weight[static_cast<std::size_t>(i)] * (sums[16 * i + r] * experts.scales[e.id][2]);
      }
      for (int r = 0; r < 16; ++r)
        if (const int row = down.row_at(static_cast<int>(tile), r); row >= 0)
          for (int t = 0; t < rows; ++t) y[t * experts.hidden + row] = total[t][r];
    }
  });
}

}  // namespace

void routed_experts(thread_pool& pool, const resident_experts& experts, const std::int32_t* ids,
                    const float* weights, const float* x, int m, float* y) {
  thread_local pass_memory memory;
  for (int done = 0; done < m; done += pass_rows) {
    const auto row = static_cast<std::ptrdiff_t>(done);
    one_pass(pool, experts, ids + row * experts.top_k, weights + row * experts.top_k,
             x + row * experts.hidden, std::min(pass_rows, m - done), y + row * experts.hidden, memory);
  }
}

}  // namespace nibble::host
#endif
