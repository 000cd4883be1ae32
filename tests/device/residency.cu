// SPDX-License-Identifier: Apache-2.0
// Placement on the device against its copy on the host: the same tables, lists and counts to the bit after
// arbitrary histories, from the least number of slots up.
#include "device_test.cuh"
#include "nibble/moe/residency_device.cuh"
#include "nibble/moe/residency_launch.cuh"

using namespace nibble;
using device_test::buffer;
using moe::place_mode;
using moe::residency_shape;

namespace {

std::vector<moe::expert_scales> scales_for(int count) {
  std::vector<moe::expert_scales> out;
  for (int i = 0; i < count; ++i)
    out.push_back({static_cast<float>(i), static_cast<float>(i) + 0.25f, static_cast<float>(i) + 0.5f});
  return out;
}

template <class T>
std::vector<T> read(const T* from, std::size_t count) {
  std::vector<T> out(count);
  NIBBLE_CUDA_CHECK(cudaStreamSynchronize(device_test::stream()));
  NIBBLE_CUDA_CHECK(cudaMemcpy(out.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

bool same_tables(const moe::device_residency& device, const moe::host_residency& host,
                 const std::vector<moe::expert_scales>& scales) {
  const auto v = device.view();
  const auto total = static_cast<std::size_t>(host.shape().total()),
             slots = static_cast<std::size_t>(host.slot_count());
  const auto equal = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  bool good = equal(read(v.slot_of, total), host.slot_of()) &&
              equal(read(v.expert_of, slots), host.expert_of()) &&
              equal(read(v.slot_key, slots), host.slot_key()) && equal(read(v.worth, total), host.worth()) &&
              read(v.clock, 1)[0] == host.clock() && device.counts(device_test::stream()) == host.counts();
  const auto slot_scales = read(v.slot_scales, 3 * slots);
  for (std::size_t s = 0; s < slots; ++s)
    if (const int e = host.expert_of()[s]; e >= 0)
      for (int i = 0; i < 3; ++i) good = good && slot_scales[3 * s + i] == scales[e][i];
  return good;
}

/// What placements publish for the copy engine, which here only pretends to copy.
class records {
 public:
  explicit records(int experts)
      : words_(moe::engine_record_words(experts)), memory_(8 * moe::engine_records * words_) {
    std::memset(memory_.data(), 0, 8 * moe::engine_records * words_);
  }
  [[nodiscard]] moe::engine_link link() const {
    return {memory_.as<std::uint64_t>(), state_.data(), static_cast<int>(words_), 1024};
  }
  /// The copies of all records so far may be done, but for the last `left`.
  void done(std::uint64_t left) {
    moe::engine_state now = state_.read()[0];
    now.done = left >= 2 * published_ + 1 ? 0 : 2 * published_ + 1 - left;
    done_ = now.done;
    NIBBLE_CUDA_CHECK(cudaMemcpy(state_.data(), &now, sizeof now, cudaMemcpyHostToDevice));
  }
  /// \param used whether a guess for the layer came true  \param spared whether the last guesses' slots were
  /// left alone
  [[nodiscard]] bool good(const std::vector<moe::fetch_entry>& demand,
                          const std::vector<moe::fetch_entry>& ahead, bool used, bool spared) {
    const auto after = [](std::uint64_t record) { return record == 0 ? 0 : 2 * record + 1; };
    const bool head = done_ >= after(spared ? older_ : guessed_);
    const std::uint64_t needed = demand.empty() ? after(used ? guessed_ : older_) : 2 * (published_ + 1);
    older_ = guessed_;
    const moe::engine_state s = state_.read()[0];
    bool same = s.needed == needed && s.head == (head && !demand.empty() ? 1u : 0u);
    if (!demand.empty() || !ahead.empty()) {
      const std::uint64_t number = ++published_;
      if (!ahead.empty()) guessed_ = number;
      const std::uint64_t* word = memory_.as<std::uint64_t>() + number % moe::engine_records * words_;
      const auto is = [&](std::uint64_t high, std::uint64_t low) {
        same = same && *word++ == (number << 32 | high << 16 | low);
      };
      is(demand.size(), ahead.size() | (head ? moe::engine_head_flag : 0u));
      for (const auto* entries : {&demand, &ahead})
        for (const auto& e : *entries)
          is(static_cast<std::uint64_t>(e.number), static_cast<std::uint64_t>(e.slot));
    }
    return same && s.published == published_ && s.guessed == guessed_ && s.guessed_older == older_;
  }

 private:
  std::size_t words_;
  pinned_memory memory_;
  buffer<moe::engine_state> state_{std::vector<moe::engine_state>(1)};
  std::uint64_t published_ = 0, guessed_ = 0, older_ = 0, done_ = 0;
};

template <residency_shape S, moe::residency_policy P>
void replay(int slots, int calls, int compare_every, std::uint64_t seed) {
  if (device_test::quick()) calls = std::min(calls, 24);
  std::mt19937_64 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); };
  const auto scales = scales_for(S.total());
  moe::device_residency device(S, S.total(), scales);
  moe::host_residency host(S, slots);
  // A third of the runs begins with a warm start, one just below the clock's limit.
  std::vector<std::uint32_t> worth(static_cast<std::size_t>(S.total()), moe::worth_never);
  if (seed % 3 == 0) {
    for (auto& w : worth) w = below(2) ? moe::clock_start + static_cast<std::uint32_t>(below(5000)) : 0;
    host.warm(worth);
  }
  if (seed % 3 == 1) host.set_clock(moe::clock_limit - 40);
  if (slots > 2 * S.experts) host.protect(below(S.total()));
  device.set(host, device_test::stream());
  NIBBLE_CHECK(same_tables(device, host, scales));

  const int most_rows = 64;
  const buffer<std::int32_t> d_ids(static_cast<std::size_t>(most_rows * S.top_k)), d_next(d_ids.size());
  const auto send = [](const buffer<std::int32_t>& to, const std::vector<std::int32_t>& from) {
    NIBBLE_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), 4 * from.size(), cudaMemcpyHostToDevice,
                                      device_test::stream()));
  };
  std::vector<std::int32_t> fetch_of(moe::most_split_misses + 1);
  for (int i = 0; i <= moe::most_split_misses; ++i) fetch_of[static_cast<std::size_t>(i)] = (i + 1) / 2;
  const buffer<std::int32_t> d_fetch_of(fetch_of), d_host_list(4 + moe::most_split_misses);
  std::vector<moe::fetch_entry> guesses;
  records published(S.experts);
  const std::vector<int> sizes = {1, 1, 1, 2, 4, 8, 16, most_rows};
  bool guessed = false;
  for (int call = 0, layer = 0; call < calls; ++call, layer = (layer + 1) % S.layers) {
    if (layer == 0) guessed = false;
    moe::place_request q;
    q.layer = layer;
    q.mode = below(10) < 7 ? place_mode::decode : place_mode::streaming;
    q.new_step = q.mode == place_mode::decode && layer == 0;
    q.ticks = below(4) == 0 ? 40 : moe::default_ticks;
    const int rows = sizes[static_cast<std::size_t>(below(static_cast<int>(sizes.size())))];
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * S.top_k)), next(ids.size());
    const int hot = 1 + below(S.experts);  // ids come from a few experts or from all
    for (auto* row : {&ids, &next}) {
      for (auto& id : *row) id = below(below(3) ? hot : S.experts);
      if (below(4) == 0) (*row)[static_cast<std::size_t>(below(static_cast<int>(row->size())))] = -1;
      if (below(16) == 0) row->front() = S.experts;
      if (below(16) == 0) row->back() = INT32_MIN;
    }
    q.ids = ids;
    q.whole_layer = q.mode == place_mode::streaming && below(3) == 0;
    q.ahead = layer + 1 < S.layers && below(2) != 0;
    q.ahead_whole_layer = q.ahead && below(4) == 0;
    q.ahead_ids = next, q.ahead_row = S.top_k;
    q.ahead_limit = (q.ahead_whole_layer && below(2)) || below(4) == 0 ? S.experts : below(6);
    const bool coming = guessed && below(2) != 0;
    if (guessed) q.guesses = guesses;
    if (coming) q.recent = guesses;

    moe::place_params p;
    p.state = device.view();
    p.layer = q.layer, p.mode = q.mode, p.new_step = q.new_step, p.ticks = q.ticks;
    send(d_ids, ids);
    send(d_next, next);
    p.ids = q.whole_layer ? nullptr : d_ids.data();
    p.assignments = static_cast<int>(ids.size());
    p.list = p.state.demand_list(S, layer);
    if (q.ahead) p.ahead_list = p.state.ahead_list(S, layer + 1);
    p.ahead_ids = q.ahead_whole_layer ? nullptr : d_next.data();
    p.ahead_assignments = static_cast<int>(next.size()), p.ahead_row = S.top_k, p.ahead_limit = q.ahead_limit;
    if (guessed) p.guesses = p.state.ahead_list(S, layer);
    if (coming) p.recent = p.guesses;
    p.tables_settled = below(2) != 0;  // copies lie between the launches, so both are true
    if (below(4) == 0)
      q.fetch_of = fetch_of, p.fetch_of = d_fetch_of.data(), p.host_list = d_host_list.data();
    const bool publishes = seed % 2 == 0;
    if (publishes) published.done(static_cast<std::uint64_t>(below(6))), p.engine = published.link();
    const std::uint64_t used_before = host.counts().ahead_used;
    const auto want = host.place(q);
    const bool used = host.counts().ahead_used > used_before;
    NIBBLE_GOOD(
        (moe::launch_place_with<S, P>(p, launch_options{device_test::stream(), device_test::chained})));
    const auto same_list = [&](const std::int32_t* from, const std::vector<moe::fetch_entry>& entries) {
      const auto list = read(from, 4 + 2 * static_cast<std::size_t>(S.experts));
      bool same = list[0] == static_cast<int>(entries.size());
      for (std::size_t i = 0; same && i < entries.size(); ++i)
        same = list[4 + 2 * i] == entries[i].number && list[5 + 2 * i] == entries[i].slot;
      return same;
    };
    bool good = same_list(p.list, want.demand) && (!q.ahead || same_list(p.ahead_list, want.ahead));
    if (p.fetch_of != nullptr) {
      const auto list = read(p.host_list, d_host_list.size());
      good = good && list[0] == static_cast<int>(want.on_host.size()) &&
             std::equal(want.on_host.begin(), want.on_host.end(), list.begin() + 4);
    }
    if (publishes) good = good && published.good(want.demand, want.ahead, used || !p.guesses, coming);
    NIBBLE_CHECK(good);
    guessed = q.ahead;
    guesses = want.ahead;
    if (call % compare_every == 0) {
      const bool same = same_tables(device, host, scales);
      NIBBLE_CHECK(same);
      if (!same || !good) {
        std::printf("  %d slots, call %d, mode %d, %d rows, whole %d, ahead %d\n", slots, call,
                    static_cast<int>(q.mode), rows, q.whole_layer ? 1 : 0, q.ahead ? 1 : 0);
        return;
      }
    }
  }
  NIBBLE_CHECK(same_tables(device, host, scales));
  // Through the host and back: a pool that shrinks, then grows.
  moe::host_residency moved = device.get(device_test::stream());
  moved.resize(std::max(1, slots / 2));
  moved.resize(slots);
  device.set(moved, device_test::stream());
  NIBBLE_CHECK(std::equal(moved.slot_of().begin(), moved.slot_of().end(),
                          device.get(device_test::stream()).slot_of().begin()));
}

constexpr residency_shape small{3, 16, 2}, tiny{8, 16, 4}, qwen{40, 256, 8}, wide{2, 1000, 8},
    most{32, 1024, 8};
constexpr moe::residency_policy usual{}, fewer{512};
static_assert(moe::select_residency(qwen) == fewer && moe::select_residency(most) == usual);

const bool registered[] = {
    device_test::add("small", "16 experts of 3 layers",
                     [] {
                       std::uint64_t seed = 1;
                       for (const int slots : {1, 2, 3, 5, 8, 16, 17, 31, 40, 47, 48})
                         replay<small, usual>(slots, 150, 1, ++seed);
                       for (const int slots : {4, 33}) replay<small, fewer>(slots, 150, 1, ++seed);
                     }),
    device_test::add("small", "16 experts of 8 layers",
                     [] {
                       for (const int slots : {4, 64, 127, 128})
                         replay<tiny, usual>(slots, 100, 1, static_cast<std::uint64_t>(slots));
                     }),
    device_test::add("real", "256 experts of 40 layers",
                     [] {
                       std::uint64_t seed = 20;
                       for (const int slots : {8, 300, 1024, 3581, 10239, 10240})
                         replay<qwen, usual>(slots, 300, 30, ++seed);
                       replay<qwen, fewer>(2700, 300, 30, ++seed);
                     }),
    device_test::add("real", "the largest shapes",
                     [] {
                       replay<wide, usual>(1500, 100, 10, 31);
                       replay<most, usual>(20000, 100, 20, 32);
                       replay<most, usual>(32768, 60, 20, 33);
                     }),
    device_test::add(
        "small", "placements that break the contract are refused",
        [] {
          moe::device_residency device(small, 8, scales_for(small.total()));
          device.set(moe::host_residency(small, 8), device_test::stream());
          const launch_options o{device_test::stream()};
          moe::place_params p;
          NIBBLE_CHECK(moe::residency_family<small>::launch(p, o).code == status_code::invalid_argument);
          p.state = device.view();
          NIBBLE_CHECK(moe::residency_family<small>::launch(p, o).code == status_code::invalid_argument);
          p.list = p.state.lists;
          p.layer = small.layers;
          NIBBLE_CHECK(moe::residency_family<small>::launch(p, o).code == status_code::invalid_argument);
          p.layer = 0, p.state.slot_count = 0;
          NIBBLE_CHECK(moe::residency_family<small>::launch(p, o).code == status_code::invalid_argument);
        }),
};

}  // namespace

int main(int argc, char** argv) { return device_test::run(argc, argv); }
