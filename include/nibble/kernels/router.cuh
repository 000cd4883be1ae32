// SPDX-License-Identifier: Apache-2.0
/// \file
/// The family of router kernels.
#pragma once

#include <algorithm>

#include "nibble/core/launch.cuh"
#include "nibble/kernels/norm.cuh"
#include "nibble/kernels/router_kernel.cuh"

namespace nibble {

template <router_shape S, int Rows, bool Staged>
inline constexpr auto router_decode_kernel_of =
    &router_decode_kernel<Rows, Staged, S.hidden, S.experts, S.top_k, S.shared, S.normalise>;
template <router_shape S, device_class Device = default_device>
inline constexpr auto router_prefill_kernel_of =
    &router_prefill_kernel<Device.dynamic_shared_bytes(), S.hidden, S.experts, S.top_k, S.shared,
                           S.normalise>;

/// RMSNorm of the residual stream, router logits, the choice, the shared expert's gate. Up to 112 rows in one
/// kernel, more in two (the norm, then the rest), or in turns where a block has too little shared memory for
/// the second. A row's results are the same bits for any number of rows. Cost: the router's weights once for
/// few rows; matrix instructions for many. Two routers of few rows share a launch (router_params::beside).
///
/// With 2 to 112 rows the next kernel may begin before the one before the router has ended, behind several
/// routers in a row before the one before the first: what it reads before its own wait must be older than
/// those.
template <router_shape Shape, device_class Device = default_device>
struct router_family {
  static_assert(Shape.valid(),
                "a router has a hidden size that is a multiple of 256, at most 512 experts, "
                "and chooses at most 32 of them");
  using params = router_params;
  using norm = rms_norm_family<Shape.hidden>;
  using product = rows_product_plan<Shape.experts, Shape.shared, Shape.hidden, Device.dynamic_shared_bytes()>;
  static constexpr const char* name = "router";
  /// Whether there are kernels for many rows. Without them, more rows than one kernel takes go in turns.
  static constexpr bool has_prefill = product::fits;

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = visit_decode<1>(visit);
    if (s.ok()) s = visit_decode<4>(visit);
    if (s.ok()) s = visit_decode<8>(visit);
    if (s.ok()) s = visit_decode<16>(visit);
    if (s.ok()) s = norm::for_each_kernel(visit);
    if constexpr (has_prefill)
      if (s.ok())
        s = visit(router_prefill_kernel_of<Shape, Device>, product::threads,
                  static_cast<std::size_t>(product::shared_bytes), "router_prefill");
    return s;
  }

  static status launch(const params& p, const launch_options& options) {
    if (p.rows > max_router_decode_rows) return launch_prefill(p, options);
    if (const status s = check(p); !s.ok()) return s;
    switch (router_group_rows(p.rows)) {
      case 1:
        return decode<1>(p, options);
      case 4:
        return decode<4>(p, options);
      case 8:
        return decode<8>(p, options);
      default:
        return decode<16>(p, options);
    }
  }

  /// The path for many rows, for any number of them. Of two routers one follows the other.
  static status launch_prefill(const params& p, const launch_options& options) {
    if (const status s = check(p); !s.ok()) return s;
    if (p.beside.weight != nullptr) {
      params first = p;
      first.beside = {};
      const status s = launch_prefill(first, options);
      return s.ok() ? launch_prefill(beside_alone(p), options) : s;
    }
    if constexpr (has_prefill)
      return launch_norm_and_choice(p, options);
    else
      return launch_turns(p, options);
  }

 private:
  /// Up to 8 rows, where a block has the memory for the weights beside them.
  template <int Rows>
  static constexpr bool staged = Rows <= 8 &&
                                 router_plan<Shape.hidden, Rows, Shape.tiles(), true>::shared_bytes <=
                                     std::min(Device.dynamic_shared_bytes(), 116 * 1024);
  template <int Rows>
  using decode_plan = router_plan<Shape.hidden, Rows, Shape.tiles(), staged<Rows>>;

  static params beside_alone(params p) {
    static_cast<router_operands&>(p) = p.beside;
    p.beside = {};
    return p;
  }
  /// The kernels for few rows, as often as the rows need it.
  static status launch_turns(params p, const launch_options& options) {
    status s;
    for (int left = p.rows; left > 0 && s.ok(); left -= p.rows) {
      p.rows = std::min(left, max_router_decode_rows);
      s = launch(p, options);
      p.hidden += static_cast<std::ptrdiff_t>(p.rows) * p.ldh;
      p.normed += static_cast<std::ptrdiff_t>(p.rows) * p.ldn;
      p.ids += p.rows * Shape.top_k, p.weights += p.rows * Shape.top_k;
      if (Shape.shared) p.shared_weights += p.rows;
    }
    return s;
  }
  /// Two kernels: the norm, then the rest.
  static status launch_norm_and_choice(const params& p, const launch_options& options) {
    rms_norm_params n;
    n.rows = p.rows, n.x = p.hidden, n.ldx = p.ldh, n.weight = p.norm, n.zero_centred = p.zero_centred;
    n.eps = p.eps, n.y = p.normed, n.ldy = p.ldn;
    if (const status s = norm::launch(n, options); !s.ok()) return s;
    const int blocks = (p.rows + product::tile_rows - 1) / product::tile_rows;
    return nibble::launch(router_prefill_kernel_of<Shape, Device>, dim3(static_cast<unsigned>(blocks)),
                          product::threads, product::shared_bytes, options, name, p);
  }
  template <int Rows, class Visit>
  static status visit_decode(Visit& visit) {
    using plan = decode_plan<Rows>;
    static_assert(plan::shared_bytes <= Device.dynamic_shared_bytes(),
                  "a block of this architecture has too little shared memory for the router's rows");
    return visit(router_decode_kernel_of<Shape, Rows, staged<Rows>>, plan::threads,
                 static_cast<std::size_t>(plan::shared_bytes), "router_decode");
  }
  template <int Rows>
  static status decode(const params& p, const launch_options& options) {
    using plan = decode_plan<Rows>;
    return nibble::launch(
        router_decode_kernel_of<Shape, Rows, staged<Rows>>,
        dim3(static_cast<unsigned>(Shape.tiles()), static_cast<unsigned>((p.rows + Rows - 1) / Rows),
             p.beside.weight != nullptr ? 2 : 1),
        plan::threads, plan::shared_bytes, options, name, p);
  }
  static status check(const params& p) {
    if (p.beside.weight != nullptr) {
      if (p.beside.workspace == p.workspace || p.beside.ids == p.ids || p.beside.normed == p.normed)
        return status::invalid(name, "two routers in one launch need results and workspaces of their own");
      if (const status s = check(beside_alone(p)); !s.ok()) return s;
    }
    const auto aligned = [](const void* a) {
      return a != nullptr && reinterpret_cast<std::uintptr_t>(a) % 16 == 0;
    };
    const auto rows = [&](const void* a, int ld) { return aligned(a) && ld >= Shape.hidden && ld % 8 == 0; };
    if (p.rows < 1) return status::invalid(name, "a launch takes at least one row");
    if (!rows(p.hidden, p.ldh) || !rows(p.normed, p.ldn) || p.hidden == p.normed)
      return status::invalid(name,
                             "hidden and normed are different, at 16-byte addresses, with row strides "
                             "of the hidden size or more, multiples of 8");
    if (!aligned(p.norm) || !aligned(p.weight) || (Shape.shared && !aligned(p.gate)))
      return status::invalid(name, "the norm's, router's and gate's weights need 16-byte addresses");
    if (p.ids == nullptr || p.weights == nullptr || (Shape.shared && p.shared_weights == nullptr))
      return status::invalid(name, "ids, weights or shared_weights are missing");
    if (!aligned(p.workspace)) return status::invalid(name, "the workspace needs a 256-byte address");
    return status::success();
  }
};

}  // namespace nibble
