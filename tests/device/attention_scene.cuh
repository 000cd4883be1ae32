// SPDX-License-Identifier: Apache-2.0
/// \file
/// Sequences with shuffled pages, random caches and rows, and what attention must make of them in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include "device_test.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/fp8/e4m3.hpp"
#include "nibble/kernels/attention.cuh"
#include "nibble/ref/attention.hpp"
#include "nibble/ref/norm.hpp"
#include "nibble/ref/rope.hpp"

namespace device_test {

using nibble::attention_params;
using nibble::attention_shape;
using nibble::kv_format;

/// Nearly normal numbers, quickly.
class noise {
 public:
  explicit noise(std::uint64_t seed) : state_(seed * 0x9E37'79B9'7F4A'7C15ull + 1) {}
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E37'79B9'7F4A'7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBull;
    return z ^ (z >> 31);
  }
  float operator()() {
    const std::uint64_t b = bits();
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(b >> (16 * i) & 0xFFFF);
    return (sum / 65536.0f - 2.0f) * 1.7320508f;
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<std::uint64_t>(n)); }

 private:
  std::uint64_t state_;
};

struct sequence_plan {
  int position;  ///< tokens the cache holds; negative: padding
  int rows;
};

/// One layer (of two in the pool) of several sequences.
template <attention_shape S>
class attention_scene {
 public:
  static constexpr double theta = 1e7;
  static constexpr float eps = 1e-6f;
  static constexpr std::size_t element = nibble::bytes_of(S.format);

  attention_scene(std::vector<sequence_plan> plan, std::uint64_t seed)
      : plan_(std::move(plan)), random_(seed) {
    int pages = 3;  // belong to nobody
    for (const auto& s : plan_) {
      first_row_.push_back(rows_);
      rows_ += s.rows;
      position_.push_back(s.position);
      const int held = s.position < 0 ? 0 : (s.position + s.rows + S.page_tokens - 1) / S.page_tokens;
      stride_ = std::max(stride_, held);
      pages += held;
    }
    first_row_.push_back(rows_);
    pages_ = pages;
    std::vector<int> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    for (int i = pages - 1; i > 0; --i) std::swap(order[i], order[random_.below(i + 1)]);
    // Entries that no token needs point far outside: a kernel that follows one faults.
    table_.assign(plan_.size() * static_cast<std::size_t>(stride_), 0x3FFF'FFFF);
    int next = 0;
    for (std::size_t s = 0; s < plan_.size(); ++s) {
      const int held =
          plan_[s].position < 0 ? 0 : (plan_[s].position + plan_[s].rows + S.page_tokens - 1) / S.page_tokens;
      for (int i = 0; i < held; ++i) table_[s * static_cast<std::size_t>(stride_) + i] = order[next++];
    }
    page_bytes_ = 2 * S.page_bytes() + 64;
    layer_offset_ = S.page_bytes() + 32;
    pool_.assign(page_bytes_ * static_cast<std::size_t>(pages), 0xFF);
    for (std::size_t s = 0; s < plan_.size(); ++s)
      for (int token = 0; token < plan_[s].position; ++token)
        for (int kv = 0; kv < S.kv_heads; ++kv)
          for (int value = 0; value < 2; ++value) {
            std::uint8_t* head = pool_.data() + place(static_cast<int>(s), token, kv, value != 0);
            for (int d = 0; d < S.head_dim; ++d)
              put(head, at(d, token, value != 0), random_() * (value ? 1.0f : 1.3f));
          }
    ldqkv_ = S.qkv_width() + 8;
    ldo_ = S.output_width() + 16;
    qkv_.resize(static_cast<std::size_t>(rows_) * ldqkv_);
    for (auto& v : qkv_) v = nibble::bf16::encode(random_() * 2.0f);
    for (auto* w : {&q_norm_, &k_norm_}) {
      w->resize(S.head_dim);
      for (auto& v : *w) v = (S.zero_centred_norm ? 0.2f : 1.2f) + 0.3f * random_();
    }
    for (int i = 0; i < S.rotary_dim / 2; ++i)
      frequencies_.push_back(static_cast<float>(std::pow(theta, -2.0 * i / S.rotary_dim)));
  }

  [[nodiscard]] int rows() const { return rows_; }
  [[nodiscard]] int sequences() const { return static_cast<int>(plan_.size()); }
  [[nodiscard]] std::vector<std::uint16_t>& qkv() { return qkv_; }
  [[nodiscard]] const std::vector<std::uint8_t>& pool() const { return pool_; }
  void set_pool(std::vector<std::uint8_t> pool) { pool_ = std::move(pool); }

  /// Byte of the pool where a token's key or value head begins.
  [[nodiscard]] std::size_t place(int s, int token, int kv, bool value) const {
    const int page = table_[static_cast<std::size_t>(s) * stride_ + token / S.page_tokens];
    return page_bytes_ * page + layer_offset_ +
           ((static_cast<std::size_t>(value ? S.kv_heads + kv : kv) * S.page_tokens + token % S.page_tokens) *
            S.head_dim) *
               element;
  }
  /// Where dimension d of a token is in its row: 16-byte units are permuted (kv_element.cuh).
  static int at(int d, int token, bool value) {
    const int units = S.head_dim * static_cast<int>(element) / 16, per_unit = 16 / static_cast<int>(element);
    const int swizzle = value ? token & 7 : (token & 1) * 4 + (token / 2 & 3);
    return ((d / per_unit) ^ (swizzle & (units - 1))) * per_unit + d % per_unit;
  }
  static void put(std::uint8_t* head, int d, float v) {
    if constexpr (S.format == kv_format::bf16) {
      const std::uint16_t bits = nibble::bf16::encode(v);
      std::memcpy(head + 2 * d, &bits, 2);
    } else {
      head[d] = nibble::e4m3::encode(v);
    }
  }
  static double get(const std::uint8_t* head, int d) {
    if constexpr (S.format == kv_format::bf16) {
      std::uint16_t bits;
      std::memcpy(&bits, head + 2 * d, 2);
      return nibble::bf16::decode(bits);
    } else {
      return nibble::e4m3::decode(head[d]);
    }
  }

  struct outcome {
    std::vector<std::uint16_t> out;  ///< [rows][ldo], rows of the chosen sequences only
    std::vector<std::uint8_t> pool;
  };
  /// Runs the kernels on the sequences `chosen` (all where empty), on copies of everything.
  /// \param decode the decode kernel; else append and prefill
  /// \param DecodeBlocks the grid of decode, 0: the usual one
  /// \param Small the policy for devices with 99 KiB of shared memory a block
  template <int DecodeBlocks = 0, bool Small = false>
  outcome run(bool decode, std::vector<int> chosen = {}, int launches = 1) const {
    if (chosen.empty())
      for (int s = 0; s < sequences(); ++s) chosen.push_back(s);
    std::vector<std::int32_t> first_row{0}, position, table;
    std::vector<std::uint16_t> rows;
    for (const int s : chosen) {
      for (int r = first_row_[s]; r < first_row_[s + 1]; ++r)
        rows.insert(rows.end(), qkv_.begin() + static_cast<std::ptrdiff_t>(r) * ldqkv_,
                    qkv_.begin() + static_cast<std::ptrdiff_t>(r + 1) * ldqkv_);
      first_row.push_back(first_row.back() + plan_[s].rows);
      position.push_back(position_[s]);
      table.insert(table.end(), table_.begin() + static_cast<std::ptrdiff_t>(s) * stride_,
                   table_.begin() + static_cast<std::ptrdiff_t>(s + 1) * stride_);
    }
    const buffer<std::int32_t> d_first(first_row), d_position(position), d_table(table);
    const buffer<std::uint16_t> d_qkv(rows);
    const buffer<std::uint8_t> d_pool(pool_);
    const buffer<float> d_q(q_norm_), d_k(k_norm_), d_frequencies(frequencies_);
    const buffer<std::uint16_t> d_out(static_cast<std::size_t>(first_row.back()) * ldo_);
    constexpr nibble::attention_policy Policy = [] {
      nibble::attention_policy policy =
          Small ? nibble::select_attention(S, 132, 99 * 1024) : nibble::select_attention(S);
      if (DecodeBlocks > 0) policy.decode_blocks = DecodeBlocks;
      return policy;
    }();
    using decoder = nibble::attention_decode_family<S, Policy>;
    using appender = nibble::attention_append_family<S, Policy>;
    using prefiller = nibble::attention_prefill_family<S, Policy>;
    std::size_t held = 0;
    for (const int s : chosen) held += static_cast<std::size_t>(std::max(plan_[s].position, 0));
    const nibble::attention_workspace layout =
        decoder::workspace(static_cast<int>(chosen.size()), std::max<std::size_t>(held, 1));
    const buffer<std::uint8_t> d_workspace(layout.bytes);
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(d_workspace.data(), 0, layout.counter_bytes, stream()));
    attention_params p;
    p.step.sequences = static_cast<int>(chosen.size());
    p.step.first_row = d_first.data(), p.step.position = d_position.data(), p.step.pages = d_table.data();
    p.step.page_stride = stride_;
    p.pool.base = reinterpret_cast<std::byte*>(d_pool.data());
    p.pool.page_bytes = page_bytes_, p.pool.layer_offset_bytes = layer_offset_;
    p.qkv = reinterpret_cast<const __nv_bfloat16*>(d_qkv.data()), p.ldqkv = ldqkv_;
    p.out = reinterpret_cast<__nv_bfloat16*>(d_out.data()), p.ldo = ldo_;
    p.q_norm = d_q.data(), p.k_norm = d_k.data(), p.inverse_frequencies = d_frequencies.data();
    p.eps = eps, p.rows = first_row.back();
    p.workspace = reinterpret_cast<std::byte*>(d_workspace.data()), p.layout = layout;
    const auto prepare = [](auto kernel, int threads, std::size_t bytes, const char* name) {
      nibble::kernel_info info;
      const nibble::status s = nibble::prepare(kernel, threads, bytes, name, &info);
      NIBBLE_CHECK(info.local_bytes <=
                   std::max(Small ? 96 : 0, allowed_local_bytes));  // 64 rows of FP8 prefill spill
      return s;
    };
    const nibble::launch_options options{stream(), chained};
    for (int i = 0; i < launches; ++i) {
      if (decode) {
        NIBBLE_GOOD(decoder::for_each_kernel(prepare));
        NIBBLE_GOOD(decoder::launch(p, options));
      } else {
        NIBBLE_GOOD(appender::for_each_kernel(prepare));
        NIBBLE_GOOD(prefiller::for_each_kernel(prepare));
        NIBBLE_GOOD(appender::launch(p, options));
        NIBBLE_GOOD(prefiller::launch(p, options));
      }
    }
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream()));
    if (decode) {
      const auto after = d_workspace.read();
      NIBBLE_CHECK(std::all_of(after.begin(),
                               after.begin() + static_cast<std::ptrdiff_t>(layout.counter_bytes),
                               [](std::uint8_t b) { return b == 0; }));
    }
    return {d_out.read(), d_pool.read()};
  }

  /// The cache after a run: new tokens at their places, all else as it was.
  void check_pool(const std::vector<std::uint8_t>& after) const {
    std::vector<std::uint8_t> expected = pool_;
    double worst = 0;
    for (int s = 0; s < sequences(); ++s) {
      if (plan_[s].position < 0) continue;
      for (int r = 0; r < plan_[s].rows; ++r) {
        const int token = plan_[s].position + r;
        for (int kv = 0; kv < S.kv_heads; ++kv) {
          const auto key = new_key(first_row_[s] + r, token, kv);
          const std::size_t key_at = place(s, token, kv, false), bytes = S.head_dim * element;
          for (int d = 0; d < S.head_dim; ++d) {
            const double got = get(after.data() + key_at, at(d, token, false)),
                         scale = std::max(std::fabs(key[d]), 0.02);
            const double error = std::fabs(got - key[d]) / scale;
            if (!(error <= worst)) worst = error;
          }
          std::copy_n(after.begin() + static_cast<std::ptrdiff_t>(key_at), bytes,
                      expected.begin() + static_cast<std::ptrdiff_t>(key_at));
          std::uint8_t* value = expected.data() + place(s, token, kv, true);
          for (int d = 0; d < S.head_dim; ++d)
            put(value, at(d, token, true),
                nibble::bf16::decode(qkv_[static_cast<std::size_t>(first_row_[s] + r) * ldqkv_ + S.q_width() +
                                          S.kv_width() + kv * S.head_dim + d]));
        }
      }
    }
    NIBBLE_CHECK(worst < (S.format == kv_format::bf16 ? 0.0041 : 0.07));
    NIBBLE_CHECK(expected == after);
  }

  /// Every output row against fp64 attention over the cache that the run left.
  void check_output(const outcome& got, double most) const {
    double worst = 0;
    int worst_at = 0;
    for (int s = 0; s < sequences(); ++s) {
      const auto& [position, count] = plan_[s];
      for (int r = 0; r < count; ++r)
        for (int i = S.output_width(); i < ldo_; ++i)
          NIBBLE_CHECK(got.out[static_cast<std::size_t>(first_row_[s] + r) * ldo_ + i] == 0xFFFF);
      if (position < 0) continue;
      const auto expected = attend(s, got.pool);
      for (int r = 0; r < count; ++r)
        for (int h = 0; h < S.heads; ++h) {
          double error = 0, norm = 0;
          for (int d = 0; d < S.head_dim; ++d) {
            const double e = expected[(static_cast<std::size_t>(r) * S.heads + h) * S.head_dim + d];
            const double v = nibble::bf16::decode(
                got.out[static_cast<std::size_t>(first_row_[s] + r) * ldo_ + h * S.head_dim + d]);
            error += (v - e) * (v - e), norm += e * e;
          }
          const double relative = std::sqrt(error / norm);
          if (!(relative <= worst)) worst = relative, worst_at = s;
        }
    }
    std::printf("%s: error %.2e (limit %.0e), worst at position %d\n", current().c_str(), worst, most,
                plan_[worst_at].position);
    NIBBLE_CHECK(worst < most);
  }

  /// fp64 attention of a sequence's rows: [rows][heads][head_dim].
  [[nodiscard]] std::vector<double> attend(int s, const std::vector<std::uint8_t>& pool) const {
    const int history = plan_[s].position + plan_[s].rows;
    std::vector<double> k(static_cast<std::size_t>(history) * S.kv_width()), v(k.size()), q, gate;
    for (int token = 0; token < history; ++token)
      for (int kv = 0; kv < S.kv_heads; ++kv)
        for (int d = 0; d < S.head_dim; ++d) {
          const std::size_t to = (static_cast<std::size_t>(token) * S.kv_heads + kv) * S.head_dim + d;
          k[to] = get(pool.data() + place(s, token, kv, false), at(d, token, false));
          v[to] = get(pool.data() + place(s, token, kv, true), at(d, token, true));
        }
    for (int r = 0; r < plan_[s].rows; ++r)
      for (int h = 0; h < S.heads; ++h) {
        const int row = first_row_[s] + r, stride = S.gated ? 2 * S.head_dim : S.head_dim;
        const auto head = normed(row, h * stride, q_norm_, plan_[s].position + r);
        q.insert(q.end(), head.begin(), head.end());
        if (S.gated) {
          const auto g = raw(row, h * stride + S.head_dim);
          gate.insert(gate.end(), g.begin(), g.end());
        }
      }
    return nibble::ref::attention(q, gate, k, v, {S.heads, S.kv_heads, S.head_dim},
                                  1.0 / std::sqrt(static_cast<double>(S.head_dim)));
  }

  [[nodiscard]] std::vector<std::uint16_t> output_rows(const outcome& o, int first, int count) const {
    return {o.out.begin() + static_cast<std::ptrdiff_t>(first) * ldo_,
            o.out.begin() + static_cast<std::ptrdiff_t>(first + count) * ldo_};
  }
  [[nodiscard]] int ldo() const { return ldo_; }
  [[nodiscard]] int first_row(int s) const { return first_row_[s]; }
  /// The same cache and tokens, cut elsewhere: the first sequence's rows before `rows` are in the cache.
  void advance(int rows, std::vector<std::uint8_t> pool, int next_rows) {
    plan_[0].position += rows;
    position_[0] = plan_[0].position;
    qkv_.erase(qkv_.begin(), qkv_.begin() + static_cast<std::ptrdiff_t>(rows) * ldqkv_);
    cut(next_rows);
    pool_ = std::move(pool);
  }
  /// The first sequence brings `rows` rows only. The scene has no other.
  void cut(int rows) {
    plan_[0].rows = rows;
    first_row_ = {0, rows};
    rows_ = rows;
  }

 private:
  [[nodiscard]] std::vector<double> raw(int row, int column) const {
    std::vector<double> x(S.head_dim);
    for (int d = 0; d < S.head_dim; ++d)
      x[d] = nibble::bf16::decode(qkv_[static_cast<std::size_t>(row) * ldqkv_ + column + d]);
    return x;
  }
  [[nodiscard]] std::vector<double> normed(int row, int column, const std::vector<float>& weight,
                                           int position) const {
    const std::vector<double> w(weight.begin(), weight.end());
    const auto y = nibble::ref::rms_norm(raw(row, column), w, S.zero_centred_norm, eps);
    return nibble::ref::rope(y, std::vector<int>{position}, 1, S.head_dim, S.rotary_dim, theta);
  }
  [[nodiscard]] std::vector<double> new_key(int row, int token, int kv) const {
    return normed(row, S.q_width() + kv * S.head_dim, k_norm_, token);
  }

  std::vector<sequence_plan> plan_;
  noise random_;
  int rows_ = 0, stride_ = 1, pages_ = 0, ldqkv_ = 0, ldo_ = 0;
  std::vector<std::int32_t> first_row_, position_, table_;
  std::size_t page_bytes_ = 0, layer_offset_ = 0;
  std::vector<std::uint8_t> pool_;
  std::vector<std::uint16_t> qkv_;
  std::vector<float> q_norm_, k_norm_, frequencies_;
};

}  // namespace device_test
