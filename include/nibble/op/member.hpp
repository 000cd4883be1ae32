// SPDX-License-Identifier: Apache-2.0
/// \file
/// Member lists: what an op is made of, as a type.
///
/// An op names its parts once:
/// \code
/// struct mlp {
///   linear<gate_up_geometry, "gate_proj", "up_proj"> gate_up;
///   linear<down_geometry, "down_proj"> down;
///   using op_members = members<part<&mlp::gate_up>, part<&mlp::down>>;
/// };
/// struct layer {
///   nibble::mlp mlp;
///   using op_members = members<member<"mlp", &layer::mlp>>;
/// };
/// \endcode
/// From the list every visitor follows: loading, names, bytes, geometries, printing, checking.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <type_traits>

namespace nibble {

/// A string as a template argument.
template <std::size_t Size>
struct fixed_string {
  char text[Size]{};
  // NOLINTNEXTLINE: implicit, so that a literal can be written as the argument
  constexpr fixed_string(const char (&literal)[Size]) { std::copy_n(literal, Size, text); }
  [[nodiscard]] constexpr std::string_view view() const { return {text, Size - 1}; }
  friend constexpr bool operator==(const fixed_string&, const fixed_string&) = default;
};

namespace detail {
template <class Pointer>
struct member_pointer;
template <class Owner, class Value>
struct member_pointer<Value Owner::*> {
  using owner = Owner;
  using value = Value;
};

constexpr bool is_member_name(std::string_view name) {
  return !name.empty() && name.find('.') == std::string_view::npos;
}
}  // namespace detail

/// A part that adds its name to the path: "layers.3" + "mlp" → "layers.3.mlp".
template <fixed_string Name, auto Pointer>
struct member {
  static_assert(detail::is_member_name(Name.view()), "a member's name is not empty and has no dot");
  static constexpr std::string_view name = Name.view();
  static constexpr auto pointer = Pointer;
  using owner = typename detail::member_pointer<decltype(Pointer)>::owner;
  using value = typename detail::member_pointer<decltype(Pointer)>::value;
};

/// A part that names its tensors itself and adds nothing to the path: a fused matrix.
template <auto Pointer>
struct part {
  static constexpr std::string_view name{};
  static constexpr auto pointer = Pointer;
  using owner = typename detail::member_pointer<decltype(Pointer)>::owner;
  using value = typename detail::member_pointer<decltype(Pointer)>::value;
};

/// The list itself. Two members of one name, or one listed twice, do not compile.
template <class... Members>
struct members {
  static constexpr std::size_t count = sizeof...(Members);

 private:
  static constexpr bool unique_names() {
    const std::array<std::string_view, count + 1> names{Members::name..., {}};
    for (std::size_t i = 0; i < names.size(); ++i)
      for (std::size_t j = i + 1; j < names.size(); ++j)
        if (!names[i].empty() && names[i] == names[j]) return false;
    return true;
  }
  static_assert(unique_names(), "two members of one op have the same name");
};

/// The member list of an op. The one place to replace once the language can list members by itself.
template <class Op>
struct members_of {
  using type = typename Op::op_members;
};
template <class Op>
using members_of_t = typename members_of<std::remove_cv_t<Op>>::type;

/// A type with a member list.
template <class Op>
concept composite_op = requires {
  typename members_of_t<Op>;
};

/// A type that holds tensors itself: it says so with `using leaf_op = void`.
template <class Op>
concept leaf_op = requires {
  typename std::remove_cv_t<Op>::leaf_op;
};

}  // namespace nibble
