// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nibble/host/thread_pool.hpp>
#include <stdexcept>
#include <thread>

#include "kernel_test.hpp"

using nibble::host::thread_pool;

TEST_CASE("thread pool: every index once, in ranges of at most the grain") {
  thread_pool pool;
  CHECK(pool.threads() >= 1);
  CHECK(pool.threads() <= nibble::host::available_cores());
  for (const std::int64_t n : {0, 1, 2, 7, 64, 1000, 4096})
    for (const std::int64_t grain : {0, 1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
      std::atomic<int> wrong{0};
      pool.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
        if (begin >= end || end - begin > std::max<std::int64_t>(grain, 1)) ++wrong;
        for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
      });
      for (const auto& count : seen) wrong += count != 1;
      INFO("n " << n << ", grain " << grain);
      CHECK(wrong == 0);
    }
}

TEST_CASE("thread pool: many short loops, with pauses long enough to sleep") {
  thread_pool pool;
  std::atomic<std::int64_t> sum{0};
  for (int round = 0; round < 2000; ++round) {
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    pool.parallel_for(8, 1, [&](std::int64_t begin, std::int64_t) { sum += begin; });
  }
  CHECK(sum == 2000 * 28);
}

TEST_CASE("thread pool: an exception comes back to the caller and the pool works on") {
  thread_pool pool;
  for (int round = 0; round < 50; ++round) {
    std::string text;
    try {
      pool.parallel_for(100, 1, [](std::int64_t begin, std::int64_t) {
        if (begin == 37) throw std::runtime_error("index 37");
      });
    } catch (const std::runtime_error& e) {
      text = e.what();
    }
    CHECK(text == "index 37");
  }
  std::atomic<int> count{0};
  pool.parallel_for(100, 1, [&](std::int64_t, std::int64_t) { ++count; });
  CHECK(count == 100);
}

TEST_CASE("thread pool: a loop inside a loop runs inline") {
  thread_pool pool;
  std::atomic<int> count{0}, foreign{0};
  pool.parallel_for(16, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    pool.parallel_for(10, 1, [&](std::int64_t, std::int64_t) {
      ++count;
      if (std::this_thread::get_id() != self) ++foreign;
    });
  });
  CHECK(count == 160);
  if (pool.threads() > 1) CHECK(foreign == 0);
}

TEST_CASE("thread pool: two callers and two pools at once") {
  thread_pool first, second(2);
  std::atomic<int> count{0};
  const auto work = [&](thread_pool& pool) {
    for (int i = 0; i < 300; ++i) pool.parallel_for(20, 1, [&](std::int64_t, std::int64_t) { ++count; });
  };
  std::thread a([&] { work(first); }), b([&] { work(first); }), c([&] { work(second); });
  a.join();
  b.join();
  c.join();
  CHECK(count == 3 * 300 * 20);
}

TEST_CASE("thread pool: a request is lowered to the cores there are") {
  CHECK(thread_pool(1).threads() == 1);
  CHECK(thread_pool(100000).threads() == nibble::host::available_cores());
}

TEST_CASE("thread pool: control-group quotas") {
  namespace fs = std::filesystem;
  const fs::path root =
      fs::temp_directory_path() / ("nibble_cgroup_" + std::to_string(std::random_device{}()));
  const auto write = [&](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("a/b/cpu.max", "250000 100000\n");
  write("a/cpu.max", "max 100000\n");
  write("tight/inner/cpu.max", "max 100000\n");
  write("tight/cpu.max", "50000 100000\n");
  write("cpu/docker/x/cpu.cfs_quota_us", "400000\n");
  write("cpu/docker/x/cpu.cfs_period_us", "100000\n");
  write("cpu/free/cpu.cfs_quota_us", "-1\n");
  write("cpu/free/cpu.cfs_period_us", "100000\n");
  write("bad/cpu.max", "fast please\n");
  const auto cores = [&](const char* membership) {
    return nibble::host::cgroup_cores(membership, root.string());
  };
  CHECK(cores("0::/a/b\n") == 3);          // 2.5, rounded up
  CHECK(cores("0::/a\n") == 0);            // no quota
  CHECK(cores("0::/tight/inner\n") == 1);  // half a core of the parent
  CHECK(cores("3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n") == 4);
  CHECK(cores("3:cpu:/free\n") == 0);
  CHECK(cores("3:cpu:/docker/x\n0::/a/b") == 3);
  CHECK(cores("0::/bad\n") == 0);
  CHECK(cores("0::/\n") == 0);
  CHECK(cores("0::/../a/b\n") == 0);
  CHECK(cores("") == 0);
  CHECK(cores("nonsense\n:\n::\n") == 0);
  fs::remove_all(root);
}
