// SPDX-License-Identifier: Apache-2.0
#include "nibble/moe/residency.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "nibble/moe/placement_file.hpp"
#include "nibble/moe/placement_split.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "unit/moe/traces.hpp"

using namespace nibble::moe;
using nibble::test::has;

namespace {

/// Every table says the same.
bool consistent(const host_residency& r) {
  std::set<int> slots;
  for (std::size_t e = 0; e < r.slot_of().size(); ++e) {
    const int s = r.slot_of()[e];
    if (s < -1 || s >= r.slot_count()) return false;
    if (s >= 0 &&
        (!slots.insert(s).second || r.expert_of()[static_cast<std::size_t>(s)] != static_cast<int>(e)))
      return false;
  }
  for (std::size_t s = 0; s < r.expert_of().size(); ++s)
    if (r.expert_of()[s] >= 0 &&
        r.slot_of()[static_cast<std::size_t>(r.expert_of()[s])] != static_cast<int>(s))
      return false;
  return true;
}

/// A decode placement that owns its ids.
struct decode : place_request {
  decode(int at, std::vector<std::int32_t> named) : held(std::move(named)) {
    layer = at, ids = held, new_step = at == 0;
  }
  decode(const decode&) = delete;
  decode& operator=(const decode&) = delete;
  std::vector<std::int32_t> held;
};

}  // namespace

TEST_CASE("worth adds uses as their sum of powers would", "[residency]") {
  for (std::uint32_t d = 0; d < 13000; ++d) {
    const double want = 1024 * std::log2(1 + std::exp2(-static_cast<double>(d) / 1024));
    REQUIRE(std::fabs(worth_added(d) - want) < 12);
    REQUIRE((d == 0 || worth_added(d) <= worth_added(d - 1)));
  }
  REQUIRE(worth_added(0) == 1024);
  // Twice at one time is an octave more than once; the order of two uses does not matter much.
  REQUIRE(worth_used(worth_used(worth_never, 5000), 5000) == 6024);
  // Many uses long ago lose against one use now once enough half-lives have passed.
  std::uint32_t often = worth_never;
  for (int i = 0; i < 64; ++i) often = worth_used(often, 10000);
  REQUIRE(often == Approx(10000 + 6 * 1024).margin(100));
  REQUIRE(often > worth_used(worth_never, 10000 + 5 * 1024));
  REQUIRE(often < worth_used(worth_never, 10000 + 7 * 1024));
  REQUIRE(worth_used(worth_protected, 10000) == worth_protected);
}

TEST_CASE("a placement makes what it is asked for resident and keeps what it uses", "[residency]") {
  std::mt19937 random(1);
  for (int run = 0; run < 60; ++run) {
    const residency_shape shape{1 + static_cast<int>(random() % 4), 4 + static_cast<int>(random() % 20), 2};
    const int slots = 2 + static_cast<int>(random() % static_cast<unsigned>(shape.total() - 1));
    host_residency r(shape, std::min(slots, shape.total()));
    for (int call = 0; call < 200; ++call) {
      const int rows =
          std::min(1 + static_cast<int>(random() % 6), largest_placed_rows(shape, r.slot_count()));
      std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * shape.top_k));
      for (auto& id : ids) id = static_cast<int>(random() % static_cast<unsigned>(shape.experts));
      decode q(call % shape.layers, ids);
      if (random() % 4 == 0) q.mode = place_mode::streaming;
      const auto misses = r.counts().misses;
      const std::vector<std::int32_t> before(r.slot_of().begin(), r.slot_of().end());
      const auto fetch = r.place(q).demand;
      REQUIRE(consistent(r));
      REQUIRE(fetch.size() == r.counts().misses - misses);
      std::set<int> filled;
      for (const auto& e : fetch) {
        REQUIRE(r.slot_of()[static_cast<std::size_t>(e.number)] == e.slot);
        REQUIRE(before[static_cast<std::size_t>(e.number)] == -1);
        REQUIRE(filled.insert(e.slot).second);
      }
      for (const int id : ids) {
        const auto number = static_cast<std::size_t>(q.layer * shape.experts + id);
        REQUIRE(r.slot_of()[number] >= 0);
        if (before[number] >= 0) REQUIRE(r.slot_of()[number] == before[number]);
      }
    }
    REQUIRE(r.counts().good());
  }
}

TEST_CASE("C100: exactly as many slots as a token asks for, and one fewer", "[residency]") {
  const residency_shape shape{2, 16, 8};
  host_residency exact(shape, 8), fewer(shape, 7);
  const std::vector<std::int32_t> a{0, 1, 2, 3, 4, 5, 6, 7}, b{8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = 0; i < 4; ++i) {
    REQUIRE(exact.place(decode(0, i % 2 ? a : b)).demand.size() == 8);
    static_cast<void>(fewer.place(decode(0, i % 2 ? a : b)));
  }
  REQUIRE(exact.counts().good());
  REQUIRE(fewer.counts().unplaced == 4);
  REQUIRE(largest_placed_rows(shape, 7) == 0);
  REQUIRE(largest_placed_rows(shape, 8) == 1);
  REQUIRE(largest_placed_rows(shape, 15) == 1);
  REQUIRE(largest_placed_rows(shape, 16) == 1 << 30);
}

TEST_CASE("ids that are none or out of range are counted, never placed", "[residency]") {
  host_residency r({2, 8, 2}, 8);
  REQUIRE(r.place(decode(1, {-1, 8, 3, INT32_MIN, -1, INT32_MAX})).demand.size() == 1);
  REQUIRE(r.counts().bad_ids == 3);
  REQUIRE_FALSE(r.counts().good());
}

TEST_CASE("prefill leaves the experts that decode uses", "[residency]") {
  const residency_shape shape{8, 32, 4};
  host_residency r(shape, 96);  // room for the hot 64, and a layer
  std::vector<std::int32_t> hot{0, 1, 2, 3, 4, 5, 6, 7};
  for (int step = 0; step < 20; ++step)
    for (int layer = 0; layer < 8; ++layer) static_cast<void>(r.place(decode(layer, hot)));
  for (int layer = 0; layer < 8; ++layer) {
    place_request q;
    q.layer = layer, q.whole_layer = true, q.mode = place_mode::streaming;
    REQUIRE(r.place(q).demand.size() == 24);
  }
  for (int layer = 0; layer < 8; ++layer) REQUIRE(r.place(decode(layer, hot)).demand.empty());
  REQUIRE(r.counts().good());
}

TEST_CASE("protected experts stay", "[residency]") {
  const residency_shape shape{4, 16, 2};
  host_residency r(shape, 12);
  static_cast<void>(r.place(decode(0, {3, 4})));
  r.protect(3);
  r.protect(4);
  nibble::test::trace trace(4, 16, 2, 0, 1);
  for (int i = 0; i < 400; ++i) static_cast<void>(r.place(decode(1 + i % 3, trace.next(i % 3))));
  REQUIRE(r.slot_of()[3] >= 0);
  REQUIRE(r.slot_of()[4] >= 0);
  REQUIRE(r.counts().good());
}

TEST_CASE("C102: with every slot protected a miss is counted, and no slot changes hands", "[residency]") {
  const residency_shape shape{2, 8, 2};
  host_residency r(shape, 4);
  static_cast<void>(r.place(decode(0, {0, 1})));
  static_cast<void>(r.place(decode(1, {2, 3})));
  for (const int number : {0, 1, 8 + 2, 8 + 3}) r.protect(number);
  const std::vector<std::int32_t> before(r.slot_of().begin(), r.slot_of().end());
  REQUIRE(r.place(decode(0, {4, 5})).demand.empty());
  REQUIRE(std::equal(before.begin(), before.end(), r.slot_of().begin()));
  REQUIRE(r.counts().unplaced == 2);
  REQUIRE_FALSE(r.counts().good());  // the step fails: nothing computes with another expert's bytes
}

TEST_CASE("guesses are few, likeliest first, and spare the layer that computes", "[residency]") {
  const residency_shape shape{3, 16, 4};
  host_residency r(shape, 6);
  static_cast<void>(r.place(decode(2, {0, 1, 2, 3})));
  const std::vector<std::int32_t> likely{9, 8, 7, 6, 9, 5, 4, 3};
  decode first(0, {0, 1, 2, 3});
  first.ahead = true, first.ahead_ids = likely, first.ahead_row = 4, first.ahead_limit = 2;
  const auto placed = r.place(first);
  REQUIRE(placed.demand.size() == 4);
  REQUIRE(placed.ahead.size() == 2);
  REQUIRE(placed.ahead[0].number == 16 + 9);
  REQUIRE(placed.ahead[1].number == 16 + 8);
  for (const int id : {0, 1, 2, 3}) REQUIRE(r.slot_of()[static_cast<std::size_t>(id)] >= 0);
  // The first came true; the second, of least worth, has come too and is the first to go.
  decode next(1, {9, 5, 4, 3});
  next.guesses = placed.ahead;
  const auto second = r.place(next);
  REQUIRE(second.demand.size() == 3);
  REQUIRE(r.slot_of()[16 + 9] == placed.ahead[0].slot);
  REQUIRE(r.slot_of()[16 + 8] == -1);
  REQUIRE(r.counts().ahead == 2);
  REQUIRE(r.counts().ahead_used == 1);
  REQUIRE(consistent(r));
  // Guesses give way to what is asked for.
  host_residency tight(shape, 5);
  decode q(0, {0, 1, 2, 3});
  q.ahead = true, q.ahead_whole_layer = true, q.ahead_limit = 16;
  const auto few = tight.place(q);
  REQUIRE(few.demand.size() == 4);
  REQUIRE(few.ahead.size() == 1);
  REQUIRE(tight.counts().good());
}

TEST_CASE("guesses that are still coming keep their slots, right or wrong, and stay afterwards",
          "[residency]") {
  const residency_shape shape{3, 16, 4};
  constexpr int limit = 1;
  host_residency r(shape, slots_to_look_ahead(shape, 1, limit));
  const std::vector<std::int32_t> likely{9, 8, 7, 6};
  decode first(0, {0, 1, 2, 3});
  first.ahead = true, first.ahead_ids = likely, first.ahead_row = 4, first.ahead_limit = limit;
  const auto placed = r.place(first);
  REQUIRE(placed.ahead.size() == 1);
  REQUIRE(placed.ahead[0].number == 16 + 9);
  // The guess was wrong; it has the least key of all that is resident, and still nothing takes its slot.
  decode second(1, {4, 5, 6, 7});
  second.guesses = second.recent = placed.ahead;
  const std::vector<std::int32_t> next{1, 2, 3, 4};
  second.ahead = true, second.ahead_ids = next, second.ahead_row = 4, second.ahead_limit = limit;
  const auto then = r.place(second);
  REQUIRE(r.counts().ahead_used == 0);
  REQUIRE(then.demand.size() == 4);
  REQUIRE(then.ahead.size() == 1);
  for (const auto& list : {then.demand, then.ahead})
    for (const auto& e : list) REQUIRE(e.slot != placed.ahead[0].slot);
  REQUIRE(r.slot_of()[16 + 9] == placed.ahead[0].slot);
  // It has come by now, so the next placement may take it.
  decode third(2, {1, 8, 9, 10});
  third.guesses = third.recent = then.ahead;
  const auto last = r.place(third);
  REQUIRE(last.demand.size() == 3);
  REQUIRE(r.slot_of()[16 + 9] == -1);
  REQUIRE(r.counts().ahead == 2);
  REQUIRE(r.counts().ahead_used == 1);
  REQUIRE(r.counts().good());
  REQUIRE(consistent(r));
}

TEST_CASE("with room to look ahead, guesses never take what is demanded", "[residency]") {
  const residency_shape shape{6, 24, 4};
  for (const int rows : {1, 2, 5})
    for (const int limit : {1, 4}) {
      const int slots = slots_to_look_ahead(shape, rows, limit);
      REQUIRE(rows <= largest_placed_rows(shape, slots));
      host_residency r(shape, slots);
      nibble::test::trace trace(shape.layers, shape.experts, shape.top_k, 0.0, 3),
          other(shape.layers, shape.experts, shape.top_k, 0.0, 4);
      const auto draw = [&](auto& from, int layer) {
        std::vector<std::int32_t> ids;
        for (int row = 0; row < rows; ++row)
          for (const std::int32_t id : from.next(layer)) ids.push_back(id);
        return ids;
      };
      for (int step = 0; step < 200; ++step) {
        std::vector<fetch_entry> coming;
        std::vector<std::int32_t> ids = draw(trace, 0);
        for (int layer = 0; layer < shape.layers; ++layer) {
          const bool guesses = layer + 1 < shape.layers;
          const std::vector<std::int32_t> next = guesses ? draw(trace, layer + 1) : ids;
          const std::vector<std::int32_t> likely = guesses && step % 2 == 0 ? next : draw(other, layer);
          decode q(layer, ids);
          q.new_step = layer == 0;
          q.guesses = q.recent = coming;
          q.ahead = guesses, q.ahead_ids = likely, q.ahead_row = shape.top_k, q.ahead_limit = limit;
          const auto placed = r.place(q);
          REQUIRE(r.counts().good());
          for (const std::int32_t id : ids)
            REQUIRE(r.slot_of()[static_cast<std::size_t>(layer * shape.experts + id)] >= 0);
          // What is coming is written by nobody else, and is there when it is asked for.
          for (const auto& c : coming) {
            for (const auto& e : placed.demand) REQUIRE(e.slot != c.slot);
            for (const auto& e : placed.ahead) REQUIRE(e.slot != c.slot);
          }
          coming = placed.ahead, ids = next;
        }
      }
      REQUIRE(r.counts().ahead_used > 0);
      REQUIRE(r.counts().ahead > r.counts().ahead_used);
      REQUIRE(consistent(r));
    }
}

TEST_CASE("worth survives the clock's limit", "[residency]") {
  const residency_shape shape{1, 16, 2};
  host_residency r(shape, 4), same(shape, 4);
  r.set_clock(clock_limit - 100);
  nibble::test::trace trace(1, 16, 2, 1.0, 5);
  for (int i = 0; i < 300; ++i) {
    const auto ids = trace.next(0);
    REQUIRE(r.place(decode(0, ids)).demand == same.place(decode(0, ids)).demand);
  }
  REQUIRE(r.clock() < clock_limit);
}

TEST_CASE("a pool shrinks and grows, failures are forgotten", "[residency]") {
  const residency_shape shape{4, 16, 2};
  host_residency r(shape, 40, 64);
  nibble::test::trace trace(4, 16, 2, 0.5, 2);
  for (int i = 0; i < 200; ++i) static_cast<void>(r.place(decode(i % 4, trace.next(i % 4))));
  r.resize(10);
  REQUIRE(consistent(r));
  REQUIRE(std::count_if(r.slot_of().begin(), r.slot_of().end(), [](int s) { return s >= 0; }) <= 10);
  for (int i = 0; i < 200; ++i) static_cast<void>(r.place(decode(i % 4, trace.next(i % 4))));
  REQUIRE(std::all_of(r.slot_of().begin(), r.slot_of().end(), [](int s) { return s < 10; }));
  const auto again =
      host_residency::of_tables(shape, r.slot_of(), r.expert_of(), r.slot_key(), r.worth(), r.clock());
  REQUIRE(again.slot_count() == 10);
  REQUIRE(again.most_slots() == 64);
  REQUIRE_THROWS_AS(r.resize(65), nibble::error);
  r.resize(64);
  for (int i = 0; i < 400; ++i) static_cast<void>(r.place(decode(i % 4, trace.next(i % 4))));
  REQUIRE(std::count_if(r.slot_of().begin(), r.slot_of().end(), [](int s) { return s >= 10; }) > 0);
  r.forget_all();
  REQUIRE(std::all_of(r.slot_of().begin(), r.slot_of().end(), [](int s) { return s == -1; }));
  const auto fetch = r.place(decode(0, {5, 6})).demand;
  r.forget(fetch);
  REQUIRE(consistent(r));
  REQUIRE(r.place(decode(0, {5, 6})).demand.size() >= fetch.size());
  // What contradicts itself is not resident.
  std::vector<std::int32_t> slot_of(64, -1), expert_of(4, -1);
  std::vector<std::uint32_t> key(4, 9), worth(64, 9);
  slot_of[1] = 0, expert_of[0] = 1, expert_of[1] = 1, expert_of[2] = 77, slot_of[3] = 3;
  const auto made = host_residency::of_tables(shape, slot_of, expert_of, key, worth, 100);
  REQUIRE(consistent(made));
  REQUIRE(made.slot_of()[1] == 0);
  REQUIRE(made.slot_of()[3] == -1);
  REQUIRE_THROWS_AS(host_residency(shape, 65), nibble::error);
  REQUIRE_THROWS_AS(host_residency({1, 2000, 8}, 8), nibble::error);
}

TEST_CASE("against LRU: no worse on uniform traces, better on skewed ones", "[residency]") {
  const residency_shape shape{10, 64, 4};
  for (const double exponent : {0.0, 0.8, 1.2})
    for (const int slots : {100, 320}) {
      host_residency r(shape, slots);
      nibble::test::lru lru(static_cast<std::size_t>(slots));
      nibble::test::trace trace(10, 64, 4, exponent, 3);
      std::uint64_t used = 0, lru_hits = 0, hits = 0;
      for (int step = 0; step < 1200; ++step) {
        if (step == 400) used = lru_hits = 0, hits = r.counts().hits;
        for (int layer = 0; layer < 10; ++layer) {
          const auto ids = trace.next(layer);
          for (const int id : ids) lru_hits += lru.use(layer * 64 + id) ? 1 : 0, ++used;
          static_cast<void>(r.place(decode(layer, ids)));
        }
      }
      const double ours = static_cast<double>(r.counts().hits - hits) / static_cast<double>(used),
                   theirs = static_cast<double>(lru_hits) / static_cast<double>(used);
      INFO("exponent " << exponent << ", " << slots << " slots: " << ours << " against " << theirs);
      REQUIRE(ours > theirs - 0.01);
      if (exponent > 0) REQUIRE(ours > theirs + 0.02);
    }
}

TEST_CASE("a warm start holds the worthiest", "[residency]") {
  const residency_shape shape{4, 16, 2};
  host_residency r(shape, 20);
  nibble::test::trace trace(4, 16, 2, 1.2, 9);
  for (int i = 0; i < 800; ++i) static_cast<void>(r.place(decode(i % 4, trace.next(i % 4))));
  const nibble::test::temporary_folder folder;
  const auto file = folder.path() / "worth";
  nibble::io::fingerprint of, other;
  of.add("a checkpoint");
  other.add("another");
  const auto worth = worth_at_start(r.worth(), r.clock());
  save_worth(file, of, worth);
  std::string why;
  REQUIRE(load_worth(file, of, 64, why) == worth);
  REQUIRE(why.empty());

  host_residency next(shape, 20);
  const auto entries = next.warm(worth);
  REQUIRE(entries.size() == 20);
  REQUIRE(consistent(next));
  std::uint32_t least = UINT32_MAX, most_left = 0;
  for (std::size_t e = 0; e < 64; ++e)
    if (next.slot_of()[e] >= 0)
      least = std::min(least, worth[e]);
    else
      most_left = std::max(most_left, worth[e]);
  REQUIRE(least >= most_left);
  // Loaded experts rank below the first ones used.
  const auto fetch = next.place(decode(0, {14, 15})).demand;
  for (const auto& e : fetch) REQUIRE(next.slot_key()[static_cast<std::size_t>(e.slot)] >= clock_start);

  REQUIRE(load_worth(file, other, 64, why).empty());
  REQUIRE(has(why, "another checkpoint"));
  REQUIRE(load_worth(file, of, 65, why).empty());
  REQUIRE(load_worth(folder.path() / "none", of, 64, why).empty());
  std::string bytes = nibble::io::file::read_text(file, 1 << 20);
  for (const std::size_t at :
       {std::size_t{0}, std::size_t{20}, std::size_t{45}, std::size_t{60}, bytes.size() - 1}) {
    std::string damaged = bytes;
    damaged[at] ^= 1;
    REQUIRE(load_worth(folder.write("damaged", damaged), of, 64, why).empty());
    REQUIRE_FALSE(why.empty());
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{10}, std::size_t{48}, bytes.size() - 4})
    REQUIRE(load_worth(folder.write("short", bytes.substr(0, size)), of, 64, why).empty());
}

TEST_CASE("without worth the slots are filled evenly over the layers", "[residency]") {
  const residency_shape shape{4, 16, 2};
  host_residency r(shape, 20);
  static_cast<void>(r.warm(std::vector<std::uint32_t>(64, worth_never)));
  for (int layer = 0; layer < 4; ++layer)
    REQUIRE(std::count_if(r.slot_of().begin() + 16 * layer, r.slot_of().begin() + 16 * (layer + 1),
                          [](int s) { return s >= 0; }) == 5);
}

TEST_CASE("misses are split by measured latencies, never slower than one way alone", "[residency]") {
  const auto line = [](float start, float each, int n) {
    std::vector<float> v;
    for (int k = 0; k <= n; ++k) v.push_back(k == 0 ? 0 : start + each * static_cast<float>(k));
    return v;
  };
  // No CPU: everything is fetched.
  const auto fetch = line(3, 35, 8);
  auto none = split_misses({fetch, fetch, {}, {}});
  for (int k = 0; k <= most_split_misses; ++k) REQUIRE(none[static_cast<std::size_t>(k)] == k);
  // Equal speeds, but the CPU's hand-over costs 20: half and half once it pays.
  const auto host = line(20, 35, 8);
  const auto even = split_misses({fetch, fetch, host, host});
  REQUIRE(even[1] == 1);
  REQUIRE(even[4] == 2);
  REQUIRE(even[8] == 4);
  // A CPU that is slow under contention is left alone, however fast it is by itself.
  const auto slow = split_misses({fetch, fetch, line(200, 300, 8), line(400, 900, 8)});
  for (int k = 0; k <= 8; ++k) REQUIRE(slow[static_cast<std::size_t>(k)] == k);
  // A slow link: the CPU does it all.
  const auto link = line(10, 900, 8);
  REQUIRE(split_misses({link, link, line(20, 30, 8), line(20, 30, 8)})[4] == 0);
  std::mt19937 random(8);
  for (int run = 0; run < 200; ++run) {
    const auto any = [&] {
      return line(static_cast<float>(random() % 60), 1 + static_cast<float>(random() % 100), 12);
    };
    const auto a = any(), b = any(), c = any(), d = any();
    const auto split = split_misses({a, b, c, d});
    for (std::size_t k = 1; k <= 12; ++k) {
      const auto f = static_cast<std::size_t>(split[k]);
      const float us = f == k ? a[k] : f == 0 ? c[k] : std::max(b[f], d[k - f]);
      REQUIRE(us <= a[k]);
      REQUIRE((us <= c[k] || (f == k && 0.9f * a[k] <= c[k])));
    }
  }
}

TEST_CASE("the CPU takes a share only where a step gains at uniform and at skewed routing", "[residency]") {
  const auto line = [](float start, float each) {
    std::vector<float> v;
    for (int k = 0; k <= 6; ++k) v.push_back(k == 0 ? 0 : start + each * static_cast<float>(k));
    return v;
  };
  const auto pays = [&](const std::vector<float>& fetch, const std::vector<float>& host, double miss_rate) {
    const miss_latencies measured{fetch, fetch, host, host};
    return split_pays(measured, split_misses(measured), 8, miss_rate);
  };
  // A link that takes three times what the CPU does: always.
  REQUIRE(pays(line(5, 120), line(20, 40), 0.55));
  REQUIRE(pays(line(5, 120), line(20, 40), 0.25));
  // A fast link, and a hand-over that only many misses make up for: those are rare where routing is skewed.
  REQUIRE(split_misses({line(9, 35), line(9, 35), line(36, 37), line(36, 37)})[5] < 5);
  REQUIRE_FALSE(pays(line(9, 35), line(36, 37), 0.55));
  REQUIRE(pays(line(9, 35), line(36, 37), 1.0));
  // Nothing is missing, nothing is gained.
  REQUIRE_FALSE(pays(line(5, 120), line(20, 40), 0.0));
  // By hand: of one expert a token, missing with probability 1/2 or 1/12, a miss takes 60 less; 60/12 > 4.
  const std::vector<float> fetch{0, 100}, host{0, 40}, close{0, 60};
  const miss_latencies gains{fetch, fetch, host, host}, little{fetch, fetch, close, close};
  REQUIRE(split_pays(gains, split_misses(gains), 1, 0.5));
  REQUIRE_FALSE(split_pays(gains, split_misses(gains), 1, 0.25));   // 60/24 < 4
  REQUIRE_FALSE(split_pays(little, split_misses(little), 1, 0.5));  // 40/12 < 4
}

TEST_CASE("misses left to the CPU are those of least worth and stay out", "[residency]") {
  const residency_shape shape{1, 16, 4};
  host_residency r(shape, 8);
  for (int i = 0; i < 6; ++i) static_cast<void>(r.place(decode(0, {i < 4 ? 10 : 9})));
  static_cast<void>(r.place(decode(0, {0, 1, 2, 3, 4, 5, 6, 7})));  // 9 and 10 are out now
  decode q(0, {10, 11, 9, 12});
  const std::vector<std::int32_t> fetch_of{0, 1, 1, 2, 2};
  std::vector<std::int32_t> table(most_split_misses + 1, 0);
  std::copy(fetch_of.begin(), fetch_of.end(), table.begin());
  q.fetch_of = table;
  const auto placed = r.place(q);
  REQUIRE(placed.demand.size() == 2);
  REQUIRE(placed.demand[0].number == 10);
  REQUIRE(placed.demand[1].number == 9);
  REQUIRE(placed.on_host == std::vector<std::int32_t>{11, 12});
  REQUIRE(r.slot_of()[11] == -1);
  REQUIRE(r.counts().on_host == 2);
  REQUIRE(r.counts().good());
  REQUIRE(r.worth()[11] > worth_never);
}
