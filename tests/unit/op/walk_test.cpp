// SPDX-License-Identifier: Apache-2.0
#include "nibble/op/walk.hpp"

#include <string>
#include <type_traits>
#include <vector>

#include "nibble/op/leaves.hpp"
#include "nibble/op/type_visitors.hpp"
#include "support/catch.hpp"

using namespace nibble;

namespace {

constexpr geometry up_geometry = fused(32, weight_format::nvfp4, 64, 64);
constexpr geometry down_geometry = matrix(32, 64, weight_format::nvfp4);

struct mlp {
  linear<up_geometry, "gate_proj", "up_proj"> gate_up;
  linear<down_geometry, "down_proj"> down;
  using op_members = members<part<&mlp::gate_up>, part<&mlp::down>>;
};
struct first_kind {
  parameter<"weight", 32> scale;
  ::mlp mlp;
  using op_members = members<member<"norm", &first_kind::scale>, member<"mlp", &first_kind::mlp>>;
};
class second_kind {
 public:
  op_list<::mlp, 3> experts;
  absent_op nothing;

 private:
  linear<matrix(7, 32, weight_format::bf16), "router"> router_;

 public:
  using op_members = members<member<"experts", &second_kind::experts>, part<&second_kind::nothing>,
                             part<&second_kind::router_>>;
};
struct pattern {
  static constexpr int size = 4;
  static constexpr int kind_at(int i) { return i % 2; }
};
struct model {
  embedding<"weight", 10, 32> table;
  op_sequence<pattern, first_kind, second_kind> layers;
  using op_members = members<member<"embed", &model::table>, member<"layers", &model::layers>>;
};

}  // namespace

TEST_CASE("leaves are visited in member order with the checkpoint's paths") {
  model m;
  std::vector<std::string> paths;
  for_each_leaf(m, [&](const op_path& path, auto& leaf) {
    static_assert(!std::is_const_v<std::remove_reference_t<decltype(leaf)>>);
    paths.push_back(path.text());
  });
  const std::vector<std::string> expected{"embed",
                                          "layers.0.norm",
                                          "layers.0.mlp",
                                          "layers.0.mlp",
                                          "layers.1.experts.0",
                                          "layers.1.experts.0",
                                          "layers.1.experts.1",
                                          "layers.1.experts.1",
                                          "layers.1.experts.2",
                                          "layers.1.experts.2",
                                          "layers.1",
                                          "layers.2.norm",
                                          "layers.2.mlp",
                                          "layers.2.mlp",
                                          "layers.3.experts.0",
                                          "layers.3.experts.0",
                                          "layers.3.experts.1",
                                          "layers.3.experts.1",
                                          "layers.3.experts.2",
                                          "layers.3.experts.2",
                                          "layers.3"};
  CHECK(paths == expected);
}

TEST_CASE("a const tree gives const leaves, a root begins the paths") {
  const model m;
  bool first = true;
  for_each_leaf(
      m,
      [&](const op_path& path, auto& leaf) {
        static_assert(std::is_const_v<std::remove_reference_t<decltype(leaf)>>);
        if (first) CHECK(path.text() == "root.embed");
        first = false;
      },
      "root");
  CHECK_FALSE(first);
}

TEST_CASE("what follows from the type agrees with the walk over a value") {
  model m;
  int leaves = 0;
  std::uint64_t bytes = 0;
  geometry_set<16> found;
  for_each_leaf(m, [&](const op_path&, auto& leaf) {
    using leaf_type = std::remove_reference_t<decltype(leaf)>;
    ++leaves;
    bytes += leaf_bytes<leaf_type>();
    if constexpr (leaf_type::kind == leaf_kind::matrix) found.insert(leaf_type::shape);
  });
  CHECK(leaf_count<model>() == leaves);
  CHECK(weight_bytes<model>() == bytes);
  constexpr auto geometries = distinct_geometries<model>();
  static_assert(geometries.size() == 3);
  REQUIRE(found.size() == geometries.size());
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == geometries[i]);
  CHECK(weight_bytes<model>() ==
        10 * 32 * 2 + 2 * 32 * 4 + (2 + 6) * (up_geometry.bytes() + down_geometry.bytes()) + 2 * 7 * 32 * 2);
}

TEST_CASE("a sequence holds each child as its own type") {
  op_sequence<pattern, first_kind, second_kind> layers;
  static_assert(decltype(layers)::count_of(0) == 2 && decltype(layers)::count_of(1) == 2);
  for (int i = 0; i < 4; ++i)
    layers.visit(i, [&](auto& child) {
      CHECK(std::is_same_v<std::remove_reference_t<decltype(child)>, first_kind> == (i % 2 == 0));
    });
}

TEST_CASE("names of parts") {
  CHECK(linear<up_geometry, "gate_proj", "up_proj">::part_names[1] == "up_proj");
  op_path path("a");
  {
    const op_path::scope scope(path, "b");
    const op_path::scope nothing(path, "");
    CHECK(path.text() == "a.b");
    CHECK(path.joined("c") == "a.b.c");
  }
  CHECK(path.text() == "a");
}
