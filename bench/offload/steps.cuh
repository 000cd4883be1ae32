// SPDX-License-Identifier: Apache-2.0
/// \file
/// Decode steps through 40 layers of experts with a pool that does not hold all: router ids from a trace,
/// placement, fetch, gate|up, down; the rest of a layer is a read of as many bytes.
#pragma once

#include "world.cuh"

namespace bench {

struct step_case {
  double vram_gib = 12;
  double exponent = 0;  ///< of the Zipf trace; 0: uniform
  std::uint32_t ticks = nibble::moe::default_ticks;
  const char* policy = "worth";
  bool cpu = false;  ///< misses are split between link and CPU
};

/// What a card of so many GiB leaves for slots: weights, context, workspace, states and 8k tokens of KV taken
/// off.
inline int slots_for(double vram_gib) {
  constexpr double taken = 2.5 + 1.2;
  return static_cast<int>((vram_gib - taken) * (std::size_t{1} << 30) / static_cast<double>(slot_bytes));
}

/// The CPU's side: an expert's bytes read as the checkpoint would hold them, where the store has them.
class cpu_experts {
 public:
  explicit cpu_experts(const nibble::moe::expert_store& store)
      : layers_(static_cast<std::size_t>(shape.layers)),
        server_(experts_shape.hidden, shape.top_k,
                [this](int layer, int rows, const std::int32_t* ids, const float* weights, const float* x,
                       float* y) {
                  nibble::host::routed_experts(pool_, layers_[static_cast<std::size_t>(layer)], ids, weights,
                                               shape.top_k, x, experts_shape.hidden, rows, y,
                                               experts_shape.hidden);
                }) {
    constexpr int hidden = experts_shape.hidden, inner = experts_shape.inner;
    for (int layer = 0; layer < shape.layers; ++layer)
      for (int e = 0; e < shape.experts; ++e) {
        const auto* at =
            reinterpret_cast<const std::uint8_t*>(store.expert(layer * shape.experts + e).data());
        const auto matrix = [&](int n, int k) {
          const nibble::host::nvfp4_view v{at, at + static_cast<std::size_t>(n) * k / 2, 0.01f, n, k};
          at += static_cast<std::size_t>(n) * k / 2 + static_cast<std::size_t>(n) * k / 16;
          return nibble::host::weight_view(v);
        };
        nibble::host::expert_weights w;
        w.gate = matrix(inner, hidden), w.up = matrix(inner, hidden), w.down = matrix(hidden, inner);
        layers_[static_cast<std::size_t>(layer)].push_back(w);
      }
  }
  [[nodiscard]] nibble::moe::host_experts_server& server() { return server_; }
  [[nodiscard]] int threads() const { return pool_.threads(); }

 private:
  nibble::host::thread_pool pool_;
  std::vector<std::vector<nibble::host::expert_weights>> layers_;
  nibble::moe::host_experts_server server_;
};

class steps {
 public:
  nibble::moe::host_experts_server* server = nullptr;
  std::vector<std::int32_t> fetch_of;  ///< the split that was measured to be best

  steps(timer& t, const nibble::moe::expert_store& store, std::byte* arena, std::byte* dense)
      : t_(t),
        store_(store),
        arena_(arena),
        dense_(dense),
        tables_(shape, shape.total(), store.scales()),
        small_(std::size_t{8} << 20),
        ids_(id_bytes),
        split_(1024) {
    BENCH_CHECK(cudaMemset(small_.data(), 0, small_.bytes()));
  }

  /// Microseconds of the step's reads and kernels when every expert is resident and nothing is looked after.
  double resident_us() {
    nibble::moe::host_residency host(shape, 2000);
    host.warm(std::vector<std::uint32_t>(static_cast<std::size_t>(shape.total()), 0));
    tables_.set(host, t_.stream());
    std::vector<std::int32_t> ids;
    for (int layer = 0; layer < shape.layers; ++layer)
      for (int i = 0; i < shape.top_k; ++i) ids.push_back((layer + 7 * i) % 40);  // resident: 50 a layer
    BENCH_CHECK(cudaMemcpy(ids_.data(), ids.data(), 4 * ids.size(), cudaMemcpyHostToDevice));
    return t_.per_call(1, 15, [&](int) { step(false, {}); });
  }

  struct result {
    double us = 0, hit_rate = 0, missed_bytes = 0;
  };
  result run(const step_case& c) {
    using namespace nibble::moe;
    const int slots = slots_for(c.vram_gib), warm_steps = 60, steps = 60;
    nibble::test::trace trace(shape.layers, shape.experts, shape.top_k, c.exponent, 11);
    host_residency host(shape, slots);
    // The pool as it is after a thousand steps: worth by counting, then the worthiest are brought.
    std::vector<std::uint32_t> worth(static_cast<std::size_t>(shape.total()), worth_never);
    std::uint32_t now = clock_start - 1000 * c.ticks;
    for (int s = 0; s < 1000; ++s, now += c.ticks)
      for (int layer = 0; layer < shape.layers; ++layer)
        for (const int id : trace.next(layer)) {
          auto& w = worth[static_cast<std::size_t>(layer * shape.experts + id)];
          w = worth_used(w, now);
        }
    const auto entries = host.warm(worth);
    good(bring_experts(store_, entries, arena_, t_.stream()));
    tables_.set(host, t_.stream());
    std::vector<std::vector<std::int32_t>> ids;
    for (int s = 0; s < warm_steps + steps; ++s) {
      std::vector<std::int32_t> row;
      for (int layer = 0; layer < shape.layers; ++layer)
        for (const int id : trace.next(layer)) row.push_back(id);
      ids.push_back(std::move(row));
    }
    if (c.cpu)
      BENCH_CHECK(cudaMemcpy(split_.data(), fetch_of.data(), 4 * fetch_of.size(), cudaMemcpyHostToDevice));
    cudaGraphExec_t exec = t_.capture([&] { step(true, c); });
    nibble::pinned_memory staged(id_bytes);
    std::vector<double> all;
    residency_counts before;
    for (int s = 0; s < warm_steps + steps; ++s) {
      std::memcpy(staged.data(), ids[static_cast<std::size_t>(s)].data(), id_bytes);
      BENCH_CHECK(cudaMemcpyAsync(ids_.data(), staged.data(), id_bytes, cudaMemcpyHostToDevice, t_.stream()));
      if (s == warm_steps) before = tables_.counts(t_.stream());
      const double us = t_.microseconds([&] { BENCH_CHECK(cudaGraphLaunch(exec, t_.stream())); });
      if (s >= warm_steps) all.push_back(us);
    }
    const residency_counts after = tables_.counts(t_.stream());
    BENCH_CHECK(cudaGraphExecDestroy(exec));
    if (!after.good()) std::printf("FAILED: a step did not have its experts\n");
    result r;
    for (const double us : all) r.us += us / steps;
    const auto misses = static_cast<double>(after.misses - before.misses),
               hits = static_cast<double>(after.hits - before.hits);
    r.hit_rate = hits / (hits + misses);
    r.missed_bytes = misses * static_cast<double>(slot_bytes) / steps;
    return r;
  }

 private:
  static constexpr std::size_t id_bytes = 4 * static_cast<std::size_t>(shape.layers * shape.top_k);

  void step(bool swaps, const step_case& c) {
    using namespace nibble::moe;
    const nibble::launch_options main{t_.stream(), nibble::launch_chain::pdl};
    const residency_view v = tables_.view();
    auto* const out = small_.as<unsigned>();
    const auto* const ids = ids_.as<std::int32_t>();
    fetch_params f;
    f.store = reinterpret_cast<const std::uint8_t*>(store_.data());
    f.slots = reinterpret_cast<std::uint8_t*>(arena_);
    f.slot_bytes = f.bytes = slot_bytes, f.slot_count = v.slot_count, f.expert_count = store_.count();
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int i = 0; i < 4; ++i)
        read(dense_ + static_cast<std::size_t>(layer) * layer_bytes + i * (layer_bytes / 4), layer_bytes / 4,
             out, main);
      place_params q;
      q.state = v, q.layer = layer, q.new_step = layer == 0, q.ticks = c.ticks;
      q.ids = ids + layer * shape.top_k, q.assignments = shape.top_k;
      q.list = v.demand_list(shape, layer);
      if (swaps) {
        if (c.cpu) q.fetch_of = split_.as<std::int32_t>(), q.host_list = split_.as<std::int32_t>() + 64;
        good(residency_family<shape>::launch(q, main));
        if (c.cpu) good(host_experts_family::ask(hand_over(q), main));
        f.list = q.list;
        good(fetch_family::launch(f, main));
      }
      experts_params e;
      e.slots = reinterpret_cast<const std::uint8_t*>(arena_);
      e.slot_scales = v.slot_scales, e.slot_count = v.slot_count;
      e.slot_of = v.slot_of + layer * shape.experts;
      e.shared_expert =
          reinterpret_cast<const std::uint8_t*>(dense_) + static_cast<std::size_t>(layer) * layer_bytes;
      e.ids = q.ids, e.weights = small_.as<float>() + 1024, e.x = small_.as<__nv_bfloat16>() + 65536;
      e.ldx = experts_shape.hidden, e.h = small_.as<__nv_bfloat16>() + 131072;
      e.y = small_.as<__nv_bfloat16>() + 262144, e.ldy = experts_shape.hidden, e.m = 1;
      good(launch_gate_up<experts_shape>(e, main));
      good(launch_down<experts_shape>(e, main));
      if (swaps && c.cpu) good(host_experts_family::launch(hand_over(q), main));
    }
    read(dense_ + shape.layers * layer_bytes, head_bytes, out, main);
  }

  [[nodiscard]] nibble::moe::host_experts_params hand_over(const nibble::moe::place_params& q) const {
    nibble::moe::host_experts_params h;
    server->set(h);
    h.host_list = q.host_list, h.layer = q.layer, h.rows = 1, h.ids = q.ids,
    h.weights = small_.as<float>() + 1024;
    h.x = small_.as<__nv_bfloat16>() + 65536, h.ldx = experts_shape.hidden;
    h.y = small_.as<__nv_bfloat16>() + 262144, h.ldy = experts_shape.hidden;
    h.failures = &q.state.counts->failed;
    return h;
  }

  timer& t_;
  const nibble::moe::expert_store& store_;
  std::byte *arena_, *dense_;
  nibble::moe::device_residency tables_;
  nibble::device_memory small_, ids_, split_;
};

inline void all_steps(timer& t, const nibble::moe::expert_store& store, const std::string& file) {
  using namespace nibble::moe;
  good(prepare_experts<experts_shape>());
  const auto prepare_all = [](auto kernel, int threads, std::size_t shared, const char* name) {
    return nibble::prepare(kernel, threads, shared, name);
  };
  good(residency_family<shape>::for_each_kernel(prepare_all));
  good(fetch_family::for_each_kernel(prepare_all));
  nibble::device_memory arena(slot_bytes * static_cast<std::size_t>(slots_for(16))),
      dense(shape.layers * layer_bytes + head_bytes);
  BENCH_CHECK(cudaMemset(arena.data(), 0x11, arena.bytes()));
  BENCH_CHECK(cudaMemset(dense.data(), 0x11, dense.bytes()));
  steps s(t, store, arena.data(), dense.data());
  const double pcie = [&] {  // bytes a microsecond: one large copy
    const std::size_t bytes = slot_bytes * 32;
    return static_cast<double>(bytes) / t.per_call(2, 5, [&](int) {
      BENCH_CHECK(cudaMemcpyAsync(arena.data(), store.data(), bytes, cudaMemcpyHostToDevice, t.stream()));
    });
  }();
  const double memory = [&] {
    return static_cast<double>(dense.bytes()) / t.per_call(3, 5, [&](int) {
      read(dense.data(), dense.bytes(), reinterpret_cast<unsigned*>(arena.data()), {t.stream()});
    });
  }();
  const double gpu_bytes =
      static_cast<double>(shape.layers) * (layer_bytes + (shape.top_k + 1.0) * slot_bytes) + head_bytes;
  const double resident = s.resident_us();
  std::printf(
      "{\"part\":\"machine\",\"pcie_gbps\":%.1f,\"memory_gbps\":%.0f,\"gpu_bound_us\":%.0f,\"resident_us\":%."
      "0f}\n",
      pcie / 1e3, memory / 1e3, gpu_bytes / memory, resident);
  // CPU and link, alone and together.
  good(host_experts_family::for_each_kernel(prepare_all));
  cpu_experts cpu(store);
  s.server = &cpu.server();
  fetch_params all;
  all.store = reinterpret_cast<const std::uint8_t*>(store.data()),
  all.slots = reinterpret_cast<std::uint8_t*>(arena.data());
  all.slot_bytes = all.bytes = slot_bytes, all.slot_count = slots_for(16), all.expert_count = store.count();
  const auto latencies = measure_misses(all, cpu.server(), experts_shape.hidden, shape.top_k, t.stream());
  const auto split = split_misses(latencies.view());
  s.fetch_of.assign(split.begin(), split.end());
  std::printf("{\"part\":\"latencies\",\"threads\":%d", cpu.threads());
  const auto print = [](const char* name, const auto& values) {
    std::printf(",\"%s\":[", name);
    for (std::size_t i = 0; i < values.size(); ++i)
      std::printf("%s%.0f", i == 0 ? "" : ",", static_cast<double>(values[i]));
    std::printf("]");
  };
  print("fetch", latencies.fetch), print("fetch_contended", latencies.fetch_contended);
  print("host", latencies.host), print("host_contended", latencies.host_contended);
  print("fetch_of", std::vector<std::int32_t>(split.begin(), split.begin() + 9));
  std::printf("}\n");
  std::string rows;
  const auto measure = [&](const step_case& c) {
    const auto r = s.run(c);
    const double bound = std::max(gpu_bytes / memory, r.missed_bytes / pcie);
    char text[512];
    std::snprintf(
        text, sizeof text,
        "{\"suite\":\"layers\",\"vram_gib\":%g,\"slots\":%d,\"trace\":\"%s\",\"policy\":\"%s\",\"cpu\":%s,"
        "\"hit_rate\":%.4f,\"us_per_step\":%.0f,\"bound_us\":%.0f,\"over_bound\":%.3f,\"tokens_per_s\":%.1f}",
        c.vram_gib, slots_for(c.vram_gib), c.exponent > 0 ? "zipf" : "uniform", c.policy,
        c.cpu ? "true" : "false", r.hit_rate, r.us, bound, r.us / bound, 1e6 / r.us);
    std::printf("%s\n", text);
    std::fflush(stdout);
    rows += (rows.empty() ? "" : ",\n") + std::string(text);
  };
  for (const double vram : {8.0, 12.0, 16.0})
    for (const double exponent : {0.0, 1.0}) {
      measure({vram, exponent});
      if (exponent > 0) measure({vram, exponent, 2048, "lru"});
      measure({vram, exponent, default_ticks, "worth", true});
    }
  if (!file.empty()) {
    std::FILE* out = std::fopen(file.c_str(), "w");
    if (out == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", file.c_str());
      std::exit(1);
    }
    std::fprintf(out, "[\n%s\n]\n", rows.c_str());
    std::fclose(out);
  }
}

}  // namespace bench
