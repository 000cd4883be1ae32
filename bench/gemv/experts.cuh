// SPDX-License-Identifier: Apache-2.0
/// \file
/// The expert suites: gate|up, down, and the pair, with random routes over 256 resident experts.
#pragma once

#include <cstring>
#include <random>
#include <set>

#include "harness.cuh"
#include "nibble/moe/experts_family.cuh"

namespace bench {

template <nibble::moe::experts_shape S>
struct experts_case {
  static constexpr int sets = 64, max_m = 16, shared_copies = 64;
  int most;  ///< tokens
  nibble::moe::experts_params base;
  std::int32_t* ids;
  std::uint8_t* shared;
  std::vector<std::int32_t> routes;
  double up_plain, up_pdl, down_plain, down_pdl;

  explicit experts_case(int most_tokens) : most(std::max(most_tokens, max_m)) {
    std::mt19937_64 random(3);
    const std::size_t bytes = S.slot_bytes();
    std::vector<std::uint8_t> slot(bytes);
    for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
      const std::uint64_t v = random() & 0xB7B7'B7B7'B7B7'B7B7ull;
      std::memcpy(slot.data() + i, &v, 8);
    }
    auto* arena = allocate<std::uint8_t>(bytes * S.experts);
    shared = allocate<std::uint8_t>(bytes * shared_copies);
    for (int e = 0; e < S.experts; ++e)
      BENCH_CHECK(cudaMemcpy(arena + static_cast<std::size_t>(e) * bytes, slot.data(), bytes,
                             cudaMemcpyHostToDevice));
    for (int e = 0; e < shared_copies; ++e)
      BENCH_CHECK(cudaMemcpy(shared + static_cast<std::size_t>(e) * bytes, slot.data(), bytes,
                             cudaMemcpyHostToDevice));
    std::vector<std::int32_t> slot_of(S.experts);
    for (int e = 0; e < S.experts; ++e) slot_of[e] = e;
    std::shuffle(slot_of.begin(), slot_of.end(), random);
    routes.resize(static_cast<std::size_t>(std::max(sets * max_m, 2 * most)) * S.top_k);
    for (std::size_t t = 0; t < routes.size() / S.top_k; ++t) {
      std::vector<std::int32_t> order(S.experts);
      for (int e = 0; e < S.experts; ++e) order[e] = e;
      for (int j = 0; j < S.top_k; ++j) {
        std::swap(order[j],
                  order[j + static_cast<int>(random() % static_cast<std::uint64_t>(S.experts - j))]);
        routes[t * S.top_k + j] = order[j];
      }
    }
    ids = upload(routes);
    std::vector<__nv_bfloat16> x(static_cast<std::size_t>(most) * S.hidden);
    for (auto& v : x) v = __float2bfloat16(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
    base.slots = arena,
    base.slot_scales = upload(std::vector<float>(3 * static_cast<std::size_t>(S.experts), 0.01f));
    base.slot_count = S.experts, base.slot_of = upload(slot_of), base.shared_expert = shared;
    for (float& s : base.shared_scales) s = 0.01f;
    base.weights = upload(std::vector<float>(static_cast<std::size_t>(most) * S.top_k, 0.125f));
    base.shared_weights = upload(std::vector<float>(most, 0.5f));
    base.x = upload(x), base.ldx = S.hidden;
    base.h = allocate<__nv_bfloat16>(static_cast<std::size_t>(most) * S.groups() * S.inner);
    base.workspace_bytes = nibble::moe::experts_family<S>::workspace_bytes(most);
    base.workspace = allocate<std::byte>(base.workspace_bytes + 1);
    base.y = allocate<__nv_bfloat16>(static_cast<std::size_t>(most) * S.hidden), base.ldy = S.hidden;
    base.residual = base.y, base.ldr = S.hidden;
    base.report = allocate<unsigned>(nibble::moe::report_words(S));
    const auto floors = [&](std::size_t part, double& plain, double& pdl) {
      std::vector<const std::uint8_t*> copies;
      for (std::size_t at = 0; (at + 1) * part * S.groups() <= bytes * S.experts; ++at)
        copies.push_back(arena + at * part * S.groups());
      plain = read_floor(copies, part * S.groups(), 200, nibble::launch_chain::plain);
      pdl = read_floor(copies, part * S.groups(), 200, nibble::launch_chain::pdl);
    };
    floors(S.gate_up().bytes(), up_plain, up_pdl);
    floors(S.down().bytes(), down_plain, down_pdl);
  }
  [[nodiscard]] nibble::moe::experts_params params(int i, int m) const {
    nibble::moe::experts_params p = base;
    p.m = m;
    p.ids = ids + static_cast<std::ptrdiff_t>(i * m % (sets * max_m - m + 1)) * S.top_k;
    p.shared_expert = shared + static_cast<std::size_t>(i % shared_copies) * S.slot_bytes();
    return p;
  }
  /// Distinct matrices a launch reads, on average.
  [[nodiscard]] double distinct(int m, int count) const {
    double sum = 0;
    for (int i = 0; i < count; ++i) {
      const std::size_t at = static_cast<std::size_t>(i * m % (sets * max_m - m + 1)) * S.top_k;
      sum += static_cast<double>(
                 std::set<std::int32_t>(routes.begin() + at, routes.begin() + at + m * S.top_k).size()) +
             (S.shared ? 1 : 0);
    }
    return sum / count;
  }
  /// More than 16 tokens: sort, gate|up, down and the sum together. Two sets of routes in turn; all experts'
  /// weights exceed the caches.
  void time_many(int m, report& out) const {
    const double us = graph_time(m <= 512 ? 20 : 6, [&](int i) {
      nibble::moe::experts_params p = params(0, m);
      p.ids = ids + static_cast<std::ptrdiff_t>(i % 2) * m * S.top_k;
      good(nibble::moe::experts_family<S>::launch(p, {stream(), nibble::launch_chain::pdl}));
    });
    const double matrices =
        static_cast<double>(
            std::set<std::int32_t>(routes.begin(), routes.begin() + static_cast<std::ptrdiff_t>(m) * S.top_k)
                .size()) +
        (S.shared ? 1 : 0);
    out.add({"experts_pair",
             "experts " + std::to_string(S.top_k) + "/" + std::to_string(S.experts) + (S.shared ? "+1" : ""),
             2 * S.inner, S.hidden, m, std::string(nibble::name_of(S.format)),
             "sorted w" + std::to_string(nibble::moe::expert_tile_width(S, m)), "pdl", us,
             (up_pdl + down_pdl) * matrices / S.groups(),
             static_cast<std::size_t>(static_cast<double>(S.slot_bytes()) * matrices)});
  }
  template <class Up, class Down>
  void time(const std::string& label, const std::vector<int>& tokens, Up up, Down down, report* out) const {
    const int count = 200;
    for (const int m : tokens)
      for (const auto chain : {nibble::launch_chain::plain, nibble::launch_chain::pdl}) {
        const nibble::launch_options o{stream(), chain};
        const double matrices = distinct(m, count), share = matrices / S.groups();
        const bool pdl = chain == nibble::launch_chain::pdl;
        const std::string geometry =
            "experts " + std::to_string(S.top_k) + "/" + std::to_string(S.experts) + (S.shared ? "+1" : "");
        const auto emit = [&](const char* suite, int n, int k, double us, double floor, std::size_t bytes) {
          row r{suite,
                geometry,
                n,
                k,
                m,
                std::string(nibble::name_of(S.format)),
                label,
                pdl ? "pdl" : "plain",
                us,
                floor,
                static_cast<std::size_t>(static_cast<double>(bytes) * matrices)};
          if (out != nullptr)
            out->add(r);
          else
            std::printf("%-16s m=%-2d %-30s %-5s %7.2f us\n", suite, m, label.c_str(), r.chain.c_str(), us);
        };
        // Floors beyond M = 1 scale the bytes: a longer read only gets closer to the memory's rate.
        const double t_up = graph_time(count, [&](int i) { good(up(params(i, m), o)); });
        const double t_down = graph_time(count, [&](int i) { good(down(params(i, m), o)); });
        const double t_pair = 2 * graph_time(count, [&](int i) {
                                good(i % 2 ? down(params(i / 2, m), o) : up(params(i / 2, m), o));
                              });
        emit("experts_gate_up", 2 * S.inner, S.hidden, t_up, (pdl ? up_pdl : up_plain) * share,
             S.gate_up().bytes());
        emit("experts_down", S.hidden, S.inner, t_down, (pdl ? down_pdl : down_plain) * share,
             S.down().bytes());
        emit("experts_pair", 2 * S.inner, S.hidden, t_pair,
             (pdl ? up_pdl + down_pdl : up_plain + down_plain) * share, S.slot_bytes());
        std::fflush(stdout);
      }
  }
};

template <nibble::moe::experts_shape S>
void experts(report& out, const std::vector<int>& tokens, const std::vector<int>& many) {
  good(nibble::moe::prepare_experts<S>());
  good(nibble::moe::prepare_experts_many<S>());
  const experts_case<S> c(many.empty() ? 0 : *std::max_element(many.begin(), many.end()));
  c.time(
      "grouped", tokens, [](const auto& p, const auto& o) { return nibble::moe::launch_gate_up<S>(p, o); },
      [](const auto& p, const auto& o) { return nibble::moe::launch_down<S>(p, o); }, &out);
  for (const int m : many) c.time_many(m, out);
}

}  // namespace bench
