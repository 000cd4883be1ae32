// SPDX-License-Identifier: Apache-2.0
// The copy engine that brings missing experts: steps of every kind behind each other, copies that do not
// come, and the measurement at the start.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "device_test.cuh"
#include "expert_stores.cuh"
#include "nibble/moe/fetch_engine_measure.cuh"
#include "nibble/moe/placement_offload.cuh"

using namespace nibble;
using device_test::buffer;
using device_test::make_store;
using device_test::use_experts;
using moe::place_mode;

namespace {

constexpr moe::residency_shape shape = device_test::store_shape;
const launch_options chained{device_test::stream(), device_test::chained};

/// A thread that hangs: the step fails once the kernel's patience is over, and the next one works.
void stuck() {
  constexpr std::size_t slot_bytes = 128 * 9;
  const auto store = make_store(shape.total(), slot_bytes, UINT64_MAX);
  const buffer<std::uint8_t> memory(24 * slot_bytes);
  moe::expert_offload<shape> offload(*store, reinterpret_cast<std::byte*>(memory.data()), 24, 24, {},
                                     device_test::stream());
  std::atomic<bool> hang = true;
  offload.fetch_by_engine(std::make_unique<moe::copy_engine>(
      *store, reinterpret_cast<std::byte*>(memory.data()), 24, shape.experts, [&](int) {
        const auto begin = std::chrono::steady_clock::now();
        while (hang && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20))
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }));
  const buffer<std::int32_t> ids(std::vector<std::int32_t>{14, 15});
  moe::residency_counts counts;
  const auto step = [&] {
    NIBBLE_GOOD(offload.bring(2, ids.data(), 1, place_mode::decode, chained));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    NIBBLE_CUDA_CHECK(cudaMemcpy(&counts, offload.tables().counts, sizeof counts, cudaMemcpyDeviceToHost));
  };
  step();
  NIBBLE_CHECK(counts.failed == 1 && counts.misses == 2);
  step();  // launched before anybody knew: fails at once, although its experts are in the tables
  NIBBLE_CHECK(counts.failed == 2 && counts.hits == 2);
  hang = false;
  NIBBLE_CHECK(offload.failure(counts, offload.generation(), device_test::stream())
                   .find("did not answer within 5 s") != std::string::npos);
  step();
  NIBBLE_CHECK(counts.good() && counts.misses == 2);
  const auto bytes = memory.read();
  std::vector<std::int32_t> of(static_cast<std::size_t>(shape.total()));
  NIBBLE_CUDA_CHECK(cudaMemcpy(of.data(), offload.tables().slot_of, 4 * of.size(), cudaMemcpyDeviceToHost));
  for (const int id : {14, 15}) {
    const int number = 2 * shape.experts + id, at = of[static_cast<std::size_t>(number)];
    NIBBLE_CHECK(at >= 0 && std::memcmp(bytes.data() + static_cast<std::size_t>(at) * slot_bytes,
                                        store->expert(number).data(), slot_bytes) == 0);
  }
}

/// Steps that look ahead, that do not, and that stream, behind each other without waiting, while copies come
/// late: each layer finds its experts' bytes, and in the end every slot holds the expert that the tables
/// name. So many launches that they would not all find room in a stream's queue.
void mixed() {
  constexpr moe::residency_shape shape{6, 16, 2};
  constexpr std::size_t slot_bytes = 128 * 133;
  constexpr int slots = 40, rows = 3, each = rows * shape.top_k, under_way = 40;
  const auto store = make_store(shape.total(), slot_bytes, UINT64_MAX);
  const buffer<std::uint8_t> memory(slots * slot_bytes);
  moe::expert_offload<shape> offload(*store, reinterpret_cast<std::byte*>(memory.data()), slots, slots, {},
                                     device_test::stream());
  std::mt19937 lateness(11), random(12);
  offload.fetch_by_engine(std::make_unique<moe::copy_engine>(
      *store, reinterpret_cast<std::byte*>(memory.data()), slots, shape.experts, [&](int) {
        if (lateness() % 6 == 0) std::this_thread::sleep_for(std::chrono::microseconds(lateness() % 400));
      }));
  NIBBLE_CHECK(offload.looks_ahead(rows, 2) && offload.streams_layers(24) && offload.streams_ahead());
  const auto family = []<class Family>(std::type_identity<Family>, const auto& p, const launch_options& how) {
    return Family::launch(p, how);
  };
  const buffer<std::int32_t> ids(under_way * shape.layers * each), likely(ids.size());
  const buffer<unsigned> wrong_uses(std::vector<unsigned>(1, 0u));
  const auto view = offload.tables();
  for (int round = 0; round < (device_test::quick() ? 2 : 6); ++round) {
    for (const auto* to : {&ids, &likely}) {
      std::vector<std::int32_t> named(ids.size());
      // Few experts for a while, so that guesses are often right and slots are hits.
      for (auto& id : named) id = static_cast<int>(random() % (round % 2 == 0 ? 5u : 16u));
      NIBBLE_CUDA_CHECK(cudaMemcpyAsync(to->data(), named.data(), to->bytes(), cudaMemcpyHostToDevice,
                                        device_test::stream()));
      NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    }
    for (int step = 0; step < under_way; ++step) {
      const int kind = static_cast<int>(random() % 4);
      for (int layer = 0; layer < shape.layers; ++layer) {
        const std::int32_t* const now = ids.data() + (step * shape.layers + layer) * each;
        const std::int32_t* const next = likely.data() + (step * shape.layers + layer) * each;
        switch (kind) {
          case 0:
            NIBBLE_GOOD(offload.bring_ahead(layer, now, rows, place_mode::decode, {next, 2, nullptr}, chained,
                                            family));
            break;
          case 1:
            NIBBLE_GOOD(offload.bring_streaming(layer, now, rows, chained, nullptr));
            break;
          case 2:
            NIBBLE_GOOD(offload.bring_streaming(layer, now, rows, chained, nullptr, next));
            break;
          default:
            NIBBLE_GOOD(offload.bring(layer, now, rows, place_mode::decode, chained));
        }
        NIBBLE_GOOD(offload.pace(device_test::stream()));
        for (int i = 0; i < 4; ++i)  // as many launches as a layer is
          NIBBLE_GOOD(
              launch(&use_experts, dim3(each), 128, 0, chained, "use_experts", now,
                     view.slot_of + layer * shape.experts,
                     reinterpret_cast<const std::uint32_t*>(store->data() + static_cast<std::size_t>(layer) *
                                                                                shape.experts * slot_bytes),
                     reinterpret_cast<const std::uint32_t*>(memory.data()), static_cast<int>(slot_bytes / 4),
                     wrong_uses.data()));
      }
    }
    offload.finish(device_test::stream());
    moe::residency_counts counts;
    NIBBLE_CUDA_CHECK(cudaMemcpy(&counts, view.counts, sizeof counts, cudaMemcpyDeviceToHost));
    NIBBLE_CHECK(counts.good() && counts.ahead_used > 0 && counts.hits > 0);
    NIBBLE_CHECK(wrong_uses.read()[0] == 0);
    std::vector<std::int32_t> of(static_cast<std::size_t>(shape.total()));
    NIBBLE_CUDA_CHECK(cudaMemcpy(of.data(), view.slot_of, 4 * of.size(), cudaMemcpyDeviceToHost));
    const auto bytes = memory.read();
    int wrong = 0;
    for (int e = 0; e < shape.total(); ++e)
      if (const int at = of[static_cast<std::size_t>(e)]; at >= 0)
        wrong += std::memcmp(bytes.data() + static_cast<std::size_t>(at) * slot_bytes,
                             store->expert(e).data(), slot_bytes) != 0;
    NIBBLE_CHECK(wrong == 0);
  }
}

/// Both ways are measured, and both bring the experts.
void measured() {
  constexpr std::size_t slot_bytes = 128 * 1000;
  const auto store = make_store(shape.total(), slot_bytes, UINT64_MAX);
  buffer<std::uint8_t> memory(4 * slot_bytes);
  const moe::copy_engine engine(*store, reinterpret_cast<std::byte*>(memory.data()), 4, shape.experts);
  moe::fetch_params fetch;
  fetch.store = reinterpret_cast<const std::uint8_t*>(store->data()), fetch.slots = memory.data();
  fetch.slot_bytes = fetch.bytes = slot_bytes, fetch.slot_count = 4, fetch.expert_count = shape.total();
  const moe::fetch_times times = moe::measure_fetch(fetch, engine, device_test::stream());
  NIBBLE_CHECK(times.experts == 4 && times.kernel_us > 0 && times.engine_us > 0 && times.engine_us < 1e6f);
  // Each by itself into slots that hold nothing.
  const buffer<std::int32_t> list(std::vector<std::int32_t>{3, 0, 0, 0, 7, 2, 40, 0, 19, 3});
  const buffer<std::uint64_t> failures(std::vector<std::uint64_t>(1, 0));
  fetch.list = list.data();
  for (const moe::copy_engine* by : {static_cast<const moe::copy_engine*>(nullptr), &engine}) {
    memory.poison();
    NIBBLE_GOOD(moe::fetch_listed(fetch, by, failures.data(), chained));
    const auto bytes = memory.read();
    for (const auto& [expert, slot] : {std::pair{7, 2}, std::pair{40, 0}, std::pair{19, 3}})
      NIBBLE_CHECK(std::memcmp(bytes.data() + static_cast<std::size_t>(slot) * slot_bytes,
                               store->expert(expert).data(), slot_bytes) == 0);
    NIBBLE_CHECK(failures.read()[0] == 0);
  }
}

const bool registered[] = {
    device_test::add("mixed", "steps of every kind behind each other", [] { mixed(); }),
    device_test::add("stuck", "a copy that does not come fails the step", [] { stuck(); }),
    device_test::add("measured", "the measurement at the start", [] { measured(); }),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
