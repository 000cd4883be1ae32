// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cassert>
#include <cstring>
#include <nibble/core/bf16.hpp>
#include <nibble/fp8/e4m3.hpp>
#include <nibble/host/detail/matmul_rows.hpp>
#include <nibble/host/detail/scratch.hpp>
#include <nibble/host/linear.hpp>
#include <nibble/nvfp4/e2m1.hpp>
#include <vector>

namespace nibble::host {
namespace {

/// Weight bytes that one task may take: they are read again for every 4 rows of x, so they must stay in a
/// core's own cache.
constexpr std::size_t task_bytes = 128 * 1024;

/// Rows of the weight for one task: small enough to stay in cache and to give every thread several.
std::int64_t task_rows(const weight_view& weight, int threads) {
  const std::size_t row_bytes = std::max<std::size_t>(weight.bytes() / static_cast<std::size_t>(weight.n), 1);
  const auto fitting = static_cast<std::int64_t>(task_bytes / row_bytes);
  const std::int64_t fair = (weight.n + 4 * threads - 1) / (4 * threads);
  // Even, so that rows are taken in pairs; and a task should be worth waking a thread for.
  const auto worth = static_cast<std::int64_t>(4096 / row_bytes);
  return std::max<std::int64_t>((std::max(std::min(fitting, fair), worth) + 1) / 2 * 2, 2);
}

}  // namespace

void linear(thread_pool& pool, const weight_view& weight, const float* x, std::ptrdiff_t ldx, int m, float* y,
            std::ptrdiff_t ldy) {
  assert(weight.format != weight_format::nvfp4 || weight.k % 16 == 0);
  if (m <= 0 || weight.n <= 0) return;
  thread_local detail::scratch packed_memory;
  thread_local std::vector<const float*> rows;
  thread_local std::vector<float*> outputs;
  rows.resize(static_cast<std::size_t>(m));
  outputs.resize(static_cast<std::size_t>(m));
  for (int r = 0; r < m; ++r) {
    rows[static_cast<std::size_t>(r)] = x + r * ldx;
    outputs[static_cast<std::size_t>(r)] = y + r * ldy;
  }
  if (!detail::is_packed(weight.format, weight.k)) {
    const auto length = static_cast<std::size_t>(detail::packed_length(weight.format, weight.k));
    float* packed = packed_memory.take(length * static_cast<std::size_t>(m));
    const std::int64_t grain =
        std::max<std::int64_t>(static_cast<std::int64_t>(32768 / std::max<std::size_t>(length, 1)), 1);
    pool.parallel_for(m, grain, [&, from = rows.data()](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r)
        detail::pack_row(weight.format, from[r], weight.k, packed + static_cast<std::size_t>(r) * length);
    });
    for (int r = 0; r < m; ++r)
      rows[static_cast<std::size_t>(r)] = packed + static_cast<std::size_t>(r) * length;
  }
  // The vectors are this thread's: workers get their addresses.
  const float* const* from = rows.data();
  float* const* to = outputs.data();
  pool.parallel_for(weight.n, task_rows(weight, pool.threads()),
                    [&weight, from, to, m](std::int64_t begin, std::int64_t end) {
                      detail::matmul_rows(weight, static_cast<int>(begin), static_cast<int>(end), from, m,
                                          to);
                    });
}

void dequantize_row(const weight_view& weight, std::int64_t row, float* out) {
  const auto k = static_cast<std::size_t>(weight.k);
  const auto* data = static_cast<const std::uint8_t*>(weight.data);
  if (weight.format == weight_format::nvfp4) {
    const std::uint8_t* codes = data + static_cast<std::size_t>(row) * (k / 2);
    const std::uint8_t* scales = weight.block_scales + static_cast<std::size_t>(row) * (k / 16);
    for (std::size_t i = 0; i < k; ++i) {
      const unsigned code = i % 2 == 0 ? e2m1::unpack_even(codes[i / 2]) : e2m1::unpack_odd(codes[i / 2]);
      out[i] = e2m1::decode(code) * e4m3::decode(scales[i / 16]) * weight.scale;
    }
  } else if (weight.format == weight_format::fp8) {
    const std::uint8_t* bytes = data + static_cast<std::size_t>(row) * k;
    for (std::size_t i = 0; i < k; ++i) out[i] = e4m3::decode(bytes[i]) * weight.scale;
  } else {
    const std::uint8_t* bytes = data + static_cast<std::size_t>(row) * k * 2;
    for (std::size_t i = 0; i < k; ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, bytes + 2 * i, 2);
      out[i] = bf16::decode(bits);
    }
  }
}

}  // namespace nibble::host
