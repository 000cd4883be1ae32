// SPDX-License-Identifier: Apache-2.0
// Times of the kernels between the matrices at the shapes of Qwen3.6-35B-A3B: delta rule, router, norms,
// sampling. Graphs of many chained launches over layers of their own, so that states and weights come from
// memory as in a model. bench_layer [OUTPUT.json] [NAME...]: only cases whose name contains one of the NAMEs.
#include <cstring>
#include <random>
#include <utility>

#include "../gemv/harness.cuh"
#include "nibble/core/bf16.hpp"
#include "nibble/kernels/delta_prefill.cuh"
#include "nibble/kernels/norm.cuh"
#include "nibble/kernels/router.cuh"
#include "nibble/kernels/sampling.cuh"

using namespace nibble;
using bench::allocate;
using bench::good;
using bench::graph_time;
using bench::upload;
using bf = __nv_bfloat16;

namespace {

constexpr delta_shape delta{2048, 16, 32, 128, 128, 4};
constexpr router_shape routed{2048, 256, 8, true, true};

bench::report report;
std::vector<std::string> wanted;

bool asked(const std::string& name) {
  if (wanted.empty()) return true;
  for (const auto& w : wanted)
    if (name.find(w) != std::string::npos) return true;
  return false;
}
void add(const std::string& kernel, const std::string& shape, int rows, double us, double bytes) {
  bench::row r;
  r.suite = "layer", r.geometry = shape, r.m = rows, r.kernel = kernel, r.chain = "pdl", r.us = us;
  r.bytes = static_cast<std::size_t>(bytes), r.floor_us = bytes / 4.3e6, r.format = "bf16";
  report.add(r);
}

bf* random_bf16(std::size_t count, double scale) {
  static std::mt19937 random(1);
  std::vector<std::uint16_t> v(count);
  for (std::size_t i = 0; i < count; ++i)
    v[i] = bf16::encode(static_cast<float>((static_cast<double>(random()) * 0x1p-32 - 0.5) * 3.4 * scale));
  return reinterpret_cast<bf*>(upload(v));
}
float* random_float(std::size_t count, double low, double high) {
  static std::mt19937 random(2);
  std::vector<float> v(count);
  for (auto& e : v) e = static_cast<float>(low + (high - low) * static_cast<double>(random()) * 0x1p-32);
  return upload(v);
}
template <class Family>
void load() {
  good(Family::for_each_kernel([](auto kernel, int threads, std::size_t shared, const char* name) {
    return prepare(kernel, threads, shared, name);
  }));
}

struct delta_setup {
  static constexpr int layers = 30;
  delta_rule_params p;
  std::size_t layer_bytes = state_bytes(delta);

  explicit delta_setup(int rows, int sequences) {
    p.pool.slot_bytes = layers * layer_bytes;
    p.pool.base = allocate<std::byte>(static_cast<std::size_t>(sequences) * p.pool.slot_bytes);
    BENCH_CHECK(cudaMemset(p.pool.base, 0, static_cast<std::size_t>(sequences) * p.pool.slot_bytes));
    p.qkvz = random_bf16(static_cast<std::size_t>(rows) * delta.projected(), 1), p.ldqkvz = delta.projected();
    p.x = random_bf16(static_cast<std::size_t>(rows) * delta.hidden, 1), p.ldx = delta.hidden;
    p.out = random_bf16(static_cast<std::size_t>(rows) * delta.value_width(), 1), p.ldo = delta.value_width();
    p.ba = random_bf16(static_cast<std::size_t>(2 * layers) * delta.value_heads * delta.hidden, 0.02);
    p.conv = random_float(static_cast<std::size_t>(4) * delta.channels(), -0.5, 0.5);
    p.a_log = random_float(delta.value_heads, -2, 1), p.dt_bias = random_float(delta.value_heads, -2, 1);
    p.norm = random_float(delta.value_dim, 0.5, 1.5);
    std::vector<std::int32_t> first, position, slot;
    for (int s = 0; s <= sequences; ++s) first.push_back(s * (rows / sequences));
    for (int s = 0; s < sequences; ++s) position.push_back(128 + s), slot.push_back(s);
    p.step.sequences = sequences, p.step.first_row = upload(first), p.step.position = upload(position);
    p.step.slot = upload(slot), p.rows = rows;
  }
  delta_rule_params layer(int i) const {
    delta_rule_params q = p;
    q.pool.layer_offset_bytes = static_cast<std::size_t>(i % layers) * layer_bytes;
    q.ba = p.ba + static_cast<std::size_t>(i % layers) * 2 * delta.value_heads * delta.hidden;
    return q;
  }
};

void time_decode() {
  using family = delta_decode_family<delta>;
  load<family>();
  for (const int batch : {1, 2, 4, 8, 16, 32, 64}) {
    const delta_setup setup(batch, batch);
    const double bytes =
        batch * (2.0 * static_cast<double>(delta.recurrent_bytes()) + 2.0 * 4 * delta.projected()) +
        4.0 * delta.value_heads * delta.hidden + 16.0 * delta.channels();
    for (const auto& [blocks, title] :
         {std::pair{nibble::delta_blocks::cluster, "delta_decode clusters"},
          std::pair{nibble::delta_blocks::head_alone, "delta_decode heads alone"},
          std::pair{nibble::delta_blocks::head, "delta_decode heads"}}) {
      const launch_options chained{bench::stream(), launch_chain::pdl};
      const double us = graph_time(delta_setup::layers * 2, [&](int i) {
        good(family::launch_with(setup.layer(i), chained, blocks));
      });
      add(title, "35b", batch, us, bytes);
    }
    BENCH_CHECK(cudaFree(setup.p.pool.base));
  }
}

void time_prefill() {
  using family = delta_prefill_family<delta>;
  load<family>();
  for (const int rows : {512, 2048, 8192}) {
    delta_setup setup(rows, 1);
    setup.p.workspace = allocate<std::byte>(delta_prefill_workspace_bytes(delta, rows));
    const launch_options chained{bench::stream(), launch_chain::pdl};
    const double us = graph_time(
        delta_setup::layers, [&](int i) { good(family::launch(setup.layer(i), chained)); }, 7);
    add("delta_prefill", "35b", rows, us,
        rows * 2.0 * (delta.projected() + delta.value_width() + delta.hidden));
    const auto part = [&](const char* name, auto kernel, dim3 grid, int threads, int shared, auto... more) {
      const double each = graph_time(
          delta_setup::layers,
          [&](int i) {
            good(launch(kernel, grid, threads, static_cast<std::size_t>(shared), chained, name,
                        setup.layer(i), more...));
          },
          7);
      add(name, "35b", rows, each, 0);
    };
    part("delta_gates", delta_gates_kernel_of<delta>, dim3(static_cast<unsigned>(rows / 64)), 256,
         family::product::shared_bytes);
    part("delta_conv", delta_conv_kernel_of<delta>, dim3(static_cast<unsigned>(rows / delta_conv_run + 1), 8),
         256, 0);
    using solve = family::solve;
    using chunk = family::chunk;
    part("delta_solve", delta_solve_kernel_of<delta>,
         dim3(static_cast<unsigned>(rows / delta_chunk), static_cast<unsigned>(32 / solve::heads)),
         solve::threads, solve::shared_bytes);
    part("delta_chunk", delta_chunk_kernel_of<delta>, dim3(4, 32, 1), chunk::threads, chunk::shared_bytes);
    part("delta_recurrence without tokens", delta_recurrence_kernel_of<delta>, dim3(4, 32, 1),
         device::delta_threads, family::stream::shared_bytes, false);
    part("delta_norm", delta_norm_kernel_of<delta>, dim3(static_cast<unsigned>(rows / delta_norm_run + 1), 4),
         256, 0);
    // 63 tokens before the chunks and one behind them.
    setup.p.step.position = upload(std::vector<std::int32_t>{129});
    add("delta_prefill from position 129", "35b", rows,
        graph_time(
            delta_setup::layers, [&](int i) { good(family::launch(setup.layer(i), chained)); }, 7),
        0);
    BENCH_CHECK(cudaFree(setup.p.workspace));
    BENCH_CHECK(cudaFree(setup.p.pool.base));
  }
}

void time_router() {
  using family = router_family<routed>;
  load<family>();
  constexpr int layers = 40;
  const std::size_t matrix = static_cast<std::size_t>(routed.experts) * routed.hidden;
  bf* const weights = random_bf16(layers * matrix, 0.02);
  bf* const gates = random_bf16(static_cast<std::size_t>(layers) * routed.hidden, 0.02);
  auto* const workspace = allocate<std::byte>(router_workspace_bytes(routed));
  BENCH_CHECK(cudaMemset(workspace, 0, router_workspace_bytes(routed)));
  for (const int rows : {1, 4, 8, 16, 32, 64, 112, 128, 512, 8192}) {
    router_params p;
    p.rows = rows, p.hidden = random_bf16(static_cast<std::size_t>(rows) * routed.hidden, 1),
    p.ldh = routed.hidden;
    p.norm = random_float(routed.hidden, -0.3, 0.3), p.zero_centred = true;
    p.normed = allocate<bf>(static_cast<std::size_t>(rows) * routed.hidden), p.ldn = routed.hidden;
    p.ids = allocate<std::int32_t>(static_cast<std::size_t>(rows) * routed.top_k);
    p.weights = allocate<float>(static_cast<std::size_t>(rows) * routed.top_k);
    p.shared_weights = allocate<float>(static_cast<std::size_t>(rows)), p.workspace = workspace;
    const launch_options chained{bench::stream(), launch_chain::pdl};
    const double us = graph_time(
        2 * layers,
        [&](int i) {
          router_params q = p;
          q.weight = weights + static_cast<std::size_t>(i % layers) * matrix;
          q.gate = gates + static_cast<std::size_t>(i % layers) * routed.hidden;
          good(family::launch(q, chained));
        },
        11);
    add("router", "256x2048", rows, us, 2.0 * static_cast<double>(matrix) + 4.0 * rows * routed.hidden);
  }
}

void time_rows() {
  using family = rms_norm_family<2048>;
  load<family>();
  for (const int rows : {1, 8, 64, 8192}) {
    rms_norm_params p;
    p.rows = rows, p.x = random_bf16(static_cast<std::size_t>(rows) * 2048, 1), p.ldx = 2048;
    p.weight = random_float(2048, -0.3, 0.3), p.zero_centred = true;
    p.y = allocate<bf>(static_cast<std::size_t>(rows) * 2048), p.ldy = 2048;
    const launch_options chained{bench::stream(), launch_chain::pdl};
    add("rms_norm", "2048", rows,
        graph_time(
            50, [&](int) { good(family::launch(p, chained)); }, 11),
        rows * 8192.0);
  }
}

void time_sampling() {
  constexpr int vocab = 248320, most = 64;
  using family = sampling_family<vocab>;
  load<family>();
  auto* const workspace = allocate<std::byte>(sampling_workspace_bytes(vocab, most));
  BENCH_CHECK(cudaMemset(workspace, 0, sampling_workspace_bytes(vocab, most)));
  // A peaked row, as models give: most of the mass on few tokens, the others far below.
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 2.5f);
  std::vector<float> logits(static_cast<std::size_t>(vocab) * most);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = normal(random) + (i % 9973 == 0 ? 9.0f : 0.0f);
  const float* const d_logits = upload(logits);
  auto* const out = allocate<sampled_row>(most);
  struct setting {
    const char* name;
    float temperature;
    int top_k;
    float top_p, min_p;
    int logprobs;
    bool all_greedy;
  };
  for (const setting& s :
       {setting{"greedy", 0, 0, 1, 0, -1, true}, setting{"unfiltered", 1, 0, 1, 0, -1, false},
        setting{"top_k 20 top_p 0.95", 1, 20, 0.95f, 0, -1, false},
        setting{"top_p 0.95", 1, 0, 0.95f, 0, -1, false}, setting{"min_p 0.05", 1, 0, 1, 0.05f, -1, false},
        setting{"top_k 20 logprobs 20", 1, 20, 1, 0, 20, false}})
    for (const int rows : {1, 8, 64}) {
      std::vector<sampling_row> r(static_cast<std::size_t>(rows));
      for (std::size_t i = 0; i < r.size(); ++i)
        r[i].temperature = s.temperature, r[i].top_k = s.top_k, r[i].top_p = s.top_p, r[i].min_p = s.min_p,
        r[i].logprobs = s.logprobs, r[i].seed = 17 * i + 1;
      sampling_launch_params p;
      p.rows = rows, p.logits = d_logits, p.ldl = vocab, p.row = upload(r), p.out = out,
      p.workspace = workspace;
      p.all_greedy = s.all_greedy, p.any_logprobs = s.logprobs >= 0;
      const launch_options chained{bench::stream(), launch_chain::pdl};
      const double us = graph_time(
          20, [&](int) { good(family::launch(p, chained)); }, 11);
      add(std::string("sampling ") + s.name, "248320", rows, us, 4.0 * rows * vocab);
    }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 2; i < argc; ++i) wanted.emplace_back(argv[i]);
  if (asked("decode")) time_decode();
  if (asked("router")) time_router();
  if (asked("rows")) time_rows();
  if (asked("sampling")) time_sampling();
  if (asked("prefill")) time_prefill();
  if (argc > 1 && std::strlen(argv[1]) > 0) report.write(argv[1]);
  return 0;
}
