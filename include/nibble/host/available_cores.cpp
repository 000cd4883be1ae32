// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nibble/host/thread_pool.hpp>
#include <optional>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace nibble::host {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

std::optional<std::int64_t> number(const std::string& text) {
  std::istringstream stream(text);
  std::int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

int cores_of(std::int64_t quota, std::int64_t period) {
  if (quota <= 0 || period <= 0) return 0;
  return static_cast<int>(
      std::clamp<std::int64_t>(quota / period + (quota % period != 0 ? 1 : 0), 1, 1 << 20));
}

/// Version 2: "quota period", or "max period".
int unified_quota(const std::string& directory) {
  std::istringstream stream(read_file(directory + "/cpu.max"));
  std::string quota, period;
  if (!(stream >> quota >> period)) return 0;
  return cores_of(number(quota).value_or(0), number(period).value_or(0));
}

/// Version 1: two files; a quota of -1 is none.
int legacy_quota(const std::string& directory) {
  return cores_of(number(read_file(directory + "/cpu.cfs_quota_us")).value_or(0),
                  number(read_file(directory + "/cpu.cfs_period_us")).value_or(0));
}

/// The smallest quota from the group at `path` up to the root.
template <class Quota>
int smallest_quota(const std::string& mount, std::string path, Quota quota) {
  int smallest = 0;
  for (;;) {
    if (const int cores = quota(mount + path); cores > 0)
      smallest = smallest == 0 ? cores : std::min(smallest, cores);
    const auto slash = path.find_last_of('/');
    if (path.empty() || slash == std::string::npos) return smallest;
    path.resize(slash);
  }
}

bool lists_cpu(std::string_view controllers) {
  while (!controllers.empty()) {
    const auto comma = controllers.find(',');
    if (controllers.substr(0, comma) == "cpu") return true;
    if (comma == std::string_view::npos) return false;
    controllers.remove_prefix(comma + 1);
  }
  return false;
}

}  // namespace

int cgroup_cores(std::string_view membership, const std::string& root) {
  int smallest = 0;
  const auto take = [&](int cores) {
    if (cores > 0) smallest = smallest == 0 ? cores : std::min(smallest, cores);
  };
  // Lines of "id:controllers:path"; the unified hierarchy has no controllers.
  while (!membership.empty()) {
    const auto end = membership.find('\n');
    const std::string_view line = membership.substr(0, end);
    membership.remove_prefix(end == std::string_view::npos ? membership.size() : end + 1);
    const auto first = line.find(':');
    const auto second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    std::string path(line.substr(second + 1));
    if (path == "/") path.clear();
    if (path.find("..") != std::string::npos) path.clear();  // a group outside this namespace
    if (controllers.empty()) {
      take(smallest_quota(root, path, unified_quota));
    } else if (lists_cpu(controllers)) {
      take(smallest_quota(root + "/cpu", path, legacy_quota));
      take(smallest_quota(root + "/cpu,cpuacct", path, legacy_quota));
    }
  }
  return smallest;
}

int available_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  // The mask may be wider than cpu_set_t: ask again with a larger one.
  for (int cpus = 1024; cpus <= (1 << 18); cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    if (known) cores = CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    if (known) break;
  }
  if (const int quota = cgroup_cores(read_file("/proc/self/cgroup"), "/sys/fs/cgroup"); quota > 0)
    cores = std::min(cores, quota);
#endif
  return std::max(cores, 1);
}

}  // namespace nibble::host
