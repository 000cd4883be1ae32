// SPDX-License-Identifier: Apache-2.0
// The delta rule token by token against fp64: decode and prefill, several sequences of unequal length, any
// cut of a prompt, padding, states that nobody else touches.
#include "delta_layer.cuh"

using namespace delta_test;

namespace {

bool has_clusters() {
  int major = 0;
  NIBBLE_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major >= 9;
}

/// Several steps of four sequences, one of them padding, at different positions.
template <delta_shape S, bool Normed>
void decode_steps(std::uint64_t seed, delta_blocks blocks) {
  using family = delta_decode_family<S, Normed>;
  load<family>();
  if (blocks == delta_blocks::cluster && (!has_clusters() || S.splits() == 1)) return;
  layer l(S, seed);
  const std::vector<std::int32_t> slot{4, 1, -7, 7};
  std::vector<std::int32_t> position{0, 0, -1, 0};
  for (const int s : {4, 1, 7}) l.clear<S>(s);
  for (int step = 0; step < 7; ++step) {
    step_rows r(S, 5, seed + 100 * static_cast<std::uint64_t>(step));
    const device_step d({1, 2, 3, 4, 5}, position, slot);
    NIBBLE_GOOD(family::launch_with(params_of(l, r, d), step % 2 != 0 ? plain : chained, blocks));
    const auto got = r.d_out.read();
    NIBBLE_CHECK(r.only_rows_written(got, {false, true, true, true, true}));
    for (int i = 0; i < 4; ++i) {
      if (position[i] < 0) {
        for (int c = 0; c < S.value_width(); ++c)
          NIBBLE_CHECK(got[static_cast<std::size_t>(1 + i) * r.ldo + c] == 0);
        continue;
      }
      r.check(got, 1 + i, 1,
              l.expect(slot[i], r.part(r.qkvz, r.ldq, S.projected(), 1 + i, 1),
                       r.part(r.x, r.ldx, S.hidden, 1 + i, 1), 1, !Normed));
      ++position[i];
    }
  }
  for (const int i : {0, 1, 3}) l.check_state(slot[i], position[i]);
  // Nobody else's bytes.
  const auto bytes = l.pool.read();
  bool untouched = true;
  for (int s = 0; s < slots; ++s)
    for (std::size_t b = 0; b < l.slot_bytes; ++b)
      if ((s != 4 && s != 1 && s != 7) || b < layer_offset || b >= layer_offset + state_bytes(S))
        untouched = untouched && bytes[l.slot_bytes * s + b] == 0xFF;
  NIBBLE_CHECK(untouched);
}

/// A sequence alone, among strangers, and by the other kinds of blocks: the same bits.
template <delta_shape S>
void decode_alone_or_not(std::uint64_t seed) {
  using family = delta_decode_family<S>;
  load<family>();
  std::vector<std::uint16_t> outputs[4];
  std::vector<std::uint8_t> states[4];
  for (int way = 0; way < 4; ++way) {
    layer l(S, seed);
    for (int s = 0; s < slots; ++s) l.clear<S>(s);
    for (int step = 0; step < 5; ++step) {
      step_rows r(S, 8, seed + 50 + static_cast<std::uint64_t>(step));
      const std::int32_t p = step;
      const device_step alone({6, 7}, {p}, {3});
      const device_step many({0, 1, 2, 3, 4, 5, 6, 7, 8}, {p, p, p, p, p, p, p, p}, {0, 1, 2, 8, 4, 5, 3, 7});
      auto parameters = params_of(l, r, way == 1 ? many : alone);
      NIBBLE_GOOD(family::launch_with(parameters, plain,
                                      way == 2   ? delta_blocks::head
                                      : way == 3 ? delta_blocks::head_alone
                                                 : delta_blocks::cluster));
      const auto got = r.d_out.read();
      outputs[way].insert(outputs[way].end(), got.begin() + 6 * r.ldo, got.begin() + 7 * r.ldo);
    }
    const auto bytes = l.pool.read();
    states[way].assign(bytes.begin() + static_cast<std::ptrdiff_t>(3 * l.slot_bytes),
                       bytes.begin() + static_cast<std::ptrdiff_t>(4 * l.slot_bytes));
  }
  for (int way = 1; way < 4; ++way) {
    NIBBLE_CHECK(outputs[0] == outputs[way]);
    NIBBLE_CHECK(states[0] == states[way]);
  }
}

const bool added[] = {
    device_test::add("small", "decode",
                     [] {
                       decode_steps<tiny, true>(1, delta_blocks::head_alone);
                       decode_steps<tiny, true>(2, delta_blocks::cluster);
                       decode_alone_or_not<tiny>(10);
                     }),
    device_test::add("small", "prefill",
                     [] {
                       prefill_sequences<tiny>(20, {1, 70, 5, 33, 2, 16});
                       cuts<tiny>(33, 37, {{37}, {1, 36}});
                     }),
    device_test::add(
        "small", "refusals",
        [] {
          delta_rule_params p{};
          NIBBLE_CHECK(delta_decode_family<tiny>::launch(p, plain).code == status_code::invalid_argument);
          NIBBLE_CHECK(delta_prefill_family<tiny>::launch(p, plain).code == status_code::invalid_argument);
        }),
    device_test::add("decode", "full",
                     [] {
                       decode_steps<full, true>(3, delta_blocks::head);
                       decode_steps<full, true>(4, delta_blocks::cluster);
                     }),
    device_test::add("decode", "ratio 3",
                     [] {
                       decode_steps<odd, true>(5, delta_blocks::head_alone);
                       decode_steps<odd, true>(6, delta_blocks::cluster);
                     }),
    device_test::add("decode", "one split", [] { decode_steps<narrow, true>(7, delta_blocks::head); }),
    device_test::add("decode", "raw input",
                     [] {
                       decode_steps<full, false>(8, delta_blocks::cluster);
                       decode_steps<odd, false>(9, delta_blocks::head_alone);
                     }),
    device_test::add("decode", "alone or among strangers",
                     [] {
                       decode_alone_or_not<full>(11);
                       decode_alone_or_not<odd>(12);
                     }),
    device_test::add("prefill", "unequal sequences",
                     [] {
                       prefill_sequences<odd>(21, {17, 3, 64});
                       prefill_sequences<narrow>(22, {4, 1, 1});
                       prefill_sequences<full>(23, {3, 35});
                     }),
    device_test::add("prefill", "C093, C095: the last piece of every length",
                     [] {
                       prefill_sequences<tiny>(40, {1, 2, 3, 4, 31, 32, 33, 63});
                       prefill_sequences<tiny>(41, {64, 65, 95, 96, 97, 127, 128, 129});
                     }),
    device_test::add("prefill", "cuts of a prompt",
                     [] {
                       cuts<tiny>(30, 63, {{63}, {1, 3, 4, 33, 22}, {2, 1, 60}, {52, 11}});
                       cuts<full>(31, 50, {{50}, {49, 1}, {3, 3, 44}});
                       cuts<odd>(32, 37, {{37}, {16, 16, 5}});
                     }),
};

}  // namespace

int main(int argc, char** argv) { return added[0] ? device_test::run(argc, argv) : 1; }
