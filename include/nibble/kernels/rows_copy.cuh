// SPDX-License-Identifier: Apache-2.0
/// \file
/// Rows by index: token embedding and the rows whose logits are wanted.
#pragma once

#include "nibble/core/launch.cuh"
#include "nibble/kernels/rows_math.cuh"
#include "nibble/kernels/rows_params.cuh"

namespace nibble {

namespace detail {
template <int Width>
inline constexpr int copy_threads = Width / 8 < 256 ? Width / 8 : 256;
}  // namespace detail

template <int Vocab, int Width>
__global__ __launch_bounds__(detail::copy_threads<Width>) void embed_kernel(
    const __grid_constant__ embed_params p) {
  using namespace device;
  wait_for_previous_grid();
  let_next_grid_start();
  const int row = static_cast<int>(blockIdx.x);
  int id = load_int(p.ids + row);
  if (id < 0 && p.previous != nullptr) id = load_int(p.previous + load_int(p.slot + row));
  const int safe = max(0, min(id, Vocab - 1));
  if (threadIdx.x == 0 && safe != id && p.out_of_range != nullptr) atomicAdd(p.out_of_range, 1u);
  for (int c = 8 * static_cast<int>(threadIdx.x); c < Width; c += 8 * detail::copy_threads<Width>)
    *reinterpret_cast<uint4*>(p.y + static_cast<std::size_t>(row) * p.ldy + c) =
        load_16(p.table + static_cast<std::size_t>(safe) * Width + c);
}

template <int Width>
__global__ __launch_bounds__(detail::copy_threads<Width>) void select_rows_kernel(
    const __grid_constant__ select_rows_params p) {
  using namespace device;
  wait_for_previous_grid();
  let_next_grid_start();
  const int row = static_cast<int>(blockIdx.x);
  const int from = max(0, min(load_int(p.index + row), p.limit - 1));
  for (int c = 8 * static_cast<int>(threadIdx.x); c < Width; c += 8 * detail::copy_threads<Width>)
    *reinterpret_cast<uint4*>(p.y + static_cast<std::size_t>(row) * p.ldy + c) =
        load_16(p.x + static_cast<std::size_t>(from) * p.ldx + c);
}

template <int Vocab, int Width>
struct embedding_family {
  static_assert(Vocab > 0 && Width > 0 && Width % 8 == 0, "a table has rows of a multiple of 8 columns");
  using params = embed_params;
  static constexpr const char* name = "embedding";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(&embed_kernel<Vocab, Width>, detail::copy_threads<Width>, std::size_t{0}, name);
  }
  static status launch(const params& p, const launch_options& options) {
    if (p.rows < 1) return status::invalid(name, "a launch takes at least one row");
    if (p.table == nullptr || reinterpret_cast<std::uintptr_t>(p.table) % 16 != 0 || p.ids == nullptr ||
        p.y == nullptr || reinterpret_cast<std::uintptr_t>(p.y) % 16 != 0 || p.ldy < Width || p.ldy % 8 != 0)
      return status::invalid(
          name,
          "the table and y need 16-byte addresses, y a row stride of the width or more, a multiple of 8");
    return nibble::launch(&embed_kernel<Vocab, Width>, dim3(static_cast<unsigned>(p.rows)),
                          detail::copy_threads<Width>, 0, options, name, p);
  }
};

template <int Width>
struct select_rows_family {
  static_assert(Width > 0 && Width % 8 == 0, "rows have a multiple of 8 columns");
  using params = select_rows_params;
  static constexpr const char* name = "select_rows";

  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return visit(&select_rows_kernel<Width>, detail::copy_threads<Width>, std::size_t{0}, name);
  }
  static status launch(const params& p, const launch_options& options) {
    const auto rows = [](const void* at, int ld) {
      return at != nullptr && reinterpret_cast<std::uintptr_t>(at) % 16 == 0 && ld >= Width && ld % 8 == 0;
    };
    if (p.rows < 1 || p.limit < 1)
      return status::invalid(name, "a launch takes at least one row of at least one");
    if (!rows(p.x, p.ldx) || !rows(p.y, p.ldy) || p.index == nullptr || p.x == p.y)
      return status::invalid(name,
                             "x and y are different, at 16-byte addresses, with row strides of the width or "
                             "more, multiples of 8");
    return nibble::launch(&select_rows_kernel<Width>, dim3(static_cast<unsigned>(p.rows)),
                          detail::copy_threads<Width>, 0, options, name, p);
  }
};

}  // namespace nibble
