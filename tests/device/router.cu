// SPDX-License-Identifier: Apache-2.0
// The router, RMSNorm, embedding and row selection against fp64.
#include "device_test.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/kernels/norm.cuh"
#include "nibble/kernels/router.cuh"
#include "nibble/kernels/rows_copy.cuh"
#include "nibble/ref/norm.hpp"
#include "nibble/ref/router.hpp"
#include "random_matrix.hpp"

using namespace nibble;
using device_test::buffer;
using device_test::random_activations;
using bf = __nv_bfloat16;

namespace {

const launch_options chained{device_test::stream(), device_test::chained};

std::vector<float> random_floats(std::size_t count, std::uint64_t seed, double low, double high) {
  std::vector<float> v(count);
  device_test::fast_random random{seed};
  for (auto& e : v)
    e = static_cast<float>(low + (high - low) * static_cast<double>(random() >> 11) * 0x1p-53);
  return v;
}
std::vector<double> wide_row(const std::vector<std::uint16_t>& v, std::size_t first, int count) {
  std::vector<double> w;
  for (int i = 0; i < count; ++i) w.push_back(bf16::decode(v[first + static_cast<std::size_t>(i)]));
  return w;
}
bf* as_bf(const buffer<std::uint16_t>& b) { return reinterpret_cast<bf*>(b.data()); }

struct routed {
  std::vector<std::uint16_t> normed;
  std::vector<std::int32_t> ids;
  std::vector<float> weights, shared;
};

template <router_shape S>
struct routers {
  using family = router_family<S>;
  static constexpr int most = 150, ldh = S.hidden + 8, ldn = S.hidden + 24;
  std::vector<std::uint16_t> hidden, weight, gate;
  std::vector<float> norm;
  buffer<std::uint16_t> d_hidden, d_weight, d_gate;
  buffer<float> d_norm;
  buffer<std::byte> workspace;

  explicit routers(std::uint64_t seed)
      : hidden(random_activations(static_cast<std::size_t>(most) * ldh, seed)),
        weight(random_activations(static_cast<std::size_t>(S.experts) * S.hidden, seed + 1)),
        gate(random_activations(S.hidden, seed + 2)),
        norm(random_floats(S.hidden, seed + 3, -0.5, 0.5)),
        d_hidden(prepared(seed)),
        d_weight(weight),
        d_gate(gate),
        d_norm(norm),
        workspace(router_workspace_bytes(S)) {
    NIBBLE_CUDA_CHECK(cudaMemsetAsync(workspace.data(), 0, workspace.bytes(), device_test::stream()));
    NIBBLE_GOOD(family::for_each_kernel([](auto kernel, int threads, std::size_t shared, const char* name) {
      kernel_info info;
      const status s = prepare(kernel, threads, shared, name, &info);
      NIBBLE_CHECK(!s.ok() || info.local_bytes <= device_test::allowed_local_bytes);
      return s;
    }));
  }
  /// Equal experts for ties: 3, 5 and the last one are copies of 1.
  std::vector<std::uint16_t>& prepared(std::uint64_t) {
    for (auto& v : weight) v = bf16::encode(bf16::decode(v) / 24);
    for (auto& v : gate) v = bf16::encode(bf16::decode(v) / 24);
    for (const int copy : {3, 5, S.experts - 1})
      if (copy < S.experts)
        std::copy_n(weight.begin() + S.hidden, S.hidden, weight.begin() + std::ptrdiff_t{copy} * S.hidden);
    return hidden;
  }
  /// What a router writes, apart from its workspace.
  struct outputs {
    buffer<std::uint16_t> normed;
    buffer<std::int32_t> ids;
    buffer<float> weights, shared;
    explicit outputs(int rows)
        : normed(static_cast<std::size_t>(rows) * ldn),
          ids(static_cast<std::size_t>(rows) * S.top_k),
          weights(static_cast<std::size_t>(rows) * S.top_k),
          shared(static_cast<std::size_t>(rows)) {}
    [[nodiscard]] routed read() const { return {normed.read(), ids.read(), weights.read(), shared.read()}; }
  };
  [[nodiscard]] router_operands operands(const outputs& to) const {
    return {d_norm.data(), as_bf(d_weight),   S.shared ? as_bf(d_gate) : nullptr,    as_bf(to.normed),
            to.ids.data(), to.weights.data(), S.shared ? to.shared.data() : nullptr, workspace.data()};
  }
  [[nodiscard]] router_params params(int rows, int first, const router_operands& operands) const {
    router_params p;
    static_cast<router_operands&>(p) = operands;
    p.rows = rows, p.hidden = as_bf(d_hidden) + std::ptrdiff_t{first} * ldh, p.ldh = ldh, p.ldn = ldn;
    p.zero_centred = true;
    return p;
  }
  routed run(int rows, int first, bool prefill) {
    const outputs to(rows);
    const router_params p = params(rows, first, operands(to));
    NIBBLE_GOOD(prefill ? family::launch_prefill(p, chained) : family::launch(p, chained));
    return to.read();
  }
  /// Two routers in one launch leave what each of them leaves alone.
  void check_beside(const routers& other) {
    const auto same = [](const routed& a, const routed& b) {
      return a.normed == b.normed && a.ids == b.ids &&
             std::memcmp(a.weights.data(), b.weights.data(), 4 * a.weights.size()) == 0 &&
             (!S.shared || std::memcmp(a.shared.data(), b.shared.data(), 4 * a.shared.size()) == 0);
    };
    for (const int rows : {1, 2, 9, 16, 29, 57, 112, 113}) {
      const outputs mine(rows), theirs(rows), alone(rows);
      router_params p = params(rows, 0, operands(mine));
      p.beside = other.operands(theirs);
      NIBBLE_GOOD(family::launch(p, chained));
      NIBBLE_GOOD(family::launch(params(rows, 0, other.operands(alone)), chained));
      NIBBLE_CHECK(same(mine.read(), run(rows, 0, false)));
      NIBBLE_CHECK(same(theirs.read(), alone.read()));
      NIBBLE_CHECK(rows < 9 || mine.read().ids != theirs.read().ids);
    }
    const outputs mine(1), theirs(1);
    router_params p = params(1, 0, operands(mine));
    p.beside = other.operands(theirs);
    for (std::byte* const bad : {static_cast<std::byte*>(nullptr), p.workspace}) {
      p.beside.workspace = bad;
      NIBBLE_CHECK(family::launch(p, chained).code == status_code::invalid_argument);
      NIBBLE_CHECK(family::launch_prefill(p, chained).code == status_code::invalid_argument);
    }
  }
  void check(const routed& got, int rows, int first) const {
    for (int r = 0; r < rows; ++r) {
      const auto x = wide_row(hidden, static_cast<std::size_t>(first + r) * ldh, S.hidden);
      const auto y = ref::rms_norm(x, std::vector<double>(norm.begin(), norm.end()), true, 1e-6);
      std::vector<double> stored = wide_row(got.normed, static_cast<std::size_t>(r) * ldn, S.hidden);
      for (int c = 0; c < S.hidden; ++c)
        NIBBLE_CHECK(std::fabs(stored[c] - y[c]) <= 0x1.02p-8 * std::fabs(y[c]) + 1e-30);
      for (int c = S.hidden; c < ldn; ++c)
        NIBBLE_CHECK(got.normed[static_cast<std::size_t>(r) * ldn + c] == 0xFFFF);
      std::vector<double> logits(S.experts);
      const auto dot = [&](const std::uint16_t* w) {
        double sum = 0;
        for (int k = 0; k < S.hidden; ++k) sum += stored[k] * bf16::decode(w[k]);
        return sum;
      };
      for (int e = 0; e < S.experts; ++e) logits[e] = dot(weight.data() + std::ptrdiff_t{e} * S.hidden);
      const ref::routing want = ref::route(logits, S.experts, S.top_k, S.normalise);
      for (int k = 0; k < S.top_k; ++k) {
        const auto at = static_cast<std::size_t>(r) * S.top_k + k;
        const int id = got.ids[at];
        NIBBLE_CHECK(id >= 0 && id < S.experts);
        if (id < 0 || id >= S.experts) continue;
        // Another id only where the logits are as good as equal; exact copies must come in order.
        NIBBLE_CHECK(id == want.ids[k] || (std::fabs(logits[id] - logits[want.ids[k]]) < 1e-5 &&
                                           logits[id] != logits[want.ids[k]]));
        NIBBLE_CHECK(std::fabs(got.weights[at] - want.weights[k]) < 2e-5);
      }
      if (S.shared) NIBBLE_CHECK(std::fabs(got.shared[r] - 1 / (1 + std::exp(-dot(gate.data())))) < 1e-5);
    }
  }
  void check_all() {
    std::vector<routed> alone;
    for (int first : {0, 1, 2, 3, 4, 149}) {
      alone.push_back(run(1, first, false));
      check(alone.back(), 1, first);
    }
    for (const int rows : {2, 4, 5, 8, 9, 16, 17, 28, 29, 56, 57, 64, 112, 113, 150})
      for (const bool prefill : {false, true}) {
        const routed got = run(rows, 0, prefill);
        if (rows % 4 == 1 || rows == 150) check(got, rows, 0);
        // The same bits as alone, in every kernel.
        for (int r = 0; r < std::min(rows, 5); ++r) {
          const auto n = static_cast<std::size_t>(r), k = static_cast<std::size_t>(S.top_k);
          NIBBLE_CHECK(std::equal(alone[n].ids.begin(), alone[n].ids.end(), got.ids.begin() + n * k));
          NIBBLE_CHECK(std::memcmp(alone[n].weights.data(), got.weights.data() + n * k, 4 * k) == 0);
          NIBBLE_CHECK(!S.shared || alone[n].shared[0] == got.shared[n]);
          NIBBLE_CHECK(
              std::equal(alone[n].normed.begin(), alone[n].normed.end(), got.normed.begin() + n * ldn));
        }
      }
    check_beside(routers(1000));
    // Counters go back to zero: the first word of the workspace.
    const auto bytes = workspace.read();
    NIBBLE_CHECK(bytes[0] == std::byte{} && bytes[1] == std::byte{});
    // NaN in a row: valid ids, NaN weights, and only there.
    std::vector<std::uint16_t> bad = hidden;
    bad[ldh + 7] = 0x7FC0;
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(d_hidden.data(), bad.data(), 2 * bad.size(), cudaMemcpyHostToDevice,
                                      device_test::stream()));
    for (const bool prefill : {false, true}) {
      const routed got = run(3, 0, prefill);
      for (int k = 0; k < S.top_k; ++k) {
        NIBBLE_CHECK(got.ids[S.top_k + k] >= 0 && got.ids[S.top_k + k] < S.experts);
        NIBBLE_CHECK(std::isnan(got.weights[S.top_k + k]));
        NIBBLE_CHECK(got.weights[k] == alone[0].weights[k] && got.ids[k] == alone[0].ids[k]);
        NIBBLE_CHECK(got.weights[2 * S.top_k + k] == alone[2].weights[k]);
      }
    }
  }
};

/// C018: negative logits in any order, huge ones, equal ones. Rows of ones, and one column of weights that
/// says each expert's logit.
template <router_shape S>
void negative_logits() {
  using family = router_family<S>;
  NIBBLE_GOOD(family::for_each_kernel([](auto kernel, int threads, std::size_t shared, const char* name) {
    return prepare(kernel, threads, shared, name);
  }));
  static_assert(S.experts == 256 && S.shared && S.normalise);
  // 256 neighbours in bf16, 4 … 16, for experts in another order.
  std::vector<float> distinct(256);
  for (int i = 0; i < 256; ++i)
    distinct[static_cast<std::size_t>(i * 37 % 256)] =
        i < 128 ? 4 + static_cast<float>(i) / 32 : 8 + static_cast<float>(i - 128) / 16;
  std::vector<float> huge = distinct;
  for (auto& v : huge) v *= 1024;
  constexpr int most = 70;
  const buffer<std::uint16_t> hidden(
      std::vector<std::uint16_t>(static_cast<std::size_t>(most) * S.hidden, bf16::encode(1)));
  const buffer<std::uint16_t> gate(std::vector<std::uint16_t>(S.hidden, 0));
  const buffer<float> norm(std::vector<float>(S.hidden, 0.0f));
  const buffer<std::byte> workspace(std::vector<std::byte>(router_workspace_bytes(S)));
  for (const auto& sizes :
       {distinct, huge, std::vector<float>(256, 7.0f), std::vector<float>(256, 10240.0f)}) {
    std::vector<std::uint16_t> columns(static_cast<std::size_t>(S.experts) * S.hidden, 0);
    std::vector<double> logits;
    for (int e = 0; e < S.experts; ++e) {
      const float logit = -sizes[static_cast<std::size_t>(e)];
      columns[static_cast<std::size_t>(e) * S.hidden] = bf16::encode(logit);
      NIBBLE_CHECK(bf16::decode(bf16::encode(logit)) == logit);
      logits.push_back(logit);
    }
    const ref::routing want = ref::route(logits, S.experts, S.top_k, true);
    const buffer<std::uint16_t> weight(columns);
    for (const int rows : {1, 3, 16, most}) {
      const buffer<std::uint16_t> normed(static_cast<std::size_t>(rows) * S.hidden);
      const buffer<std::int32_t> ids(static_cast<std::size_t>(rows) * S.top_k);
      const buffer<float> weights(static_cast<std::size_t>(rows) * S.top_k),
          shared(static_cast<std::size_t>(rows));
      router_params p;
      p.rows = rows, p.hidden = as_bf(hidden), p.ldh = S.hidden, p.norm = norm.data(), p.zero_centred = true;
      p.weight = as_bf(weight), p.gate = as_bf(gate), p.normed = as_bf(normed), p.ldn = S.hidden;
      p.ids = ids.data(), p.weights = weights.data(), p.shared_weights = shared.data();
      p.workspace = workspace.data();
      NIBBLE_GOOD(family::launch(p, chained));
      const auto got = ids.read();
      const auto got_weights = weights.read();
      for (int r = 0; r < rows; ++r) {
        float sum = 0;
        for (int i = 0; i < S.top_k; ++i) {
          const auto at = static_cast<std::size_t>(r * S.top_k + i);
          NIBBLE_CHECK(got[at] == want.ids[static_cast<std::size_t>(i)]);
          sum += got_weights[at];
        }
        NIBBLE_CHECK(std::fabs(sum - 1) < 1e-6f);
      }
    }
  }
}

template <int Width>
void norms(std::uint64_t seed) {
  using family = rms_norm_family<Width>;
  const int rows = 11, ldx = Width + 16, ldy = Width + 8;
  const auto x = random_activations(static_cast<std::size_t>(rows) * ldx, seed);
  const auto w = random_floats(Width, seed + 1, -1, 1);
  const std::vector<std::int32_t> index{10, 0, 3, 3, -5, 99};
  buffer<std::uint16_t> d_x(x);
  buffer<float> d_w(w);
  buffer<std::int32_t> d_index(index);
  for (const bool zero_centred : {false, true})
    for (const bool indexed : {false, true}) {
      const int count = indexed ? 6 : rows;
      buffer<std::uint16_t> y(static_cast<std::size_t>(count) * ldy);
      rms_norm_params p;
      p.rows = count, p.x = as_bf(d_x), p.ldx = ldx, p.weight = d_w.data(), p.zero_centred = zero_centred;
      p.eps = 1e-5f, p.y = as_bf(y), p.ldy = ldy;
      if (indexed) p.index = d_index.data(), p.index_limit = rows;
      NIBBLE_GOOD(family::launch(p, chained));
      const auto got = y.read();
      for (int r = 0; r < count; ++r) {
        const int from = indexed ? std::clamp(index[r], 0, rows - 1) : r;
        const auto want = ref::rms_norm(wide_row(x, static_cast<std::size_t>(from) * ldx, Width),
                                        std::vector<double>(w.begin(), w.end()), zero_centred, 1e-5);
        for (int c = 0; c < ldy; ++c) {
          const std::uint16_t g = got[static_cast<std::size_t>(r) * ldy + c];
          NIBBLE_CHECK(c < Width
                           ? std::fabs(bf16::decode(g) - want[c]) <= 0x1.02p-8 * std::fabs(want[c]) + 1e-36
                           : g == 0xFFFF);
        }
      }
    }
}

template <int Vocab, int Width>
void copies(std::uint64_t seed) {
  const auto table = random_activations(static_cast<std::size_t>(Vocab) * Width, seed);
  const std::vector<std::int32_t> ids{0, Vocab - 1, 5, 5, -1, Vocab, 1 << 30, -(1 << 30), 2};
  const int rows = static_cast<int>(ids.size()), ldy = Width + 8;
  buffer<std::uint16_t> d_table(table), y(static_cast<std::size_t>(rows) * ldy),
      z(static_cast<std::size_t>(rows) * ldy);
  buffer<std::int32_t> d_ids(ids);
  buffer<std::uint32_t> out_of_range(std::vector<std::uint32_t>{0});
  embed_params e;
  e.rows = rows, e.table = as_bf(d_table), e.ids = d_ids.data(), e.y = as_bf(y), e.ldy = ldy;
  e.out_of_range = out_of_range.data();
  NIBBLE_GOOD((embedding_family<Vocab, Width>::launch(e, chained)));
  select_rows_params s;
  s.rows = rows, s.x = as_bf(d_table), s.ldx = Width, s.index = d_ids.data(), s.limit = Vocab, s.y = as_bf(z);
  s.ldy = ldy;
  NIBBLE_GOOD(select_rows_family<Width>::launch(s, chained));
  NIBBLE_CHECK(out_of_range.read()[0] == 4);
  const auto got = y.read();
  NIBBLE_CHECK(got == z.read());
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < ldy; ++c)
      NIBBLE_CHECK(got[static_cast<std::size_t>(r) * ldy + c] ==
                   (c < Width ? table[static_cast<std::size_t>(std::clamp(ids[r], 0, Vocab - 1)) * Width + c]
                              : 0xFFFF));
}

const bool added[] = {
    device_test::add("router", "256 experts, shared",
                     [] {
                       routers<router_shape{2048, 256, 8, true, true}>(1).check_all();
                     }),
    device_test::add("small", "tiny router",
                     [] {
                       routers<router_shape{256, 16, 4, true, true}>(2).check_all();
                     }),
    device_test::add("router", "not normalised, none shared",
                     [] {
                       routers<router_shape{768, 40, 3, false, false}>(3).check_all();
                     }),
    device_test::add("router", "512 experts",
                     [] {
                       routers<router_shape{1536, 512, 10, true, false}>(4).check_all();
                     }),
    device_test::add("router", "all experts",
                     [] {
                       routers<router_shape{256, 6, 6, true, true}>(5).check_all();
                     }),
    device_test::add("router", "C018: negative, huge and equal logits",
                     [] {
                       negative_logits<router_shape{2048, 256, 8, true, true}>();
                     }),
    device_test::add("small", "norms", [] { norms<2048>(6), norms<256>(7), norms<1280>(8); }),
    device_test::add("small", "embedding and selection", [] { copies<50, 2048>(9), copies<7, 8>(10); }),
};

}  // namespace

int main(int argc, char** argv) { return added[0] ? device_test::run(argc, argv) : 1; }
