// SPDX-License-Identifier: Apache-2.0
// Growing and shrinking at a constant address, on a driver that only counts.
#include "nibble/core/arena.hpp"

#include <map>
#include <memory>

#include "support/catch.hpp"

using namespace nibble;

namespace {

constexpr std::uint64_t mib = 1 << 20;

struct counts {
  std::map<std::byte*, std::uint64_t> blocks;
  std::uint64_t mapped = 0, limit = UINT64_MAX, reserved = 0;
  int synchronised = 0;
  status sync_result;
};

class fake_driver {
 public:
  fake_driver() = default;
  explicit fake_driver(std::shared_ptr<counts> c) : c_(std::move(c)) {}
  std::uint64_t granule_bytes() const { return c_ == nullptr ? 0 : 2 * mib; }
  status reserve(std::uint64_t bytes, std::byte*& base) {
    c_->reserved += bytes;
    base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
    return status::success();
  }
  void release(std::byte*, std::uint64_t bytes) { c_->reserved -= bytes; }
  status map(std::byte* at, std::uint64_t bytes) {
    if (c_->mapped + bytes > c_->limit) return status::cuda(2, "fake", "out of memory");
    c_->mapped += bytes;
    c_->blocks[at] = bytes;
    return status::success();
  }
  status unmap(std::byte* at, std::uint64_t bytes) {
    if (c_->blocks[at] != bytes) return status::invalid("fake", "no such block");
    c_->blocks.erase(at);
    c_->mapped -= bytes;
    return status::success();
  }
  status synchronize() { return ++c_->synchronised, c_->sync_result; }

 private:
  std::shared_ptr<counts> c_;
};

using arena = elastic_arena<fake_driver>;

arena open(const std::shared_ptr<counts>& c, std::uint64_t reserved) {
  arena a;
  REQUIRE(arena::open(fake_driver(c), reserved, a).ok());
  return a;
}

}  // namespace

TEST_CASE("arena: grows exactly to a granule, in blocks") {
  const auto c = std::make_shared<counts>();
  {
    arena a = open(c, 1000 * mib);
    CHECK(a.mapped_bytes() == 0);
    CHECK(c->mapped == 0);
    std::byte* const base = a.base();
    REQUIRE(a.resize(35 * mib).ok());
    CHECK(a.mapped_bytes() == 36 * mib);
    CHECK(c->blocks.size() == 3);  // 16, 16, 4
    REQUIRE(a.resize(36 * mib + 1).ok());
    CHECK(a.mapped_bytes() == 38 * mib);
    CHECK(c->blocks.size() == 4);
    CHECK(a.base() == base);
    CHECK(c->synchronised == 0);  // growing never waits
    arena moved = std::move(a);
    CHECK(moved.base() == base);
    CHECK(moved.mapped_bytes() == 38 * mib);
    CHECK(a.base() == nullptr);
    CHECK(!a.resize(1).ok());
  }
  CHECK(c->mapped == 0);
  CHECK(c->reserved == 0);
}

TEST_CASE("arena: shrinks by whole blocks from the end, never below what is asked, after waiting") {
  const auto c = std::make_shared<counts>();
  arena a = open(c, 1000 * mib);
  REQUIRE(a.resize(70 * mib).ok());  // 16 × 4 and 6
  REQUIRE(a.resize(66 * mib).ok());
  CHECK(a.mapped_bytes() == 70 * mib);  // the block of 6 holds what is asked for
  CHECK(c->synchronised == 0);
  REQUIRE(a.resize(40 * mib).ok());
  CHECK(a.mapped_bytes() == 48 * mib);
  CHECK(c->synchronised == 1);
  REQUIRE(a.resize(50 * mib).ok());
  CHECK(a.mapped_bytes() == 50 * mib);
  REQUIRE(a.resize(0).ok());
  CHECK(a.mapped_bytes() == 0);
  CHECK(c->mapped == 0);
}

TEST_CASE("arena: growth without memory leaves everything as it was") {
  const auto c = std::make_shared<counts>();
  c->limit = 60 * mib;
  arena a = open(c, 1000 * mib);
  REQUIRE(a.resize(20 * mib).ok());
  const status s = a.resize(100 * mib);
  CHECK(is_out_of_memory(s));
  CHECK(a.mapped_bytes() == 20 * mib);
  CHECK(c->mapped == 20 * mib);
  CHECK_THROWS_AS(require(s), device_out_of_memory);
  REQUIRE(a.resize(60 * mib).ok());
}

TEST_CASE("arena: a device that failed is told, and nothing is given back under running work") {
  const auto c = std::make_shared<counts>();
  arena a = open(c, 1000 * mib);
  REQUIRE(a.resize(64 * mib).ok());
  c->sync_result = status::cuda(700, "fake", "illegal address");
  CHECK(is_sticky(a.resize(0)));
  CHECK(a.mapped_bytes() == 64 * mib);
}

TEST_CASE("arena: past its address space, empty or absurd") {
  const auto c = std::make_shared<counts>();
  arena a = open(c, 10 * mib);
  CHECK(a.reserved_bytes() == 10 * mib);
  CHECK(a.resize(10 * mib).ok());
  CHECK(a.resize(10 * mib + 1).code == status_code::invalid_argument);
  CHECK(a.mapped_bytes() == 10 * mib);
  arena none;
  CHECK(!none.resize(1).ok());
  CHECK(arena::open(fake_driver(c), 0, none).code == status_code::invalid_argument);
  CHECK(arena::open(fake_driver(c), UINT64_MAX, none).code == status_code::invalid_argument);
  CHECK(arena::open(fake_driver(), mib, none).code == status_code::unsupported);
}

TEST_CASE("device errors: which exception is thrown") {
  CHECK_NOTHROW(require(status::success()));
  CHECK_THROWS_AS(require(status::cuda(2, "w", "t")), device_out_of_memory);
  CHECK_THROWS_AS(require(status::cuda(2, "w", "t")), out_of_memory);
  for (const int sticky : {46, 214, 700, 702, 709, 710, 714, 716, 719, 999})
    CHECK_THROWS_AS(require(status::cuda(sticky, "w", "t")), context_lost_error);
  for (const int passing : {1, 98, 209, 701, 800, 900, 901, 910}) {
    CHECK_THROWS_AS(require(status::cuda(passing, "w", "t")), device_error);
    CHECK(!is_sticky(status::cuda(passing, "w", "t")));
  }
  CHECK_THROWS_AS(require(status::invalid("w", "t")), device_error);
  CHECK(is_capture_error(status::cuda(901, "w", "t")));
  CHECK(describe(status::cuda(700, "where", "what")) == "where: what (CUDA error 700)");
  CHECK(describe(status::invalid("where", "what")) == "where: what");
}
