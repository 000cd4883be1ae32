// SPDX-License-Identifier: Apache-2.0
/// \file
/// A small harness for tests that need a GPU: groups by name, exit code 4 where there is no device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "nibble/core/launch.cuh"
#include "nibble/core/status.hpp"

namespace device_test {

/// Whether a short run is wanted that launches everything all the same: NIBBLE_TEST_QUICK is set. For tools
/// under which kernels are slow.
inline bool quick() {
  static const bool set = std::getenv("NIBBLE_TEST_QUICK") != nullptr;
  return set;
}

/// Chained where the build's devices can.
inline constexpr nibble::launch_chain chained = nibble::chain_of(nibble::default_device);
/// Local memory of a thread that kernels may have: none on the measured class, elsewhere what a preload
/// allows.
inline constexpr int allowed_local_bytes = nibble::default_device.measured ? 0 : 128;

struct test {
  std::string group, name;
  std::function<void()> body;
};
inline std::vector<test>& tests() {
  static std::vector<test> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}
inline bool add(std::string group, std::string name, std::function<void()> body) {
  tests().push_back({std::move(group), std::move(name), std::move(body)});
  return true;
}
inline std::string& current() {
  static std::string name;
  return name;
}

inline void check(bool good, const char* text, const char* file, int line) {
  if (good) return;
  if (++failures() <= 40) std::printf("FAILED %s: %s (%s:%d)\n", current().c_str(), text, file, line);
}
inline void cuda(cudaError_t error, const char* text, const char* file, int line) {
  if (error == cudaSuccess) return;
  std::printf("FAILED %s: %s: %s (%s:%d)\n", current().c_str(), text, cudaGetErrorString(error), file, line);
  std::exit(1);  // the context may be gone: nothing after this would mean anything
}
inline void good(nibble::status s, const char* file, int line) {
  if (s.ok()) return;
  std::printf("FAILED %s: %s: %s (%d: %s) (%s:%d)\n", current().c_str(), s.where, s.text, s.cuda_error,
              cudaGetErrorString(static_cast<cudaError_t>(s.cuda_error)), file, line);
  std::exit(1);
}

#define NIBBLE_CHECK(condition) device_test::check((condition), #condition, __FILE__, __LINE__)
#define NIBBLE_CUDA_CHECK(call) device_test::cuda((call), #call, __FILE__, __LINE__)
#define NIBBLE_GOOD(call) device_test::good((call), __FILE__, __LINE__)

/// Ends the program as skipped where there is no device, also before main: tests keep streams as constants.
inline void need_device() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return;
  std::printf("skipped: no CUDA device\n");
  std::fflush(stdout);
  std::_Exit(4);
}

inline cudaStream_t stream() {
  static const cudaStream_t s = [] {
    need_device();
    cudaStream_t made;
    NIBBLE_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
  }();
  return s;
}

/// Device memory of exactly `count` elements, bytes 0xFF (NaN in every float format) until copied into.
template <class T>
class buffer {
 public:
  explicit buffer(std::size_t count) : count_(count) {
    NIBBLE_CUDA_CHECK(cudaMalloc(&data_, bytes()));
    poison();
  }
  explicit buffer(const std::vector<T>& values) : buffer(values.size()) {
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(data_, values.data(), bytes(), cudaMemcpyHostToDevice, stream()));
  }
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  ~buffer() { cudaFree(data_); }
  void poison() {
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(data_, 0xFF, bytes(), stream()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream()));
  }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> out(count_);
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(stream()));
    NIBBLE_CUDA_CHECK(cudaMemcpy(out.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return out;
  }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

template <class T>
bool untouched(const T& value) {
  unsigned char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  for (const unsigned char byte : raw)
    if (byte != 0xFF) return false;
  return true;
}

/// Runs the tests of one group (all without an argument). \return 0 good, 1 failed; ends with 4 without a
/// device
inline int run(int argc, char** argv) {
  need_device();
  const std::string group = argc > 1 ? argv[1] : "";
  int count = 0;
  for (const test& t : tests()) {
    if (!group.empty() && t.group != group) continue;
    current() = t.group + ": " + t.name;
    t.body();
    ++count;
  }
  NIBBLE_CUDA_CHECK(cudaDeviceSynchronize());
  std::printf("%d tests of %s, %d failed checks\n", count, group.empty() ? "all groups" : group.c_str(),
              failures());
  if (count == 0) std::printf("FAILED: no test of that group\n");
  return failures() != 0 || count == 0 ? 1 : 0;
}

}  // namespace device_test
