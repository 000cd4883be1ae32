// SPDX-License-Identifier: Apache-2.0
/// \file
/// The walker: one order, one naming, for values and for types.
#pragma once

#include <charconv>
#include <string_view>
#include <type_traits>
#include <utility>

#include "nibble/op/containers.hpp"
#include "nibble/op/member.hpp"
#include "nibble/op/path.hpp"

namespace nibble {

namespace detail {

template <class T>
inline constexpr bool always_false = false;

template <class Op, class Visitor>
void walk(Op& op, op_path& path, Visitor& visitor);

template <class Op, class Visitor, class... Members>
void walk_members(Op& op, op_path& path, Visitor& visitor, members<Members...>) {
  [[maybe_unused]] const auto one = [&]<class Member>(std::type_identity<Member>) {
    static_assert(std::is_same_v<typename Member::owner, std::remove_cv_t<Op>>,
                  "a member list names a member of another class");
    const op_path::scope scope(path, Member::name);
    walk(op.*Member::pointer, path, visitor);
  };
  (one(std::type_identity<Members>{}), ...);
}

/// Calls `f` with each number in [0, count) as text.
template <class F>
void for_each_number(int count, F&& f) {
  for (int i = 0; i < count; ++i) {
    char digits[12];
    const auto end = std::to_chars(digits, digits + sizeof digits, i).ptr;
    f(i, std::string_view(digits, static_cast<std::size_t>(end - digits)));
  }
}

template <class Op, class Visitor>
void walk(Op& op, op_path& path, Visitor& visitor) {
  using type = std::remove_cv_t<Op>;
  if constexpr (is_op_list<type>) {
    for_each_number(type::count, [&](int i, std::string_view number) {
      const op_path::scope scope(path, number);
      walk(op[i], path, visitor);
    });
  } else if constexpr (is_op_sequence<type>) {
    for_each_number(type::count, [&](int i, std::string_view number) {
      const op_path::scope scope(path, number);
      op.visit(i, [&](auto& child) { walk(child, path, visitor); });
    });
  } else if constexpr (leaf_op<type>) {
    visitor(static_cast<const op_path&>(path), op);
  } else if constexpr (composite_op<type>) {
    walk_members(op, path, visitor, members_of_t<type>{});
  } else {
    static_assert(always_false<type>,
                  "a member of an op is neither an op (op_members), a list of ops, nor a leaf (leaf_op)");
  }
}

template <class T, class Visitor>
constexpr void walk_type(Visitor& visitor, int times);

template <class Visitor, class... Members>
constexpr void walk_member_types([[maybe_unused]] Visitor& visitor, [[maybe_unused]] int times,
                                 members<Members...>) {
  (walk_type<typename Members::value>(visitor, times), ...);
}

template <class Visitor, class Pattern, class... Ops>
constexpr void walk_sequence_types(Visitor& visitor, int times,
                                   std::type_identity<op_sequence<Pattern, Ops...>>) {
  int kind = 0;
  const auto one = [&]<class Op>(std::type_identity<Op>) {
    const int count = op_sequence<Pattern, Ops...>::count_of(kind++);
    if (count > 0) walk_type<Op>(visitor, times * count);
  };
  (one(std::type_identity<Ops>{}), ...);
}

template <class T, class Visitor>
constexpr void walk_type(Visitor& visitor, int times) {
  using type = std::remove_cv_t<T>;
  if constexpr (is_op_list<type>) {
    if constexpr (type::count > 0) walk_type<typename type::value_type>(visitor, times * type::count);
  } else if constexpr (is_op_sequence<type>) {
    walk_sequence_types(visitor, times, std::type_identity<type>{});
  } else if constexpr (leaf_op<type>) {
    visitor(std::type_identity<type>{}, times);
  } else if constexpr (composite_op<type>) {
    walk_member_types(visitor, times, members_of_t<type>{});
  } else {
    static_assert(always_false<type>,
                  "a member of an op is neither an op (op_members), a list of ops, nor a leaf (leaf_op)");
  }
}

}  // namespace detail

/// Calls `visitor(path, leaf)` for every leaf of `op` in the order of the member lists; `root` begins the
/// paths. `op` may be const: then the leaves are.
template <class Op, class Visitor>
void for_each_leaf(Op& op, Visitor&& visitor, std::string root = {}) {
  op_path path(std::move(root));
  detail::walk(op, path, visitor);
}

/// Calls `visitor(std::type_identity<Leaf>, times)` for every leaf type of `Op`, `times` being how often the
/// tree has it there. Needs no value; usable in constant expressions.
template <class Op, class Visitor>
constexpr void for_each_leaf_type(Visitor&& visitor) {
  detail::walk_type<Op>(visitor, 1);
}

}  // namespace nibble
