// SPDX-License-Identifier: Apache-2.0
/// \file
/// The table of every kernel a model launches, as a type.
///
/// A kernel family is a type that knows its kernels and launches them:
///
///     struct my_family {
///       static constexpr const char* name = "my_family";
///       /// visit(kernel_function, threads, dynamic_shared_bytes, name) → status, for EVERY __global__
///       /// instance that launch() may use
///       template <class Visit> static status for_each_kernel(Visit&& visit);
///       static status launch(const my_params&, const launch_options&);
///     };
///
/// A family may say which weight matrices it is specialised on, which only the report counts: `geometry
/// shape`, `resident_layout layout`, or a shape with gate_up() and down() layouts.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "nibble/core/status.hpp"
#include "nibble/geometry/geometry_set.hpp"
#include "nibble/op/type_visitors.hpp"

namespace nibble {

template <class... Families>
struct kernel_table;

namespace detail {

struct any_kernel_visitor {
  template <class Kernel>
  status operator()(Kernel, int, std::size_t, const char*) const {
    return status::success();
  }
};

/// Adds the geometries that a family is specialised on.
template <class Family, std::size_t Capacity>
constexpr void add_geometries(geometry_set<Capacity>& found) {
  if constexpr (requires { geometry(Family::layout.shape); })
    found.insert(Family::layout.shape);
  else if constexpr (requires { geometry(Family::shape.gate_up().shape); })
    found.insert(Family::shape.gate_up().shape), found.insert(Family::shape.down().shape);
  else if constexpr (requires { geometry(Family::shape); })
    found.insert(Family::shape);
}

template <class T>
inline constexpr bool is_kernel_table = false;
template <class... Families>
inline constexpr bool is_kernel_table<kernel_table<Families...>> = true;

}  // namespace detail

/// A type that lists its kernels.
template <class T>
concept kernel_family = requires {
  { T::name } -> std::convertible_to<const char*>;
  { T::for_each_kernel(detail::any_kernel_visitor{}) } -> std::same_as<status>;
};

namespace detail {

/// Distinct families in the order of their first appearance; tables among them are taken apart.
template <class Done, class... Rest>
struct distinct_families;
template <class... Done>
struct distinct_families<kernel_table<Done...>> {
  using type = kernel_table<Done...>;
};
template <class... Done, class... Inner, class... Rest>
struct distinct_families<kernel_table<Done...>, kernel_table<Inner...>, Rest...>
    : distinct_families<kernel_table<Done...>, Inner..., Rest...> {};
template <class... Done, class First, class... Rest>
requires(!is_kernel_table<First>) struct distinct_families<kernel_table<Done...>, First, Rest...>
    : std::conditional_t<(std::is_same_v<Done, First> || ...),
                         distinct_families<kernel_table<Done...>, Rest...>,
                         distinct_families<kernel_table<Done..., First>, Rest...>> {
};

}  // namespace detail

/// The distinct families of all arguments, which are families or tables: `table_of<tree_kernels<lm, gemvs>,
/// attention_family<…>, sampling_family>`.
template <class... FamiliesOrTables>
using table_of = typename detail::distinct_families<kernel_table<>, FamiliesOrTables...>::type;

/// Families, each once. Made by table_of, which removes duplicates.
template <class... Families>
struct kernel_table {
  static_assert((kernel_family<Families> && ...),
                "a kernel table is made of kernel families: types with a name and for_each_kernel(visit)");
  static_assert(std::is_same_v<kernel_table, table_of<Families...>>,
                "a kernel table holds each family once: write nibble::table_of<...>, which sees to it");

  static constexpr std::size_t families = sizeof...(Families);

  template <class Family>
  static constexpr bool contains = (std::is_same_v<Family, Families> || ...);

  /// Distinct weight geometries that the families are specialised on.
  static constexpr std::size_t geometries() {
    geometry_set<2 * sizeof...(Families) + 1> found;
    (detail::add_geometries<Families>(found), ...);
    return found.size();
  }

  /// Calls f(std::type_identity<Family>{}) → status for each family until one is not ok.
  template <class F>
  static status for_each_family(F&& f) {
    status s;
    static_cast<void>((... && (s = f(std::type_identity<Families>{}), s.ok())));
    return s;
  }
  /// Calls visit(kernel_function, threads, dynamic_shared_bytes, name) → status for each kernel.
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    return for_each_family(
        [&]<class Family>(std::type_identity<Family>) { return Family::for_each_kernel(visit); });
  }
};

namespace detail {

template <class Op, template <geometry> class FamilyOf, class Numbers>
struct tree_kernels;
template <class Op, template <geometry> class FamilyOf, std::size_t... I>
struct tree_kernels<Op, FamilyOf, std::index_sequence<I...>> {
  static constexpr auto set = distinct_geometries<Op>();
  using type = table_of<FamilyOf<set[I]>...>;
};

}  // namespace detail

/// One family (or table) for each distinct geometry of an op tree's matrices, found without a value:
/// FamilyOf<G> is the family for geometry G, or kernel_table<> for a matrix that another family serves.
template <class Op, template <geometry> class FamilyOf>
using tree_kernels =
    typename detail::tree_kernels<Op, FamilyOf,
                                  std::make_index_sequence<distinct_geometries<Op>().size()>>::type;

/// Launches kernels of the table and no others.
template <class Table>
struct launcher {
  static_assert(detail::is_kernel_table<Table>, "a launcher is made from a kernel table");

  /// Family::launch(arguments…); does not compile for a family that is not preloaded.
  template <class Family, class... Arguments>
  static status launch(Arguments&&... arguments) {
    static_assert(Table::template contains<Family>,
                  "this kernel family is not in the model's kernel table, so it would be loaded at its first "
                  "launch: add it to the table");
    return Family::launch(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace nibble
