// SPDX-License-Identifier: Apache-2.0
// Sampling against fp64: filters in all combinations, penalties, bias, masks, ties, rows that hold no
// distribution, log-probabilities; and the same tokens alone and in a batch.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "device_test.cuh"
#include "nibble/kernels/sampling.cuh"
#include "nibble/ref/sampling.hpp"
#include "random_matrix.hpp"

using namespace nibble;
using device_test::buffer;

namespace {

const launch_options chained{device_test::stream(), device_test::chained};
constexpr float infinity = std::numeric_limits<float>::infinity();

/// The uniform number of (seed, step), as the library documents it.
double uniform(std::uint64_t seed, std::uint64_t step) {
  const auto mix = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9u;
    z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBu;
    return z ^ (z >> 31);
  };
  const std::uint64_t key = mix(seed + 0x9E37'79B9'7F4A'7C15u);
  return static_cast<double>(mix(key + mix(step * 0x9E37'79B9'7F4A'7C15u + 0xD1B5'4A32'D192'ED03u)) >> 11) *
         0x1p-53;
}

/// A row as the host knows it; arrays are empty where absent.
struct row {
  std::vector<float> logits;
  sampling_row r;
  std::vector<std::uint32_t> seen, allowed;
  std::vector<device_token_bias> bias;
};

std::vector<float> normal(int vocab, std::uint64_t seed, double scale) {
  std::vector<float> v(static_cast<std::size_t>(vocab));
  device_test::fast_random random{seed};
  for (auto& e : v) {
    double s = 0;
    for (int i = 0; i < 6; ++i) s += static_cast<double>(random() >> 11) * 0x1p-53 - 0.5;
    e = static_cast<float>(s * 1.414 * scale);
  }
  return v;
}

std::vector<double> adjusted(const row& x) {
  std::vector<double> l(x.logits.begin(), x.logits.end());
  for (std::size_t i = 0; i < l.size(); ++i) {
    if (!x.allowed.empty() && (x.allowed[i / 32] >> (i % 32) & 1) == 0) l[i] = -infinity;
    if (x.seen.empty() || x.seen[i] == 0) continue;
    l[i] = l[i] > 0 ? l[i] / x.r.repetition : l[i] * x.r.repetition;
    const std::uint32_t count = x.seen[i] & 0x7FFF'FFFFu;
    if (count > 0) l[i] -= x.r.presence + static_cast<double>(x.r.frequency) * count;
  }
  for (const auto& b : x.bias)
    if (b.token >= 0 && static_cast<std::size_t>(b.token) < l.size())
      l[static_cast<std::size_t>(b.token)] += b.bias;
  return l;
}

/// Whether `token` is what the row's uniform number chooses, up to rounding at the edges. `exact` counts rows
/// where no rounding is needed to agree.
bool drawn_rightly(const row& x, int token, int& exact) {
  const auto l = adjusted(x);
  const sampling_row& r = x.r;
  if (token < 0 || static_cast<std::size_t>(token) >= l.size()) return false;
  if (r.temperature <= 1e-5f) {
    const auto p = ref::sampling_probabilities(l, 0, 0, 1, 0);
    ++exact;
    return p[static_cast<std::size_t>(token)] == 1;
  }
  const bool filters =
      r.top_p < 1 || r.min_p > 0 || (r.top_k > 0 && static_cast<std::size_t>(r.top_k) < l.size());
  std::vector<std::size_t> order(l.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (filters) std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return l[a] > l[b]; });
  const double u = uniform(r.seed, r.step);
  for (const double slack : {0.0, 2e-6}) {
    const auto p = ref::sampling_probabilities(l, r.temperature, r.top_k,
                                               r.top_p >= 1 ? 1 : std::min(1.0, r.top_p + slack),
                                               r.min_p * (1 - 2 * slack));
    double before = 0;
    for (const std::size_t i : order) {
      if (static_cast<int>(i) == token) break;
      before += p[i];
    }
    const double own = p[static_cast<std::size_t>(token)];
    if (own > 0 && u >= before - 10 * slack && u < before + own + 10 * slack) {
      if (slack == 0) ++exact;
      return true;
    }
  }
  std::printf("  token %d p %g, u %g\n", token,
              ref::sampling_probabilities(l, r.temperature, r.top_k, r.top_p,
                                          r.min_p)[static_cast<std::size_t>(token)],
              u);
  return false;
}

/// Rows on the device for a launch, and what came back.
template <int Vocab>
struct launcher {
  using family = sampling_family<Vocab>;
  static constexpr std::ptrdiff_t ldl = (Vocab + 3) / 4 * 4 + 8;
  buffer<std::byte> workspace;

  explicit launcher(int most) : workspace(sampling_workspace_bytes(Vocab, most)) {
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(workspace.data(), 0, workspace.bytes(), device_test::stream()));
    NIBBLE_GOOD(family::for_each_kernel([](auto kernel, int threads, std::size_t shared, const char* name) {
      kernel_info info;
      const status s = prepare(kernel, threads, shared, name, &info);
      NIBBLE_CHECK(!s.ok() || info.local_bytes <= device_test::allowed_local_bytes);
      return s;
    }));
  }
  std::vector<sampled_row> run(std::vector<row>& rows, bool all_greedy = false, bool logprobs = true) {
    const auto count = rows.size();
    std::vector<float> logits((count - 1) * ldl + Vocab, std::numeric_limits<float>::quiet_NaN());
    std::vector<sampling_row> r;
    std::vector<std::unique_ptr<buffer<std::uint32_t>>> words;
    std::vector<std::unique_ptr<buffer<device_token_bias>>> biases;
    buffer<std::uint64_t> steps(count);
    std::vector<std::uint64_t> first_steps;
    for (std::size_t i = 0; i < count; ++i) {
      std::copy(rows[i].logits.begin(), rows[i].logits.end(),
                logits.begin() + static_cast<std::ptrdiff_t>(i) * ldl);
      r.push_back(rows[i].r);
      if (!rows[i].seen.empty())
        words.push_back(std::make_unique<buffer<std::uint32_t>>(rows[i].seen)),
            r[i].seen = words.back()->data();
      if (!rows[i].allowed.empty())
        words.push_back(std::make_unique<buffer<std::uint32_t>>(rows[i].allowed)),
            r[i].allowed = words.back()->data();
      if (!rows[i].bias.empty()) {
        biases.push_back(std::make_unique<buffer<device_token_bias>>(rows[i].bias));
        r[i].bias = biases.back()->data(), r[i].bias_count = static_cast<int>(rows[i].bias.size());
      }
      first_steps.push_back(rows[i].r.step);
      if (i % 2 == 1) r[i].step = 12345, r[i].step_at = steps.data() + i;  // read from the device instead
    }
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(steps.data(), first_steps.data(), 8 * count, cudaMemcpyHostToDevice,
                                      device_test::stream()));
    buffer<float> d_logits(logits);
    buffer<sampling_row> d_rows(r);
    buffer<sampled_row> out(count);
    std::vector<std::int32_t> index;
    for (std::size_t i = 0; i < count; ++i)
      index.push_back(i % 3 == 2 ? -1 : static_cast<std::int32_t>(count - 1 - i));
    buffer<std::int32_t> d_index(index), tokens(count);
    sampling_launch_params p;
    p.rows = static_cast<int>(count), p.logits = d_logits.data(), p.ldl = ldl, p.row = d_rows.data(),
    p.out = out.data();
    p.tokens = tokens.data(), p.token_index = d_index.data(), p.workspace = workspace.data();
    p.all_greedy = all_greedy, p.any_logprobs = logprobs;
    NIBBLE_GOOD(family::launch(p, chained));
    const auto got = out.read();
    const auto next = tokens.read();
    const auto stepped = steps.read();
    std::size_t word = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const int to = index[i];
      NIBBLE_CHECK(to < 0 || next[static_cast<std::size_t>(to)] == got[i].token);
      NIBBLE_CHECK(stepped[i] == first_steps[i] + (i % 2 == 1 && got[i].status == 0 ? 1 : 0));
      if (!rows[i].seen.empty()) {
        auto want = rows[i].seen;
        if (got[i].status == 0) ++want[static_cast<std::size_t>(got[i].token)];
        NIBBLE_CHECK(words[word++]->read() == want);
      }
      if (!rows[i].allowed.empty()) ++word;
    }
    for (std::size_t i = 0; i < count; ++i)
      if (i % 3 == 2) NIBBLE_CHECK(device_test::untouched(next[count - 1 - i]));
    return got;
  }
};

void check_logprobs(const row& x, const sampled_row& got) {
  if (x.r.logprobs < 0) {
    NIBBLE_CHECK(std::isnan(got.logprob) && got.top_count == 0);
    return;
  }
  const std::vector<float>& l = x.logits;
  const double largest = *std::max_element(l.begin(), l.end());
  double sum = 0;
  for (const float v : l) sum += std::exp(v - largest);
  const double shift = largest + std::log(sum);
  const int wanted = std::min(x.r.logprobs, static_cast<int>(l.size()));
  NIBBLE_CHECK(std::fabs(got.logprob - (l[static_cast<std::size_t>(got.token)] - shift)) < 1e-5 ||
               l[static_cast<std::size_t>(got.token)] == -infinity);
  NIBBLE_CHECK(got.top_count == wanted);
  std::vector<int> order(l.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](int a, int b) {
    return l[static_cast<std::size_t>(a)] > l[static_cast<std::size_t>(b)] ||
           (l[static_cast<std::size_t>(a)] == l[static_cast<std::size_t>(b)] && a < b);
  });
  for (int n = 0; n < wanted; ++n) {
    NIBBLE_CHECK(got.top_token[n] == order[static_cast<std::size_t>(n)]);
    const double want = l[static_cast<std::size_t>(order[static_cast<std::size_t>(n)])] - shift;
    NIBBLE_CHECK(got.top_logprob[n] == want ||
                 std::fabs(got.top_logprob[n] - want) < 1e-5 * std::max(1.0, std::fabs(want)));
  }
}

/// Every kind of filter on distributions of every shape.
template <int Vocab>
std::vector<row> all_rows(std::uint64_t seed, int draws) {
  std::vector<row> rows;
  device_test::fast_random random{seed};
  const auto add = [&](std::vector<float> logits, float temperature, int top_k, float top_p,
                       float min_p) -> row& {
    row x;
    x.logits = std::move(logits);
    x.r.temperature = temperature, x.r.top_k = top_k, x.r.top_p = top_p, x.r.min_p = min_p;
    x.r.seed = random(), x.r.step = random() % 1000;
    x.r.logprobs = rows.size() % 3 == 0 ? static_cast<int>(random() % (max_top_logprobs + 1)) : -1;
    rows.push_back(std::move(x));
    return rows.back();
  };
  struct setting {
    float temperature;
    int top_k;
    float top_p, min_p;
  };
  const setting settings[] = {{0, 0, 1, 0},
                              {1, 0, 1, 0},
                              {1, 20, 0.95f, 0},
                              {1, 1, 1, 0},
                              {0.7f, 0, 0.9f, 0},
                              {1, 0, 0, 0},
                              {1, 0, 1, 0.05f},
                              {2, 700, 1, 0},
                              {1, 40, 0.8f, 0.1f},
                              {0.1f, 5, 0.99f, 0},
                              {3, 0, 0.999f, 0},
                              {1, Vocab - 1, 1, 0},
                              {1, 0, 1, 1},
                              {1.5f, 100, 0.5f, 0.9f},
                              {1, Vocab + 5, 0.7f, 0},
                              {1e-6f, 20, 0.9f, 0}};
  for (const double scale : {1.0, 4.0})
    for (const setting& s : settings)
      for (int d = 0; d < draws; ++d)
        add(normal(Vocab, random(), scale), s.temperature, s.top_k, s.top_p, s.min_p);
  // Ties, everywhere and at a cut.
  const std::vector<float> flat(static_cast<std::size_t>(Vocab), 1.25f);
  add(flat, 0, 0, 1, 0), add(flat, 1, 0, 1, 0), add(flat, 1, 7, 1, 0), add(flat, 1, 0, 0.3f, 0);
  add(flat, 1, Vocab / 2, 0.5f, 0.5f);
  std::vector<float> steps = normal(Vocab, 5, 2);
  for (auto& v : steps) v = std::round(v);
  add(steps, 1, 300, 1, 0), add(steps, 1, 0, 0.6f, 0), add(steps, 0.5f, 0, 1, 0.3f), add(steps, 0, 0, 1, 0);
  // Few possible tokens; zeros of both signs.
  std::vector<float> few(static_cast<std::size_t>(Vocab), -infinity);
  few[static_cast<std::size_t>(Vocab - 1)] = -0.0f, few[3] = 0.0f, few[1] = -50;
  add(few, 1, 0, 1, 0), add(few, 1, 2, 0.9f, 0), add(few, 0, 0, 1, 0), add(few, 1, 0, 1, 0.5f),
      add(few, 1, 50, 1, 0);
  // Penalties, bias, masks.
  for (const setting& s : {settings[0], settings[1], settings[2], settings[8]}) {
    row& x = add(normal(Vocab, random(), 3), s.temperature, s.top_k, s.top_p, s.min_p);
    x.r.repetition = 1.3f, x.r.presence = 0.6f, x.r.frequency = 0.4f;
    x.seen.assign(static_cast<std::size_t>(Vocab), 0);
    for (int i = 0; i < Vocab / 3; ++i)
      x.seen[random() % static_cast<std::uint64_t>(Vocab)] =
          static_cast<std::uint32_t>((random() % 2) << 31 | random() % 4);
    row& y = add(normal(Vocab, random(), 3), s.temperature, s.top_k, s.top_p, s.min_p);
    y.bias = {{-1, 100}, {Vocab, 100}, {5, 6.5f}, {Vocab - 1, 7}, {Vocab / 2, -100}, {7, 6}};
    row& z = add(normal(Vocab, random(), 3), s.temperature, s.top_k, s.top_p, s.min_p);
    z.allowed.assign(static_cast<std::size_t>((Vocab + 31) / 32), 0);
    for (int i = 0; i < 9; ++i) {
      const auto token = random() % static_cast<std::uint64_t>(Vocab);
      z.allowed[token / 32] |= 1u << (token % 32);
    }
    z.bias = {{3, 1}, {9, 2}};
    z.seen = x.seen, z.r.repetition = 0.8f;
  }
  return rows;
}

template <int Vocab>
void against_reference(std::uint64_t seed, int draws) {
  auto rows = all_rows<Vocab>(seed, draws);
  launcher<Vocab> launch(static_cast<int>(rows.size()));
  const auto got = launch.run(rows);
  int exact = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    NIBBLE_CHECK(got[i].status == 0);
    const bool right = drawn_rightly(rows[i], got[i].token, exact);
    if (!right)
      std::printf("  row %zu: T %g top_k %d top_p %g min_p %g\n", i, rows[i].r.temperature, rows[i].r.top_k,
                  rows[i].r.top_p, rows[i].r.min_p);
    NIBBLE_CHECK(right);
    check_logprobs(rows[i], got[i]);
  }
  NIBBLE_CHECK(exact >= static_cast<int>(rows.size()) * 97 / 100);
  // Again, alone: the same tokens, and the workspace was left as it must be.
  for (std::size_t i = 0; i < rows.size(); i += 5) {
    std::vector<row> one{rows[i]};
    const auto alone = launch.run(one, false, rows[i].r.logprobs >= 0);
    NIBBLE_CHECK(alone[0].token == got[i].token && alone[0].top_count == got[i].top_count);
    NIBBLE_CHECK(rows[i].r.logprobs < 0 || alone[0].logprob == got[i].logprob);
  }
}

template <int Vocab>
void greedy_only(std::uint64_t seed) {
  launcher<Vocab> launch(6);
  std::vector<row> rows(6);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].logits = normal(Vocab, seed + i, 3), rows[i].r.temperature = 0;
    rows[i].r.logprobs = static_cast<int>(i) * 4 - 1;
  }
  rows[1].logits[static_cast<std::size_t>(Vocab - 1)] = rows[1].logits[Vocab / 2] = 90;
  const auto got = launch.run(rows, true);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& l = rows[i].logits;
    NIBBLE_CHECK(got[i].status == 0 && got[i].token == std::max_element(l.begin(), l.end()) - l.begin());
    check_logprobs(rows[i], got[i]);
  }
}

template <int Vocab>
void no_distribution() {
  launcher<Vocab> launch(8);
  for (const float temperature : {0.0f, 1.0f}) {
    std::vector<row> rows(8);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].logits = normal(Vocab, 3 + i, 2), rows[i].r.temperature = temperature, rows[i].r.top_k = 10;
      rows[i].r.logprobs = 2;
    }
    rows[1].logits[static_cast<std::size_t>(Vocab - 1)] = std::numeric_limits<float>::quiet_NaN();
    rows[2].logits[0] = infinity;
    rows[4].logits.assign(static_cast<std::size_t>(Vocab), -infinity);
    rows[5].allowed.assign(static_cast<std::size_t>((Vocab + 31) / 32), 0);
    rows[6].seen.assign(static_cast<std::size_t>(Vocab), 0), rows[6].logits[4] = infinity;
    const auto got = launch.run(rows);
    for (const std::size_t i : {1, 2, 4, 5, 6}) NIBBLE_CHECK(got[i].status == 1 && got[i].token == -1);
    for (const std::size_t i : {1, 2, 4, 6}) NIBBLE_CHECK(std::isnan(got[i].logprob));
    for (const std::size_t i : {0, 3, 7})
      NIBBLE_CHECK(got[i].status == 0 && got[i].token >= 0 && got[i].top_count == 2);
  }
}

const bool added[] = {
    device_test::add("small", "one chunk", [] { against_reference<2048>(1, 2); }),
    device_test::add("small", "odd", [] { against_reference<4999>(2, 2); }),
    device_test::add("small", "greedy", [] { greedy_only<4999>(4), greedy_only<2048>(5); }),
    device_test::add("small", "C016: no distribution",
                     [] { no_distribution<2048>(), no_distribution<6001>(); }),
    device_test::add("full", "248320 tokens", [] { against_reference<248320>(3, 1); }),
    device_test::add("full", "greedy", [] { greedy_only<248320>(6); }),
};

}  // namespace

int main(int argc, char** argv) { return added[0] ? device_test::run(argc, argv) : 1; }
