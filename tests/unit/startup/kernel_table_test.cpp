// SPDX-License-Identifier: Apache-2.0
// The table as a type: deduplicated, flattened, made from an op tree.
#include "nibble/startup/kernel_table.hpp"

#include <string>
#include <vector>

#include "nibble/op/containers.hpp"
#include "nibble/op/leaves.hpp"
#include "nibble/op/member.hpp"
#include "nibble/startup/kernel_report.hpp"
#include "support/catch.hpp"

using namespace nibble;

namespace {

int launched = 0;

template <geometry G>
struct gemv {
  static constexpr const char* name = "gemv";
  static constexpr geometry shape = G;
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    static int one, many;
    status s = visit(&one, 256, std::size_t{1024}, "gemv_one");
    if (s.ok()) s = visit(&many, 256, std::size_t{2048}, "gemv_many");
    return s;
  }
  static status launch(int tokens, int) { return launched += tokens, status::success(); }
};

template <int Number>
struct plain {
  static constexpr const char* name = "plain";
  template <class Visit>
  static status for_each_kernel(Visit&& visit) {
    if (Number < 0) return status::not_supported("plain", "negative");
    return visit(Number, 32, std::size_t{0}, name);
  }
};

struct experts {
  struct shape_type {
    struct side {
      geometry shape;
    };
    static constexpr side gate_up() { return {fused(64, weight_format::nvfp4, 32, 32)}; }
    static constexpr side down() { return {matrix(64, 32, weight_format::nvfp4)}; }
  };
  static constexpr const char* name = "experts";
  static constexpr shape_type shape{};
  template <class Visit>
  static status for_each_kernel(Visit&&) {
    return status::success();
  }
};

// Two layers of equal shape, a head that has the shape of a layer's matrix, an expert served by another
// family.
struct layer {
  linear<matrix(64, 64, weight_format::nvfp4), "a"> a;
  linear<matrix(128, 64, weight_format::fp8), "b"> b;
  linear<matrix(64, 32, weight_format::nvfp4), "expert"> expert;
  using op_members = members<part<&layer::a>, part<&layer::b>, part<&layer::expert>>;
};
struct model {
  op_list<layer, 2> layers;
  linear<matrix(64, 64, weight_format::nvfp4), "lm_head"> lm_head;
  using op_members = members<member<"layers", &model::layers>, part<&model::lm_head>>;
};

template <geometry G>
struct choose {
  using type = gemv<G>;
};
template <>
struct choose<matrix(64, 32, weight_format::nvfp4)> {
  using type = kernel_table<>;  // the experts' family has it
};
template <geometry G>
using family_of = typename choose<G>::type;

using from_tree = tree_kernels<model, family_of>;
using table = table_of<from_tree, experts, plain<1>, plain<2>, plain<1>, kernel_table<plain<2>, plain<3>>>;

}  // namespace

TEST_CASE("kernel table: equal geometries are one family, whatever layer or head they are in") {
  static_assert(from_tree::families == 2);
  static_assert(from_tree::contains<gemv<matrix(64, 64, weight_format::nvfp4)>>);
  static_assert(from_tree::contains<gemv<matrix(128, 64, weight_format::fp8)>>);
  static_assert(!from_tree::contains<gemv<matrix(64, 32, weight_format::nvfp4)>>);
  static_assert(table::families == 2 + 1 + 3);
  static_assert(table::geometries() == 4);
  static_assert(table_of<>::families == 0);
  static_assert(std::is_same_v<table_of<plain<1>, table_of<plain<1>>>, kernel_table<plain<1>>>);
  SUCCEED();
}

TEST_CASE("kernel table: every kernel is visited, until one is refused") {
  std::vector<std::string> names;
  const auto visit = [&](auto, int threads, std::size_t, const char* name) {
    names.push_back(std::string(name) + " " + std::to_string(threads));
    return status::success();
  };
  REQUIRE(table::for_each_kernel(visit).ok());
  CHECK(names == std::vector<std::string>{"gemv_one 256", "gemv_many 256", "gemv_one 256", "gemv_many 256",
                                          "plain 32", "plain 32", "plain 32"});
  names.clear();
  using broken = table_of<plain<1>, plain<-1>, plain<2>>;
  CHECK(broken::for_each_kernel(visit).code == status_code::unsupported);
  CHECK(names.size() == 1);
  int calls = 0;
  CHECK(!table::for_each_kernel([&](auto, int, std::size_t, const char*) {
           return ++calls == 2 ? status::invalid("test", "stop") : status::success();
         }).ok());
  CHECK(calls == 2);
}

TEST_CASE("launcher: hands its arguments to a family of the table") {
  launched = 0;
  REQUIRE(launcher<table>::launch<gemv<matrix(64, 64, weight_format::nvfp4)>>(3, 0).ok());
  CHECK(launched == 3);
}

TEST_CASE("kernel report: one line says what is resident") {
  kernel_report r;
  r.geometries = 6;
  r.kernels.resize(48);
  r.ms = 3.04;
  r.bytes = 2 << 20;
  CHECK(r.line() == "6 distinct geometries, 48 kernels resident in 3.0 ms, 2.0 MiB");
  r.geometries = 1;
  r.kernels.resize(1);
  r.ms = 12.3;
  r.kernels[0] = {"gemv", 40, 256, 16, 1024};
  CHECK(r.line() == "1 distinct geometry, 1 kernel resident in 12 ms, 2.0 MiB");
  CHECK(r.table() ==
        "registers  threads  shared bytes  local bytes  kernel\n"
        "       40      256          1040            0  gemv\n");
  CHECK(r.spilling() == 0);
  r.kernels.push_back({"prefill", 255, 128, 0, 65536, 48});
  CHECK(r.local_bytes() == 48);
  CHECK(r.line().ends_with("; 1 kernel spills up to 48 bytes a thread"));
  r.kernels.push_back({"fetch", 48, 256, 0, 0, 8});
  CHECK(r.line().ends_with("; 2 kernels spill up to 48 bytes a thread"));
}
