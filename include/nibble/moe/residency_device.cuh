// SPDX-License-Identifier: Apache-2.0
/// \file
/// The tables of resident experts on a device, what they start with, and host memory locked for kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/moe/expert_store.hpp"
#include "nibble/moe/fetch_types.hpp"
#include "nibble/moe/residency.hpp"

namespace nibble::moe {

/// Locks pages through cudaHostRegister.
class cuda_page_locker final : public page_locker {
 public:
  explicit cuda_page_locker(int device) : device_(device) {}
  void enter_thread() override { static_cast<void>(cudaSetDevice(device_)); }
  std::string lock(std::byte* at, std::uint64_t bytes) override {
    constexpr unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    if (const cudaError_t e = cudaHostRegister(at, bytes, flags); e != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return cudaGetErrorString(e);
    }
    // Experts are found by arithmetic on one address, so the device must know the pages by the host's.
    void* seen = nullptr;
    if (cudaHostGetDevicePointer(&seen, at, 0) != cudaSuccess || seen != at) {
      static_cast<void>(cudaGetLastError());
      static_cast<void>(cudaHostUnregister(at));
      return "the device does not share the host's addresses";
    }
    return {};
  }
  void unlock(std::byte* at) override { static_cast<void>(cudaHostUnregister(at)); }

 private:
  int device_;
};

/// The NUMA node that a device hangs on, for expert_store_options; -1 where the system does not say.
[[nodiscard]] inline int numa_node_of_device(int device) {
  char id[32] = {};
  if (cudaDeviceGetPCIBusId(id, static_cast<int>(sizeof id), device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return -1;
  }
  std::string path = std::string("/sys/bus/pci/devices/") + id + "/numa_node";
  std::transform(path.begin(), path.end(), path.begin(),
                 [](char c) { return c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c; });
  int node = -1;
  if (std::FILE* file = std::fopen(path.c_str(), "r"); file != nullptr) {
    if (std::fscanf(file, "%d", &node) != 1) node = -1;
    std::fclose(file);
  }
  return node;
}

/// Owns the tables. Everything here waits for `stream`: it is for the start, for changes of the pool, for
/// failures and for the end, never for a step.
class device_residency {
 public:
  /// \param scales of every expert, by number  \param most_slots that the pool may ever have
  device_residency(const residency_shape& shape, int most_slots, std::span<const expert_scales> scales)
      : shape_(shape),
        layout_(residency_layout_of(shape, most_slots)),
        most_slots_(most_slots),
        memory_(layout_.bytes) {
    if (!shape.valid() || most_slots < 1 || most_slots > shape.total() ||
        scales.size() != static_cast<std::size_t>(shape.total()))
      throw error("residency: tables for a shape, a number of slots or scales that cannot be");
    require(
        runtime_status(cudaMemset(memory_.data(), 0, layout_.bytes), where, "the tables were not cleared"));
    copy_to_device(memory_.data() + layout_.expert_scales, scales.data(), scales.size_bytes());
  }

  [[nodiscard]] static std::uint64_t bytes(const residency_shape& shape, int most_slots) {
    return residency_layout_of(shape, most_slots).bytes;
  }
  [[nodiscard]] const residency_shape& shape() const { return shape_; }
  /// Slots that the tables have rows for, closed ones among them.
  [[nodiscard]] int slot_count() const { return slots_; }
  /// What kernels take. It does not change while tables with the same most_slots() are set, so graphs
  /// captured with it stay valid while the pool grows and shrinks.
  [[nodiscard]] residency_view view() const { return residency_view_of(layout_, memory_.data(), slots_); }

  /// Takes over the host's tables, clock included; counts begin at zero and lists are empty.
  void set(const host_residency& from, cudaStream_t stream) {
    if (from.shape() != shape_ || from.most_slots() > most_slots_)
      throw error("residency: tables of another shape or of too many slots");
    slots_ = from.most_slots();
    const residency_view v = view();
    std::vector<float> slot_scales(3 * static_cast<std::size_t>(slots_), 0.0f);
    const std::vector<expert_scales> scales =
        read<expert_scales>(v.expert_scales, static_cast<std::size_t>(shape_.total()), stream);
    for (int s = 0; s < slots_; ++s)
      if (const int e = from.expert_of()[static_cast<std::size_t>(s)]; e >= 0)
        std::memcpy(&slot_scales[3 * static_cast<std::size_t>(s)], &scales[static_cast<std::size_t>(e)], 12);
    const std::uint32_t now = from.clock();
    const residency_counts zero;
    write(v.slot_of, from.slot_of(), stream);
    write(v.expert_of, from.expert_of(), stream);
    write(v.slot_key, from.slot_key(), stream);
    write(v.worth, from.worth(), stream);
    write(v.slot_scales, std::span<const float>(slot_scales), stream);
    write(v.clock, std::span(&now, 1), stream);
    write(v.counts, std::span(&zero, 1), stream);
    require(runtime_status(cudaMemsetAsync(v.lists, 0, layout_.bytes - layout_.lists, stream), where,
                           "the lists were not cleared"));
    wait(stream);
  }
  /// The tables as they are now, for set() after the pool was resized or entries were forgotten, and for
  /// save_worth().
  [[nodiscard]] host_residency get(cudaStream_t stream) const {
    const residency_view v = view();
    return host_residency::of_tables(
        shape_, read<std::int32_t>(v.slot_of, total(), stream),
        read<std::int32_t>(v.expert_of, slots(), stream), read<std::uint32_t>(v.slot_key, slots(), stream),
        read<std::uint32_t>(v.worth, total(), stream), read<std::uint32_t>(v.clock, 1, stream)[0]);
  }
  /// Counts of everything the stream has done.
  [[nodiscard]] residency_counts counts(cudaStream_t stream) const {
    return read<residency_counts>(view().counts, 1, stream)[0];
  }

 private:
  static constexpr const char* where = "nibble::moe::device_residency";
  [[nodiscard]] std::size_t total() const { return static_cast<std::size_t>(shape_.total()); }
  [[nodiscard]] std::size_t slots() const { return static_cast<std::size_t>(slots_); }
  static void wait(cudaStream_t stream) {
    require(runtime_status(cudaStreamSynchronize(stream), where, "work on the stream failed"));
  }
  template <class T, class Source>
  static void write(T* to, Source from, cudaStream_t stream) {
    require(
        runtime_status(cudaMemcpyAsync(to, from.data(), from.size_bytes(), cudaMemcpyHostToDevice, stream),
                       where, "a table was not written"));
    wait(stream);
  }
  template <class T>
  static std::vector<T> read(const void* from, std::size_t count, cudaStream_t stream) {
    std::vector<T> out(count);
    require(
        runtime_status(cudaMemcpyAsync(out.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
                       where, "a table was not read"));
    wait(stream);
    return out;
  }

  residency_shape shape_;
  residency_layout layout_;
  int most_slots_ = 0, slots_ = 0;
  device_memory memory_;
};

/// Whole experts of a store into slots; what list names them is the caller's to say.
[[nodiscard]] inline fetch_params whole_experts(const expert_store& store, std::byte* slots, int slot_count) {
  fetch_params f;
  f.store = reinterpret_cast<const std::uint8_t*>(store.data());
  f.slots = reinterpret_cast<std::uint8_t*>(slots);
  f.slot_bytes = f.bytes = store.slot_bytes();
  f.slot_count = slot_count, f.expert_count = store.count();
  return f;
}

/// Copies experts into slots with the copy engine; those that are not page-locked too, which the driver
/// stages. For the start: a step fetches by kernel. Returns when all have arrived.
[[nodiscard]] inline status bring_experts(const expert_store& store, std::span<const fetch_entry> entries,
                                          std::byte* slots, cudaStream_t stream) {
  static constexpr const char* where = "nibble::moe::bring_experts";
  const std::size_t bytes = store.slot_bytes();
  for (const fetch_entry& entry : entries) {
    if (entry.number < 0 || entry.number >= store.count() || entry.slot < 0)
      return status::invalid(where, "an entry names no expert or no slot");
    if (const cudaError_t e =
            cudaMemcpyAsync(slots + static_cast<std::size_t>(entry.slot) * bytes,
                            store.expert(entry.number).data(), bytes, cudaMemcpyHostToDevice, stream);
        e != cudaSuccess)
      return runtime_status(e, where, "an expert could not be copied");
  }
  return runtime_status(cudaStreamSynchronize(stream), where, "an expert could not be copied");
}

}  // namespace nibble::moe
