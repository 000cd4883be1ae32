// SPDX-License-Identifier: Apache-2.0
// Times attention of full-size shapes over random caches: one JSON row a line on stdout.
//     bench_attention [decode|prefill [batch context]]
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "gemv/harness.cuh"
#include "nibble/kernels/attention.cuh"

using namespace nibble;

namespace {

constexpr attention_shape qwen36(kv_format f) { return {16, 2, 256, 64, true, true, 16, f}; }
constexpr attention_shape qwen3(kv_format f) { return {32, 4, 128, 128, false, false, 16, f}; }

__device__ std::uint32_t hash(std::uint64_t i) {
  std::uint64_t z = (i + 1) * 0x9E37'79B9'7F4A'7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9ull;
  return static_cast<std::uint32_t>(z >> 32);
}
/// bf16 in (-2, 2); FP8 below 2 in magnitude.
__global__ void fill_random(std::uint32_t* words, std::size_t count, bool fp8) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const std::uint32_t h = hash(i);
    const auto value = [](std::uint32_t bits) { return static_cast<float>(bits & 0xFFFF) / 16384.0f - 2.0f; };
    const __nv_bfloat162 pair = __floats2bfloat162_rn(value(h), value(h >> 16));
    words[i] = fp8 ? h & 0xBFBF'BFBFu : *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}
void fill(void* p, std::size_t bytes, bool fp8) {
  fill_random<<<1024, 256, 0, bench::stream()>>>(static_cast<std::uint32_t*>(p), bytes / 4, fp8);
  BENCH_CHECK(cudaGetLastError());
  BENCH_CHECK(cudaStreamSynchronize(bench::stream()));
}

template <class Family>
void load() {
  bench::good(Family::for_each_kernel([](auto kernel, int threads, std::size_t shared, const char* name) {
    kernel_info info;
    const status s = prepare(kernel, threads, shared, name, &info);
    if (info.local_bytes > 0) std::fprintf(stderr, "%s uses local memory\n", name);
    return s;
  }));
}

/// The policy that is measured: macros try others.
constexpr attention_policy policy_of(const attention_shape& s) {
  attention_policy p = select_attention(s);
#ifdef BENCH_DECODE_WARPS
  p.decode_warps = BENCH_DECODE_WARPS;
  p.decode_blocks = 132 * 8 / BENCH_DECODE_WARPS;
  p.most_chunks = p.decode_blocks / s.kv_heads;
#endif
#ifdef BENCH_LEAST_CHUNK_TOKENS
  p.least_chunk_tokens = BENCH_LEAST_CHUNK_TOKENS;
#endif
  return p;
}

/// A pool of pages, rows, norms, and one table of shuffled pages for each of several copies of the sequences.
template <attention_shape S>
struct setting {
  int batch, context, rows, copies, stride;
  std::uint8_t* pool;
  std::size_t pool_bytes;
  __nv_bfloat16 *qkv, *out;
  std::vector<std::int32_t*> tables;
  std::int32_t *first_row, *position;
  float *norm, *frequencies;
  std::uint8_t* workspace;
  attention_workspace layout;

  setting(int batch_, int context_, int rows_, std::uint8_t* pool_, std::size_t most_bytes)
      : batch(batch_), context(context_), rows(rows_), pool(pool_) {
    stride = (context + rows + S.page_tokens - 1) / S.page_tokens;
    const std::size_t bytes = S.page_bytes() * static_cast<std::size_t>(stride) * batch;
    copies =
        static_cast<int>(std::max<std::size_t>(1, std::min(most_bytes, 2 * bench::rotation_bytes()) / bytes));
    copies = std::min(copies, 64);
    pool_bytes = bytes * copies;
    std::vector<std::int32_t> order(static_cast<std::size_t>(stride) * batch * copies);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    for (int c = 0; c < copies; ++c) {
      const auto begin = order.begin() + static_cast<std::ptrdiff_t>(c) * stride * batch;
      tables.push_back(bench::upload(std::vector<std::int32_t>(begin, begin + stride * batch)));
    }
    qkv = bench::allocate<__nv_bfloat16>(static_cast<std::size_t>(batch) * rows * S.qkv_width());
    fill(qkv, static_cast<std::size_t>(batch) * rows * S.qkv_width() * 2, false);
    out = bench::allocate<__nv_bfloat16>(static_cast<std::size_t>(batch) * rows * S.output_width());
    std::vector<std::int32_t> first(static_cast<std::size_t>(batch) + 1), at(batch, context);
    for (int i = 0; i <= batch; ++i) first[i] = i * rows;
    first_row = bench::upload(first), position = bench::upload(at);
    norm = bench::upload(std::vector<float>(S.head_dim, 0.5f));
    std::vector<float> f;
    for (int i = 0; i < S.rotary_dim / 2; ++i)
      f.push_back(static_cast<float>(std::pow(1e7, -2.0 * i / S.rotary_dim)));
    frequencies = bench::upload(f);
    layout = attention_decode_family<S, policy_of(S)>::workspace(batch);
    workspace = bench::allocate<std::uint8_t>(layout.bytes);
    BENCH_CHECK(cudaMemset(workspace, 0, layout.bytes));
  }
  ~setting() {
    for (auto* t : tables) cudaFree(t);
    for (void* p : {static_cast<void*>(qkv), static_cast<void*>(out), static_cast<void*>(first_row),
                    static_cast<void*>(position), static_cast<void*>(norm), static_cast<void*>(frequencies),
                    static_cast<void*>(workspace)})
      cudaFree(p);
  }
  setting(const setting&) = delete;
  setting& operator=(const setting&) = delete;

  [[nodiscard]] attention_params params(int copy) const {
    attention_params p;
    p.step = {batch, first_row, position, nullptr, tables[static_cast<std::size_t>(copy % copies)], stride};
    p.pool = {reinterpret_cast<std::byte*>(pool), S.page_bytes(), 0};
    p.qkv = qkv, p.ldqkv = S.qkv_width(), p.out = out, p.ldo = S.output_width();
    p.q_norm = norm, p.k_norm = norm, p.inverse_frequencies = frequencies;
    p.rows = batch * rows;
    p.workspace = reinterpret_cast<std::byte*>(workspace), p.layout = layout;
    return p;
  }
};

const launch_options chained{bench::stream(), launch_chain::pdl};

int only_batch = 0, only_context = 0;

template <attention_shape S>
void time_decode(const char* model, std::uint8_t* pool, std::size_t pool_bytes) {
  using family = attention_decode_family<S, policy_of(S)>;
  load<family>();
  fill(pool, pool_bytes, S.format == kv_format::fp8);
  for (const int batch : {1, 8})
    for (const int context : {0, 512, 4096, 32768, 131072}) {
      if (only_batch > 0 && (only_batch != batch || only_context != context)) continue;
      const setting<S> s(batch, context, 1, pool, pool_bytes);
      const std::size_t token = S.page_bytes() / S.page_tokens;
      const std::size_t bytes = token * static_cast<std::size_t>(context) * batch;
      const int count = std::max(4, std::min(64, static_cast<int>((2ull << 30) / (bytes + 1))));
      const double us = bench::graph_time(
          count, [&](int i) { bench::good(family::launch(s.params(i), chained)); }, 11);
      double floor = 0;
      if (context > 0 && only_batch == 0) {
        std::vector<const std::uint8_t*> copies;
        for (int c = 0; c < s.copies; ++c) copies.push_back(pool + bytes * static_cast<std::size_t>(c));
        floor = bench::read_floor(copies, bytes, std::min(count, 16), launch_chain::pdl);
      }
      std::printf(
          "{\"kernel\":\"decode\",\"model\":\"%s\",\"kv\":\"%s\",\"batch\":%d,\"context\":%d,\"us\":%.3f,"
          "\"bytes\":%zu,\"gbps\":%.0f,\"floor_us\":%.3f}\n",
          model, S.format == kv_format::fp8 ? "fp8" : "bf16", batch, context, us, bytes,
          static_cast<double>(bytes) / us / 1e3, floor);
      std::fflush(stdout);
    }
}

template <attention_shape S>
void time_prefill(const char* model, std::uint8_t* pool, std::size_t pool_bytes) {
  using append = attention_append_family<S>;
  using prefill = attention_prefill_family<S>;
  load<append>();
  load<prefill>();
  fill(pool, pool_bytes, S.format == kv_format::fp8);
  for (const auto& [context, rows] : {std::pair{0, 64}, {0, 512}, {0, 2048}, {0, 8192}, {8192, 2048}}) {
    const setting<S> s(1, context, rows, pool, pool_bytes);
    const int count = rows > 4000 ? 4 : 16;
    const double append_us = bench::graph_time(
        count, [&](int i) { bench::good(append::launch(s.params(i), chained)); }, 7);
    const double us = bench::graph_time(
        count, [&](int i) { bench::good(prefill::launch(s.params(i), chained)); }, 7);
    const double pairs = static_cast<double>(rows) * context + 0.5 * rows * (rows + 1.0);
    std::printf(
        "{\"kernel\":\"prefill\",\"model\":\"%s\",\"kv\":\"%s\",\"context\":%d,\"rows\":%d,\"append_us\":%."
        "3f,"
        "\"us\":%.3f,\"tflops\":%.1f}\n",
        model, S.format == kv_format::fp8 ? "fp8" : "bf16", context, rows, append_us, us,
        4.0 * S.heads * S.head_dim * pairs / us / 1e6);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) { return argc < 2 || std::strcmp(argv[1], name) == 0; };
  if (argc > 3) only_batch = std::atoi(argv[2]), only_context = std::atoi(argv[3]);
  const std::size_t pool_bytes = 3ull << 30;
  auto* pool = bench::allocate<std::uint8_t>(pool_bytes);
  if (wanted("decode")) {
    time_decode<qwen36(kv_format::bf16)>("qwen3.6-35b-a3b", pool, pool_bytes);
    time_decode<qwen36(kv_format::fp8)>("qwen3.6-35b-a3b", pool, pool_bytes);
    time_decode<qwen3(kv_format::bf16)>("qwen3-30b-a3b", pool, pool_bytes);
  }
  if (wanted("prefill")) {
    time_prefill<qwen36(kv_format::bf16)>("qwen3.6-35b-a3b", pool, pool_bytes);
    time_prefill<qwen36(kv_format::fp8)>("qwen3.6-35b-a3b", pool, pool_bytes);
    time_prefill<qwen3(kv_format::bf16)>("qwen3-30b-a3b", pool, pool_bytes);
  }
  return 0;
}
