// SPDX-License-Identifier: Apache-2.0
// The inner products of linear(): SIMD code for each weight format, once per instruction set.
//
// NVFP4. A block's products are summed unscaled and enter the accumulator with one FMA by the block's scale.
// Codes are decoded in the order that is cheapest for the instruction set, and x is packed to match, once per
// row, so no lane is ever moved for a product:
//   AVX-512  a 64-byte load is 16 lanes of 8 nibbles; shifting a lane right by 4j brings nibble j down, and
//            one permutation of a 16-entry register looks the value up (it ignores the higher bits).
//   others   a byte shuffle looks up the two significant bytes of each value as bfloat16, interleaving joins
//            them, and a shift or a mask makes two fp32 lanes of each pair.
// E4M3 becomes fp16 by moving bits (2^-8 times the value, subnormals included) and fp32 by the conversion
// that the hardware has. The powers of two that this leaves behind are undone in the last multiplication.
#include <nibble/host/detail/simd_targets.inl>
//
#include <nibble/core/bf16.hpp>
#include <nibble/fp8/e4m3.hpp>
#include <nibble/host/detail/matmul_rows.hpp>
#include <nibble/nvfp4/e2m1.hpp>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "nibble/host/linear_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace nibble::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// x rows that share a decoded weight. Every count from 1 to this has a kernel; the order of a row's sum is
// the same in all of them.
constexpr int tile_m = 4;

// E4M3 as fp32 for each byte.
struct e4m3_table {
  float value[256];
  constexpr e4m3_table() : value() {
    for (int i = 0; i < 256; ++i) value[i] = e4m3::decode(static_cast<std::uint8_t>(i));
  }
};
HWY_ALIGN constexpr e4m3_table scale_table;

struct e2m1_table {
  float value[16];
  constexpr e2m1_table() : value() {
    for (unsigned i = 0; i < 16; ++i) value[i] = e2m1::decode(i);
  }
};
HWY_ALIGN constexpr e2m1_table code_table;

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// No vectors, or emulated ones: plain loops over 16 partial sums, which a compiler may vectorise.
constexpr int nvfp4_tile_n = 1, byte_tile_n = 1;
constexpr int nvfp4_step = 16, plain_step = 16;
constexpr int nvfp4_column(int at) { return at; }

struct nvfp4_decoder {
  static HWY_INLINE void decode(const weight_view& weight, std::size_t row, std::size_t at, int, float* out) {
    const std::size_t first = row * static_cast<std::size_t>(weight.k) + at;
    const float scale = scale_table.value[weight.block_scales[first / 16]];
    const std::uint8_t* codes = static_cast<const std::uint8_t*>(weight.data) + first / 2;
    for (int i = 0; i < 8; ++i) {
      out[2 * i] = code_table.value[codes[i] & 15] * scale;
      out[2 * i + 1] = code_table.value[codes[i] >> 4] * scale;
    }
  }
};
struct fp8_decoder {
  static HWY_INLINE void decode(const weight_view& weight, std::size_t row, std::size_t at, int count,
                                float* out) {
    const std::uint8_t* bytes =
        static_cast<const std::uint8_t*>(weight.data) + row * static_cast<std::size_t>(weight.k) + at;
    for (int i = 0; i < 16; ++i) out[i] = i < count ? scale_table.value[bytes[i]] : 0.0f;
  }
};
struct bf16_decoder {
  static HWY_INLINE void decode(const weight_view& weight, std::size_t row, std::size_t at, int count,
                                float* out) {
    const std::uint8_t* bytes =
        static_cast<const std::uint8_t*>(weight.data) + 2 * (row * static_cast<std::size_t>(weight.k) + at);
    for (int i = 0; i < 16; ++i) {
      std::uint16_t bits = 0;
      if (i < count) hwy::CopyBytes<2>(bytes + 2 * i, &bits);
      out[i] = bf16::decode(bits);
    }
  }
};

template <class Decoder, int M>
HWY_NOINLINE void portable_tile(const weight_view& weight, int row, const float* const* packed,
                                float* const* y) {
  float sum[M][16] = {};
  for (int at = 0; at < weight.k; at += 16) {
    float w[16];
    Decoder::decode(weight, static_cast<std::size_t>(row), static_cast<std::size_t>(at),
                    HWY_MIN(16, weight.k - at), w);
    for (int r = 0; r < M; ++r)
      for (int i = 0; i < 16; ++i) sum[r][i] += w[i] * packed[r][at + i];
  }
  for (int r = 0; r < M; ++r) {
    float total = 0;
    for (int i = 0; i < 16; ++i) total += sum[r][i];
    y[r][row] = total * weight.scale;
  }
}
template <int, int M>
void nvfp4_tile(const weight_view& weight, int row, const float* const* packed, float* const* y) {
  portable_tile<nvfp4_decoder, M>(weight, row, packed, y);
}
template <class Decoder, int, int M>
void plain_tile(const weight_view& weight, int row, const float* const* packed, float* const* y) {
  portable_tile<Decoder, M>(weight, row, packed, y);
}

#else  // vectors

using f32_tag = hn::ScalableTag<float>;
using vec = hn::Vec<f32_tag>;
constexpr int lanes = static_cast<int>(hn::MaxLanes(f32_tag()));

template <class D>
HWY_INLINE float sum_of(D d, vec v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

// HWY_TARGET names grow downwards: a smaller number is a later instruction set of the same family.
/// Asks for the weights that are due a few rows later: rows follow each other without a gap, and the loop is
/// too long for the processor to reach them by itself. An address past the weights is only a lost hint.
constexpr std::uintptr_t prefetch_bytes = 4096;
HWY_INLINE void prefetch(const std::uint8_t* at) {
  hwy::Prefetch(reinterpret_cast<const std::uint8_t*>(reinterpret_cast<std::uintptr_t>(at) + prefetch_bytes));
}

#undef NIBBLE_WIDE_LOOKUP
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define NIBBLE_WIDE_LOOKUP 1
#else
#define NIBBLE_WIDE_LOOKUP 0
#endif

#if NIBBLE_WIDE_LOOKUP
constexpr int nvfp4_tile_n = 2;
#else
constexpr int nvfp4_tile_n = 1;
#endif
constexpr int byte_tile_n = 2;

/// Codes that one step of the NVFP4 kernel takes.
constexpr int nvfp4_step = 8 * lanes;

/// The column, within a step, of the element that packed position `at` holds.
constexpr int nvfp4_column(int at) {
  const int group = at / lanes, lane = at % lanes;
#if NIBBLE_WIDE_LOOKUP
  return 8 * lane + group;
#else
  const int upper = group / 4, nibble = group / 2 % 2, odd = group % 2;
  return 2 * (16 * (lane / 4) + 8 * upper + 2 * (lane % 4) + odd) + nibble;
#endif
}

#if NIBBLE_WIDE_LOOKUP

/// Scales of 8 blocks as 16 lanes, each twice, times 2^-8.
HWY_INLINE vec nvfp4_scales(const std::uint8_t* scales) {
  std::uint64_t eight;
  hwy::CopyBytes<8>(scales, &eight);
  const __m256i spread = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,  //
                                          -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
  const __m256i upper = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<long long>(eight)), spread);
  const __m256i half =
      _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<short>(0xBFFF)));
  return vec{_mm512_cvtph_ps(half)};
}

/// One step: products of N weight rows and M packed rows enter sum[N][M].
template <int N, int M>
HWY_INLINE void nvfp4_step_of(const std::uint8_t* const* codes, const std::uint8_t* const* scales,
                              const float* const* x, vec sum[N][M]) {
  const f32_tag d;
  const hn::ScalableTag<std::uint32_t> du;
  const hn::ScalableTag<std::uint8_t> db;
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  __m512i bits[N];
  vec part[N][M];
  for (int i = 0; i < N; ++i) {
    bits[i] = hn::BitCast(du, hn::LoadU(db, codes[i])).raw;
    for (int r = 0; r < M; ++r) part[i][r] = hn::Zero(d);
  }
  HWY_UNROLL(8)
  for (int j = 0; j < 8; ++j) {
    vec w[N];
    for (int i = 0; i < N; ++i) {
      w[i] = vec{_mm512_permutexvar_ps(bits[i], table)};
      if (j < 7) bits[i] = _mm512_srli_epi32(bits[i], 4);
    }
    for (int r = 0; r < M; ++r) {
      const vec value = hn::LoadU(d, x[r] + j * lanes);
      for (int i = 0; i < N; ++i) part[i][r] = hn::MulAdd(w[i], value, part[i][r]);
    }
  }
  for (int i = 0; i < N; ++i) {
    const vec scale = nvfp4_scales(scales[i]);
    for (int r = 0; r < M; ++r) sum[i][r] = hn::MulAdd(part[i][r], scale, sum[i][r]);
  }
}

constexpr float nvfp4_undo = 256.0f;

#else  // byte shuffles

/// The scale of block 2B in all lanes of 128-bit part B; `scales` points at that of block 0.
template <class D>
HWY_INLINE hn::Vec<D> scales_by_block(D d, const std::uint8_t* scales) {
  static_assert(lanes == 4 || lanes == 8, "one or two 128-bit parts");
  if constexpr (lanes == 4) {
    return hn::Set(d, scale_table.value[scales[0]]);
  } else {
    const hn::Half<D> dh;
    return hn::Combine(d, hn::Set(dh, scale_table.value[scales[2]]),
                       hn::Set(dh, scale_table.value[scales[0]]));
  }
}

template <int N, int M>
HWY_INLINE void nvfp4_step_of(const std::uint8_t* const* codes, const std::uint8_t* const* scales,
                              const float* const* x, vec sum[N][M]) {
  const f32_tag d;
  const hn::ScalableTag<std::uint32_t> du;
  const hn::ScalableTag<std::uint16_t> dh;
  const hn::ScalableTag<std::uint8_t> db;
  // bfloat16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, upper and lower bytes.
  HWY_ALIGN static constexpr std::uint8_t upper_bytes[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                                             0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
  HWY_ALIGN static constexpr std::uint8_t lower_bytes[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                                             0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};
  const auto upper_table = hn::LoadDup128(db, upper_bytes);
  const auto lower_table = hn::LoadDup128(db, lower_bytes);
  const auto nibble_mask = hn::Set(db, std::uint8_t{0x0F});
  const auto odd_mask = hn::Set(du, 0xFFFF0000u);
  for (int i = 0; i < N; ++i) {
    const auto bytes = hn::LoadU(db, codes[i]);
    const auto low = hn::And(bytes, nibble_mask);
    const auto high = hn::And(hn::BitCast(db, hn::ShiftRight<4>(hn::BitCast(dh, bytes))), nibble_mask);
    const auto low_upper = hn::TableLookupBytes(upper_table, low),
               low_lower = hn::TableLookupBytes(lower_table, low);
    const auto high_upper = hn::TableLookupBytes(upper_table, high),
               high_lower = hn::TableLookupBytes(lower_table, high);
    for (int half = 0; half < 2; ++half) {
      const auto even_codes = hn::BitCast(du, half == 0 ? hn::InterleaveLower(db, low_lower, low_upper)
                                                        : hn::InterleaveUpper(db, low_lower, low_upper));
      const auto odd_codes = hn::BitCast(du, half == 0 ? hn::InterleaveLower(db, high_lower, high_upper)
                                                       : hn::InterleaveUpper(db, high_lower, high_upper));
      const vec w0 = hn::BitCast(d, hn::ShiftLeft<16>(even_codes)),
                w1 = hn::BitCast(d, hn::And(even_codes, odd_mask));
      const vec w2 = hn::BitCast(d, hn::ShiftLeft<16>(odd_codes)),
                w3 = hn::BitCast(d, hn::And(odd_codes, odd_mask));
      const vec scale = scales_by_block(d, scales[i] + half);
      for (int r = 0; r < M; ++r) {
        const float* at = x[r] + half * 4 * lanes;
        vec part = hn::Mul(w0, hn::LoadU(d, at));
        part = hn::MulAdd(w1, hn::LoadU(d, at + lanes), part);
        part = hn::MulAdd(w2, hn::LoadU(d, at + 2 * lanes), part);
        part = hn::MulAdd(w3, hn::LoadU(d, at + 3 * lanes), part);
        sum[i][r] = hn::MulAdd(part, scale, sum[i][r]);
      }
    }
  }
}

constexpr float nvfp4_undo = 1.0f;

#endif

template <int N, int M>
HWY_NOINLINE void nvfp4_tile(const weight_view& weight, int row, const float* const* packed,
                             float* const* y) {
  const f32_tag d;
  const std::size_t code_stride = static_cast<std::size_t>(weight.k) / 2, scale_stride = code_stride / 8;
  const std::uint8_t* codes[N];
  const std::uint8_t* scales[N];
  const float* x[M];
  vec sum[N][M];
  for (int i = 0; i < N; ++i) {
    codes[i] =
        static_cast<const std::uint8_t*>(weight.data) + static_cast<std::size_t>(row + i) * code_stride;
    scales[i] = weight.block_scales + static_cast<std::size_t>(row + i) * scale_stride;
    for (int r = 0; r < M; ++r) sum[i][r] = hn::Zero(d);
  }
  for (int r = 0; r < M; ++r) x[r] = packed[r];
  int left = weight.k;
  for (; left >= nvfp4_step; left -= nvfp4_step) {
    for (int i = 0; i < N; ++i) prefetch(codes[i]);
    nvfp4_step_of<N, M>(codes, scales, x, sum);
    for (int i = 0; i < N; ++i) {
      codes[i] += nvfp4_step / 2;
      scales[i] += nvfp4_step / 16;
    }
    for (int r = 0; r < M; ++r) x[r] += nvfp4_step;
  }
  if (left > 0) {  // the rest of the row, padded with zeros; nothing is read past its end
    HWY_ALIGN std::uint8_t last_codes[N][nvfp4_step / 2] = {};
    HWY_ALIGN std::uint8_t last_scales[N][nvfp4_step / 16] = {};
    for (int i = 0; i < N; ++i) {
      for (int j = 0; j < left / 2; j += 8) hwy::CopyBytes<8>(codes[i] + j, last_codes[i] + j);
      for (int j = 0; j < left / 16; ++j) last_scales[i][j] = scales[i][j];
      codes[i] = last_codes[i];
      scales[i] = last_scales[i];
    }
    nvfp4_step_of<N, M>(codes, scales, x, sum);
  }
  for (int i = 0; i < N; ++i)
    for (int r = 0; r < M; ++r) y[r][row + i] = sum_of(d, sum[i][r]) * (weight.scale * nvfp4_undo);
}

// FP8 and bfloat16 keep the natural order; a step is two vectors, each with an accumulator of its own.
constexpr int plain_step = 2 * lanes;

struct fp8_decoder {
  static constexpr int element_bytes = 1;
  static constexpr float undo = 256.0f;
  static HWY_INLINE void decode(const std::uint8_t* from, vec& first, vec& second) {
    const f32_tag d;
    const hn::ScalableTag<std::uint16_t> dh;
    const hn::ScalableTag<std::int16_t> di;
    const hn::Rebind<std::uint8_t, decltype(dh)> db;
    const hn::Rebind<hwy::float16_t, f32_tag> df16;
    const auto upper = hn::ShiftLeft<8>(hn::PromoteTo(dh, hn::LoadU(db, from)));
    const auto bits = hn::And(hn::BitCast(dh, hn::ShiftRight<1>(hn::BitCast(di, upper))),
                              hn::Set(dh, static_cast<std::uint16_t>(0xBFFF)));
    const hn::Half<decltype(dh)> dhh;
    first = hn::PromoteTo(d, hn::BitCast(df16, hn::LowerHalf(dhh, bits)));
    second = hn::PromoteTo(d, hn::BitCast(df16, hn::UpperHalf(dhh, bits)));
  }
};

struct bf16_decoder {
  static constexpr int element_bytes = 2;
  static constexpr float undo = 1.0f;
  static HWY_INLINE vec decode_one(const std::uint8_t* from) {
    const f32_tag d;
    const hn::RebindToUnsigned<f32_tag> du;
    const hn::Rebind<std::uint16_t, f32_tag> dh;
    const hn::Repartition<std::uint8_t, decltype(dh)> db;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::BitCast(dh, hn::LoadU(db, from)))));
  }
  static HWY_INLINE void decode(const std::uint8_t* from, vec& first, vec& second) {
    first = decode_one(from);
    second = decode_one(from + 2 * lanes);
  }
};

template <class Decoder, int N, int M>
HWY_INLINE void plain_step_of(const std::uint8_t* const* weights, const float* const* x, vec sum[N][M][2]) {
  const f32_tag d;
  vec w[N][2];
  for (int i = 0; i < N; ++i) Decoder::decode(weights[i], w[i][0], w[i][1]);
  for (int r = 0; r < M; ++r)
    for (int half = 0; half < 2; ++half) {
      const vec value = hn::LoadU(d, x[r] + half * lanes);
      for (int i = 0; i < N; ++i) sum[i][r][half] = hn::MulAdd(w[i][half], value, sum[i][r][half]);
    }
}

template <class Decoder, int N, int M>
HWY_NOINLINE void plain_tile(const weight_view& weight, int row, const float* const* packed,
                             float* const* y) {
  const f32_tag d;
  constexpr int bytes = Decoder::element_bytes;
  const std::size_t stride = static_cast<std::size_t>(weight.k) * bytes;
  const std::uint8_t* weights[N];
  const float* x[M];
  vec sum[N][M][2];
  for (int i = 0; i < N; ++i) {
    weights[i] = static_cast<const std::uint8_t*>(weight.data) + static_cast<std::size_t>(row + i) * stride;
    for (int r = 0; r < M; ++r) sum[i][r][0] = sum[i][r][1] = hn::Zero(d);
  }
  for (int r = 0; r < M; ++r) x[r] = packed[r];
  int left = weight.k;
  for (; left >= plain_step; left -= plain_step) {
    for (int i = 0; i < N; ++i) prefetch(weights[i]);
    plain_step_of<Decoder, N, M>(weights, x, sum);
    for (int i = 0; i < N; ++i) weights[i] += plain_step * bytes;
    for (int r = 0; r < M; ++r) x[r] += plain_step;
  }
  if (left > 0) {
    HWY_ALIGN std::uint8_t last[N][plain_step * bytes] = {};
    for (int i = 0; i < N; ++i) {
      for (int j = 0; j < left * bytes; ++j) last[i][j] = weights[i][j];
      weights[i] = last[i];
    }
    plain_step_of<Decoder, N, M>(weights, x, sum);
  }
  for (int i = 0; i < N; ++i)
    for (int r = 0; r < M; ++r)
      y[r][row + i] = sum_of(d, hn::Add(sum[i][r][0], sum[i][r][1])) * (weight.scale * Decoder::undo);
}

#endif  // vectors

using tile_function = void (*)(const weight_view&, int, const float* const*, float* const*);

struct tile_set {
  int n;
  tile_function full[tile_m];    // n weight rows by 1 … tile_m rows of x
  tile_function single[tile_m];  // one weight row
};

constexpr tile_set nvfp4_tiles = {nvfp4_tile_n,
                                  {nvfp4_tile<nvfp4_tile_n, 1>, nvfp4_tile<nvfp4_tile_n, 2>,
                                   nvfp4_tile<nvfp4_tile_n, 3>, nvfp4_tile<nvfp4_tile_n, 4>},
                                  {nvfp4_tile<1, 1>, nvfp4_tile<1, 2>, nvfp4_tile<1, 3>, nvfp4_tile<1, 4>}};
template <class Decoder>
constexpr tile_set plain_tiles = {byte_tile_n,
                                  {plain_tile<Decoder, byte_tile_n, 1>, plain_tile<Decoder, byte_tile_n, 2>,
                                   plain_tile<Decoder, byte_tile_n, 3>, plain_tile<Decoder, byte_tile_n, 4>},
                                  {plain_tile<Decoder, 1, 1>, plain_tile<Decoder, 1, 2>,
                                   plain_tile<Decoder, 1, 3>, plain_tile<Decoder, 1, 4>}};

void matmul_rows_impl(const weight_view& weight, int n_begin, int n_end, const float* const* packed, int m,
                      float* const* y) {
  const tile_set& tiles = weight.format == weight_format::nvfp4 ? nvfp4_tiles
                          : weight.format == weight_format::fp8 ? plain_tiles<fp8_decoder>
                                                                : plain_tiles<bf16_decoder>;
  for (int r = 0; r < m; r += tile_m) {
    const int rows = HWY_MIN(tile_m, m - r);
    int i = n_begin;
    for (; i + tiles.n <= n_end; i += tiles.n) tiles.full[rows - 1](weight, i, packed + r, y + r);
    for (; i < n_end; ++i) tiles.single[rows - 1](weight, i, packed + r, y + r);
  }
}

int step_of_impl(weight_format format) { return format == weight_format::nvfp4 ? nvfp4_step : plain_step; }

void pack_row_impl(weight_format format, const float* x, int k, float* out) {
  if (format != weight_format::nvfp4) {
    const int padded = (k + plain_step - 1) / plain_step * plain_step;
    for (int i = 0; i < k; ++i) out[i] = x[i];
    for (int i = k; i < padded; ++i) out[i] = 0.0f;
    return;
  }
  int at = 0;
  for (; at + nvfp4_step <= k; at += nvfp4_step)
    for (int i = 0; i < nvfp4_step; ++i) out[at + i] = x[at + nvfp4_column(i)];
  if (at < k)
    for (int i = 0; i < nvfp4_step; ++i) {
      const int column = at + nvfp4_column(i);
      out[at + i] = column < k ? x[column] : 0.0f;
    }
}

}  // namespace nibble::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nibble::host::detail {
HWY_EXPORT(matmul_rows_impl);
HWY_EXPORT(step_of_impl);
HWY_EXPORT(pack_row_impl);

int packed_length(weight_format format, int k) {
  const int step = HWY_DYNAMIC_DISPATCH(step_of_impl)(format);
  return (k + step - 1) / step * step;
}

bool is_packed(weight_format format, int k) {
  return format != weight_format::nvfp4 && packed_length(format, k) == k;
}

void pack_row(weight_format format, const float* x, int k, float* out) {
  HWY_DYNAMIC_DISPATCH(pack_row_impl)(format, x, k, out);
}

void matmul_rows(const weight_view& weight, int n_begin, int n_end, const float* const* packed_rows, int m,
                 float* const* y) {
  HWY_DYNAMIC_DISPATCH(matmul_rows_impl)(weight, n_begin, n_end, packed_rows, m, y);
}

}  // namespace nibble::host::detail
#endif
