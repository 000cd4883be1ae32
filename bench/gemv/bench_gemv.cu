// SPDX-License-Identifier: Apache-2.0
// bench_gemv [--json FILE] [--tokens 1,2,8] [--many 64,4096] [--only TEXT] [--rotate-outputs] [--no-plain]
//            [--no-cublas] [--no-many]
//
// Times every compiled geometry with weights streamed from memory, plain and chained (programmatic dependent
// launch), next to a kernel that only reads the same bytes and cuBLASLt over the same matrix in bf16, all in
// one run. The cases are chosen when the benchmark is built: see cases.py.
#include <cstring>

#include "dense.cuh"
#include "experts.cuh"

namespace {

using nibble::weight_format;

std::vector<int> numbers(const char* text, int least, int most) {
  std::vector<int> out;
  for (const char* p = text; *p != '\0';) {
    char* end = nullptr;
    const long v = std::strtol(p, &end, 10);
    if (end == p || v < least || v > most) {
      std::fprintf(
          stderr,
          "--tokens takes numbers from 1 to 16, --many from 17 to 16384, commas between them, not %s\n",
          text);
      std::exit(2);
    }
    out.push_back(static_cast<int>(v));
    p = *end == ',' ? end + 1 : end;
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  bench::dense_options options;
  std::string json, only;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const bool value = i + 1 < argc;
    if (a == "--json" && value)
      json = argv[++i];
    else if (a == "--tokens" && value)
      options.tokens = numbers(argv[++i], 1, 16);
    else if (a == "--many" && value)
      options.many = numbers(argv[++i], 17, 16384);
    else if (a == "--no-many")
      options.many.clear();
    else if (a == "--only" && value)
      only = argv[++i];
    else if (a == "--rotate-outputs")
      options.rotate_outputs = true;
    else if (a == "--no-plain")
      options.plain = false;
    else if (a == "--no-cublas")
      options.cublas = false;
    else {
      std::fprintf(stderr,
                   "usage: bench_gemv [--json FILE] [--tokens 1,2,8] [--many 64,4096] [--only TEXT] "
                   "[--rotate-outputs] "
                   "[--no-plain] [--no-cublas] [--no-many]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "bench_gemv: no CUDA device\n");
    return 4;
  }
  bench::report out;
  bench::cublas_lt cublas;
  if (options.cublas && !cublas.available())
    std::printf("cuBLASLt was not found; set NIBBLE_CUBLASLT to its path\n");
  const auto wanted = [&](const std::string& name) {
    return only.empty() || name.find(only) != std::string::npos;
  };
#define BENCH_DENSE(form, rows, columns)                                                          \
  {                                                                                               \
    constexpr nibble::resident_layout layout{nibble::matrix(rows, columns, weight_format::form)}; \
    if (wanted(layout.shape.name()))                                                              \
      bench::dense<layout, nibble::store<__nv_bfloat16>>(out, options, cublas);                   \
  }
#define BENCH_EXPERTS(hidden, inner, count, top_k, shared)                                                 \
  if (wanted("experts")) {                                                                                 \
    constexpr nibble::moe::experts_shape shape{hidden, inner, count, top_k, shared, weight_format::nvfp4}; \
    bench::experts<shape>(out, options.tokens, options.many);                                              \
  }
#include "cases.inc"
#undef BENCH_DENSE
#undef BENCH_EXPERTS
  if (!json.empty()) out.write(json);
  return 0;
}
