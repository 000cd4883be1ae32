// SPDX-License-Identifier: Apache-2.0
/// \file
/// Timing of kernels whose weights come from memory: graphs of many launches over rotating copies, the
/// read-only kernel over the same bytes, cuBLASLt where the library can be found, and JSON rows.
#pragma once

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "nibble/core/device_ops.cuh"
#include "nibble/core/launch.cuh"

namespace bench {

#define BENCH_CHECK(call)                                                                           \
  do {                                                                                              \
    if (const cudaError_t error = (call); error != cudaSuccess) {                                   \
      std::fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (0)

inline void good(nibble::status s) {
  if (s.ok()) return;
  std::fprintf(stderr, "%s: %s (%d)\n", s.where, s.text, s.cuda_error);
  std::exit(1);
}

inline cudaStream_t stream() {
  static const cudaStream_t s = [] {
    cudaStream_t made;
    BENCH_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return s;
}

template <class T>
T* allocate(std::size_t count) {
  T* p = nullptr;
  BENCH_CHECK(cudaMalloc(&p, count * sizeof(T)));
  return p;
}
template <class T>
T* upload(const std::vector<T>& v) {
  T* p = allocate<T>(v.size());
  BENCH_CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

/// Bytes the weights rotate through: more than three times the L2 cache.
inline std::size_t rotation_bytes() {
  int l2 = 0;
  BENCH_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  return std::max<std::size_t>(240u << 20, 4 * static_cast<std::size_t>(l2));
}

/// Microseconds a launch: the median of 21 replays of a graph of `count` calls of one(i).
inline double graph_time(int count, const std::function<void(int)>& one, int replays = 21) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  BENCH_CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) one(i);
  BENCH_CHECK(cudaStreamEndCapture(stream(), &graph));
  BENCH_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t a, b;
  BENCH_CHECK(cudaEventCreate(&a));
  BENCH_CHECK(cudaEventCreate(&b));
  std::vector<float> times;
  for (int r = 0; r < replays + 3; ++r) {
    BENCH_CHECK(cudaEventRecord(a, stream()));
    BENCH_CHECK(cudaGraphLaunch(executable, stream()));
    BENCH_CHECK(cudaEventRecord(b, stream()));
    BENCH_CHECK(cudaEventSynchronize(b));
    float ms = 0;
    BENCH_CHECK(cudaEventElapsedTime(&ms, a, b));
    if (r >= 3) times.push_back(ms);
  }
  BENCH_CHECK(cudaEventDestroy(a));
  BENCH_CHECK(cudaEventDestroy(b));
  BENCH_CHECK(cudaGraphExecDestroy(executable));
  BENCH_CHECK(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]) * 1e3 / count;
}

template <int Unroll>
__global__ void read_only(const std::uint8_t* p, std::size_t vectors, std::uint32_t* out) {
  nibble::device::let_next_grid_start();
  const std::size_t base = static_cast<std::size_t>(blockIdx.x) * blockDim.x * Unroll + threadIdx.x;
  uint4 v[Unroll];
#pragma unroll
  for (int i = 0; i < Unroll; ++i) {
    const std::size_t j = base + static_cast<std::size_t>(i) * blockDim.x;
    v[i] = j < vectors ? nibble::device::load_weights(p + j * 16) : make_uint4(0, 0, 0, 0);
  }
  nibble::device::wait_for_previous_grid();
  std::uint32_t s = 0;
#pragma unroll
  for (int i = 0; i < Unroll; ++i) s ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  if (s == 0x1234'5678u) *out = s;
}

/// The floor: the best of twelve shapes of a kernel that only reads `bytes` of each copy.
inline double read_floor(const std::vector<const std::uint8_t*>& copies, std::size_t bytes, int count,
                         nibble::launch_chain chain) {
  static std::uint32_t* const sink = allocate<std::uint32_t>(1);
  double best = 1e30;
  const auto run = [&](auto kernel, int unroll, int threads) {
    const std::size_t per_block = static_cast<std::size_t>(threads) * unroll;
    const auto grid = static_cast<unsigned>((bytes / 16 + per_block - 1) / per_block);
    best = std::min(best, graph_time(
                              count,
                              [&](int i) {
                                good(nibble::launch(
                                    kernel, dim3(grid), threads, 0, {stream(), chain}, "read_only",
                                    copies[static_cast<std::size_t>(i) % copies.size()], bytes / 16, sink));
                              },
                              11));
  };
  for (const int threads : {128, 256, 512}) {
    run(read_only<1>, 1, threads);
    run(read_only<2>, 2, threads);
    run(read_only<4>, 4, threads);
    run(read_only<8>, 8, threads);
  }
  return best;
}

/// y[m][n] = x[m][k] · W[n][k]ᵀ in bf16 by cuBLASLt, the fastest of its eight first proposals.
class cublas_lt {
 public:
  cublas_lt() {
    const char* path = std::getenv("NIBBLE_CUBLASLT");
    library_ = dlopen(path != nullptr ? path : "libcublasLt.so.13", RTLD_NOW);
    if (library_ == nullptr) return;
    if (load<decltype(&cublasLtCreate)>("cublasLtCreate")(&handle_) != CUBLAS_STATUS_SUCCESS)
      library_ = nullptr;
    if (library_ != nullptr) workspace_ = allocate<std::uint8_t>(workspace_bytes);
  }
  [[nodiscard]] bool available() const { return library_ != nullptr; }

  /// Microseconds over `copies` of the weights; 0 when no proposal runs.
  double time(int n, int k, int m, const std::vector<const std::uint8_t*>& copies, const __nv_bfloat16* x,
              __nv_bfloat16* y, int count) {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    load<decltype(&cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(&operation, CUBLAS_COMPUTE_32F,
                                                                          CUDA_R_32F);
    const cublasOperation_t transpose = CUBLAS_OP_T;
    load<decltype(&cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute")(
        operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose);
    const auto layout = load<decltype(&cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate");
    layout(&a, CUDA_R_16BF, static_cast<std::uint64_t>(k), static_cast<std::uint64_t>(n), k);
    layout(&b, CUDA_R_16BF, static_cast<std::uint64_t>(k), static_cast<std::uint64_t>(m), k);
    layout(&c, CUDA_R_16BF, static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(m), n);
    cublasLtMatmulPreference_t preference;
    load<decltype(&cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(&preference);
    const std::size_t bytes = workspace_bytes;
    load<decltype(&cublasLtMatmulPreferenceSetAttribute)>("cublasLtMatmulPreferenceSetAttribute")(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    cublasLtMatmulHeuristicResult_t found[8];
    int results = 0;
    load<decltype(&cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic")(
        handle_, operation, a, b, c, c, preference, 8, found, &results);
    const auto multiply = load<decltype(&cublasLtMatmul)>("cublasLtMatmul");
    double best = 0;
    for (int r = 0; r < results; ++r) {
      const float one = 1, zero = 0;
      const auto call = [&](int i) {
        return multiply(handle_, operation, &one, copies[static_cast<std::size_t>(i) % copies.size()], a, x,
                        b, &zero, y, c, y, c, &found[r].algo, workspace_, workspace_bytes, stream());
      };
      if (call(0) != CUBLAS_STATUS_SUCCESS) continue;
      BENCH_CHECK(cudaStreamSynchronize(stream()));
      const double us = graph_time(
          count, [&](int i) { (void)call(i); }, 7);
      if (best == 0 || us < best) best = us;
    }
    return best;
  }

 private:
  static constexpr std::size_t workspace_bytes = 32u << 20;
  template <class Function>
  Function load(const char* name) {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }
  void* library_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  std::uint8_t* workspace_ = nullptr;
};

/// One measurement, in the JSON form of bench/results.
struct row {
  std::string suite, geometry;
  int n = 0, k = 0, m = 0;
  std::string format, kernel, chain;
  double us = 0, floor_us = 0;
  std::size_t bytes = 0;
};

class report {
 public:
  void add(row r) {
    std::printf("%-16s %-34s m=%-3d %-24s %-6s %8.2f us  floor %7.2f  %4.0f%%\n", r.suite.c_str(),
                r.geometry.c_str(), r.m, r.kernel.c_str(), r.chain.c_str(), r.us, r.floor_us,
                r.us > 0 ? 100 * r.floor_us / r.us : 0.0);
    std::fflush(stdout);
    rows_.push_back(std::move(r));
  }
  /// Writes an array of rows. Commit and date come from the environment: NIBBLE_COMMIT, NIBBLE_DATE.
  void write(const std::string& path) const {
    cudaDeviceProp device{};
    int driver = 0, runtime = 0;
    BENCH_CHECK(cudaGetDeviceProperties(&device, 0));
    BENCH_CHECK(cudaDriverGetVersion(&driver));
    BENCH_CHECK(cudaRuntimeGetVersion(&runtime));
    const auto text = [](const char* name) {
      const char* value = std::getenv(name);
      return std::string(value != nullptr ? value : "");
    };
    const std::string driver_name = text("NIBBLE_DRIVER").empty() ? std::to_string(driver / 1000) + "." +
                                                                        std::to_string(driver % 1000 / 10)
                                                                  : text("NIBBLE_DRIVER");
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", path.c_str());
      std::exit(1);
    }
    std::fprintf(file, "[\n");
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const row& r = rows_[i];
      std::fprintf(file,
                   "{\"suite\":\"%s\",\"geometry\":\"%s\",\"n\":%d,\"k\":%d,\"m\":%d,\"format\":\"%s\","
                   "\"kernel\":\"%s\",\"chain\":\"%s\","
                   "\"us\":%.3f,\"floor_us\":%.3f,\"bytes\":%zu,\"gbps\":%.1f,\"device\":\"%s\",\"driver\":"
                   "\"%s\",\"cuda\":\"%d.%d\","
                   "\"commit\":\"%s\",\"date\":\"%s\"}%s\n",
                   r.suite.c_str(), r.geometry.c_str(), r.n, r.k, r.m, r.format.c_str(), r.kernel.c_str(),
                   r.chain.c_str(), r.us, r.floor_us, r.bytes, static_cast<double>(r.bytes) / r.us / 1e3,
                   device.name, driver_name.c_str(), runtime / 1000, runtime % 1000 / 10,
                   text("NIBBLE_COMMIT").c_str(), text("NIBBLE_DATE").c_str(),
                   i + 1 < rows_.size() ? "," : "");
    }
    std::fprintf(file, "]\n");
    std::fclose(file);
  }

 private:
  std::vector<row> rows_;
};

}  // namespace bench
