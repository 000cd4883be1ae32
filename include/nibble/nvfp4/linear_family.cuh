// SPDX-License-Identifier: Apache-2.0
/// \file
/// One resident matrix, epilogue and input as a kernel family: every kernel that its launches may use can be
/// visited, so that a table of kernels loads them before anything is captured.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>

#include "nibble/nvfp4/gemm.cuh"
#include "nibble/nvfp4/top_k_epilogue.cuh"

namespace nibble {

/// y = epilogue(input(x) · Wᵀ) for p.m tokens. Input is plain_input or rms_normed<Weight>.
///
/// plain_input: launch() takes any number of tokens: matrix-vector kernels for up to 16, above them
/// tensor-core kernels (logits with store_and_argmax or store_and_top_k: turns of 16).
/// rms_normed: launch() takes raw rows of at most 16 tokens and norms them itself. More tokens are normed by
/// a kernel of the caller's, and launch_many() takes them as they are.
template <resident_layout Layout, class Epilogue, class Input = plain_input,
          device_class Device = default_device>
struct linear_family {
  using params = gemv_params<Epilogue, Input>;
  using plain_params = gemv_params<Epilogue>;
  static constexpr const char* name = "linear";
  static constexpr resident_layout layout = Layout;
  /// Tokens up to which launch() norms.
  static constexpr int most_normed_tokens = max_gemv_tokens;
  /// Whether there are tensor-core kernels for many tokens.
  static constexpr bool has_gemm = !Epilogue::finishes;
  /// Blocks of the kernel that serves `m` tokens, at most 16.
  [[nodiscard]] static constexpr int blocks(int m) {
    return select_gemv(Layout, token_columns(m), Device, Input::norm_bytes, Epilogue::ends_block).grid;
  }
  /// Blocks for which store_and_argmax and store_and_top_k need room in their keys, whatever the tokens.
  [[nodiscard]] static constexpr int most_blocks() {
    int most = 0;
    for (const int columns : {1, 2, 4, 8, 16}) {
      most =
          std::max(most, select_gemv(Layout, columns, Device, Input::norm_bytes, Epilogue::ends_block).grid);
      most =
          std::max(most, select_gemv(Layout, columns, Device, 0, Epilogue::ends_block).grid);  // launch_many
    }
    return most;
  }
  /// Bytes of those keys for at most `most_tokens` tokens a launch.
  [[nodiscard]] static constexpr std::size_t key_bytes(int most_tokens) {
    if constexpr (Epilogue::finishes)
      return sizeof(unsigned long long) * static_cast<std::size_t>(most_tokens) * Epilogue::keys *
             static_cast<std::size_t>(most_blocks());
    else
      return 0;
  }

  /// visit(kernel, threads, dynamic shared bytes, name) → status, for every kernel of launch() and
  /// launch_many(). Ends at the first status that is not good.
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = visit_gemv<Input>(visit);
    if constexpr (Input::normed && !has_gemm)
      if (s.ok()) s = visit_gemv<plain_input>(visit);
    if constexpr (has_gemm)
      if (s.ok()) s = visit_gemm<Layout, Epilogue, Device>(visit, name);
    return s;
  }

  static status launch(const params& p, const launch_options& options) {
    if constexpr (Input::normed) {
      if (p.m > most_normed_tokens)
        return status::invalid("nibble::linear", "more than 16 rows are normed beforehand: use launch_many");
      return launch_gemv<Layout, Epilogue, Device>(p, p.m, options);
    } else {
      return launch_linear<Layout, Epilogue, Device>(p, p.m, options);
    }
  }

  /// More than 16 tokens whose rows are the input of the product as they stand; p.in is not looked at.
  static status launch_many(const params& p, const launch_options& options) {
    if (p.m <= most_normed_tokens)
      return status::invalid("nibble::linear", "launch_many takes more than 16 tokens: use launch");
    plain_params plain;
    plain.tiles = p.tiles, plain.x = p.x, plain.ldx = p.ldx, plain.m = p.m, plain.out = p.out;
    for (int i = 0; i < max_segments; ++i) plain.scale[i] = p.scale[i];
    if constexpr (has_gemm)
      return launch_gemm<Layout, Epilogue, Device>(plain, p.m, options);
    else
      return launch_gemv<Layout, Epilogue, Device>(plain, p.m, options);
  }

 private:
  template <class In, class Visit>
  static status visit_gemv(Visit& visit) {
    status s = visit_one<In, 1>(visit);
    if (s.ok()) s = visit_one<In, 2>(visit);
    if (s.ok()) s = visit_one<In, 4>(visit);
    if (s.ok()) s = visit_one<In, 8>(visit);
    if (s.ok()) s = visit_one<In, 16>(visit);
    return s;
  }
  template <class In, int Columns, class Visit>
  static status visit_one(Visit& visit) {
    constexpr gemv_policy policy = gemv_policy_of<Layout, Columns, Epilogue, In, Device>;
    if constexpr (Columns == 2)
      if (policy == gemv_policy_of<Layout, 1, Epilogue, In, Device>)
        return status::success();  // one kernel serves both
    constexpr gemv_plan plan = plan_for<Layout, policy>;
    static_assert(Device.has_bulk_copies() || policy.variant == gemv_variant::registers,
                  "this architecture has no bulk copies");
    static_assert(plan.shared_bytes <= Device.dynamic_shared_bytes(),
                  "a block of this architecture has too little shared memory for the product");
    return visit(gemv_kernel_of<Layout, policy, Epilogue, In>, plan.threads,
                 static_cast<std::size_t>(plan.shared_bytes), name);
  }
};

}  // namespace nibble
