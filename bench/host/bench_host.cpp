// SPDX-License-Identifier: Apache-2.0
// How near the CPU's matrix-vector products come to the speed at which the machine reads memory.
//   bench_host [--json FILE] [--threads N] [--target NAME] [--mib N] [--commit ID] [--date DAY]
// "read" only reads, the best of several runs and of two ways (with and without prefetch), over a buffer far
// larger than the caches. Each product walks through that same buffer, so its weights always come from
// memory. The time of a row is the median of many calls; `share` is its weight bytes per second over the
// read's.
// --json writes rows {"suite","geometry","n","k","m","format","threads","us","bytes","gbps","read_gbps",
// "share","target","cpu","commit","date"}.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <nibble/core/error.hpp>
#include <nibble/host/linear.hpp>
#include <nibble/host/simd.hpp>
#include <nibble/host/thread_pool.hpp>
#include <string>
#include <vector>

namespace {

using namespace nibble::host;
using nibble::weight_format;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct geometry {
  const char* name;
  int n, k;
};

constexpr geometry geometries[] = {
    {"lm_head", 248320, 2048},   {"qkvz", 12288, 2048},      {"qkv", 9216, 2048},
    {"in_proj_qkv", 8192, 2048}, {"out_proj", 2048, 4096},   {"gate_up", 1024, 2048},
    {"shared_down", 2048, 512},  {"expert_gate", 512, 2048},
};

/// Reads [begin, end) of 64-bit words in eight sums, a shape that compilers turn into vector loads.
std::uint64_t read_words(const std::uint64_t* words, std::size_t begin, std::size_t end, bool ahead) {
  std::uint64_t sums[8] = {};
  for (std::size_t i = begin; i + 8 <= end; i += 8) {
    if (ahead)
      __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(words + i) + 4096));
    for (std::size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

volatile std::uint64_t sink;  // keeps the reads

double read_gbps(thread_pool& pool, const std::vector<std::uint64_t>& buffer) {
  double best = 1e30;
  for (int run = 0; run < 10; ++run) {
    const double begin = now();
    pool.parallel_for(static_cast<std::int64_t>(buffer.size()), 1 << 17,
                      [&](std::int64_t from, std::int64_t to) {
                        sink = read_words(buffer.data(), static_cast<std::size_t>(from),
                                          static_cast<std::size_t>(to), run % 2 == 1);
                      });
    best = std::min(best, now() - begin);
  }
  return static_cast<double>(buffer.size() * 8) / best / 1e9;
}

struct measurement {
  geometry shape;
  weight_format format;
  int m, threads;
  double seconds, bytes, read_gbps;
};

/// A weight of this shape at `at`; scales lie behind the codes.
weight_view view_at(const std::uint8_t* at, const geometry& g, weight_format format) {
  const std::size_t values = static_cast<std::size_t>(g.n) * static_cast<std::size_t>(g.k);
  if (format == weight_format::nvfp4) return nvfp4_view{at, at + values / 2, 1e-3f, g.n, g.k};
  if (format == weight_format::fp8) return fp8_view{at, 1e-3f, g.n, g.k};
  weight_view view;
  view.data = at;
  view.n = g.n;
  view.k = g.k;
  return view;
}

measurement measure(thread_pool& pool, const std::vector<std::uint64_t>& buffer, const geometry& g,
                    weight_format format, int m, double read) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(buffer.data());
  const std::size_t size = view_at(bytes, g, format).bytes(), stride = (size + 63) / 64 * 64;
  const std::size_t copies = buffer.size() * 8 / stride;
  if (copies == 0) throw nibble::error(std::string("the buffer is smaller than ") + g.name + "; raise --mib");
  std::vector<float> x(static_cast<std::size_t>(m) * static_cast<std::size_t>(g.k), 0.01f);
  std::vector<float> y(static_cast<std::size_t>(m) * static_cast<std::size_t>(g.n));
  std::vector<double> seconds;
  const double deadline = now() + 0.7;
  for (std::size_t i = 0; seconds.size() < 7 || (now() < deadline && seconds.size() < 20000); ++i) {
    const weight_view view = view_at(bytes + i % copies * stride, g, format);
    const double begin = now();
    linear(pool, view, x.data(), m, y.data());
    seconds.push_back(now() - begin);
  }
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2),
                   seconds.end());
  return {g, format, m, pool.threads(), seconds[seconds.size() / 2], static_cast<double>(size), read};
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown";
}

/// A JSON string. Names of processors and commits need no more than this.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

std::string json_row(const measurement& r, const std::string& tail) {
  char numbers[512];
  const double gbps = r.bytes / r.seconds / 1e9;
  std::snprintf(numbers, sizeof numbers,
                "{\"suite\":\"host_gemv\",\"geometry\":\"%s\",\"n\":%d,\"k\":%d,\"m\":%d,\"format\":\"%s\","
                "\"threads\":%d,"
                "\"us\":%.3f,\"bytes\":%.0f,\"gbps\":%.3f,\"read_gbps\":%.3f,\"share\":%.4f",
                r.shape.name, r.shape.n, r.shape.k, r.m, nibble::name_of(r.format).data(), r.threads,
                r.seconds * 1e6, r.bytes, gbps, r.read_gbps, gbps / r.read_gbps);
  return numbers + tail;
}

int run(const std::string& json, int threads, std::size_t mib, const std::string& commit,
        const std::string& date) {
  // Bytes without a NaN, an infinity or a subnormal in any of the three formats.
  std::vector<std::uint64_t> buffer(mib << 17);
  for (std::size_t i = 0; i < buffer.size(); ++i)
    buffer[i] =
        ((i * 0x9E3779B97F4A7C15u) & 0xBFFFBFFFBFFFBFFFu & ~0x4000400040004000u) | 0x3000300030003000u;
  std::vector<int> counts{1};
  thread_pool widest(threads);
  if (widest.threads() > 1) counts.push_back(widest.threads());
  std::vector<measurement> rows;
  std::printf("%s, %s\n", cpu_name().c_str(), simd_target().c_str());
  for (const int count : counts) {
    thread_pool pool(count);
    const double read = read_gbps(pool, buffer);
    std::printf("\n%d thread%s, read %.2f GB/s\n%-12s %7s %5s %3s %-6s %10s %8s %6s\n", count,
                count == 1 ? "" : "s", read, "geometry", "N", "K", "M", "format", "us", "GB/s", "share");
    const auto take = [&](const geometry& g, weight_format format, int m) {
      const measurement r = measure(pool, buffer, g, format, m, read);
      std::printf("%-12s %7d %5d %3d %-6s %10.1f %8.2f %5.0f%%\n", g.name, g.n, g.k, m,
                  nibble::name_of(format).data(), r.seconds * 1e6, r.bytes / r.seconds / 1e9,
                  100 * r.bytes / r.seconds / 1e9 / read);
      std::fflush(stdout);
      rows.push_back(r);
    };
    for (const geometry& g : geometries) take(g, weight_format::nvfp4, 1);
    for (const int m : {2, 4, 8, 32}) take(geometries[3], weight_format::nvfp4, m);
    for (const weight_format format : {weight_format::fp8, weight_format::bf16})
      for (const std::size_t which : {3, 4, 6}) take(geometries[which], format, 1);
  }
  if (!json.empty()) {
    const std::string tail = ",\"target\":" + quoted(simd_target()) + ",\"cpu\":" + quoted(cpu_name()) +
                             ",\"commit\":" + quoted(commit) + ",\"date\":" + quoted(date) + "}";
    std::ofstream file(json);
    for (std::size_t i = 0; i < rows.size(); ++i) file << (i == 0 ? "[" : ",\n") << json_row(rows[i], tail);
    file << "]\n";
    if (!file.flush()) throw nibble::error("cannot write " + json);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string json, commit, date;
  int threads = 0;
  std::size_t mib = 1024;
  try {
    for (int i = 1; i < argc; i += 2) {
      const std::string option = argv[i];
      if (i + 1 >= argc)
        throw nibble::error(option + " needs a value; the options are listed at the top of bench_host.cpp");
      const char* value = argv[i + 1];
      if (option == "--json")
        json = value;
      else if (option == "--threads")
        threads = std::atoi(value);
      else if (option == "--target")
        use_simd_target(value);
      else if (option == "--mib")
        mib = static_cast<std::size_t>(std::clamp(std::atoll(value), 1ll, 1ll << 20));
      else if (option == "--commit")
        commit = value;
      else if (option == "--date")
        date = value;
      else
        throw nibble::error("unknown option " + option +
                            "; known: --json --threads --target --mib --commit --date");
    }
    return run(json, threads, mib, commit, date);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "bench_host: %s\n", failure.what());
    return 2;
  }
}
