// SPDX-License-Identifier: Apache-2.0
/// \file
/// The parts by themselves: how fast kernels and the copy engine bring experts, what a placement costs.
#pragma once

#include "world.cuh"

namespace bench {

/// Lists of `count` experts for `lists` launches, all different where the store allows.
inline std::int32_t* make_lists(int lists, int count, int experts, int slots) {
  const std::size_t words = nibble::moe::fetch_list_words(shape.experts);
  std::vector<std::int32_t> host(words * static_cast<std::size_t>(lists));
  int next = 0;
  for (int l = 0; l < lists; ++l) {
    std::int32_t* const list = host.data() + words * static_cast<std::size_t>(l);
    list[0] = count;
    for (int i = 0; i < count; ++i, ++next) list[4 + 2 * i] = next % experts, list[5 + 2 * i] = next % slots;
  }
  std::int32_t* device = nullptr;
  BENCH_CHECK(cudaMalloc(&device, 4 * host.size()));
  BENCH_CHECK(cudaMemcpy(device, host.data(), 4 * host.size(), cudaMemcpyHostToDevice));
  return device;
}

template <nibble::moe::fetch_policy P>
void time_fetch(timer& t, const nibble::moe::expert_store& store, std::uint8_t* slots, int slot_count) {
  good(nibble::prepare(nibble::moe::fetch_kernel_of<P>, 32 * P.warps, 0, "fetch"));
  const nibble::launch_options o{t.stream(), nibble::launch_chain::pdl};
  std::printf("{\"part\":\"fetch\",\"blocks\":%d,\"warps\":%d,\"wide\":%s", P.blocks, P.warps,
              P.wide ? "true" : "false");
  for (const int count : {0, 1, 2, 4, 8, 64}) {
    const int launches = count == 0 ? 200 : count > 8 ? 3 : 10;
    std::int32_t* lists = make_lists(launches, count, store.locked(), slot_count);
    nibble::moe::fetch_params f;
    f.store = reinterpret_cast<const std::uint8_t*>(store.data()), f.slots = slots;
    f.slot_bytes = f.bytes = slot_bytes, f.slot_count = slot_count, f.expert_count = store.count();
    const double us = t.per_call(launches, 5, [&](int i) {
      f.list = lists + static_cast<std::size_t>(i) * nibble::moe::fetch_list_words(shape.experts);
      good(nibble::moe::launch_fetch_with<P>(f, o));
    });
    if (count == 0)
      std::printf(",\"us_0\":%.2f", us);
    else
      std::printf(",\"gbps_%d\":%.1f", count, static_cast<double>(slot_bytes) * count / us / 1e3);
    BENCH_CHECK(cudaFree(lists));
  }
  std::printf("}\n");
  std::fflush(stdout);
}

/// \return bytes a microsecond of the copy engine in large copies
inline double time_copies(timer& t, const nibble::moe::expert_store& store, std::uint8_t* slots) {
  std::printf("{\"part\":\"copy engine\"");
  double best = 0;
  for (const int count : {1, 2, 4, 8, 64}) {
    // Back to back in one graph, an expert a copy: what a host that knew the list could do.
    const double us = t.per_call(3, 5, [&](int launch) {
      for (int i = 0; i < count; ++i)
        BENCH_CHECK(cudaMemcpyAsync(slots + static_cast<std::size_t>(i) * slot_bytes,
                                    store.expert((launch * count + i) % store.locked()).data(), slot_bytes,
                                    cudaMemcpyHostToDevice, t.stream()));
    });
    const double rate = static_cast<double>(slot_bytes) * count / us;
    best = std::max(best, rate);
    std::printf(",\"gbps_%d\":%.1f", count, rate / 1e3);
  }
  const std::size_t bytes =
      std::min<std::size_t>(slot_bytes * 64, slot_bytes * static_cast<std::size_t>(store.locked()));
  const double us = t.per_call(2, 5, [&](int) {
    BENCH_CHECK(cudaMemcpyAsync(slots, store.data(), bytes, cudaMemcpyHostToDevice, t.stream()));
  });
  best = std::max(best, static_cast<double>(bytes) / us);
  std::printf(",\"gbps_large\":%.1f}\n", static_cast<double>(bytes) / us / 1e3);
  return best;
}

/// What placement and an empty fetch add to gate|up and down when everything is resident, and what a
/// placement of misses takes by itself.
template <nibble::moe::residency_policy P>
void time_place(timer& t, int slot_count) {
  using namespace nibble::moe;
  good(nibble::prepare(place_kernel_of<shape, P>, P.threads, 0, "place"));
  good(prepare_experts<experts_shape>());
  const nibble::launch_options o{t.stream(), nibble::launch_chain::pdl};
  device_residency tables(
      shape, shape.total(),
      std::vector<expert_scales>(static_cast<std::size_t>(shape.total()), {0.01f, 0.01f, 0.01f}));
  host_residency host(shape, slot_count);
  // Slots exist in the tables only: the experts kernels read a few real ones.
  const int real = 512;
  nibble::device_memory arena(slot_bytes * real), small(std::size_t{4} << 20);
  BENCH_CHECK(cudaMemset(arena.data(), 0x11, arena.bytes()));
  BENCH_CHECK(cudaMemset(small.data(), 0, small.bytes()));
  std::vector<std::uint32_t> worth(static_cast<std::size_t>(shape.total()), 0);
  for (std::size_t i = 0; i < worth.size(); ++i)
    worth[i] = clock_start + static_cast<std::uint32_t>(i * 7919 % 9973);
  host.warm(worth);
  tables.set(host, t.stream());
  const int calls = 200;
  std::mt19937 random(1);
  for (const int m : {1, 8, 64, 2048}) {
    std::vector<std::int32_t> resident, ids;
    for (int e = 0; e < shape.experts; ++e)
      if (host.slot_of()[static_cast<std::size_t>(e)] >= 0) resident.push_back(e);
    for (int i = 0; i < m * shape.top_k; ++i) ids.push_back(resident[random() % resident.size()]);
    nibble::device_memory d_ids(4 * ids.size());
    BENCH_CHECK(cudaMemcpy(d_ids.data(), ids.data(), 4 * ids.size(), cudaMemcpyHostToDevice));
    nibble::device_memory slot_of(4 * 256);
    std::vector<std::int32_t> spread(256);
    for (int e = 0; e < 256; ++e) spread[static_cast<std::size_t>(e)] = 2 * e;
    BENCH_CHECK(cudaMemcpy(slot_of.data(), spread.data(), 1024, cudaMemcpyHostToDevice));
    place_params q;
    q.state = tables.view(), q.ids = d_ids.as<std::int32_t>(), q.assignments = m * shape.top_k,
    q.list = q.state.lists;
    experts_params e;
    e.slots = arena.as<std::uint8_t>(), e.slot_scales = q.state.slot_scales, e.slot_count = real;
    e.slot_of = slot_of.as<std::int32_t>(), e.shared_expert = arena.as<std::uint8_t>();
    e.ids = q.ids, e.weights = small.as<float>(), e.x = small.as<__nv_bfloat16>(),
    e.ldx = experts_shape.hidden;
    e.h = small.as<__nv_bfloat16>() + (std::size_t{1} << 19),
    e.y = small.as<__nv_bfloat16>() + (std::size_t{1} << 20);
    e.ldy = experts_shape.hidden, e.m = m;
    fetch_params f;
    f.list = q.list, f.store = arena.as<std::uint8_t>(), f.slots = arena.as<std::uint8_t>(),
    f.slot_bytes = f.bytes = slot_bytes;
    f.slot_count = slot_count, f.expert_count = real;
    const auto alone = [&](bool settled) {
      q.tables_settled = settled;
      return t.per_call(calls, 9, [&](int) { good(launch_place_with<shape, P>(q, o)); });
    };
    std::printf(
        "{\"part\":\"place\",\"threads\":%d,\"slots\":%d,\"m\":%d,\"all_hit_us\":%.2f,\"unsettled_us\":%.2f",
        P.threads, slot_count, m, alone(true), alone(false));
    if (m <= 8) {
      const auto pair = [&](bool place, bool fetch) {
        q.tables_settled = true;
        return t.per_call(calls, 9, [&](int) {
          if (place) good(launch_place_with<shape, P>(q, o));
          if (fetch) good(fetch_family::launch(f, o));
          good(launch_gate_up<experts_shape>(e, o));
          good(launch_down<experts_shape>(e, o));
        });
      };
      const double none = pair(false, false), placed = pair(true, false), both = pair(true, true);
      std::printf(",\"pair_us\":%.2f,\"with_place_us\":%.2f,\"with_fetch_us\":%.2f", none, placed, both);
    }
    std::printf("}\n");
  }
  // Misses: layers in turn, ids drawn anew for each call, so about slot_count / 10240 of them hit.
  for (const int m : {1, 8, 64}) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(calls * m * shape.top_k));
    for (auto& id : ids) id = static_cast<int>(random() % 256);
    nibble::device_memory d_ids(4 * ids.size());
    BENCH_CHECK(cudaMemcpy(d_ids.data(), ids.data(), 4 * ids.size(), cudaMemcpyHostToDevice));
    tables.set(host, t.stream());
    place_params q;
    q.state = tables.view(), q.assignments = m * shape.top_k, q.list = q.state.lists;
    q.tables_settled = false;
    const double us = t.per_call(calls, 9, [&](int i) {
      q.layer = i % shape.layers, q.new_step = q.layer == 0;
      q.ids = d_ids.as<std::int32_t>() + static_cast<std::size_t>(i * m * shape.top_k);
      good(launch_place_with<shape, P>(q, o));
    });
    const auto c = tables.counts(t.stream());
    std::printf(
        "{\"part\":\"place with "
        "misses\",\"threads\":%d,\"slots\":%d,\"m\":%d,\"us\":%.2f,\"misses_per_call\":%.2f}\n",
        P.threads, slot_count, m, us, static_cast<double>(c.misses) / (10.0 * calls));
  }
  std::fflush(stdout);
}

}  // namespace bench
