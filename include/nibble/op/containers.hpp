// SPDX-License-Identifier: Apache-2.0
/// \file
/// Numbered children: a list of one op, and a sequence that follows a pattern of several.
#pragma once

#include <cstddef>
#include <utility>
#include <variant>
#include <vector>

#include "nibble/op/member.hpp"

namespace nibble {

/// `Count` ops of one type, named 0 … Count-1.
template <class Op, int Count>
class op_list {
  static_assert(Count >= 0, "an op_list has no negative size");

 public:
  using value_type = Op;
  static constexpr int count = Count;

  op_list() : ops_(static_cast<std::size_t>(Count)) {}
  [[nodiscard]] Op& operator[](int i) { return ops_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const Op& operator[](int i) const { return ops_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<Op> ops_;
};

/// Ops of several types in a fixed order, named 0 … Pattern::size-1. `Pattern::kind_at(i)` is a constant
/// expression: the index into `Ops` of the i-th child.
template <class Pattern, class... Ops>
class op_sequence {
 public:
  static constexpr int count = Pattern::size;

  /// How many children are of the type with this index.
  [[nodiscard]] static constexpr int count_of(int kind) {
    int found = 0;
    for (int i = 0; i < count; ++i) found += Pattern::kind_at(i) == kind;
    return found;
  }

  op_sequence() {
    ops_.reserve(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) emplace(Pattern::kind_at(i), std::index_sequence_for<Ops...>{});
  }

  /// Calls `f(op)` with the i-th child as its own type.
  template <class F>
  decltype(auto) visit(int i, F&& f) {
    return std::visit(std::forward<F>(f), ops_[static_cast<std::size_t>(i)]);
  }
  template <class F>
  decltype(auto) visit(int i, F&& f) const {
    return std::visit(std::forward<F>(f), ops_[static_cast<std::size_t>(i)]);
  }

 private:
  template <std::size_t... Index>
  void emplace(int kind, std::index_sequence<Index...>) {
    ((static_cast<int>(Index) == kind ? (void)ops_.emplace_back(std::in_place_index<Index>) : void()), ...);
  }

  std::vector<std::variant<Ops...>> ops_;
};

/// No op: what stands where a model lacks a part. Walks pass over it.
struct absent_op {
  using op_members = members<>;
};

namespace detail {
template <class T>
inline constexpr bool is_op_list = false;
template <class Op, int Count>
inline constexpr bool is_op_list<op_list<Op, Count>> = true;
template <class T>
inline constexpr bool is_op_sequence = false;
template <class Pattern, class... Ops>
inline constexpr bool is_op_sequence<op_sequence<Pattern, Ops...>> = true;
}  // namespace detail

}  // namespace nibble
