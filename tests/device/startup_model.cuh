// SPDX-License-Identifier: Apache-2.0
/// \file
/// A small engine that goes through all phases: six geometries, elastic expert slots and KV pages, states.
#pragma once

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "nibble/core/device_arena.cuh"
#include "nibble/core/device_memory.cuh"
#include "nibble/core/device_ops.cuh"
#include "nibble/nvfp4/layout.hpp"
#include "nibble/nvfp4/linear_family.cuh"
#include "nibble/nvfp4/quantize.hpp"
#include "nibble/op/leaves.hpp"
#include "nibble/startup/cuda_platform.cuh"
#include "nibble/startup/phases.hpp"
#include "nibble/startup/representative.cuh"

namespace startup_test {

using bf16 = __nv_bfloat16;
constexpr int width = 256;

/// Three pairs of matrices, the first pair twice: four layers, six geometries.
struct tree {
  nibble::linear<nibble::matrix(512, width, nibble::weight_format::nvfp4), "a"> up0, up3;
  nibble::linear<nibble::matrix(width, 512, nibble::weight_format::nvfp4), "b"> down0, down3;
  nibble::linear<nibble::matrix(768, width, nibble::weight_format::nvfp4), "c"> up1;
  nibble::linear<nibble::matrix(width, 768, nibble::weight_format::nvfp4), "d"> down1;
  nibble::linear<nibble::matrix(1024, width, nibble::weight_format::fp8), "e"> up2;
  nibble::linear<nibble::matrix(width, 1024, nibble::weight_format::fp8), "f"> down2;
  using op_members = nibble::members<nibble::member<"0", &tree::up0>, nibble::member<"1", &tree::down0>,
                                     nibble::member<"2", &tree::up1>, nibble::member<"3", &tree::down1>,
                                     nibble::member<"4", &tree::up2>, nibble::member<"5", &tree::down2>,
                                     nibble::member<"6", &tree::up3>, nibble::member<"7", &tree::down3>>;
};

template <nibble::geometry G>
struct product : nibble::linear_family<nibble::resident_layout{G}, nibble::store<bf16>> {};

/// Reads the last expert slot in use and writes the dummy page and the dummy state, as a padding row would.
struct touch_params {
  const unsigned* slots;
  const int* slot_count;
  unsigned* page;
  unsigned* state;
  std::uint64_t slot_words;
};
template <int Unused>
__global__ void touch_kernel(const touch_params p) {
  nibble::device::wait_for_previous_grid();
  nibble::device::let_next_grid_start();
  const int last = *p.slot_count - 1;
  const unsigned v = last < 0 ? 0 : p.slots[static_cast<std::uint64_t>(last) * p.slot_words + threadIdx.x];
  p.page[threadIdx.x] = v;
  p.state[threadIdx.x] += 1;
}
template <int Unused>
struct touch_family {
  static constexpr const char* name = "touch";
  template <class Visit>
  static nibble::status for_each_kernel(Visit&& visit) {
    return visit(&touch_kernel<Unused>, 128, std::size_t{0}, name);
  }
  static nibble::status launch(const touch_params& p, const nibble::launch_options& options) {
    return nibble::launch(&touch_kernel<Unused>, dim3(1), 128, 0, options, name, p);
  }
};

template <class Leaf>
using leaf_product = product<Leaf::shape>;

template <class Tree>
class model {
 public:
  using platform = nibble::cuda_platform;
  using context_type = nibble::start_context<platform>;
  using kernel_table = nibble::table_of<nibble::tree_kernels<Tree, product>, touch_family<0>>;
  using launcher = nibble::launcher<kernel_table>;
  static constexpr std::uint64_t slot_bytes = std::uint64_t{1} << 20, page_bytes = std::uint64_t{256} << 10,
                                 state_bytes = std::uint64_t{1} << 20;

  /// \param dense_bytes of ballast among the weights  \param experts in all
  model(context_type& context, std::uint64_t dense_bytes, std::uint64_t experts)
      : context_(context), stream_(context.platform().stream()), experts_(experts) {
    std::uint64_t bytes = 0;
    nibble::for_each_leaf_type<Tree>([&]<class Leaf>(std::type_identity<Leaf>, int times) {
      bytes += product<Leaf::shape>::layout.bytes() * static_cast<std::uint64_t>(times);
    });
    weight_bytes_ = bytes + dense_bytes;
    weights_ = nibble::device_memory(weight_bytes_);
    std::mt19937 random(7);
    std::vector<std::uint8_t> tiles(bytes);
    for (auto& byte : tiles) byte = static_cast<std::uint8_t>(random() & 0x33);  // finite in every format
    nibble::copy_to_device(weights_.data(), tiles.data(), bytes);
    std::byte* at = weights_.data();  // the tree is bound to device memory
    nibble::for_each_leaf(tree_, [&]<class Leaf>(const nibble::op_path&, Leaf& leaf) {
      leaf.segments[0].weight = at;
      at += product<Leaf::shape>::layout.bytes();
    });
  }

  /// Each distinct product once, on the tree's weights.
  nibble::status representative_launch(int rows) {
    const nibble::device_memory scratch(nibble::representatives_bytes<leaf_product, Tree>(rows));
    clear(scratch.data(), scratch.bytes());
    const nibble::status s = nibble::launch_representatives<leaf_product>(
        tree_, rows, scratch.data(), nibble::launch_options{stream_}, &launched_products);
    nibble::require(nibble::runtime_status(cudaStreamSynchronize(stream_), "model", "not done"));
    return s;
  }

  [[nodiscard]] nibble::memory_model memory() const {
    nibble::memory_model m;
    m.weight_bytes = weight_bytes_;
    m.kernel_bytes = std::uint64_t{4} << 20;
    m.graph_bytes = std::uint64_t{1} << 20;
    m.max_context_tokens = 16384;
    m.state_slot_bytes = state_bytes;
    m.kv_page_bytes = page_bytes;
    m.page_tokens = 16;
    m.expert_slot_bytes = slot_bytes;
    m.experts = experts_;
    m.layer_experts = 64;
    m.experts_per_token = 8;
    m.workspace_bytes = [](const nibble::step_limits& l) {
      return activations_of(l.step_tokens > l.running ? l.step_tokens : l.running) + 4096;
    };
    return m;
  }

  void allocate(context_type& context, const nibble::memory_plan& plan) {
    try {
      allocate_all(context, plan);
    } catch (...) {
      slots_ = nibble::device_arena(), pages_ = nibble::device_arena();
      states_ = nibble::device_memory(), workspace_ = nibble::device_memory();
      throw;
    }
  }
  void allocate_all(context_type& context, const nibble::memory_plan& plan) {
    using nibble::ledger_line;
    rows_ = plan.limits.step_tokens > plan.limits.running ? plan.limits.step_tokens : plan.limits.running;
    context.measure(ledger_line::workspace,
                    [&] { workspace_ = nibble::device_memory(activations_of(rows_) + 4096); });
    context.measure(ledger_line::states,
                    [&] { states_ = nibble::device_memory(plan.state_slots * state_bytes); });
    context.measure(ledger_line::kv_pages, [&] {
      open(pages_, memory().max_context_tokens / 16 * 9ull * page_bytes, plan.kv_pages * page_bytes);
    });
    context.measure(ledger_line::expert_slots,
                    [&] { open(slots_, experts_ * slot_bytes, plan.expert_slots * slot_bytes); });
    nibble::device_carver carver(workspace_.data());
    slot_count_ = carver.take<int>(1);
    x = carver.take<bf16>(static_cast<std::uint64_t>(rows_) * width);
    h_ = carver.take<bf16>(static_cast<std::uint64_t>(rows_) * 1024);
    clear(workspace_.data(), workspace_.bytes()), clear(states_.data(), states_.bytes());
    set_slots(plan.expert_slots);
  }

  nibble::status resize(context_type& context, const nibble::memory_plan& plan) {
    // Fewer first, so that what one arena gives up is there for the other.
    set_slots(plan.expert_slots < slots() ? plan.expert_slots : slots());
    for (const bool shrinking : {true, false}) {
      for (auto [arena, bytes] : {std::pair(&pages_, plan.kv_pages * page_bytes),
                                  std::pair(&slots_, plan.expert_slots * slot_bytes)})
        if ((bytes < arena->mapped_bytes()) == shrinking)
          if (const nibble::status s = arena->resize(bytes); !s.ok()) return s;
    }
    set_slots(plan.expert_slots);
    context.set_measured(nibble::ledger_line::kv_pages, pages_.mapped_bytes());
    context.set_measured(nibble::ledger_line::expert_slots, slots_.mapped_bytes());
    return nibble::status::success();
  }

  /// `rows` up to 16 as decode would, more as prefill.
  nibble::status record(int rows) {
    offset_ = 0;
    nibble::status s;
    const auto pair = [&]<class Up, class Down>(std::type_identity<Up>, std::type_identity<Down>) {
      const nibble::op_scope scope("layer");
      if (s.ok()) s = multiply<product<Up::shape>>(x, width, h_, Up::shape.n, rows);
      if (s.ok()) s = multiply<product<Down::shape>>(h_, Down::shape.k, x, width, rows);
    };
    pair(std::type_identity<decltype(Tree::up0)>{}, std::type_identity<decltype(Tree::down0)>{});
    pair(std::type_identity<decltype(Tree::up1)>{}, std::type_identity<decltype(Tree::down1)>{});
    pair(std::type_identity<decltype(Tree::up2)>{}, std::type_identity<decltype(Tree::down2)>{});
    pair(std::type_identity<decltype(Tree::up3)>{}, std::type_identity<decltype(Tree::down3)>{});
    const touch_params touch{reinterpret_cast<const unsigned*>(slots_.base()), slot_count_,
                             reinterpret_cast<unsigned*>(pages_.base()), states_.template as<unsigned>(),
                             slot_bytes / 4};
    return s.ok() ? launcher::template launch<touch_family<0>>(touch, nibble::launch_options{stream_}) : s;
  }

  [[nodiscard]] std::uint64_t slots() const { return slots_in_use_; }
  [[nodiscard]] std::byte* slots_base() const { return slots_.base(); }
  bf16* x = nullptr;  ///< [rows][width]
  int launched_products = 0;

 private:
  static std::uint64_t activations_of(int rows) {
    return static_cast<std::uint64_t>(rows) * 2 * (width + 1024);
  }

  static void open(nibble::device_arena& arena, std::uint64_t most_bytes, std::uint64_t bytes) {
    if (arena.base() == nullptr) nibble::require(nibble::open_device_arena(most_bytes, arena));
    nibble::require(arena.resize(bytes));
  }
  void clear(std::byte* at, std::uint64_t bytes) {
    nibble::require(nibble::runtime_status(cudaMemsetAsync(at, 0, bytes, stream_), "model", "not cleared"));
  }
  void set_slots(std::uint64_t count) {
    slots_in_use_ = count;
    const int value = static_cast<int>(count);
    nibble::require(nibble::runtime_status(cudaStreamSynchronize(stream_), "model", "not done"));
    nibble::copy_to_device(slot_count_, &value, sizeof value);
  }
  template <class Family>
  nibble::status multiply(const bf16* from, int ldx, bf16* to, int ldy, int rows) {
    typename Family::params p{};
    p.tiles = weights_.template as<std::uint8_t>() + offset_;
    offset_ += Family::layout.bytes();
    p.x = from, p.ldx = ldx, p.m = rows, p.scale[0] = 1e-3f;
    p.out.y = to, p.out.ldy = ldy;
    return launcher::template launch<Family>(p, nibble::launch_options{stream_});
  }

  context_type& context_;
  Tree tree_;
  cudaStream_t stream_;
  std::uint64_t experts_, weight_bytes_ = 0, slots_in_use_ = 0;
  std::size_t offset_ = 0;
  int rows_ = 0;
  nibble::device_memory weights_, workspace_, states_;
  nibble::device_arena pages_, slots_;
  int* slot_count_ = nullptr;
  bf16* h_ = nullptr;
};

}  // namespace startup_test
