// SPDX-License-Identifier: Apache-2.0
/// \file
/// Counts what the driver loads and allocates, through CUPTI callbacks; nothing else is slowed down.
///
/// CUPTI is opened at run time: from $NIBBLE_CUPTI, the loader's path, or the toolkit's usual folders.
/// Without it available() is false, and a test has to do with free memory and cuFuncIsLoaded.
#pragma once

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#if __has_include(<cupti.h>)
#include <cupti.h>
#define NIBBLE_TEST_HAS_CUPTI 1
#endif

namespace device_test {

struct activity {
  long module_loads = 0;    ///< modules and libraries that became resident, and calls that load functions
  long allocations = 0;     ///< device or pinned memory, address space, mappings
  long instantiations = 0;  ///< executable graphs
  std::vector<std::string> calls;  ///< the first ones, by the driver's name

  [[nodiscard]] bool none() const { return module_loads == 0 && allocations == 0 && instantiations == 0; }
  [[nodiscard]] std::string text() const {
    std::string out = std::to_string(module_loads) + " loads, " + std::to_string(allocations) +
                      " allocations, " + std::to_string(instantiations) + " instantiations";
    for (const auto& call : calls) out += ", " + call;
    return out;
  }
};

#if defined(NIBBLE_TEST_HAS_CUPTI)

/// Counts from its construction to stop() or its end, on all threads. One at a time.
class activity_counter {
 public:
  activity_counter() {
    if (!open()) return;
    if (subscribe_(&subscriber_, &activity_counter::called, this) != CUPTI_SUCCESS) return;
    for (std::uint32_t id = 1; id < CUPTI_DRIVER_TRACE_CBID_SIZE; ++id) {
      const char* name = nullptr;
      if (name_(CUPTI_CB_DOMAIN_DRIVER_API, id, &name) != CUPTI_SUCCESS || name == nullptr) continue;
      if (kind_of(name) != kind::other)
        static_cast<void>(enable_(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, id));
    }
    available_ =
        enable_(1, subscriber_, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED) == CUPTI_SUCCESS;
  }
  activity_counter(const activity_counter&) = delete;
  activity_counter& operator=(const activity_counter&) = delete;
  ~activity_counter() { static_cast<void>(stop()); }

  [[nodiscard]] bool available() const { return available_; }
  [[nodiscard]] activity counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  /// Counts again from zero.
  void reset() {
    const std::lock_guard lock(mutex_);
    counts_ = {};
  }
  activity stop() {
    if (subscriber_ != nullptr) static_cast<void>(unsubscribe_(subscriber_));
    subscriber_ = nullptr;
    return counts();
  }

 private:
  enum class kind { other, load, allocation, instantiation };

  static kind kind_of(std::string_view name) {
    const auto begins = [name](std::initializer_list<std::string_view> prefixes) {
      for (const auto prefix : prefixes)
        if (name.substr(0, prefix.size()) == prefix) return true;
      return false;
    };
    if (begins({"cuModuleLoad", "cuLibraryLoad", "cuFuncLoad", "cuLinkCreate"})) return kind::load;
    if (begins({"cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuMemCreate", "cuMemMap",
                "cuMemAddressReserve", "cuMemAllocManaged", "cuArrayCreate", "cuMipmappedArrayCreate",
                "cuMemPoolCreate"}))
      return kind::allocation;
    if (begins({"cuGraphInstantiate"})) return kind::instantiation;
    return kind::other;
  }

  static void CUPTIAPI called(void* self, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                              const void* data) {
    auto& counter = *static_cast<activity_counter*>(self);
    const std::lock_guard lock(counter.mutex_);
    if (domain == CUPTI_CB_DOMAIN_RESOURCE) {
      ++counter.counts_.module_loads;
      counter.note("module loaded");
      return;
    }
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    if (call.callbackSite != CUPTI_API_ENTER || call.functionName == nullptr) return;
    switch (kind_of(call.functionName)) {
      case kind::load:
        ++counter.counts_.module_loads;
        break;
      case kind::allocation:
        ++counter.counts_.allocations;
        break;
      case kind::instantiation:
        ++counter.counts_.instantiations;
        break;
      case kind::other:
        return;
    }
    counter.note(call.functionName);
    static_cast<void>(id);
  }
  void note(const char* name) {
    if (counts_.calls.size() < 8) counts_.calls.emplace_back(name);
  }

  bool open() {
    std::vector<std::string> paths;
    if (const char* given = std::getenv("NIBBLE_CUPTI")) paths.emplace_back(given);
    for (const char* path :
         {"libcupti.so.13", "libcupti.so", "/usr/local/cuda/lib64/libcupti.so",
          "/usr/local/cuda/lib/libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"})
      paths.emplace_back(path);
    static void* library = nullptr;  // CUPTI does not like to be unloaded
    for (std::size_t i = 0; library == nullptr && i < paths.size(); ++i)
      library = ::dlopen(paths[i].c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto find = [](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      return function != nullptr;
    };
    return find(subscribe_, "cuptiSubscribe") && find(unsubscribe_, "cuptiUnsubscribe") &&
           find(enable_, "cuptiEnableCallback") && find(name_, "cuptiGetCallbackName");
  }

  decltype(&cuptiSubscribe) subscribe_ = nullptr;
  decltype(&cuptiUnsubscribe) unsubscribe_ = nullptr;
  decltype(&cuptiEnableCallback) enable_ = nullptr;
  decltype(&cuptiGetCallbackName) name_ = nullptr;
  CUpti_SubscriberHandle subscriber_ = nullptr;
  bool available_ = false;
  std::mutex mutex_;
  activity counts_;
};

#else

class activity_counter {
 public:
  [[nodiscard]] bool available() const { return false; }
  [[nodiscard]] activity counts() { return {}; }
  void reset() {}
  activity stop() { return {}; }
};

#endif

}  // namespace device_test
