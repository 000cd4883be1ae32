// SPDX-License-Identifier: Apache-2.0
/// \file
/// Every kernel family that a model's steps launch, from its configuration: shapes, families, the table.
#pragma once

#include <string_view>
#include <type_traits>

#include "model/device_workspace.hpp"
#include "model/forbid.cuh"
#include "nibble/kernels/attention.cuh"
#include "nibble/kernels/delta_decode.cuh"
#include "nibble/kernels/delta_prefill.cuh"
#include "nibble/kernels/norm.cuh"
#include "nibble/kernels/router.cuh"
#include "nibble/kernels/rows_copy.cuh"
#include "nibble/kernels/sampling.cuh"
#include "nibble/moe/experts_family.cuh"
#include "nibble/moe/placement_offload.cuh"
#include "nibble/nvfp4/linear_family.cuh"
#include "nibble/startup/kernel_table.hpp"

namespace qwen3_moe {

template <class Config, nibble::kv_format Kv, nibble::device_class Device>
struct cuda_shapes {
  static constexpr model_config c = Config::value;
  static constexpr nibble::attention_shape attention = attention_shape_of(c, Kv);
  static constexpr nibble::attention_policy attention_policy = nibble::select_attention(attention, Device);
  static constexpr nibble::delta_shape delta = delta_shape_of(c);
  static constexpr nibble::router_shape router = router_shape_of(c);
  static constexpr nibble::moe::experts_shape experts = experts_shape_of(Config::value);
  static constexpr nibble::moe::residency_shape residency{c.layers, c.experts, c.experts_per_token};
};

/// y = W norm(x).
template <class Linear, nibble::device_class Device>
using normed_project_family =
    nibble::linear_family<resident_layout_of<Linear>(), nibble::store<__nv_bfloat16>,
                          nibble::rms_normed<float>, Device>;
/// The same for more than 16 rows, which are normalised already.
template <class Linear, nibble::device_class Device>
struct project_many_family : normed_project_family<Linear, Device> {
  using base = normed_project_family<Linear, Device>;
  static nibble::status launch(const typename base::params& p, const nibble::launch_options& options) {
    return base::launch_many(p, options);
  }
};
/// y = y + W x.
template <class Linear, nibble::device_class Device>
using add_family =
    nibble::linear_family<resident_layout_of<Linear>(), nibble::add_residual, nibble::plain_input, Device>;
template <class Linear, nibble::device_class Device>
using logits_family =
    nibble::linear_family<resident_layout_of<Linear>(), nibble::store<float>, nibble::plain_input, Device>;

/// The family of a projection or of the head; of other leaves an empty table.
template <class Leaf, nibble::device_class Device>
struct product_family_lookup {
  using type = nibble::kernel_table<>;
};
template <class Leaf, nibble::device_class Device>
requires(Leaf::kind == nibble::leaf_kind::matrix) struct product_family_lookup<Leaf, Device> {
  static constexpr std::string_view name = Leaf::part_names[0];
  static constexpr bool normed = name == "q_proj" || name == "in_proj_qkv";
  static constexpr bool adds = name == "o_proj" || name == "out_proj";
  template <class L, int Which>
  struct pick {
    using type = nibble::kernel_table<>;
  };
  template <class L>
  struct pick<L, 1> {
    using type = normed_project_family<L, Device>;
  };
  template <class L>
  struct pick<L, 2> {
    using type = add_family<L, Device>;
  };
  template <class L>
  struct pick<L, 3> {
    using type = logits_family<L, Device>;
  };
  using type = typename pick<Leaf, normed ? 1 : adds ? 2 : name == "lm_head" ? 3 : 0>::type;
};
template <class Leaf, nibble::device_class Device>
using product_family_of = typename product_family_lookup<Leaf, Device>::type;

template <class Config, nibble::kv_format Kv, nibble::device_class Device>
struct cuda_families {
  using shapes = cuda_shapes<Config, Kv, Device>;
  static constexpr model_config c = Config::value;

  using embed = nibble::embedding_family<c.vocab_size, c.hidden_size>;
  using norm = nibble::rms_norm_family<c.hidden_size>;
  using attention_decode = nibble::attention_decode_family<shapes::attention, shapes::attention_policy>;
  using attention_append = nibble::attention_append_family<shapes::attention, shapes::attention_policy>;
  using attention_prefill = nibble::attention_prefill_family<shapes::attention, shapes::attention_policy>;
  static_assert(attention_decode::shared_bytes <= Device.dynamic_shared_bytes() &&
                    attention_prefill::shared_bytes <= Device.dynamic_shared_bytes(),
                "a block of this architecture has too little shared memory for the attention heads");
  using router = nibble::router_family<shapes::router, Device>;
  using experts = nibble::moe::experts_family<shapes::experts, Device>;
  using lm_head = logits_family<decltype(causal_lm<Config>::lm_head), Device>;

  using sampling = nibble::sampling_family<c.vocab_size>;
  using forbid = forbid_family;

  /// For experts that do not all fit.
  template <class S, bool Possible>
  struct offload_part {
    using type = nibble::kernel_table<>;
  };
  template <class S>
  struct offload_part<S, true> {
    using type = typename nibble::moe::expert_offload<S::residency>::kernels;
  };
  using offload = typename offload_part<shapes, shapes::residency.valid()>::type;

  using attention_matrices = nibble::table_of<normed_project_family<decltype(attention<Config>::qkv), Device>,
                                              project_many_family<decltype(attention<Config>::qkv), Device>,
                                              add_family<decltype(attention<Config>::o_proj), Device>>;

  template <class C, bool Hybrid>
  struct delta_part {
    using type = nibble::kernel_table<>;
  };
  template <class C>
  struct delta_part<C, true> {
    using decode = nibble::delta_decode_family<shapes::delta, false, Device>;  // of the residual stream
    using decode_normed = nibble::delta_decode_family<shapes::delta, true, Device>;
    using prefill = nibble::delta_prefill_family<shapes::delta, Device>;
    using type = nibble::table_of<normed_project_family<decltype(delta_net<C>::qkvz), Device>,
                                  project_many_family<decltype(delta_net<C>::qkvz), Device>,
                                  add_family<decltype(delta_net<C>::out_proj), Device>, decode, decode_normed,
                                  prefill>;
  };
  using delta = delta_part<Config, (c.delta_layers() > 0)>;

  /// A shared expert whose form differs from the routed ones has matrices of its own.
  static constexpr bool separate_shared = c.shared_intermediate > 0 && !shared_joins_routed(c);
  template <class C, bool Separate>
  struct shared_part {
    using type = nibble::kernel_table<>;
  };
  template <class C>
  struct shared_part<C, true> {
    using expert = decltype(shared_expert_parts<C>::shared_expert);
    using up = nibble::linear_family<resident_layout_of<decltype(expert::gate_up)>(), nibble::swiglu,
                                     nibble::plain_input, Device>;
    using down = nibble::linear_family<resident_layout_of<decltype(expert::down)>(),
                                       nibble::add_scaled_residual, nibble::plain_input, Device>;
    using type = nibble::table_of<up, down>;
  };
  using shared = shared_part<Config, separate_shared>;

  using table = nibble::table_of<embed, norm, attention_matrices, attention_decode, attention_append,
                                 attention_prefill, typename delta::type, router, experts,
                                 typename shared::type, lm_head, forbid, sampling, offload>;
};

}  // namespace qwen3_moe
