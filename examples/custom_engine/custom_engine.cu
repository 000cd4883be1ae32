// SPDX-License-Identifier: Apache-2.0
// An engine of one's own, y = down(silu(gate x) * up x): declared as a tree, started through all phases, its
// steps captured. Needs a GPU; it checks its own answer.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "nibble/core/device_memory.cuh"
#include "nibble/nvfp4/layout.hpp"
#include "nibble/nvfp4/linear_family.cuh"
#include "nibble/nvfp4/quantize.hpp"
#include "nibble/op/leaves.hpp"
#include "nibble/startup/cuda_platform.cuh"
#include "nibble/startup/phases.hpp"

namespace {
using bf16 = __nv_bfloat16;
constexpr int hidden = 1024, inner = 2048, most_rows = 4;

// 1. The model is a type: what it holds, by name.
struct mlp {
  nibble::linear<nibble::fused(hidden, nibble::weight_format::nvfp4, inner, inner), "gate", "up"> gate_up;
  nibble::linear<nibble::matrix(hidden, inner, nibble::weight_format::nvfp4), "down"> down;
  using op_members = nibble::members<nibble::part<&mlp::gate_up>, nibble::part<&mlp::down>>;
};

// 2. A kernel family for each distinct geometry of the tree. The table is a type as well.
constexpr nibble::resident_layout layout_of(nibble::geometry g) {
  return {g, g.segments() == 2 ? nibble::row_order::gate_up : nibble::row_order::adjacent};
}
template <nibble::geometry G>
struct family_of
    : nibble::linear_family<layout_of(G),
                            std::conditional_t<G.segments() == 2, nibble::swiglu, nibble::store<bf16>>> {};

struct random_matrix {
  random_matrix(nibble::resident_layout layout, unsigned seed) : tiles(layout.bytes()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.05f);
    std::vector<float> w(static_cast<std::size_t>(layout.shape.n) * layout.shape.k);
    std::generate(w.begin(), w.end(), [&] { return normal(random); });
    const auto q = nibble::nvfp4::quantize(w, layout.shape.n, layout.shape.k);
    scale = q.global_scale;
    values = nibble::nvfp4::dequantize(q);
    nibble::nvfp4::pack(layout, q.codes, q.block_scales, tiles);
  }
  std::vector<std::uint8_t> tiles;
  std::vector<float> values;  ///< what the codes stand for
  float scale;
};

// 3. The engine. A template: nvcc cannot spell geometries in the host code it makes of plain classes.
template <class Tree>
class engine_model {
 public:
  using platform = nibble::cuda_platform;
  using context_type = nibble::start_context<platform>;
  using kernel_table = nibble::tree_kernels<Tree, family_of>;
  using gate_up_family = family_of<decltype(Tree::gate_up)::shape>;
  using down_family = family_of<decltype(Tree::down)::shape>;
  using launcher = nibble::launcher<kernel_table>;  // launches nothing outside the table

  static random_matrix random_gate_up() { return {gate_up_family::layout, 1}; }
  static random_matrix random_down() { return {down_family::layout, 2}; }

  engine_model(context_type& context, const random_matrix& gate_up, const random_matrix& down)
      : stream_(context.platform().stream()),
        weights_(gate_up.tiles.size() + down.tiles.size()),
        gate_up_scale_(gate_up.scale),
        down_scale_(down.scale) {
    nibble::copy_to_device(weights_.data(), gate_up.tiles.data(), gate_up.tiles.size());
    nibble::copy_to_device(weights_.data() + gate_up.tiles.size(), down.tiles.data(), down.tiles.size());
  }
  nibble::memory_model memory() const {
    nibble::memory_model m;
    m.weight_bytes = gate_up_family::layout.bytes() + down_family::layout.bytes();
    m.graph_bytes = std::uint64_t{2} << 20;
    m.max_context_tokens = 1;  // no sequences here, so no caches
    m.workspace_bytes = [](const nibble::step_limits& l) { return row_bytes * unsigned(l.running); };
    return m;
  }
  void allocate(context_type& context, const nibble::memory_plan& plan) {
    const unsigned rows = plan.limits.running;
    const auto make = [&] { workspace_ = nibble::device_memory(row_bytes * rows); };
    context.measure(nibble::ledger_line::workspace, make);
    nibble::device_carver carver(workspace_.data());
    x = carver.take<bf16>(hidden * rows), h_ = carver.take<bf16>(inner * rows),
    y = carver.take<bf16>(hidden * rows);
  }
  nibble::status record(int rows) {
    typename gate_up_family::params up{};
    up.tiles = weights_.as<std::uint8_t>(), up.x = x, up.ldx = hidden, up.m = rows;
    up.scale[0] = up.scale[1] = gate_up_scale_, up.out.y = h_, up.out.ldy = inner;
    typename down_family::params down{};
    down.tiles = weights_.as<std::uint8_t>() + gate_up_family::layout.bytes();
    down.x = h_, down.ldx = inner, down.m = rows;
    down.scale[0] = down_scale_, down.out.y = y, down.out.ldy = hidden;
    const auto s = launcher::template launch<gate_up_family>(up, nibble::launch_options{stream_});
    return s.ok() ? launcher::template launch<down_family>(down, nibble::launch_options{stream_}) : s;
  }

  bf16 *x = nullptr, *y = nullptr;  ///< [rows][hidden], on the device

 private:
  static constexpr std::uint64_t row_bytes = 2 * (hidden + inner + hidden) + 1024;
  cudaStream_t stream_;
  nibble::device_memory weights_, workspace_;
  float gate_up_scale_, down_scale_;
  bf16* h_ = nullptr;
};

/// Output `row` in double precision.
double expected(const random_matrix& gate_up, const random_matrix& down, const bf16* x, int row) {
  const auto dot = [&](int r) {
    double sum = 0;
    for (int k = 0; k < hidden; ++k) sum += 1.0 * gate_up.values[r * hidden + k] * __bfloat162float(x[k]);
    return sum;
  };
  double y = 0;
  for (int i = 0; i < inner; ++i)
    y += down.values[row * inner + i] * dot(i) / (1 + std::exp(-dot(i))) * dot(inner + i);
  return y;
}
}  // namespace

int main() try {
  using model = engine_model<mlp>;
  const random_matrix gate_up = model::random_gate_up(), down = model::random_down();
  nibble::start_options options{.request = {.max_running = most_rows}};
  options.log = [](std::string_view line) { std::printf("%s\n", std::string(line).c_str()); };
  auto engine = nibble::startup::start<model>(options, gate_up, down);  // 4. all phases, in order

  std::vector<bf16> x(hidden), y(hidden);
  for (int k = 0; k < hidden; ++k) x[k] = __float2bfloat16(std::sin(0.1f * static_cast<float>(k)));
  nibble::copy_to_device(engine.model().x, x.data(), 2 * hidden);
  nibble::require(engine.decode(engine.padded(1)));  // 5. a graph replay
  engine.context().platform().synchronize();
  nibble::copy_to_host(y.data(), engine.model().y, 2 * hidden);
  double worst = 0;
  for (int row = 0; row < 8; ++row)
    worst = std::max(worst, std::abs(__bfloat162float(y[row]) - expected(gate_up, down, x.data(), row)));
  std::printf("largest error of 8 outputs: %.4f (bf16)\n", worst);
  return worst < 0.05 ? 0 : 1;
} catch (const nibble::error& problem) {
  std::printf("custom_engine: %s\n", problem.what());
  return 1;
}
