// SPDX-License-Identifier: Apache-2.0
// One mistake a case; CASE_valid must compile.
#include "nibble/op/leaves.hpp"
#include "nibble/op/type_visitors.hpp"
#include "nibble/op/walk.hpp"

using namespace nibble;

struct plain {
  parameter<"weight", 4> weight;
  using op_members = members<part<&plain::weight>>;
};
struct number {
  int value;
};

struct tree {
  plain a, b;
  number c;
#if defined(CASE_listed_twice)
  using op_members = members<member<"a", &tree::a>, member<"a", &tree::a>>;
#elif defined(CASE_empty_name)
  using op_members = members<member<"", &tree::a>>;
#elif defined(CASE_dotted_name)
  using op_members = members<member<"a.b", &tree::a>>;
#elif defined(CASE_other_class)
  using op_members = members<member<"a", &plain::weight>>;
#elif defined(CASE_not_an_op)
  using op_members = members<member<"c", &tree::c>>;
#else
  using op_members = members<member<"a", &tree::a>, member<"b", &tree::b>>;
#endif
};

#if defined(CASE_inner_dimension)
linear<matrix(4, 24, weight_format::nvfp4), "w"> matrix_leaf;
#elif defined(CASE_segments_do_not_add_up)
linear<geometry{10, 16, weight_format::nvfp4, {4, 5}}, "a", "b"> matrix_leaf;
#elif defined(CASE_one_name_for_two_segments)
linear<fused(16, weight_format::nvfp4, 4, 5), "a"> matrix_leaf;
#elif defined(CASE_no_rows)
linear<matrix(0, 16, weight_format::nvfp4), "w"> matrix_leaf;
#else
linear<fused(16, weight_format::nvfp4, 4, 5), "a", "b"> matrix_leaf;
#endif

#if defined(CASE_visitor_without_overload)
struct visitor {
  void operator()(const op_path&, number&) {}
};
#else
struct visitor {
  template <class Leaf>
  void operator()(const op_path&, Leaf&) {}
};
#endif

int main() {
  tree t;
  for_each_leaf(t, visitor{});
  return static_cast<int>(weight_bytes<tree>());
}
