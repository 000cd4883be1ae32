// SPDX-License-Identifier: Apache-2.0
// Experts brought by kernels: the right bytes in every slot after arbitrary histories, through the host where
// memory is not locked, and outputs that are those of a pool that holds everything.
#include <algorithm>
#include <memory>
#include <numeric>

#include "device_test.cuh"
#include "expert_stores.cuh"
#include "nibble/moe/experts_family.cuh"
#include "nibble/moe/fetch_beside.cuh"
#include "nibble/moe/fetch_launch.cuh"
#include "nibble/moe/fetch_server.cuh"
#include "nibble/moe/fetch_staged.cuh"
#include "nibble/moe/placement_calibrate.cuh"
#include "nibble/moe/placement_host.cuh"
#include "nibble/moe/placement_server.cuh"
#include "nibble/moe/residency_device.cuh"
#include "nibble/moe/residency_launch.cuh"

using namespace nibble;
using device_test::buffer;
using device_test::make_store;
using moe::fetch_policy;
using moe::place_mode;
using moe::residency_shape;
using bf = __nv_bfloat16;
constexpr residency_shape shape = device_test::store_shape;

namespace {

/// Tables, slots and lists of one pool.
struct pool {
  moe::device_residency tables;
  buffer<std::uint8_t> slots;
  buffer<std::int32_t> ids{64 * 8};
  const moe::expert_store& store;

  pool(const moe::expert_store& s, int slot_count)
      : tables(shape, shape.total(), s.scales()),
        slots(static_cast<std::size_t>(slot_count) * s.slot_bytes()),
        store(s) {
    tables.set(moe::host_residency(shape, slot_count), device_test::stream());
  }
  [[nodiscard]] moe::place_params place(int layer, int rows, place_mode mode) const {
    moe::place_params p;
    p.state = tables.view(), p.layer = layer, p.mode = mode, p.new_step = layer == 0;
    p.ids = ids.data(), p.assignments = rows * shape.top_k;
    p.list = p.state.lists + static_cast<std::size_t>(layer) * moe::fetch_list_words(shape.experts);
    return p;
  }
  [[nodiscard]] moe::fetch_params fetch(const std::int32_t* list) const {
    moe::fetch_params f;
    f.list = list, f.store = reinterpret_cast<const std::uint8_t*>(store.data());
    f.slots = slots.data(), f.slot_bytes = f.bytes = store.slot_bytes();
    f.slot_count = tables.slot_count(), f.expert_count = store.count();
    return f;
  }
  /// Every slot holds the expert that the tables name, and untouched memory lies in the others.
  [[nodiscard]] bool right() const {
    const auto host = tables.get(device_test::stream());
    const auto bytes = slots.read();
    for (int s = 0; s < host.slot_count(); ++s) {
      const int e = host.expert_of()[static_cast<std::size_t>(s)];
      const std::uint8_t* at = bytes.data() + static_cast<std::size_t>(s) * store.slot_bytes();
      if (e >= 0 && std::memcmp(at, store.expert(e).data(), store.slot_bytes()) != 0) return false;
      if (e < 0)
        for (std::size_t i = 0; i < store.slot_bytes(); ++i)
          if (at[i] != 0xFF) return false;
    }
    return true;
  }
};

const launch_options chained{device_test::stream(), device_test::chained};

/// \param launch launch(fetch_params) → status
template <class Launch>
void histories(std::size_t slot_bytes, Launch&& launch) {
  const auto store = make_store(shape.total(), slot_bytes, UINT64_MAX);
  NIBBLE_CHECK(store->locked() == shape.total());
  for (const int slots : {2, 5, 16, 40, 48}) {
    pool p(*store, slots);
    std::mt19937 random(static_cast<unsigned>(slots));
    for (int call = 0; call < 40; ++call) {
      const int rows = std::min(1 + static_cast<int>(random() % 8), moe::largest_placed_rows(shape, slots));
      std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * shape.top_k));
      for (auto& id : ids) id = static_cast<int>(random() % 17) - 1;
      NIBBLE_CUDA_CHECK(cudaMemcpyAsync(p.ids.data(), ids.data(), 4 * ids.size(), cudaMemcpyHostToDevice,
                                        device_test::stream()));
      const auto q = p.place(call % 3, rows, call % 5 == 4 ? place_mode::streaming : place_mode::decode);
      NIBBLE_GOOD(moe::residency_family<shape>::launch(q, chained));
      auto f = p.fetch(q.list);
      if (call % 2 == 0 && slot_bytes > 256) {  // in two parts
        f.bytes = 256;
        NIBBLE_GOOD(launch(f));
        f.first_byte = 256, f.bytes = slot_bytes - 256;
      }
      NIBBLE_GOOD(launch(f));
      if (call % 8 == 0) NIBBLE_CHECK(p.right());
    }
    NIBBLE_CHECK(p.right());
    NIBBLE_CHECK(p.tables.counts(device_test::stream()).unplaced == 0);
  }
}

template <fetch_policy P>
void histories_with(std::size_t slot_bytes) {
  histories(slot_bytes, [](const moe::fetch_params& f) { return moe::launch_fetch_with<P>(f, chained); });
}

/// Lists that no placement would write and pieces of any size: what is named arrives, every other byte stays.
void pieces() {
  using family = moe::beside_fetch_family;
  device_test::prepare_kernels<family>();
  constexpr std::size_t chunk = family::chunk_bytes, lap = chunk * family::blocks * family::stages;
  struct sizes {
    int experts;
    std::size_t slot_bytes;
  };
  struct piece {
    std::size_t first_byte, bytes;
  };
  std::mt19937 random(6);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  for (const sizes& z : {sizes{40, 128}, sizes{40, 2 * chunk + 384}, sizes{3, 2 * lap + 128}}) {
    const int experts = z.experts;
    const std::size_t slot_bytes = z.slot_bytes;
    const auto store = make_store(experts, slot_bytes, UINT64_MAX);
    NIBBLE_CHECK(store->locked() == experts);
    const int slots = experts + 1;
    buffer<std::uint8_t> memory((static_cast<std::size_t>(slots) + 1) * slot_bytes);  // one not theirs
    std::vector<piece> cases{{0, slot_bytes}, {0, 16}, {slot_bytes - 128, 128}};
    if (slot_bytes > 2 * chunk)
      for (const std::size_t bytes : {chunk - 16, chunk, chunk + 16, 2 * chunk, 2 * chunk + 16})
        cases.push_back({128, bytes});
    for (int i = 0; i < 4; ++i) {
      const std::size_t first = 128 * below(slot_bytes / 128);
      cases.push_back({first, 16 * (1 + below((slot_bytes - first) / 16))});
    }
    for (const piece& c : cases) {
      // Entries: none, a count below zero, one, all slots but one, and the same with some that are not valid.
      for (const int kind : {0, 1, 2, 3, 4}) {
        std::vector<std::int32_t> order(static_cast<std::size_t>(slots)), list(4, 0);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::uint8_t> want(memory.size(), 0xFF);
        const auto add = [&](int number, int slot) {
          list.insert(list.end(), {number, slot});
          if (kind != 1 && number >= 0 && number < experts && slot >= 0 && slot < slots)
            std::memcpy(&want[static_cast<std::size_t>(slot) * slot_bytes + c.first_byte],
                        store->expert(number).data() + c.first_byte, c.bytes);
        };
        const int named = kind == 0 ? 0 : kind < 3 ? 1 : slots - 1;
        for (int i = 0; i < named; ++i) {
          if (kind == 4 && i % 3 == 1) {
            const int spare = order.back();
            add(-1, spare), add(experts, spare), add(0, -1), add(0, slots);
          }
          add(static_cast<int>(below(static_cast<std::size_t>(experts))), order[static_cast<std::size_t>(i)]);
        }
        list[0] = kind == 1 ? -1 : static_cast<int>(list.size() - 4) / 2;
        memory.poison();
        const buffer<std::int32_t> on_device(list);
        moe::fetch_params f;
        f.list = on_device.data(), f.store = reinterpret_cast<const std::uint8_t*>(store->data());
        f.slots = memory.data(), f.slot_bytes = slot_bytes, f.first_byte = c.first_byte, f.bytes = c.bytes;
        f.slot_count = slots, f.expert_count = experts;
        NIBBLE_GOOD(family::launch(f, chained));
        const bool right = memory.read() == want;
        NIBBLE_CHECK(right);
        if (!right)
          std::printf("  slots of %zu bytes, bytes %zu to %zu, list of kind %d\n", slot_bytes, c.first_byte,
                      c.first_byte + c.bytes, kind);
      }
    }
  }
}

void through_the_host(int locked_experts) {
  const std::size_t slot_bytes = 128 * 33;
  const auto store =
      make_store(shape.total(), slot_bytes, static_cast<std::uint64_t>(locked_experts) * slot_bytes);
  NIBBLE_CHECK(store->locked() < shape.total());
  std::atomic<int> fail_at = -1;
  moe::fetch_server server(slot_bytes, [&](int number, std::span<std::byte> out) {
    if (number == fail_at) throw nibble::error("expert " + std::to_string(number) + " has vanished");
    std::memcpy(out.data(), store->expert(number).data(), out.size());
  });
  pool p(*store, 20);
  std::mt19937 random(3);
  const auto step = [&](int call) {
    const int rows = call % 4 == 3 ? 8 : 1;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * shape.top_k));
    for (auto& id : ids) id = static_cast<int>(random() % 16);
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(p.ids.data(), ids.data(), 4 * ids.size(), cudaMemcpyHostToDevice,
                                      device_test::stream()));
    const auto q = p.place(call % 3, rows, place_mode::decode);
    NIBBLE_GOOD(moe::residency_family<shape>::launch(q, chained));
    NIBBLE_GOOD(moe::staged_fetch_family::launch(
        server.params(p.fetch(q.list), store->locked(), &p.tables.view().counts->failed), chained));
  };
  for (int call = 0; call < 120; ++call) {
    step(call);
    if (call % 20 == 0) NIBBLE_CHECK(p.right());
  }
  NIBBLE_CHECK(p.right());
  NIBBLE_CHECK(p.tables.counts(device_test::stream()).good() && server.take_failure().empty());
  // An expert that cannot be read fails the step that asked; after the tables have forgotten it all goes on.
  fail_at = shape.total() - 1;
  int call = 120;
  while (p.tables.counts(device_test::stream()).failed == 0 && call < 2000) step(call++);
  NIBBLE_CHECK(p.tables.counts(device_test::stream()).failed > 0);
  NIBBLE_CHECK(server.take_failure() == "expert 47 has vanished");
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
  server.reset();
  fail_at = -1;
  p.slots.poison();
  p.tables.set(moe::host_residency(shape, 20), device_test::stream());
  for (call = 0; call < 60; ++call) step(call);
  NIBBLE_CHECK(p.right() && p.tables.counts(device_test::stream()).good());
}

/// The CPU's share: asked for, computed from what was sent, added once.
void on_the_host() {
  constexpr int hidden = 136, top_k = 4, rows = 3;
  std::atomic<bool> fail = false;
  moe::host_experts_server server(
      hidden, top_k,
      [&](int layer, int count, const std::int32_t* ids, const float* weights, const float* x, float* y) {
        if (fail) throw nibble::error("no such layer");
        for (int t = 0; t < count; ++t)
          for (int i = 0; i < hidden; ++i) {
            float sum = 0;
            for (int j = 0; j < top_k; ++j)
              if (const int id = ids[t * top_k + j]; id >= 0)
                sum += weights[t * top_k + j] * static_cast<float>(id + 1 + 100 * layer) * x[t * hidden + i];
            y[t * hidden + i] = sum;
          }
      });
  std::mt19937 random(4);
  std::vector<std::uint16_t> x(rows * hidden), y(x.size());
  std::vector<std::int32_t> ids(rows * top_k);
  std::vector<float> weights(ids.size());
  const buffer<std::uint64_t> failures(std::vector<std::uint64_t>(1, 0));
  const auto encode = [](float v) { return bf16::encode(v); };
  for (int call = 0; call < 60; ++call) {
    for (auto& v : x) v = encode(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
    for (auto& v : y) v = encode(static_cast<float>(random() % 2001) / 100.0f - 10.0f);
    for (auto& id : ids) id = static_cast<int>(random() % 12);
    for (auto& w : weights) w = static_cast<float>(random() % 100) / 100.0f;
    std::vector<std::int32_t> list(4 + moe::most_split_misses, -7);
    list[0] = static_cast<int>(random() % 5);
    for (int i = 0; i < list[0]; ++i) list[4 + i] = 2 * i + 1;
    const buffer<std::uint16_t> dx(x), dy(y);
    const buffer<std::int32_t> d_ids(ids), d_list(list);
    const buffer<float> d_weights(weights);
    moe::host_experts_params p;
    server.set(p);
    p.host_list = d_list.data(), p.layer = call % 5, p.rows = 1 + call % rows;
    p.ids = d_ids.data(), p.weights = d_weights.data();
    p.x = dx.data(), p.ldx = hidden, p.y = dy.data(), p.ldy = hidden, p.failures = failures.data();
    fail = call == 40;
    NIBBLE_GOOD(moe::host_experts_family::ask(p, chained));
    NIBBLE_GOOD(moe::host_experts_family::launch(p, chained));
    const auto got = dy.read();
    int wrong = 0;
    for (int t = 0; t < rows; ++t)
      for (int i = 0; i < hidden; ++i) {
        float sum = 0;
        for (int j = 0; j < top_k; ++j) {
          const int id = ids[t * top_k + j];
          if (id % 2 == 1 && id / 2 < list[0])
            sum += weights[t * top_k + j] * static_cast<float>(id + 1 + 100 * p.layer) *
                   bf16::decode(x[t * hidden + i]);
        }
        const std::uint16_t before = y[t * hidden + i];
        const bool added = t < p.rows && list[0] > 0 && !fail;
        const std::uint16_t want = added ? encode(bf16::decode(before) + sum) : before;
        wrong += std::fabs(bf16::decode(got[t * hidden + i]) - bf16::decode(want)) <=
                         (added ? 0.01f * std::fabs(bf16::decode(want)) : 0.0f)
                     ? 0
                     : 1;
      }
    NIBBLE_CHECK(wrong == 0);
    NIBBLE_CHECK(failures.read()[0] == (fail && list[0] > 0 ? 1 : 0));
    if (fail && list[0] > 0) {
      NIBBLE_CHECK(server.take_failure() == "no such layer");
      server.reset();
      NIBBLE_CUDA_CHECK(cudaMemsetAsync(failures.data(), 0, 8, device_test::stream()));
    }
  }
  // Latencies are measured and say something.
  const auto store = make_store(shape.total(), 128 * 77, UINT64_MAX);
  pool space(*store, 16);
  const auto measured =
      moe::measure_misses(space.fetch(nullptr), server, hidden, top_k, device_test::stream());
  NIBBLE_CHECK(measured.fetch.size() == top_k + 1 && measured.host_contended.size() == top_k + 1);
  for (int k = 1; k <= top_k; ++k)
    NIBBLE_CHECK(measured.fetch[k] > 0 && measured.host[k] > 0 && measured.fetch_contended[k] > 0 &&
                 measured.host_contended[k] > 0);
  NIBBLE_CHECK(moe::split_misses(measured.view())[0] == 0);
}

/// Layers of experts through a pool of `slots`, against one that holds all: the same bits, in a graph too.
void chain(int slots) {
  constexpr moe::experts_shape s{128, 48, 16, 2, true, weight_format::nvfp4};
  static_assert(s.experts == shape.experts && s.top_k == shape.top_k);
  NIBBLE_GOOD(moe::prepare_experts<s>());
  const auto store = make_store(shape.total(), s.slot_bytes(), UINT64_MAX);
  pool small(*store, slots), all(*store, shape.total());
  std::vector<moe::fetch_entry> every;
  {
    moe::host_residency full(shape, shape.total());
    every = full.warm(std::vector<std::uint32_t>(static_cast<std::size_t>(shape.total()), 0));
    NIBBLE_GOOD(moe::bring_experts(*store, every, reinterpret_cast<std::byte*>(all.slots.data()),
                                   device_test::stream()));
    all.tables.set(full, device_test::stream());
  }
  const buffer<std::uint8_t> shared(std::vector<std::uint8_t>(s.slot_bytes(), 0x11));
  for (const int m : {1, 2, 8}) {
    if (m > moe::largest_placed_rows(shape, slots)) continue;
    std::mt19937 random(static_cast<unsigned>(100 * slots + m));
    std::vector<std::uint16_t> x(static_cast<std::size_t>(m * s.hidden));
    for (auto& v : x) v = static_cast<std::uint16_t>(0x3C00 + random() % 0x400);
    const buffer<std::uint16_t> dx(x), h(static_cast<std::size_t>(m * s.groups() * s.inner));
    const buffer<float> weights(std::vector<float>(static_cast<std::size_t>(m * s.top_k), 0.25f));
    const buffer<std::int32_t> ids(static_cast<std::size_t>(3 * m * s.top_k));
    const buffer<unsigned> report(std::vector<unsigned>(moe::report_words(s), 0u));
    buffer<std::uint16_t> y_small(x.size() * 3), y_all(x.size() * 3);
    const auto step = [&](pool& p, const buffer<std::uint16_t>& y, bool swaps) {
      for (int layer = 0; layer < shape.layers; ++layer) {
        moe::experts_params e;
        const auto v = p.tables.view();
        e.slots = p.slots.data(), e.slot_scales = v.slot_scales, e.slot_count = v.slot_count;
        e.slot_of = v.slot_of + layer * s.experts;
        e.shared_expert = shared.data();
        for (float& f : e.shared_scales) f = 0.01f;
        e.ids = ids.data() + layer * m * s.top_k, e.weights = weights.data();
        e.x = reinterpret_cast<const bf*>(dx.data()), e.ldx = s.hidden, e.h = reinterpret_cast<bf*>(h.data());
        e.y = reinterpret_cast<bf*>(y.data()) + static_cast<std::size_t>(layer) * x.size(), e.ldy = s.hidden;
        e.residual = e.x, e.ldr = s.hidden, e.report = report.data(), e.m = m;
        if (swaps) {
          auto q = p.place(layer, m, place_mode::decode);
          q.ids = e.ids;
          NIBBLE_GOOD(moe::residency_family<shape>::launch(q, chained));
          NIBBLE_GOOD(moe::fetch_family::launch(p.fetch(q.list), chained));
        }
        NIBBLE_GOOD(moe::launch_gate_up<s>(e, chained));
        NIBBLE_GOOD(moe::launch_down<s>(e, chained));
      }
    };
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    NIBBLE_CUDA_CHECK(cudaStreamBeginCapture(device_test::stream(), cudaStreamCaptureModeThreadLocal));
    step(small, y_small, true);
    NIBBLE_CUDA_CHECK(cudaStreamEndCapture(device_test::stream(), &graph));
    NIBBLE_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    int wrong = 0;
    for (int i = 0; i < (device_test::quick() ? 4 : 40); ++i) {
      std::vector<std::int32_t> route(ids.size());
      for (auto& id : route) id = static_cast<int>(random() % 16);
      NIBBLE_CUDA_CHECK(cudaMemcpyAsync(ids.data(), route.data(), ids.bytes(), cudaMemcpyHostToDevice,
                                        device_test::stream()));
      y_small.poison(), y_all.poison();
      if (i % 4 == 3)
        step(small, y_small, true);
      else
        NIBBLE_CUDA_CHECK(cudaGraphLaunch(exec, device_test::stream()));
      step(all, y_all, false);
      wrong += y_small.read() == y_all.read() ? 0 : 1;
    }
    NIBBLE_CHECK(wrong == 0);
    if (wrong != 0) std::printf("  %d slots, %d tokens: %d steps differ\n", slots, m, wrong);
    NIBBLE_CHECK(small.tables.counts(device_test::stream()).good());
    NIBBLE_CUDA_CHECK(cudaGraphExecDestroy(exec));
    NIBBLE_CUDA_CHECK(cudaGraphDestroy(graph));
    for (const unsigned word : report.read()) NIBBLE_CHECK(word == 0);
  }
}

const bool registered[] = {
    device_test::add("direct", "arbitrary histories",
                     [] {
                       histories_with<fetch_policy{}>(128);
                       histories_with<fetch_policy{}>(128 * 77);
                       histories_with<fetch_policy{3, 4, true}>(128 * 100);
                     }),
    device_test::add("beside", "arbitrary histories",
                     [] {
                       device_test::prepare_kernels<moe::beside_fetch_family>();
                       for (const std::size_t slot_bytes : {128, 128 * 77, 128 * 1000})
                         histories(slot_bytes, [](const moe::fetch_params& f) {
                           return moe::beside_fetch_family::launch(f, chained);
                         });
                     }),
    device_test::add("beside", "any list, any piece", [] { pieces(); }),
    device_test::add("host", "none is locked", [] { through_the_host(0); }),
    device_test::add("host", "some are locked", [] { through_the_host(32); }),
    device_test::add("cpu", "experts left to the CPU", [] { on_the_host(); }),
    device_test::add("chain", "the bits of a pool that holds everything",
                     [] {
                       for (const int slots : {2, 3, 4, 7, 16, 20, 33, 47, 48}) chain(slots);
                     }),
    device_test::add(
        "direct", "fetches that break the contract are refused",
        [] {
          moe::fetch_params f;
          NIBBLE_CHECK(moe::fetch_family::launch(f, chained).code == status_code::invalid_argument);
          const auto store = make_store(shape.total(), 256, UINT64_MAX);
          pool p(*store, 4);
          f = p.fetch(p.tables.view().lists);
          f.first_byte = 128;
          NIBBLE_CHECK(moe::fetch_family::launch(f, chained).code == status_code::invalid_argument);
          f.bytes = 120;
          NIBBLE_CHECK(moe::fetch_family::launch(f, chained).code == status_code::invalid_argument);
        }),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
