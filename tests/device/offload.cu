// SPDX-License-Identifier: Apache-2.0
// expert_offload as a backend uses it: warm starts, failures, pools that shrink and grow, prefill a layer
// ahead, and the CPU's share of the misses.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "device_test.cuh"
#include "expert_stores.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/moe/placement_offload.cuh"

using namespace nibble;
using device_test::buffer;
using device_test::make_store;
using device_test::use_experts;
using moe::place_mode;

namespace {

constexpr moe::residency_shape shape = device_test::store_shape;
const launch_options chained{device_test::stream(), device_test::chained};

/// The whole: starts warm, serves, fails a step and goes on, shrinks and grows under the same view.
/// \param engine the copy engine brings what is missing, some of it late
void together(int locked_experts, bool engine) {
  device_test::prepare_kernels<moe::beside_fetch_family>();
  const std::size_t slot_bytes = 128 * 33;
  const auto store =
      make_store(shape.total(), slot_bytes,
                 locked_experts == shape.total() ? UINT64_MAX  // the last piece ends with a page
                                                 : static_cast<std::uint64_t>(locked_experts) * slot_bytes);
  NIBBLE_CHECK(store->locked() <= locked_experts && (store->locked() > 0) == (locked_experts > 0));
  constexpr int most = 40;
  const buffer<std::uint8_t> slots(most * slot_bytes);
  std::atomic<int> fail_at = -1;
  std::vector<std::uint32_t> worth(static_cast<std::size_t>(shape.total()), moe::worth_never);
  for (int e = 20; e < 30; ++e)
    worth[static_cast<std::size_t>(e)] = moe::clock_start + static_cast<unsigned>(e);
  moe::expert_offload<shape> offload(*store, reinterpret_cast<std::byte*>(slots.data()), 12, most, worth,
                                     device_test::stream(), [&](int number, std::span<std::byte> out) {
                                       if (number == fail_at) throw nibble::error("gone");
                                       std::memcpy(out.data(), store->expert(number).data(), out.size());
                                     });
  std::mt19937 lateness(5);
  if (engine)
    offload.fetch_by_engine(std::make_unique<moe::copy_engine>(
        *store, reinterpret_cast<std::byte*>(slots.data()), most, shape.experts, [&](int number) {
          if (lateness() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(lateness() % 300));
          if (number == fail_at) throw nibble::error("gone");
        }));
  NIBBLE_CHECK(offload.fetches_by_engine() == engine);
  NIBBLE_CHECK(offload.most_rows() == 6);
  const auto resident = [&] {
    const auto v = offload.tables();
    std::vector<std::int32_t> of(static_cast<std::size_t>(shape.total()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    NIBBLE_CUDA_CHECK(cudaMemcpy(of.data(), v.slot_of, 4 * of.size(), cudaMemcpyDeviceToHost));
    const auto bytes = slots.read();
    int count = 0;
    for (int e = 0; e < shape.total(); ++e)
      if (of[e] >= 0) {
        ++count;
        if (std::memcmp(bytes.data() + of[e] * slot_bytes, store->expert(e).data(), slot_bytes) != 0)
          return -1;
      }
    return count;
  };
  NIBBLE_CHECK(resident() == 12);
  std::mt19937 random(9);
  const buffer<std::int32_t> ids(64);
  const pinned_memory counts_memory(sizeof(moe::residency_counts));
  auto* const counts = counts_memory.as<moe::residency_counts>();
  const auto step = [&](int rows) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      std::vector<std::int32_t> named(static_cast<std::size_t>(rows * shape.top_k));
      for (auto& id : named) id = static_cast<int>(random() % 16);
      NIBBLE_CUDA_CHECK(cudaMemcpyAsync(ids.data(), named.data(), 4 * named.size(), cudaMemcpyHostToDevice,
                                        device_test::stream()));
      NIBBLE_GOOD(offload.bring(layer, ids.data(), rows, moe::place_mode::decode, chained));
      NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    }
    NIBBLE_GOOD(offload.read_counts(counts, device_test::stream()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    return offload.failure(*counts, offload.generation(), device_test::stream());
  };
  const auto* const address = offload.tables().slot_of;
  for (int i = 0; i < 20; ++i) NIBBLE_CHECK(step(1 + i % 3).empty());
  NIBBLE_CHECK(resident() == 12);
  offload.resize(most, device_test::stream());
  for (int i = 0; i < 60; ++i) NIBBLE_CHECK(step(2).empty());
  NIBBLE_CHECK(resident() == most);
  offload.resize(4, device_test::stream());
  NIBBLE_CHECK(offload.tables().slot_of == address && offload.tables().slot_count == most);
  for (int i = 0; i < 20; ++i) NIBBLE_CHECK(step(2).empty());
  NIBBLE_CHECK(resident() == 4);
  NIBBLE_CHECK(step(8).find("found no slot") != std::string::npos);
  NIBBLE_CHECK(resident() == 0);
  NIBBLE_CHECK(step(1).empty());
  // A step behind one that failed, launched before anybody knew: it fails too, and nothing is repaired twice.
  const auto bad = [&] {
    moe::residency_counts c;
    c.unplaced = 1;
    return c;
  }();
  const std::uint64_t before = offload.generation();
  NIBBLE_CHECK(!offload.failure(bad, before, device_test::stream()).empty());
  NIBBLE_CHECK(offload.generation() == before + 1 && resident() == 0);
  NIBBLE_CHECK(step(1).empty());
  const int kept = resident();
  NIBBLE_CHECK(kept > 0 && !offload.failure(bad, before, device_test::stream()).empty());
  NIBBLE_CHECK(offload.generation() == before + 1 && resident() == kept);
  // A step that was not launched to its end: what it placed may not have come.
  offload.abandon(device_test::stream());
  NIBBLE_CHECK(offload.generation() == before + 2 && resident() == 0);
  NIBBLE_CHECK(step(1).empty() && resident() > 0);
  if (locked_experts < shape.total() || engine) {
    fail_at = 47;
    std::string what;
    for (int i = 0; i < 400 && what.empty(); ++i) what = step(2);
    NIBBLE_CHECK(what.find("gone") != std::string::npos);
    fail_at = -1;
    for (int i = 0; i < 20; ++i) NIBBLE_CHECK(step(2).empty());
    NIBBLE_CHECK(resident() == 4);
  }
  // Prefill, a layer ahead: all that is asked for is there when the layer's kernels may run.
  offload.resize(most, device_test::stream());
  cudaStream_t side;
  NIBBLE_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  for (int i = 0; i < 6; ++i)
    for (int layer = 0; layer < shape.layers; ++layer) {
      std::vector<std::int32_t> named(32);
      for (auto& id : named) id = static_cast<int>(random() % 16);
      NIBBLE_CHECK(offload.streams_layers(24));
      NIBBLE_CUDA_CHECK(
          cudaMemcpyAsync(ids.data(), named.data(), 128, cudaMemcpyHostToDevice, device_test::stream()));
      NIBBLE_GOOD(offload.bring_streaming(layer, ids.data(), 16, chained, side));
      NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
      std::vector<std::int32_t> of(static_cast<std::size_t>(shape.total()));
      NIBBLE_CUDA_CHECK(
          cudaMemcpy(of.data(), offload.tables().slot_of, 4 * of.size(), cudaMemcpyDeviceToHost));
      const auto bytes = slots.read();
      int missing = 0;
      for (const int id : named) {
        const int number = layer * shape.experts + id, at = of[static_cast<std::size_t>(number)];
        missing += at >= 0 && std::memcmp(bytes.data() + at * slot_bytes, store->expert(number).data(),
                                          slot_bytes) == 0
                       ? 0
                       : 1;
      }
      NIBBLE_CHECK(missing == 0);
    }
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(side));
  NIBBLE_CUDA_CHECK(cudaStreamDestroy(side));
  offload.finish(device_test::stream());
  NIBBLE_CHECK(resident() > 4);
  const auto saved = offload.worth(device_test::stream());
  NIBBLE_CHECK(*std::max_element(saved.begin(), saved.end()) > moe::worth_least);
}

/// A layer ahead in captured steps, several of them behind each other, of more layers than guesses are under
/// way: whatever guesses foresee, foresee in part or do not, each layer finds its experts' bytes when it
/// computes, the tables are the host's in the end, and every slot holds the expert that they name. Chained as
/// a server's steps are: only what waits for demand and guesses, the layer's product, is launched plainly, so
/// a layer's placement and demand begin early beside the guesses for it.
void ahead(bool engine) {
  constexpr moe::residency_shape shape{6, 16, 2};
  device_test::prepare_kernels<moe::beside_fetch_family>();
  constexpr std::size_t slot_bytes = 128 * 133;
  const auto store = make_store(shape.total(), slot_bytes, UINT64_MAX);
  cudaStream_t side;
  NIBBLE_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  const auto family = []<class Family>(std::type_identity<Family>, const auto& p, const launch_options& how) {
    return Family::launch(p, how);
  };
  for (const int rows : {1, 3})
    for (const int limit : {1, 4}) {
      const int slots = moe::slots_to_look_ahead(shape, rows, limit) + (limit == 1 ? 0 : 5);
      const buffer<std::uint8_t> memory(static_cast<std::size_t>(slots) * slot_bytes);
      moe::expert_offload<shape> offload(*store, reinterpret_cast<std::byte*>(memory.data()), slots, slots,
                                         {}, device_test::stream());
      std::mt19937 lateness(7);
      if (engine)
        offload.fetch_by_engine(std::make_unique<moe::copy_engine>(
            *store, reinterpret_cast<std::byte*>(memory.data()), slots, shape.experts, [&](int) {
              if (lateness() % 8 == 0)
                std::this_thread::sleep_for(std::chrono::microseconds(lateness() % 200));
            }));
      NIBBLE_CHECK(offload.joins(1) != engine && !offload.joins(0));
      NIBBLE_CHECK(offload.looks_ahead(rows, limit) && !offload.looks_ahead(moe::most_ahead_rows + 1, limit));
      moe::host_residency host(shape, slots);
      static_cast<void>(
          host.warm(std::vector<std::uint32_t>(static_cast<std::size_t>(shape.total()), moe::worth_never)));
      const auto each = static_cast<std::size_t>(rows * shape.top_k);
      const buffer<std::int32_t> ids(each * shape.layers), likely(each * shape.layers);
      const buffer<unsigned> wrong_uses(std::vector<unsigned>(1, 0u));
      const auto step = [&] {
        for (int layer = 0; layer < shape.layers; ++layer) {
          const launch_options how{device_test::stream(), device_test::chained};
          const std::size_t at = static_cast<std::size_t>(layer) * each;
          NIBBLE_GOOD(offload.bring_ahead(layer, ids.data() + at, rows, place_mode::decode,
                                          {likely.data() + at, limit, side}, how, family));
          const auto v = offload.tables();
          const launch_options product{device_test::stream(),
                                       offload.joins(layer) ? launch_chain::plain : device_test::chained};
          NIBBLE_GOOD(
              launch(&use_experts, dim3(static_cast<unsigned>(each)), 128, 0, product, "use_experts",
                     ids.data() + at, v.slot_of + layer * shape.experts,
                     reinterpret_cast<const std::uint32_t*>(store->data() + static_cast<std::size_t>(layer) *
                                                                                shape.experts * slot_bytes),
                     reinterpret_cast<const std::uint32_t*>(memory.data()), static_cast<int>(slot_bytes / 4),
                     wrong_uses.data()));
        }
      };
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      NIBBLE_CUDA_CHECK(cudaStreamBeginCapture(device_test::stream(), cudaStreamCaptureModeThreadLocal));
      step();
      NIBBLE_CUDA_CHECK(cudaStreamEndCapture(device_test::stream(), &graph));
      NIBBLE_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
      NIBBLE_CUDA_CHECK(cudaGraphDestroy(graph));
      std::mt19937 random(static_cast<unsigned>(rows * 10 + limit));
      for (int i = 0; i < 300; ++i) {
        std::vector<std::int32_t> named(ids.size()), guessed(ids.size());
        for (auto& id : named) id = static_cast<int>(random() % static_cast<unsigned>(shape.experts));
        for (std::size_t at = 0; at < named.size(); ++at) {
          const bool right = at + each < named.size() && random() % 4 != 0;
          guessed[at] =
              right ? named[at + each] : static_cast<int>(random() % static_cast<unsigned>(shape.experts));
        }
        NIBBLE_CUDA_CHECK(cudaMemcpyAsync(ids.data(), named.data(), ids.bytes(), cudaMemcpyHostToDevice,
                                          device_test::stream()));
        NIBBLE_CUDA_CHECK(cudaMemcpyAsync(likely.data(), guessed.data(), ids.bytes(), cudaMemcpyHostToDevice,
                                          device_test::stream()));
        if (i % 10 == 9)
          step();  // as a step that is not captured
        else
          NIBBLE_CUDA_CHECK(cudaGraphLaunch(exec, device_test::stream()));
        std::vector<moe::fetch_entry> coming;
        for (int layer = 0; layer < shape.layers; ++layer) {
          const std::size_t at = static_cast<std::size_t>(layer) * each;
          moe::place_request q;
          q.layer = layer, q.new_step = layer == 0, q.guesses = q.recent = coming;
          q.ids = std::span<const std::int32_t>(named).subspan(at, each);
          q.ahead = layer + 1 < shape.layers, q.ahead_row = shape.top_k, q.ahead_limit = limit;
          q.ahead_ids = std::span<const std::int32_t>(guessed).subspan(at, each);
          coming = host.place(q).ahead;
        }
        if (i % 5 != 4) continue;  // up to five steps are under way
        offload.finish(device_test::stream());
        NIBBLE_CUDA_CHECK(cudaStreamSynchronize(side));
        const auto v = offload.tables();
        std::vector<std::int32_t> of(static_cast<std::size_t>(shape.total()));
        NIBBLE_CUDA_CHECK(cudaMemcpy(of.data(), v.slot_of, 4 * of.size(), cudaMemcpyDeviceToHost));
        const auto bytes = memory.read();
        int wrong = 0, other = 0;
        for (int e = 0; e < shape.total(); ++e) {
          const int slot = of[static_cast<std::size_t>(e)];
          other += slot != host.slot_of()[static_cast<std::size_t>(e)];
          wrong += slot >= 0 && std::memcmp(bytes.data() + static_cast<std::size_t>(slot) * slot_bytes,
                                            store->expert(e).data(), slot_bytes) != 0;
        }
        NIBBLE_CHECK(other == 0);
        NIBBLE_CHECK(wrong == 0);
        NIBBLE_CHECK(wrong_uses.read()[0] == 0);
        if (other + wrong != 0) break;
      }
      moe::residency_counts counts;
      NIBBLE_CUDA_CHECK(cudaMemcpy(&counts, offload.tables().counts, sizeof counts, cudaMemcpyDeviceToHost));
      NIBBLE_CHECK(counts == host.counts());
      NIBBLE_CHECK(counts.good() && counts.ahead_used > 0 && counts.ahead > counts.ahead_used);
      NIBBLE_CUDA_CHECK(cudaGraphExecDestroy(exec));
    }
  NIBBLE_CUDA_CHECK(cudaStreamDestroy(side));
}

/// The CPU's share: every expert of a row is resident after bring() or comes from the CPU, each exactly once.
void shared(bool engine) {
  constexpr std::size_t slot_bytes = 128 * 9;
  constexpr int hidden = 64, rows = 4, slots = 24;
  const auto store = make_store(shape.total(), slot_bytes, UINT64_MAX);
  const buffer<std::uint8_t> memory(slots * slot_bytes);
  moe::expert_offload<shape> offload(*store, reinterpret_cast<std::byte*>(memory.data()), slots, slots, {},
                                     device_test::stream());
  if (engine)
    offload.fetch_by_engine(std::make_unique<moe::copy_engine>(
        *store, reinterpret_cast<std::byte*>(memory.data()), slots, shape.experts));
  const auto value = [](int layer, int id) { return static_cast<float>(1 + id + 16 * layer); };
  std::atomic<bool> fail = false;
  auto server = std::make_unique<moe::host_experts_server>(
      hidden, shape.top_k,
      [&](int layer, int count, const std::int32_t* ids, const float* weights, const float* x, float* y) {
        if (fail) throw nibble::error("no threads");
        for (int t = 0; t < count; ++t)
          for (int i = 0; i < hidden; ++i) {
            float sum = 0;
            for (int j = 0; j < shape.top_k; ++j)
              if (const int id = ids[t * shape.top_k + j]; id >= 0)
                sum += weights[t * shape.top_k + j] * value(layer, id) * x[t * hidden + i];
            y[t * hidden + i] = sum;
          }
      });
  std::vector<std::int32_t> fetch_of(moe::most_split_misses + 1);
  for (int k = 0; k <= moe::most_split_misses; ++k) fetch_of[static_cast<std::size_t>(k)] = k / 2;
  NIBBLE_CHECK(!offload.shares_with_host());
  offload.share_with_host(std::move(server), fetch_of);
  const std::vector<float> ones(rows * shape.top_k, 1.0f);
  const std::vector<std::uint16_t> x(rows * hidden, bf16::encode(1.0f));
  const buffer<std::uint16_t> dx(x);
  const buffer<float> weights(ones);
  const buffer<std::int32_t> ids(rows * shape.top_k);
  const pinned_memory counts_memory(sizeof(moe::residency_counts));
  auto* const counts = counts_memory.as<moe::residency_counts>();
  const auto family = [&]<class Family>(std::type_identity<Family>, const auto& p) {
    return Family::launch(p, chained);
  };
  std::mt19937 random(3);
  std::uint64_t on_host = 0;
  for (int step = 0; step < 60; ++step) {
    const int m = 1 + step % rows;
    fail = step == 43;
    int wrong = 0;
    for (int layer = 0; layer < shape.layers; ++layer) {
      std::vector<std::int32_t> named;
      for (int t = 0; t < rows; ++t) {
        named.push_back(static_cast<int>(random() % 16));
        named.push_back((named.back() + 1 + static_cast<int>(random() % 15)) % 16);
      }
      NIBBLE_CUDA_CHECK(cudaMemcpyAsync(ids.data(), named.data(), ids.bytes(), cudaMemcpyHostToDevice,
                                        device_test::stream()));
      const buffer<std::uint16_t> y(std::vector<std::uint16_t>(rows * hidden, 0));
      const moe::expert_offload<shape>::host_share share{weights.data(), dx.data(), hidden, y.data(), hidden};
      const bool decodes = step % 7 != 6;
      const auto mode = decodes ? place_mode::decode : place_mode::streaming;
      NIBBLE_GOOD(offload.bring(layer, ids.data(), m, mode, family, &share));
      NIBBLE_GOOD(offload.add_host_share(layer, ids.data(), m, mode, family, share));
      const auto got = y.read();
      std::vector<std::int32_t> of(static_cast<std::size_t>(shape.total()));
      NIBBLE_CUDA_CHECK(
          cudaMemcpy(of.data(), offload.tables().slot_of, 4 * of.size(), cudaMemcpyDeviceToHost));
      for (int t = 0; t < rows; ++t) {
        float want = 0;
        for (int j = 0; j < shape.top_k && t < m; ++j)
          if (const int id = named[static_cast<std::size_t>(t * shape.top_k + j)];
              of[static_cast<std::size_t>(layer * shape.experts + id)] < 0)
            want += value(layer, id);
        if (!decodes) wrong += want != 0.0f;  // prompts have all of theirs fetched
        if (fail) want = 0;
        for (int i = 0; i < hidden; ++i)
          wrong += bf16::decode(got[static_cast<std::size_t>(t * hidden + i)]) != want;
      }
    }
    NIBBLE_GOOD(offload.read_counts(counts, device_test::stream()));
    NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
    const bool failed = !counts->good();
    on_host += counts->on_host;
    const std::string what = offload.failure(*counts, offload.generation(), device_test::stream());
    NIBBLE_CHECK(failed == fail && what.empty() != failed);
    if (failed) NIBBLE_CHECK(what.find("no threads") != std::string::npos);
    if (!failed) NIBBLE_CHECK(wrong == 0);
  }
  NIBBLE_CHECK(on_host > 0);
}

const bool registered[] = {
    device_test::add("together", "all locked, some locked, none locked",
                     [] {
                       for (const int locked : {48, 32, 0}) together(locked, false);
                     }),
    device_test::add("ahead", "guesses come beside a layer, captured and not", [] { ahead(false); }),
    device_test::add("shared", "the CPU takes some of the misses", [] { shared(false); }),
    device_test::add("engine", "the copy engine brings what is missing", [] { together(48, true); }),
    device_test::add("engine_ahead", "the copy engine brings guesses, too", [] { ahead(true); }),
    device_test::add("engine_shared", "the copy engine and the CPU", [] { shared(true); }),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
