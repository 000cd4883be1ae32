// SPDX-License-Identifier: Apache-2.0
#include <nibble/host/linear.hpp>
#include <nibble/host/thread_pool.hpp>
#include <nibble/nvfp4/quantize.hpp>
#include <nibble/op/load.hpp>
#include <nibble/op/type_visitors.hpp>

namespace {
struct op {
  nibble::linear<nibble::matrix(4, 16, nibble::weight_format::nvfp4), "w"> weight;
  using op_members = nibble::members<nibble::part<&op::weight>>;
};
}  // namespace

std::size_t geometries_of_second();
std::size_t geometries_of_second() { return nibble::distinct_geometries<op>().size(); }
