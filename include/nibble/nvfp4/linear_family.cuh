// SPDX-License-Identifier: Apache-2.0
/// \file
/// One resident matrix and epilogue as a kernel family: every kernel that its launches may use can be
/// visited, so that a table of kernels loads them before anything is captured.
#pragma once

#include <array>

#include "nibble/nvfp4/gemm.cuh"

namespace nibble {

/// y = epilogue(x · Wᵀ) for any number of tokens, p.m: matrix-vector kernels for up to 16, above them the
/// tensor-core kernel where the format has one and it pays, else turns of 16.
template <resident_layout Layout, class Epilogue, device_class Device = h200>
struct linear_family {
  using params = gemv_params<Epilogue>;
  static constexpr const char* name = "linear";
  static constexpr resident_layout layout = Layout;
  /// Whether there is a tensor-core kernel for many tokens.
  static constexpr bool has_gemm = Layout.shape.format != weight_format::bf16 && !Epilogue::finishes;
  /// Blocks of the kernel that serves `m` tokens at most 16: what store_and_argmax wants to know.
  [[nodiscard]] static constexpr int blocks(int m) {
    return select_gemv(Layout, token_columns(m), Device).grid;
  }

  /// visit(kernel, threads, dynamic shared bytes, name) → status, for every kernel of launch(). Ends at the
  /// first status that is not good.
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    status s = visit_gemv<1>(visit);
    if (s.ok()) s = visit_gemv<2>(visit);
    if (s.ok()) s = visit_gemv<4>(visit);
    if (s.ok()) s = visit_gemv<8>(visit);
    if (s.ok()) s = visit_gemv<16>(visit);
    if constexpr (has_gemm)
      if (s.ok())
        s = visit(gemm_kernel_of<Layout, Epilogue>, gemm::threads,
                  static_cast<std::size_t>(gemm::stages * gemm::stage_bytes(Layout.shape.format)), name);
    return s;
  }

  /// p.m ≥ 1 tokens; the contract of launch_gemv.
  static status launch(const params& p, const launch_options& options) {
    if constexpr (has_gemm)
      if (gemm_pays(Layout, p.m, Device)) return launch_gemm<Layout, Epilogue>(p, p.m, options);
    return launch_gemv<Layout, Epilogue, Device>(p, p.m, options);
  }

 private:
  template <int Columns, class Visit>
  static status visit_gemv(Visit& visit) {
    constexpr gemv_policy policy = select_gemv(Layout, Columns, Device);
    if constexpr (Columns == 2)
      if (policy == select_gemv(Layout, 1, Device)) return status::success();  // one kernel serves both
    constexpr gemv_plan plan = plan_for<Layout, policy>;
    return visit(gemv_kernel_of<Layout, policy, Epilogue>, plan.threads,
                 static_cast<std::size_t>(plan.shared_bytes), name);
  }
};

}  // namespace nibble
